//! dpdk-testpmd's virtio-user front end on a vhost port.

mod rings;

use peers::offcore::Signal;
use peers::testpmd::{LOG_VIRTIO_PATHS, PortStats};
use peers::{Need, Offcore, TempDir, Testpmd, TestpmdConfig, VirtioUser, exclusive};

use crate::switch::{self, Copies, Report, VIRTIO_F_RING_PACKED};

/// Features of virtio 1.2 (5.1.3, 6) that show the kind of a front end.
const VIRTIO_NET_F_MRG_RXBUF: u64 = 1 << 15;
const VIRTIO_NET_F_MQ: u64 = 1 << 22;
const VIRTIO_F_IN_ORDER: u64 = 1 << 35;

/// Number of bursts in flight, of 32 packets for each queue. They fit into a virtqueue.
const BURSTS: u32 = 4;
/// Returns the number of packets that a test waits for. It is smaller when the helper thread and testpmd share lcore 1.
fn enough(copies: Copies) -> u64 {
    let packets = if copies == Copies::Helper { 4_000 } else { 20_000 };
    if switch::full() { 50 * packets } else { packets }
}

/// The configuration of a front end.
#[derive(Clone, Copy, Debug)]
struct Case {
    packed: bool,
    in_order: bool,
    vectorized: bool,
    mrg_rxbuf: bool,
    queue_size: u16,
    queues: u16,
    copies: Copies,
}

impl Case {
    const PLAIN: Self = Self {
        packed: false,
        in_order: false,
        vectorized: false,
        mrg_rxbuf: true,
        queue_size: 256,
        queues: 1,
        copies: Copies::Core,
    };
    const PACKED: Self = Self { packed: true, ..Self::PLAIN };

    fn front_end(self, dir: &TempDir) -> VirtioUser {
        let Self { packed, in_order, vectorized, mrg_rxbuf, queue_size, queues, copies: _ } = self;
        let new = VirtioUser::new(dir.file("s"));
        VirtioUser { packed_vq: packed, in_order, vectorized, mrg_rxbuf, queue_size, queues, ..new }
    }

    /// Returns the configuration of testpmd on core 1 with this front end.
    fn config(self, front_end: &VirtioUser) -> TestpmdConfig {
        let mut config = TestpmdConfig::virtio_user(1, front_end);
        config.eal_args.push(LOG_VIRTIO_PATHS.into());
        config
    }

    /// Starts a switch with only this front end's port, which returns packets to their sender.
    fn switch(self, dir: &TempDir, options: &str, forward: &str) -> Offcore {
        let port = format!("vhost:{},queues={}{options}", dir.file("s").display(), self.queues);
        switch::start(&[&port], self.copies, self.queues, &["--forward", forward])
    }

    /// Returns the receive and transmit functions that testpmd uses for this front end, as its log names them.
    fn paths(self) -> [&'static str; 2] {
        let Self { packed, in_order, vectorized, mrg_rxbuf, .. } = self;
        let vectorized = vectorized && (!packed || has_packed_vectors());
        let rx = match (packed, mrg_rxbuf) {
            (true, false) if vectorized => "packed ring vectorized Rx",
            (true, true) => "packed ring mergeable buffer Rx",
            (true, false) => "packed ring standard Rx",
            (false, _) if in_order => "inorder Rx",
            (false, true) => "mergeable buffer Rx",
            (false, false) if vectorized => "vectorized Rx",
            (false, false) => "standard Rx",
        };
        let tx = match (packed, in_order) {
            (true, _) if vectorized => "packed ring vectorized Tx",
            (true, _) => "packed ring standard Tx",
            (false, true) => "inorder Tx",
            (false, false) => "standard Tx",
        };
        [rx, tx]
    }

