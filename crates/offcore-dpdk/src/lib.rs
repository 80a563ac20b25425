//! DPDK: its network devices as ports, its DMA devices as copy engines.
//!
//! Everything here needs the feature `dpdk`; without it the crate is empty and builds anywhere.
//!
//! * `eal`: the environment that DPDK has once in a process,
//! * `mempool`: our packet pool as DPDK's: received buffers are ours, sent ones come back to it,
//! * `convert`: mbufs and packet handles, made into each other in bursts,
//! * `ethdev`: network devices,
//! * `dmadev`: DMA devices as copy engines,
//! * `measure`: what the conversion costs.
//!
//! The C side (`shim/`) is there since half of DPDK is inline functions. It is called once a burst.
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
