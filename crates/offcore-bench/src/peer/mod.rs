//! Other people's software that does the same job, driven by the same harness.
//!
//! * [`about`]: what a peer is, in a row,
//! * `dpdk_lib` (feature `dpdk`): librte_vhost, called from the benchmark's own thread,
//! * [`frames`]: the kernel itself, as a source and a sink of frames on an interface,
//! * [`leftovers`]: what a run that is interrupted removes,
//! * [`netns`]: network namespaces,
//! * [`ovs`]: Open vSwitch with DPDK, processes of its own,
//! * [`testpmd`]: dpdk-testpmd, a process of its own, driven over its prompt.

// Calls into C.
#[cfg(feature = "dpdk")]
#[allow(unsafe_code)]
pub mod dpdk_lib;
#[cfg(feature = "dpdk")]
pub mod variant;
// Asks the kernel for frames, and for those that arrive.
pub mod about;
#[allow(unsafe_code)]
pub mod frames;
pub mod leftovers;
pub mod netns;
pub mod ovs;
// Starts programs that the kernel ends with this process, which takes a hook between fork and exec.
#[allow(unsafe_code)]
pub mod process;
pub mod tempdir;
pub mod testpmd;
