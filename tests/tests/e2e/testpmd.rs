//! dpdk-testpmd's virtio-user front end on a vhost port.

use peers::offcore::Signal;
use peers::testpmd::PortStats;
use peers::{Need, Offcore, TempDir, Testpmd, TestpmdConfig, VirtioUser, exclusive, require};

use crate::switch::{self, Copies, Report};

/// Bursts that go round, of 32 packets for each queue: less than a virtqueue holds.
const BURSTS: u32 = 4;
/// Packets that a test waits for: fewer when the helper thread and testpmd take turns on lcore 1.
fn enough(copies: Copies) -> u64 {
    let packets = if copies == Copies::Helper { 4_000 } else { 20_000 };
    if switch::full() { 50 * packets } else { packets }
}

/// What a front end is like.
#[derive(Clone, Copy, Debug)]
struct Case {
    mrg_rxbuf: bool,
    queue_size: u16,
    queues: u16,
    copies: Copies,
}

impl Case {
    const PLAIN: Self = Self { mrg_rxbuf: true, queue_size: 256, queues: 1, copies: Copies::Core };

    fn front_end(self, dir: &TempDir) -> VirtioUser {
        let Self { mrg_rxbuf, queue_size, queues, .. } = self;
        VirtioUser { mrg_rxbuf, queue_size, queues, ..VirtioUser::new(dir.file("s")) }
    }

    /// A switch with this front end's port only, whose packets go back where they came from.
    fn switch(self, dir: &TempDir, role: &str, forward: &str) -> Offcore {
        let port = format!("vhost:{},queues={}{role}", dir.file("s").display(), self.queues);
        switch::start(&[&port], self.copies, self.queues, &["--forward", forward])
    }
}

/// testpmd on core 1 that makes the socket: the switch connects to it, and again after its own restart.
fn serving(case: Case, dir: &TempDir) -> Testpmd {
    let front_end = VirtioUser { server: true, ..case.front_end(dir) };
    Testpmd::spawn(&TestpmdConfig::virtio_user(1, &front_end)).unwrap()
}

/// testpmd on core 1 that connects to this switch, which listens already.
fn connecting(case: Case, dir: &TempDir, offcore: &mut Offcore) -> Testpmd {
    let mut testpmd = Testpmd::start(&TestpmdConfig::virtio_user(1, &case.front_end(dir))).unwrap();
    wait_connected(&mut testpmd, case, offcore);
    testpmd
}

/// Waits until both sides are ready. testpmd believes to be so a moment before its last messages have been read, and
/// what it sends by then is discarded, as the protocol asks of a virtqueue that is not yet enabled.
fn wait_connected(testpmd: &mut Testpmd, case: Case, offcore: &mut Offcore) {
    testpmd.wait_link_up(0).unwrap();
    let vrings = 2 * case.queues;
    switch::wait_for_status(offcore, 0, &format!("connected, {vrings} of {vrings} virtqueues enabled"));
}

/// Sends `bursts` of packets round and round until enough have passed, then stops; testpmd's counts since before.
fn send_round(testpmd: &mut Testpmd, case: Case, bursts: u32) -> PortStats {
    testpmd.clear_port_stats().unwrap();
    testpmd.set_forward("io").unwrap();
    testpmd.start_forwarding_tx_first(bursts).unwrap();
    testpmd.wait_for_port_stats(0, "round trips", |stats| stats.rx_packets >= enough(case.copies)).unwrap();
    testpmd.stop_forwarding().unwrap();
    let stats = testpmd.port_stats(0).unwrap();
    let round = u64::from(bursts * 32) * u64::from(case.queues);
    let on_their_way = stats.tx_packets.checked_sub(stats.rx_packets);
    assert!(on_their_way.is_some_and(|n| n <= round), "of {round} packets that go round: {stats:?}");
    assert_eq!((stats.rx_errors, stats.tx_errors, stats.rx_no_mbuf), (0, 0, 0), "{stats:?}");
    stats
}

/// Asserts that a loop switch took every packet that testpmd sent and sent each one back.
fn assert_looped(report: &Report, case: Case, sent: &PortStats) {
    assert_eq!(report.packets(0, "rx"), sent.tx_packets, "{report}");
    assert_eq!(report.packets(0, "tx"), sent.tx_packets, "{report}");
    assert_eq!(report.bytes(0, "tx"), sent.tx_bytes, "{report}");
    report.assert_only_drops(&[]);
    report.assert_copies(case.copies, 2 * sent.tx_packets);
    let used = |half| report.packets_by_queue(0, half).into_iter().filter(|&packets| packets > 0).count();
    assert_eq!([used("rx"), used("tx")], [usize::from(case.queues); 2], "{report}");
}

