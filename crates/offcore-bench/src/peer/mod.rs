//! Peers: other software for the same task, measured by the same harness.
//!
//! - [`about`]: description of a peer in a row,
//! - `dpdk_lib` (feature `dpdk`): librte_vhost, called from the benchmark's own thread,
//! - [`frames`]: the kernel as a source and a sink of frames on an interface,
//! - [`leftovers`]: objects that an interrupted run removes,
//! - [`netns`]: network namespaces,
//! - [`ovs`]: Open vSwitch with DPDK, as separate processes,
//! - [`testpmd`]: dpdk-testpmd, as a separate process driven over its prompt.

// Unsafe: calls into C.
#[cfg(feature = "dpdk")]
#[allow(unsafe_code)]
pub mod dpdk_lib;
#[cfg(feature = "dpdk")]
pub mod variant;
// Unsafe (`frames`): system calls that send and receive frames.
pub mod about;
#[allow(unsafe_code)]
pub mod frames;
pub mod leftovers;
pub mod netns;
pub mod ovs;
// Unsafe: starts programs that the kernel kills together with this process, which requires a hook between fork and
// exec.
#[allow(unsafe_code)]
pub mod process;
pub mod tempdir;
pub mod testpmd;
