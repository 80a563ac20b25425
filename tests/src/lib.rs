//! Drivers for the programs that the end-to-end tests run Offcore against: dpdk-testpmd, a QEMU guest, network
//! namespaces, and the `offcore` binary itself.
//!
//! Every driver starts a real program, talks to it over its own console, and stops it when dropped. They share three
//! rules:
//! - **A wait ends when nothing moves.** Deadlines count from the last sign of progress (new output, a counter that
//!   grew), so a slow machine is not a failure and a hang is.
//! - **A failure shows what the program said.** Every error carries the end of its output.
//! - **Nothing outlives the test.** Programs die with the test process, however it ends; names (namespaces, sockets,
//!   file prefixes) are unique to the process.
//!
//! A test starts by saying what it needs:
//! ```no_run
//! use peers::{Need, exclusive, require};
//!
//! fn packets_pass_both_ways() {
//!     let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
//!     let _cores = exclusive();
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
/// Directories and names of a test's own.
pub use offcore_bench::peer::tempdir;
/// dpdk-testpmd, which the benchmarks drive too.
pub use offcore_bench::peer::testpmd;

pub use guest::{Guest, GuestConfig, Nic};
pub use netns::Netns;
pub use offcore::Offcore;
pub use programs::Link;
pub use require::{Need, exclusive, one_core, require};
pub use tempdir::TempDir;
pub use testpmd::{Memory, NetVhost, Testpmd, TestpmdConfig, VirtioUser};
pub use wire::Wire;
