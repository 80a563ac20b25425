//! End-to-end tests of the `offcore` binary, run as by a user, against real peers.
//!
//! Each test compares the counters of both sides. Rates are never asserted: with two cores, a helper thread and a
//! polling peer, they measure the scheduler. `OFFCORE_FULL=1` runs every combination and longer transfers.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

/// Defines tests that differ by the arguments of one call.
macro_rules! tests {
    ($($(#[$attribute:meta])* fn $name:ident() => $call:expr;)+) => {$($(#[$attribute])* #[test] fn $name() { $call; })+};
}

mod af_packet;
mod af_xdp;
mod copy;
mod documents;
mod dpdk;
mod dsa;
mod epping;
mod exec;
mod gpu;
mod guest;
mod hostile;
mod http;
mod jumbo;
mod kills;
mod l2;
#[path = "../../../crates/offcore-vhost/tests/control/migrating.rs"]
#[allow(dead_code, reason = "its own tests use the rest")]
mod migrating;
mod no_harm;
mod ours;
#[path = "../../../crates/offcore-vhost/tests/control/peer.rs"]
#[allow(dead_code, reason = "its own tests use the rest")]
mod peer;
mod pktgen;
mod programs;
mod refused;
mod robust;
mod run;
mod settings;
mod soak;
mod switch;
mod tcp;
mod tcp_lcores;
mod tcp_network;
mod tcp_reports;
mod tcp_veth;
mod testpmd;
mod udp;
mod virtio_user;