    /// Asserts that testpmd uses this kind of front end and did not fall back to another.
    fn assert_negotiated(self, testpmd: &Testpmd, offcore: &Offcore) {
        let features = switch::latest(offcore).features(0);
        for (feature, wanted) in [
            (VIRTIO_NET_F_MRG_RXBUF, self.mrg_rxbuf),
            (VIRTIO_NET_F_MQ, self.queues > 1),
            (VIRTIO_F_RING_PACKED, self.packed),
            (VIRTIO_F_IN_ORDER, self.in_order),
        ] {
            assert_eq!(features & feature != 0, wanted, "feature {feature:#x} of {features:#x}: {self:?}");
        }
        let log = testpmd.log();
        let last = log.rfind(" Rx path on port 0").unwrap_or_else(|| panic!("no path in {log}"));
        // The line for transmission comes just before the line for reception.
        let start = log[..last].rfind(" Tx path on port 0").and_then(|at| log[..at].rfind("virtio: using"));
        let last = &log[start.unwrap_or(0)..];
        for path in self.paths() {
            assert!(last.contains(&format!("virtio: using {path} path on port 0")), "{path}? {last}");
        }
    }
}

/// Returns whether DPDK's virtio driver can use vector instructions for packed rings on this CPU. They need AVX-512
/// (`virtio_dev_configure` in virtio_ethdev.c). Without it the driver uses the scalar path.
fn has_packed_vectors() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
}

/// Starts testpmd on core 1 with a listening socket. The switch connects to it, also after a restart of the switch.
fn serving(case: Case, dir: &TempDir) -> Testpmd {
    let front_end = VirtioUser { server: true, ..case.front_end(dir) };
    Testpmd::spawn(&case.config(&front_end)).unwrap()
}

/// Starts testpmd on core 1, which connects to this listening switch.
fn connecting(case: Case, dir: &TempDir, offcore: &mut Offcore) -> Testpmd {
    let mut testpmd = Testpmd::start(&case.config(&case.front_end(dir))).unwrap();
    wait_connected(&mut testpmd, case, offcore);
    testpmd
}

/// Waits until both sides are ready. testpmd reports the link as up before its last messages have been read. Packets
/// that it sends until then are discarded, as the protocol requires for a virtqueue that is not enabled.
fn wait_connected(testpmd: &mut Testpmd, case: Case, offcore: &mut Offcore) {
    testpmd.wait_link_up(0).unwrap();
    let vrings = 2 * case.queues;
    switch::wait_for_status(offcore, 0, &format!("connected, {vrings} of {vrings} virtqueues enabled"));
    case.assert_negotiated(testpmd, offcore);
}

/// Keeps `bursts` of packets in flight until enough have passed, then stops. Returns testpmd's counters for this time.
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

/// Asserts that a switch received every packet that testpmd sent and returned each one.
fn assert_looped(report: &Report, case: Case, sent: &PortStats) {
    assert_eq!(report.packets(0, "rx"), sent.tx_packets, "{report}");
    assert_eq!(report.packets(0, "tx"), sent.tx_packets, "{report}");
    assert_eq!(report.bytes(0, "tx"), sent.tx_bytes, "{report}");
    report.assert_only_drops(&[]);
    report.assert_copies(case.copies, 2 * sent.tx_packets);
    let used = |half| report.packets_by_queue(0, half).into_iter().filter(|&packets| packets > 0).count();
    assert_eq!([used("rx"), used("tx")], [usize::from(case.queues); 2], "{report}");
}

/// Packets circulate between testpmd and a switch.
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

/// A switch sends at full speed, testpmd receives.
fn from_the_switch(testpmd: &mut Testpmd, case: Case, dir: &TempDir) {
    testpmd.clear_port_stats().unwrap();
    testpmd.set_forward("rxonly").unwrap();
    testpmd.start_forwarding().unwrap();
    let mut offcore = case.switch(dir, ",client", "txonly");
    switch::wait_for_packets(&mut offcore, 0, "tx", enough(case.copies));
    // The switch completes its submitted packets before it stops. They stay in the virtqueue when it is gone.
    let report = switch::stop(offcore);
    let sent = report.packets(0, "tx");
    let received = testpmd.wait_for_port_stats(0, "the rest", |stats| stats.rx_packets >= sent).unwrap();
    testpmd.stop_forwarding().unwrap();
    assert_eq!(received.rx_packets, sent, "{received:?} {report}");
    assert_eq!(received.rx_bytes, report.bytes(0, "tx"), "{received:?} {report}");
    assert_eq!((received.rx_errors, received.rx_no_mbuf), (0, 0), "{received:?}");
    // Packets that were sent before testpmd was ready, or faster than it receives.
    report.assert_only_drops(&["port0 tx down", "port0 tx full"]);
    report.assert_copies(case.copies, sent);
}

