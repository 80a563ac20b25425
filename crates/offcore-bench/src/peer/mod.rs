//! Other people's software that does the same job, driven by the same harness.
//!
//! * `dpdk_lib` (feature `dpdk`): librte_vhost, called from the benchmark's own thread.

// Calls into C: the one place of this crate with unsafe code.
#[cfg(feature = "dpdk")]
#[allow(unsafe_code)]
pub mod dpdk_lib;
#[cfg(feature = "dpdk")]
pub mod lane;
