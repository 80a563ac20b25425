//! Drivers for the programs that the end-to-end tests run Offcore against: dpdk-testpmd, a QEMU guest, network
//! namespaces, and the `offcore` binary itself.
//!
//! Every driver starts a real program, communicates over its own console, and stops it when dropped. They share three
//! rules:
//! - **A wait ends when nothing progresses.** Deadlines count from the last sign of progress (new output, or a counter
//!   that grew), so a slow machine is not a failure, but a hang is.
//! - **A failure shows the program's output.** Every error carries the end of the output.
//! - **No process outlives the test.** Programs end with the test process, however it ends. Names (namespaces, sockets,
//!   file prefixes) are unique to the process.
//!
//! A test starts with its requirements:
//! ```no_run
//! use peers::{Need, exclusive};
//!
//! fn packets_pass_both_ways() {
//!     let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
//!     // …
//! }
//! ```

pub mod guest;
#[cfg(test)]
mod netns_tests;
pub mod offcore;
#[cfg(test)]
mod ovs_tests;
pub mod programs;
pub mod require;
#[cfg(test)]
mod testpmd_tests;
#[cfg(test)]
mod veth_tests;
pub mod wire;

/// Network namespaces.
pub use offcore_bench::peer::netns;
/// Temporary directories and unique names for tests.
pub use offcore_bench::peer::tempdir;
/// Driver for dpdk-testpmd, which the benchmarks also use.
pub use offcore_bench::peer::testpmd;

pub use guest::{Guest, GuestConfig, Nic};
pub use netns::Netns;
pub use offcore::Offcore;
pub use programs::Link;
pub use require::{Need, exclusive, one_core, require};
pub use tempdir::TempDir;
pub use testpmd::{Memory, NetVhost, Testpmd, TestpmdConfig, VirtioUser};
pub use wire::Wire;
