//! Other people's software that does the same job, driven by the same harness.
//!
//! * `dpdk_lib` (feature `dpdk`): librte_vhost, called from the benchmark's own thread,
//! * [`testpmd`]: dpdk-testpmd, a process of its own, driven over its prompt.

// Calls into C.
#[cfg(feature = "dpdk")]
#[allow(unsafe_code)]
pub mod dpdk_lib;
#[cfg(feature = "dpdk")]
pub mod lane;
pub mod machine;
pub mod netns;
// Starts programs that the kernel ends with this process, which takes a hook between fork and exec.
#[allow(unsafe_code)]
pub mod process;
pub mod tempdir;
pub mod testpmd;
