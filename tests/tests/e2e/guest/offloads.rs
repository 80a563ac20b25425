//! Two queues with the offloads of guest and kernel: checksums and TCP segmentation.

use peers::{Guest, Netns, Offcore, TempDir, one_core};

use super::{GUEST, NEEDS, System, TAP, Way, iperf, ping_both_ways, stop, wait_for_guest};
use crate::switch::{self, Copies, Report};

/// The longest frame on a wire with an MTU of 1500.
pub(super) const FRAME: u64 = 1514;

/// Switches all offloads of a guest's interface on or off.
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

/// Returns a report that is newer than the call.
pub(super) fn fresh_report(offcore: &mut Offcore) -> Report {
    let seen = offcore.lines().len();
    // The first report may have been started before the call, so the second one is used.
    for _ in 0..2 {
        offcore.wait_for("the next report", |line| line.json.is_some()).unwrap();
    }
    while offcore.lines().len() < seen + 2 {
        offcore.wait_for("the next report", |line| line.json.is_some()).unwrap();
    }
    switch::latest(offcore)
}

/// Returns the mean packet length of one direction of a port between two reports.
pub(super) fn mean_length(before: &Report, after: &Report, port: usize, half: &str) -> u64 {
    let packets = after.packets(port, half) - before.packets(port, half);
    let bytes = after.bytes(port, half) - before.bytes(port, half);
    bytes / packets.max(1)
}

/// Runs a stream in each direction. Offloads show as packets longer than the MTU allows: an end with offloads sends
/// such packets, and an end receives them if both ends have offloads.
fn assert_streams(netns: &Netns, offcore: &mut Offcore, offloads: [bool; 2]) {
    // The input port and the output port of a stream.
    for (way, from, to) in [(Way::FromGuest, 0, 1), (Way::ToGuest, 1, 0)] {
        let before = fresh_report(offcore);
        iperf(netns, way);
        let after = fresh_report(offcore);
        let lengths = [mean_length(&before, &after, from, "rx"), mean_length(&before, &after, to, "tx")];
        // The kernel accepts large packets from a TAP port even if it does not send them.
        let expected = [offloads[from], offloads[from] && (to == 1 || offloads[to])];
        let found = lengths.map(|length| length > FRAME);
        assert_eq!(found, expected, "{way:?}: packets of {lengths:?} bytes\n{after}");
    }
}

/// One guest with two queues: with and without offloads, and with two queues and one queue in use.
fn offloads_and_queues(packed: bool, copies: Copies) {
    let Some(core) = one_core(&NEEDS) else { return };
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

    // With one queue pair, packets that the kernel sends through the second queue of the TAP interface have no
    // destination, unless the kernel also uses only one queue.
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

tests! {
    fn offloads_and_queues_on_split_rings() => offloads_and_queues(false, Copies::Core);
    fn offloads_and_queues_on_packed_rings() => offloads_and_queues(true, Copies::Helper);
}

/// The switch segments the kernel's large packets if the guest does not accept them.
#[test]
fn large_packets_without_offloads() {
    let Some(core) = one_core(&NEEDS) else { return };
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let system = System { offloads: [false, true], ..System::PLAIN };
    let mut offcore = system.start(&netns, &dir, switch::idle());
    let mut guest = system.boot(core.number(), &dir);
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);
    assert_streams(&netns, &mut offcore, system.offloads);
    stop(offcore, system.copies);
}
