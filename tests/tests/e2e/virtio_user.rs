//! Offcore's virtio-user port on dpdk-testpmd's vhost back end (`net_vhost`).

use peers::testpmd::PortForwardStats;
use peers::{Need, NetVhost, Offcore, TempDir, Testpmd, TestpmdConfig, exclusive};

use crate::switch::{self, Copies, Report, VIRTIO_F_RING_PACKED};

/// Minimum number of packets that return.
const PACKETS: u64 = 100_000;

/// The packets to send, and the configuration of the device.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Frame length, including FCS.
    size: u16,
    queues: u16,
    queue_size: u16,
    /// Whether mergeable buffers and the event index are used.
    mrg: bool,
    packed: bool,
    /// Whether Offcore creates the socket and testpmd connects.
    server: bool,
}

impl Case {
    const PLAIN: Self =
        Self { size: 64, queues: 1, queue_size: 256, mrg: true, packed: false, server: false };

    /// Starts testpmd on core 1, which returns every packet.
    fn testpmd(self, dir: &TempDir) -> Testpmd {
        let back_end = NetVhost { queues: self.queues, client: self.server, ..NetVhost::new(dir.file("s")) };
        let mut config = TestpmdConfig::net_vhost(1, &back_end);
        // By default it discards packets, uncounted, that arrive before it starts to forward.
        config.args = vec!["--no-flush-rx".into()];
        let mut testpmd = Testpmd::start(&config).unwrap();
        testpmd.set_forward("io").unwrap();
        testpmd
    }

    /// Starts a switch between the virtio-user port, 0, and a generator, 1, which sends until the switch is stopped.
    fn switch(self, dir: &TempDir) -> Offcore {
        let Self { size, queues, queue_size, mrg, packed, server } = self;
        let socket = dir.file("s").display().to_string();
        let mrg = if mrg { "" } else { ",mrg=off,event_idx=off" };
        let packed = if packed { ",packed" } else { "" };
        let server = if server { ",server" } else { "" };
        let ports = [
            format!("virtio-user:{socket},queues={queues},queue_size={queue_size}{mrg}{packed}{server}"),
            format!("gen:size={size},queues={queues}"),
        ];
        switch::start(&ports, Copies::Core, 1, &[])
    }
}

/// Asserts that testpmd received all packets that the switch sent. The generator must have received, in order and
/// unchanged, all packets that testpmd returned, except for packets in flight when the switch stopped.
fn assert_returned(report: &Report, case: Case, testpmd: &PortForwardStats) {
    let sent = report.packets(0, "tx");
    assert_eq!(testpmd.rx_packets, sent, "{testpmd:?} {report}");
    // testpmd drops packets if Offcore's virtqueue has no room.
    assert_eq!(testpmd.tx_packets + testpmd.tx_dropped, sent, "{testpmd:?} {report}");
    let found = report.generator(1);
    assert_eq!((found.verified, found.wrong), (found.received, 0), "{report}");
    let on_their_way = testpmd.tx_packets.checked_sub(found.received);
    let room = u64::from(case.queues) * u64::from(case.queue_size);
    assert!(on_their_way.is_some_and(|packets| packets <= room), "{testpmd:?} {report}");
    let early = report.dropped("port0 tx down");
    assert!(found.lost <= early + testpmd.tx_dropped, "{testpmd:?} {report}");
    let bytes = u64::from(case.size - 4);
    assert_eq!(report.bytes(0, "tx"), bytes * sent, "{report}");
    assert_eq!(report.bytes(0, "rx"), bytes * found.received, "{report}");
    // Drops happened before the back end was connected, and in the burst that still waited for room at the end.
    report.assert_only_drops(&["port0 tx down", "port0 tx full"]);
    assert!(report.full(0) <= 32 * u64::from(case.queues), "{report}");
}

/// Packets of a generator go to testpmd and return.
fn out_and_back(case: Case) {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let (mut testpmd, mut offcore);
    if case.server {
        offcore = case.switch(&dir);
        switch::wait_for_status(&mut offcore, 0, "waiting for a back end to connect");
        testpmd = case.testpmd(&dir);
    } else {
        testpmd = case.testpmd(&dir);
        offcore = case.switch(&dir);
    }
    testpmd.start_forwarding().unwrap();
    let report = switch::wait_for_packets(&mut offcore, 1, "tx", PACKETS);
    assert_eq!(report.features(0) & VIRTIO_F_RING_PACKED != 0, case.packed, "{report}");
    let report = switch::stop(offcore);
    let stats = testpmd.stop_forwarding().unwrap();
    assert_returned(&report, case, stats.port(0).unwrap());
    for half in ["rx", "tx"] {
        assert!(report.packets_by_queue(0, half).iter().all(|&packets| packets > 0), "{report}");
    }
    testpmd.quit().unwrap();
}

tests! {
    fn small_packets_out_and_back() => out_and_back(Case::PLAIN);
    fn large_packets_out_and_back() => out_and_back(Case { size: 1518, queue_size: 1024, ..Case::PLAIN });
    fn round_trip_without_mrg() => out_and_back(Case { size: 512, mrg: false, ..Case::PLAIN });
    fn packets_out_and_back_over_two_queues() => out_and_back(Case { size: 512, queues: 2, ..Case::PLAIN });
    fn round_trip_small_on_packed() => out_and_back(Case { packed: true, ..Case::PLAIN });
    fn round_trip_large_on_packed() => out_and_back(Case { packed: true, size: 1518, queue_size: 1024, ..Case::PLAIN });
    fn round_trip_on_packed_without_mrg() => out_and_back(Case { packed: true, size: 512, queues: 2, mrg: false, ..Case::PLAIN });
}

/// The back end connects to the front end's socket.
#[test]
fn round_trip_when_back_end_connects() {
    for packed in [false, true] {
        out_and_back(Case { server: true, packed, size: 128, ..Case::PLAIN });
    }
}

/// The back end is killed in the middle of the traffic and replaced.
#[test]
fn the_back_end_restarts() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    for packed in [false, true] {
        back_end_restarts(Case { packed, ..Case::PLAIN });
    }
}

fn back_end_restarts(case: Case) {
    let dir = TempDir::new().unwrap();
    let mut testpmd = case.testpmd(&dir);
    testpmd.start_forwarding().unwrap();
    let mut offcore = case.switch(&dir);
    let mut seen = switch::wait_for_packets(&mut offcore, 1, "tx", PACKETS).packets(1, "tx");
    for _ in 0..2 {
        testpmd.kill();
        switch::wait_for_status(&mut offcore, 0, "waiting for a back end");
        // testpmd would not replace the socket that its predecessor has left.
        std::fs::remove_file(dir.file("s")).unwrap();
        testpmd = case.testpmd(&dir);
        testpmd.start_forwarding().unwrap();
        switch::wait_for_status(&mut offcore, 0, "connected to");
        seen = switch::wait_for_packets(&mut offcore, 1, "tx", seen + PACKETS).packets(1, "tx");
    }
    let report = switch::stop(offcore);
    let found = report.generator(1);
    assert_eq!((found.received, found.wrong), (found.verified, 0), "{report}");
    report.assert_only_drops(&["port0 tx down", "port0 tx full"]);
    assert!(report.full(0) <= 32, "{report}");
    testpmd.quit().unwrap();
}