/// One testpmd and three switches in sequence: packets circulate, testpmd sends, the switch sends.
fn every_pattern(case: Case) {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let mut testpmd = serving(case, &dir);
    goes_round(&mut testpmd, case, &dir);
    to_the_switch(&mut testpmd, case, &dir);
    from_the_switch(&mut testpmd, case, &dir);
    end_alone(testpmd);
}

/// Kills a testpmd whose last switch is gone. On a busy machine it notices this late. Until then, quitting would make
/// it write to that switch's socket, and SIGPIPE would end it.
fn end_alone(testpmd: Testpmd) {
    testpmd.kill();
}

/// Packets longer than a buffer of the front end: they are in chains of several descriptors, and are received in
/// several chains.
#[test]
fn packets_in_pieces() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    in_pieces(Case::PLAIN, "");
    in_pieces(Case { copies: Copies::Helper, ..Case::PLAIN }, "");
    in_pieces(Case::PLAIN, ",indirect=off");
}

#[test]
fn packets_in_pieces_on_packed_rings() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    in_pieces(Case::PACKED, "");
    in_pieces(Case { in_order: true, copies: Copies::Helper, ..Case::PACKED }, "");
    in_pieces(Case { in_order: true, ..Case::PACKED }, ",indirect=off");
    in_pieces(Case { copies: Copies::Helper, ..Case::PACKED }, ",indirect=off");
}

/// Runs a case with the port's `options`.
fn in_pieces(case: Case, options: &str) {
    let dir = TempDir::new().unwrap();
    let mut offcore = case.switch(&dir, options, "io");
    switch::wait_for_status(&mut offcore, 0, "waiting");
    let mut config = case.config(&case.front_end(&dir));
    // 512 bytes of data and 128 bytes of headroom.
    config.mbuf_size = Some(640);
    config.args = vec!["--enable-scatter".into(), "--max-pkt-len=1518".into(), "--txpkts=500,500,514".into()];
    let mut testpmd = Testpmd::start(&config).unwrap();
    wait_connected(&mut testpmd, case, &mut offcore);
    // One burst, because each packet takes three buffers of the virtqueue.
    let sent = send_round(&mut testpmd, case, 1);
    assert_eq!(sent.tx_bytes, 1514 * sent.tx_packets, "{sent:?}");
    assert_eq!(sent.rx_bytes, 1514 * sent.rx_packets, "{sent:?}");
    switch::wait_for_packets(&mut offcore, 0, "tx", sent.tx_packets);
    let report = switch::stop(offcore);
    assert_looped(&report, case, &sent);
    // Three copies from testpmd, and at least three back.
    report.assert_copies(case.copies, 6 * sent.tx_packets);
}

/// Returns the cases for restarts: split and packed rings with both kinds of copies.
fn restarted() -> impl Iterator<Item = Case> {
    let copied = |case: Case| Copies::ALL.map(|copies| Case { copies, ..case });
    [Case::PLAIN, Case::PACKED].into_iter().flat_map(copied)
}

/// One switch and three testpmds: the first is killed in the middle of its traffic, the others quit.
#[test]
fn testpmd_restarts() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    for case in restarted() {
        let dir = TempDir::new().unwrap();
        let copies = case.copies;
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
        // Only packets that arrived just when their sender ended could not be returned.
        report.assert_only_drops(&["port0 tx down"]);
        let dropped: u64 = report.drops().values().sum();
        assert_eq!(report.packets(0, "rx"), report.packets(0, "tx") + dropped, "{report}");
    }
}

/// One testpmd and four switches: three are killed in the middle of the traffic, and the next one continues at the
/// current position of the virtqueues. Packets in the rings are returned again, or discarded because testpmd enables
/// the rings last.
#[test]
fn the_switch_restarts() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    for case in restarted() {
        let dir = TempDir::new().unwrap();
        let copies = case.copies;
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
        // The packets left in the virtqueue are at most its size.
        let left = taken(&report) - sent;
        assert!(left <= u64::from(case.queue_size), "{left} packets too many for {sent}: {report}");
        report.assert_only_drops(&["port0 rx down", "port0 tx full"]);
        assert_eq!(report.packets(0, "rx"), report.packets(0, "tx") + report.full(0), "{report}");
        end_alone(testpmd);
    }
}
