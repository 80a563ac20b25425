//! DPDK support: its network devices as ports, and its DMA devices as copy engines.
//!
//! Everything here needs the feature `dpdk`. Without it the crate is empty and builds on any machine.
//!
//! * `eal`: the DPDK environment, which exists once per process,
//! * `mempool`: the packet pool as a DPDK mempool: received buffers are its chunks, and sent ones return to it,
//! * `convert`: conversion between mbufs and packet handles, in bursts,
//! * `ethdev`: network devices,
//! * `dmadev`: DMA devices as copy engines,
//! * `measure`: measures the cost of the conversion.
//!
//! The C shim (`shim/`) is necessary because many DPDK functions are inline. It is called once per burst.
#![cfg(feature = "dpdk")]

pub mod convert;
pub mod dmadev;
pub mod eal;
pub mod ethdev;
mod ffi;
pub mod measure;
pub mod mempool;
mod pci;

pub use eal::EalError;
