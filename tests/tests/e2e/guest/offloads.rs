//! Two queues, and what guest and kernel leave to their interfaces: checksums and the segmentation of TCP.

use peers::{Guest, Netns, Offcore, TempDir, one_core};

use super::{GUEST, System, TAP, Way, iperf, needed, ping_both_ways, stop, wait_for_guest};
use crate::switch::{self, Copies, Report};

/// The longest frame that goes over a wire with an MTU of 1500.
pub(super) const FRAME: u64 = 1514;

/// What an interface of a guest leaves to what is behind it, all of it or nothing.
pub(super) fn set_offloads(guest: &mut Guest, interface: &str, on: bool) {
    let state = if on { "on" } else { "off" };
    guest
        .check(&format!("ethtool -K {interface} tx {state} sg {state} tso {state} gso {state} gro {state}"))
        .unwrap();
    let features = guest.check(&format!("ethtool -k {interface}")).unwrap();
    for feature in ["tx-checksumming", "tcp-segmentation-offload"] {
        assert!(features.contains(&format!("{feature}: {state}")), "{features}");
    }
}

/// A report that is newer than the call.
pub(super) fn fresh_report(offcore: &mut Offcore) -> Report {
    let seen = offcore.lines().len();
    // What was being written, and the one after.
    for _ in 0..2 {
        offcore.wait_for("the next report", |line| line.json.is_some()).unwrap();
    }
    while offcore.lines().len() < seen + 2 {
        offcore.wait_for("the next report", |line| line.json.is_some()).unwrap();
    }
    switch::latest(offcore)
}

/// The mean length of the packets that went through one half of a port from one report to another.
pub(super) fn mean_length(before: &Report, after: &Report, port: usize, half: &str) -> u64 {
    let packets = after.packets(port, half) - before.packets(port, half);
    let bytes = after.bytes(port, half) - before.bytes(port, half);
    bytes / packets.max(1)
}

/// A stream each way. What an end leaves to the other shows in packets that are longer than any wire would take: it
/// sends such packets where it has offloads, and is sent them where both ends have.
fn assert_streams(netns: &Netns, offcore: &mut Offcore, offloads: [bool; 2]) {
    // The port that a stream comes in at, and the one it goes out of.
    for (way, from, to) in [(Way::FromGuest, 0, 1), (Way::ToGuest, 1, 0)] {
        let before = fresh_report(offcore);
        iperf(netns, way);
        let after = fresh_report(offcore);
        let lengths = [mean_length(&before, &after, from, "rx"), mean_length(&before, &after, to, "tx")];
        // The kernel takes large packets from a TAP port whatever it sends itself.
        let expected = [offloads[from], offloads[from] && (to == 1 || offloads[to])];
        let found = lengths.map(|length| length > FRAME);
        assert_eq!(found, expected, "{way:?}: packets of {lengths:?} bytes\n{after}");
    }
}

/// One guest with two queues: with offloads and without, with two queues in use and with one.
fn offloads_and_queues(packed: bool, copies: Copies) {
    let Some(()) = needed() else { return };
    let core = one_core();
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let system = System { packed, queues: 2, offloads: [true; 2], copies };
    let mut offcore = system.start(&netns, &dir, switch::idle());
    let mut guest = system.boot(core.number(), &dir);
    wait_for_guest(&netns);

    ping_both_ways(&netns, &mut guest);
    assert_streams(&netns, &mut offcore, [true; 2]);
    let report = switch::latest(&offcore);
    for half in ["rx", "tx"] {
        assert!(report.packets_by_queue(0, half).iter().all(|&packets| packets > 0), "{report}");
    }

    netns.disable_offloads(TAP).unwrap();
    set_offloads(&mut guest, "eth0", false);
    ping_both_ways(&netns, &mut guest);
    assert_streams(&netns, &mut offcore, [false; 2]);

    // One queue pair: what the kernel sends through the second queue of the TAP interface has nowhere to go, unless
    // both are one to the kernel, too.
    guest.check("ethtool -L eth0 combined 1").unwrap();
    switch::wait_for_status(&mut offcore, 0, "2 of 4 virtqueues enabled");
    guest.check("ethtool -L eth0 combined 2").unwrap();
    switch::wait_for_status(&mut offcore, 0, "4 of 4 virtqueues enabled");
    set_offloads(&mut guest, "eth0", true);
    netns.enable_offloads(TAP).unwrap();
    ping_both_ways(&netns, &mut guest);
    assert_streams(&netns, &mut offcore, [true; 2]);
    netns.run("ping", &["-c1", "-W5", GUEST]).unwrap();
    stop(offcore, copies);
}

#[test]
fn offloads_and_queues_on_split_rings() {
    offloads_and_queues(false, Copies::Core);
}

#[test]
fn offloads_and_queues_on_packed_rings() {
    offloads_and_queues(true, Copies::Helper);
}

/// What the kernel leaves to a guest that takes nothing, the switch does.
#[test]
fn large_packets_without_offloads() {
    let Some(()) = needed() else { return };
    let core = one_core();
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let system = System { offloads: [false, true], ..System::PLAIN };
    let mut offcore = system.start(&netns, &dir, switch::idle());
    let mut guest = system.boot(core.number(), &dir);
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);
    assert_streams(&netns, &mut offcore, system.offloads);
    stop(offcore, system.copies);
}