/// Packets go round between testpmd and a switch.
fn goes_round(testpmd: &mut Testpmd, case: Case, dir: &TempDir) {
    let mut offcore = case.switch(dir, ",client", "io");
    wait_connected(testpmd, case, &mut offcore);
    let sent = send_round(testpmd, case, BURSTS);
    switch::wait_for_packets(&mut offcore, 0, "tx", sent.tx_packets);
    assert_looped(&switch::stop(offcore), case, &sent);
}

/// testpmd sends, a switch receives.
fn to_the_switch(testpmd: &mut Testpmd, case: Case, dir: &TempDir) {
    let mut offcore = case.switch(dir, ",client", "rxonly");
    wait_connected(testpmd, case, &mut offcore);
    testpmd.clear_port_stats().unwrap();
    testpmd.set_forward("txonly").unwrap();
    testpmd.set_tx_length(600).unwrap();
    testpmd.start_forwarding().unwrap();
    switch::wait_for_packets(&mut offcore, 0, "rx", enough(case.copies));
    testpmd.stop_forwarding().unwrap();
    let sent = testpmd.port_stats(0).unwrap();
    switch::wait_for_packets(&mut offcore, 0, "rx", sent.tx_packets);
    let report = switch::stop(offcore);
    assert_eq!(report.packets(0, "rx"), sent.tx_packets, "{report}");
    assert_eq!(report.bytes(0, "rx"), 600 * sent.tx_packets, "{report}");
    report.assert_only_drops(&[]);
    report.assert_copies(case.copies, sent.tx_packets);
}

/// A switch sends, as fast as it can; testpmd receives.
fn from_the_switch(testpmd: &mut Testpmd, case: Case, dir: &TempDir) {
    testpmd.clear_port_stats().unwrap();
    testpmd.set_forward("rxonly").unwrap();
    testpmd.start_forwarding().unwrap();
    let mut offcore = case.switch(dir, ",client", "txonly");
    switch::wait_for_packets(&mut offcore, 0, "tx", enough(case.copies));
    // What it had submitted when it stopped is finished first, and stays in the virtqueue when it is gone.
    let report = switch::stop(offcore);
    let sent = report.packets(0, "tx");
    let received = testpmd.wait_for_port_stats(0, "the rest", |stats| stats.rx_packets >= sent).unwrap();
    testpmd.stop_forwarding().unwrap();
    assert_eq!(received.rx_packets, sent, "{received:?} {report}");
    assert_eq!(received.rx_bytes, report.bytes(0, "tx"), "{received:?} {report}");
    assert_eq!((received.rx_errors, received.rx_no_mbuf), (0, 0), "{received:?}");
    // Sent before testpmd was ready, and faster than it receives.
    report.assert_only_drops(&["port0 tx down", "port0 tx full"]);
    report.assert_copies(case.copies, sent);
}

/// One testpmd, three switches one after the other: round, to the switch, from the switch.
fn every_pattern(case: Case) {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    let dir = TempDir::new().unwrap();
    let mut testpmd = serving(case, &dir);
    goes_round(&mut testpmd, case, &dir);
    to_the_switch(&mut testpmd, case, &dir);
    from_the_switch(&mut testpmd, case, &dir);
    testpmd.quit().unwrap();
}

#[test]
fn mergeable_256() {
    for copies in Copies::ALL {
        every_pattern(Case { copies, ..Case::PLAIN });
    }
}

#[test]
fn mergeable_1024() {
    for copies in Copies::ALL {
        every_pattern(Case { queue_size: 1024, copies, ..Case::PLAIN });
    }
}

#[test]
fn not_mergeable_256() {
    for copies in Copies::ALL {
        every_pattern(Case { mrg_rxbuf: false, copies, ..Case::PLAIN });
    }
}

#[test]
fn not_mergeable_1024() {
    for copies in Copies::ALL {
        every_pattern(Case { mrg_rxbuf: false, queue_size: 1024, copies, ..Case::PLAIN });
    }
}

#[test]
fn two_queues() {
    for copies in Copies::ALL {
        every_pattern(Case { queues: 2, copies, ..Case::PLAIN });
    }
}

