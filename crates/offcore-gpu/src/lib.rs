//! Work on packets by a GPU.
//!
//! * [`layout`]: what the CPU and a device share, byte by byte,
//! * [`ring`]: bursts of packets go to a device, and come back in order,
//! * [`device`]: who works on bursts,
//! * [`devices`]: devices by name,
//! * [`host`]: threads that stand in for a GPU,
//! * [`cuda`]: GPUs of NVIDIA,
//! * [`kernel`]: what kernels do with bursts, by a thread of the host, [`ptx`]: the same for a CUDA driver,
//! * [`pipeline`]: bursts are worked on by whoever it is, and come back with their results,
//! * [`patterns`]: sets of patterns that payloads are searched for,
//! * [`trie`]: patterns as a device searches for them,
//! * [`cpu`]: the work as a CPU does it,
//! * [`doctor`]: what is there to run on, and what stands in the way.

pub mod cpu;
pub mod cuda;
pub mod device;
pub mod devices;
pub mod doctor;
#[cfg(feature = "test-switches")]
pub mod fake_cuda;
pub mod host;
mod idle;
pub mod kernel;
pub mod layout;
pub mod patterns;
pub mod pipeline;
pub mod ptx;
pub mod ring;
pub mod trie;
