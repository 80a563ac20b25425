//! Offcore's front end against its own back end: two `offcore` processes, each with a generator and a sink.

use peers::{Need, Offcore, TempDir, exclusive};

use crate::switch::{self, Copies, Report, VIRTIO_F_RING_PACKED};

/// Minimum number of packets in each direction.
const PACKETS: u64 = 1_000_000;
/// Minimum number of packets if a simulated device and the front end share one core.
const FEW: u64 = 10_000;

/// Asserts that a process received all packets that the other one sent, except for packets that were generated before
/// the receiver was connected. A generator waits for room, so no packets are lost.
fn assert_all_received(from: &Report, to: &Report, packets: u64) {
    from.assert_only_drops(&["port0 tx down"]);
    let early = from.dropped("port0 tx down");
    let (sent, found) = (from.generator(1).sent, to.generator(1));
    assert_eq!((sent, found.received), (2 * packets, 2 * packets - early), "{from} {to}");
    assert_eq!((found.verified, found.lost, found.wrong), (found.received, early, 0), "{from} {to}");
    assert!(found.received >= packets, "{from} {to}");
}

/// Packets go in both directions at once, and each one is checked. `ring` are options of the virtio-user port.
fn packets_each_way(copies: Copies, packets: u64, ring: &str) {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s").display().to_string();
    let generator = |size| format!("gen:size={size},count={},rate={}", 2 * packets, packets / 2);
    let ports = [format!("vhost:{socket}"), generator(1518)];
    let mut back_end = switch::start_on(0, &ports, copies, 1, &[]);
    let ports = [format!("virtio-user:{socket},queue_size=4096{ring}"), generator(256)];
    let mut front_end = switch::start_on(1, &ports, Copies::Core, 1, &["--mbufs", "32768"]);

    for offcore in [&mut back_end, &mut front_end] {
        let report = switch::wait_for_packets(offcore, 1, "rx", 2 * packets);
        assert_eq!(report.features(0) & VIRTIO_F_RING_PACKED != 0, !ring.is_empty(), "{report}");
    }
    // The last burst of a generator may still wait for room, but the counters of early drops no longer change.
    let early = |offcore: &Offcore| switch::latest(offcore).dropped("port0 tx down");
    let (from_back_end, from_front_end) = (early(&back_end), early(&front_end));
    switch::wait_for_packets(&mut front_end, 1, "tx", 2 * packets - from_back_end);
    switch::wait_for_packets(&mut back_end, 1, "tx", 2 * packets - from_front_end);
    let (front_end, back_end) = (switch::stop(front_end), switch::stop(back_end));
    assert_all_received(&front_end, &back_end, packets);
    assert_all_received(&back_end, &front_end, packets);
    back_end.assert_copies(copies, back_end.packets(0, "rx") + back_end.packets(0, "tx"));
}

tests! {
    fn a_million_each_way_copied_by_the_core() => packets_each_way(Copies::Core, PACKETS, "");
    fn a_million_each_way_copied_by_a_helper() => packets_each_way(Copies::Helper, PACKETS, "");
}

#[test]
fn a_million_each_way_on_packed_rings() {
    for copies in Copies::ALL {
        packets_each_way(copies, PACKETS, ",packed");
    }
}

#[test]
fn simulated_device_copies_both_ways() {
    for ring in ["", ",packed"] {
        packets_each_way(Copies::Simulator, FEW, ring);
    }
}