/// Packets longer than a buffer of the front end: they come and go in chains of several descriptors, and are received
/// in several chains.
#[test]
fn packets_in_pieces() {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    for copies in Copies::ALL {
        let dir = TempDir::new().unwrap();
        let case = Case { copies, ..Case::PLAIN };
        let mut offcore = case.switch(&dir, "", "io");
        switch::wait_for_status(&mut offcore, 0, "waiting");
        let mut config = TestpmdConfig::virtio_user(1, &case.front_end(&dir));
        // 512 bytes of data and 128 of headroom.
        config.mbuf_size = Some(640);
        config.args =
            vec!["--enable-scatter".into(), "--max-pkt-len=1518".into(), "--txpkts=500,500,514".into()];
        let mut testpmd = Testpmd::start(&config).unwrap();
        wait_connected(&mut testpmd, case, &mut offcore);
        // One burst: each packet takes three buffers of the virtqueue.
        let sent = send_round(&mut testpmd, case, 1);
        assert_eq!(sent.tx_bytes, 1514 * sent.tx_packets, "{sent:?}");
        assert_eq!(sent.rx_bytes, 1514 * sent.rx_packets, "{sent:?}");
        switch::wait_for_packets(&mut offcore, 0, "tx", sent.tx_packets);
        let report = switch::stop(offcore);
        assert_looped(&report, case, &sent);
        // Three pieces out, and three back at least.
        report.assert_copies(copies, 6 * sent.tx_packets);
    }
}

/// One switch, three testpmds: the first is killed in the middle of its traffic, the others quit.
#[test]
fn testpmd_restarts() {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    for copies in Copies::ALL {
        let dir = TempDir::new().unwrap();
        let case = Case { copies, ..Case::PLAIN };
        let mut offcore = case.switch(&dir, "", "io");
        switch::wait_for_status(&mut offcore, 0, "waiting for a front end");
        let mut testpmd = connecting(case, &dir, &mut offcore);
        testpmd.start_forwarding_tx_first(BURSTS).unwrap();
        testpmd.wait_for_port_stats(0, "round trips", |stats| stats.rx_packets >= enough(copies)).unwrap();
        testpmd.kill();
        switch::wait_for_status(&mut offcore, 0, "waiting for a front end");
        for _ in 0..2 {
            let mut testpmd = connecting(case, &dir, &mut offcore);
            send_round(&mut testpmd, case, BURSTS);
            testpmd.quit().unwrap();
            switch::wait_for_status(&mut offcore, 0, "waiting for a front end");
        }
        let report = switch::stop(offcore);
        assert!(report.packets(0, "rx") >= 3 * enough(copies), "{report}");
        // Only what came in the moment in which its sender went away could not be returned.
        report.assert_only_drops(&["port0 tx down"]);
        let dropped: u64 = report.drops().values().sum();
        assert_eq!(report.packets(0, "rx"), report.packets(0, "tx") + dropped, "{report}");
    }
}

/// One testpmd, four switches: three are killed in the middle of the traffic, and the next one takes up the virtqueues
/// where they are. What is in them is sent back again, or discarded because testpmd enables them last.
#[test]
fn the_switch_restarts() {
    let Some(()) = require(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let _cores = exclusive();
    for copies in Copies::ALL {
        let dir = TempDir::new().unwrap();
        let case = Case { copies, ..Case::PLAIN };
        let mut testpmd = serving(case, &dir);
        for _ in 0..3 {
            let mut offcore = case.switch(&dir, ",client", "io");
            wait_connected(&mut testpmd, case, &mut offcore);
            testpmd.clear_port_stats().unwrap();
            testpmd.start_forwarding_tx_first(BURSTS).unwrap();
            let more = |stats: &PortStats| stats.rx_packets >= enough(copies);
            testpmd.wait_for_port_stats(0, "round trips", more).unwrap();
            offcore.signal(Signal::KILL).unwrap();
            assert_eq!(offcore.wait().unwrap().status.code(), None, "killed");
            let stats = testpmd.stop_forwarding().unwrap();
            assert_eq!(stats.port(0).unwrap().tx_dropped, 0, "{stats:?}");
        }
        let mut offcore = case.switch(&dir, ",client", "io");
        wait_connected(&mut testpmd, case, &mut offcore);
        testpmd.clear_port_stats().unwrap();
        testpmd.set_forward("txonly").unwrap();
        testpmd.start_forwarding().unwrap();
        switch::wait_for_packets(&mut offcore, 0, "rx", enough(copies));
        testpmd.stop_forwarding().unwrap();
        let sent = testpmd.port_stats(0).unwrap().tx_packets;
        let taken = |report: &Report| report.packets(0, "rx") + report.dropped("port0 rx down");
        switch::wait_for(&mut offcore, "every packet of testpmd", sent, taken);
        let report = switch::stop(offcore);
        // At most all of the virtqueue was left in it.
        let left = taken(&report) - sent;
        assert!(left <= u64::from(case.queue_size), "{left} packets too many for {sent}: {report}");
        report.assert_only_drops(&["port0 rx down", "port0 tx full"]);
        assert_eq!(report.packets(0, "rx"), report.packets(0, "tx") + report.full(0), "{report}");
        testpmd.quit().unwrap();
    }
}
