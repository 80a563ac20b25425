//! Packet processing on a GPU.
//!
//! * [`layout`]: the memory layout that CPU and device share,
//! * [`ring`]: the ring that carries bursts to a device and back in order,
//! * [`device`]: the interface of a device,
//! * [`devices`]: opening a device by name,
//! * [`host`]: threads that emulate a GPU,
//! * [`cuda`]: NVIDIA GPUs,
//! * [`kernel`]: the kernels on a thread of the host; [`ptx`]: the kernels for the CUDA driver,
//! * [`pipeline`]: a burst ring with a CPU or a device that processes its bursts,
//! * [`patterns`]: sets of patterns to find in payloads,
//! * [`trie`]: pattern sets as tables for a device,
//! * [`cpu`]: the same work on a CPU,
//! * [`doctor`]: checks of a machine.

pub mod cpu;
pub mod cuda;
pub mod device;
pub mod devices;
pub mod doctor;
pub mod host;
mod idle;
pub mod kernel;
pub mod layout;
pub mod patterns;
pub mod pipeline;
pub mod ptx;
pub mod ring;
pub mod trie;
