//! Our own front end against our own back end: two `offcore` processes, each with a generator and a sink.

use peers::{Need, TempDir, exclusive, require};

use crate::switch::{self, Copies};

/// Packets each way.
const PACKETS: u64 = 1_000_000;

/// A million packets each way at once; every one is checked, and none is lost: a generator waits where there is no
/// room. The back end's packets are counted from when the front end is there.
fn a_million_each_way(copies: Copies) {
    let Some(()) = require(&[Need::Cores(2)]) else { return };
    let _cores = exclusive();
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s").display().to_string();
    let back_end = [format!("vhost:{socket}"), format!("gen:size=1518,count={},rate=1M", 2 * PACKETS)];
    let back_end = back_end.each_ref().map(String::as_str);
    let mut back_end = switch::start_on(0, &back_end, copies, 1, &[]);
    let front_end =
        [format!("virtio-user:{socket},queue_size=4096"), format!("gen:size=256,count={PACKETS}")];
    let front_end = front_end.each_ref().map(String::as_str);
    let mut front_end = switch::start_on(1, &front_end, Copies::Core, 1, &["--mbufs", "32768"]);

    let sink = 1;
    switch::wait_for_packets(&mut back_end, sink, "tx", PACKETS);
    let sent = switch::wait_for_packets(&mut back_end, sink, "rx", 2 * PACKETS);
    // The back end's last burst may be waiting for room.
    let early = |report: &switch::Report| report.drops().get("port0 tx down").copied().unwrap_or(0);
    switch::wait_for_packets(&mut front_end, sink, "tx", 2 * PACKETS - early(&sent));
    let (front_end, back_end) = (switch::stop(front_end), switch::stop(back_end));

    let received = back_end.generator(sink);
    assert_eq!((received.received, received.verified), (PACKETS, PACKETS), "{back_end}");
    assert_eq!((received.lost, received.wrong), (0, 0), "{back_end}");
    front_end.assert_only_drops(&[]);

    back_end.assert_only_drops(&["port0 tx down"]);
    let (sent, received) = (back_end.generator(sink).sent, front_end.generator(sink));
    assert!(received.received >= PACKETS, "{front_end}");
    assert_eq!(received.verified, received.received, "{front_end}");
    assert_eq!((received.lost, received.wrong), (early(&back_end), 0), "{front_end} {back_end}");
    assert_eq!(received.received + received.lost, sent, "{front_end} {back_end}");
    back_end.assert_copies(copies, PACKETS + received.received);
}

#[test]
fn a_million_each_way_copied_by_the_core() {
    a_million_each_way(Copies::Core);
}

#[test]
fn a_million_each_way_copied_by_a_helper() {
    a_million_each_way(Copies::Helper);
}
