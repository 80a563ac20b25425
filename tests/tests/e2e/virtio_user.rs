//! Our virtio-user port on dpdk-testpmd's vhost back end (`net_vhost`).

use peers::testpmd::PortForwardStats;
use peers::{Need, NetVhost, Offcore, TempDir, Testpmd, TestpmdConfig, exclusive, require};

use crate::switch::{self, Copies, Report};

/// Packets that go through testpmd and come back.
const PACKETS: u64 = 100_000;

/// What is sent, and over what.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Frame length, FCS included.
    size: u16,
    queues: u16,
    queue_size: u16,
    mrg: bool,
    /// Whether our side makes the socket, and testpmd connects.
    server: bool,
}

impl Case {
    const PLAIN: Self = Self { size: 64, queues: 1, queue_size: 256, mrg: true, server: false };

    /// testpmd on core 1, which sends everything back.
    fn testpmd(self, dir: &TempDir) -> Testpmd {
        let back_end = NetVhost { queues: self.queues, client: self.server, ..NetVhost::new(dir.file("s")) };
        let mut testpmd = Testpmd::start(&TestpmdConfig::net_vhost(1, &back_end)).unwrap();
        testpmd.set_forward("io").unwrap();
        testpmd
    }

    /// A switch between the virtio-user port, 0, and a generator, 1.
    fn switch(self, dir: &TempDir, packets: u64) -> Offcore {
        let Self { size, queues, queue_size, mrg, server } = self;
        let socket = dir.file("s").display().to_string();
        let mrg = if mrg { "" } else { ",mrg=off" };
        let server = if server { ",server" } else { "" };
        let ports = [
            format!("virtio-user:{socket},queues={queues},queue_size={queue_size}{mrg}{server}"),
            format!("gen:size={size},count={packets},queues={queues}"),
        ];
        switch::start(&ports.each_ref().map(String::as_str), Copies::Core, 1, &[])
    }
}

/// Asserts that the generator got back, in order and unchanged, all that testpmd says to have sent back, and that
/// nothing is unaccounted for: testpmd drops what our virtqueue has no room for.
fn assert_returned(report: &Report, case: Case, sent: u64, testpmd: &PortForwardStats) {
    assert_eq!(testpmd.rx_packets, sent, "{testpmd:?} {report}");
    assert_eq!(testpmd.tx_packets + testpmd.tx_dropped, sent, "{testpmd:?} {report}");
    let found = report.generator(1);
    assert_eq!((found.sent, found.received, found.wrong), (sent, testpmd.tx_packets, 0), "{report}");
    assert_eq!(found.verified, found.received, "{report}");
    assert!(found.lost <= testpmd.tx_dropped, "{testpmd:?} {report}");
    assert!(found.received >= sent / 2, "{testpmd:?} {report}");
    let bytes = u64::from(case.size - 4);
    assert_eq!(
        (report.bytes(0, "tx"), report.bytes(0, "rx")),
        (bytes * sent, bytes * found.received),
        "{report}"
    );
    report.assert_only_drops(&[]);
}

/// Packets of a generator go to testpmd and come back.
fn out_and_back(case: Case) {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    let dir = TempDir::new().unwrap();
    let mut testpmd = case.testpmd(&dir);
    testpmd.start_forwarding().unwrap();
    let mut offcore = case.switch(&dir, PACKETS);
    testpmd.wait_for_port_stats(0, "every packet", |stats| stats.rx_packets >= PACKETS).unwrap();
    let stats = testpmd.stop_forwarding().unwrap();
    let testpmd_says = stats.port(0).unwrap();
    switch::wait_for_packets(&mut offcore, 1, "tx", testpmd_says.tx_packets);
    let report = switch::stop(offcore);
    assert_returned(&report, case, PACKETS, testpmd_says);
    assert!(report.packets_by_queue(0, "tx").iter().all(|&packets| packets > 0), "{report}");
    testpmd.quit().unwrap();
}

#[test]
fn small_packets_out_and_back() {
    out_and_back(Case::PLAIN);
}

#[test]
fn large_packets_out_and_back() {
    out_and_back(Case { size: 1518, queue_size: 1024, ..Case::PLAIN });
}

#[test]
fn packets_out_and_back_without_mergeable_buffers() {
    out_and_back(Case { size: 512, mrg: false, ..Case::PLAIN });
}

#[test]
fn packets_out_and_back_over_two_queues() {
    out_and_back(Case { size: 512, queues: 2, ..Case::PLAIN });
}

/// The sides of the socket exchanged: testpmd connects to ours. The generator starts before anybody is there, so what
/// it sends by then goes nowhere, and the switch is watched instead of the generator.
#[test]
fn packets_out_and_back_when_the_back_end_connects() {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    let dir = TempDir::new().unwrap();
    let case = Case { server: true, size: 128, ..Case::PLAIN };
    let mut offcore = case.switch(&dir, u64::MAX);
    switch::wait_for_status(&mut offcore, 0, "waiting for a back end to connect");
    let mut testpmd = case.testpmd(&dir);
    testpmd.start_forwarding().unwrap();
    switch::wait_for_packets(&mut offcore, 1, "tx", PACKETS);
    let report = switch::stop(offcore);
    let found = report.generator(1);
    assert!(found.received >= PACKETS && found.verified == found.received && found.wrong == 0, "{report}");
    report.assert_only_drops(&["port0 tx down"]);
    let stats = testpmd.stop_forwarding().unwrap();
    let testpmd_says = stats.port(0).unwrap();
    assert!(testpmd_says.rx_packets <= report.packets(0, "tx"), "{testpmd_says:?} {report}");
    assert!(found.received <= testpmd_says.tx_packets, "{testpmd_says:?} {report}");
    testpmd.quit().unwrap();
}

/// The back end is killed in the middle of the traffic, and another one takes its place.
#[test]
fn the_back_end_restarts() {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    let dir = TempDir::new().unwrap();
    let case = Case::PLAIN;
    let mut testpmd = case.testpmd(&dir);
    testpmd.start_forwarding().unwrap();
    let mut offcore = case.switch(&dir, u64::MAX);
    let mut seen = switch::wait_for_packets(&mut offcore, 1, "tx", PACKETS).packets(1, "tx");
    for _ in 0..2 {
        testpmd.kill();
        switch::wait_for_status(&mut offcore, 0, "waiting for a back end");
        // testpmd would not replace the socket that the one before has left.
        std::fs::remove_file(dir.file("s")).unwrap();
        testpmd = case.testpmd(&dir);
        testpmd.start_forwarding().unwrap();
        switch::wait_for_status(&mut offcore, 0, "connected to");
        seen = switch::wait_for_packets(&mut offcore, 1, "tx", seen + PACKETS).packets(1, "tx");
    }
    let report = switch::stop(offcore);
    let found = report.generator(1);
    assert_eq!((found.received, found.wrong), (found.verified, 0), "{report}");
    report.assert_only_drops(&["port0 tx down"]);
    testpmd.quit().unwrap();
}
