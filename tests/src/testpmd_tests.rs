//! testpmd against testpmd, over vhost-user: the driver's commands take effect, and its counters are correct.

use std::path::PathBuf;

use crate::{Memory, Need, NetVhost, TempDir, Testpmd, TestpmdConfig, VirtioUser, exclusive, require};

/// Sends frames of 128 bytes in one direction until 10,000 have arrived, and checks that no frame is lost.
fn one_way(from: &mut Testpmd, to: &mut Testpmd) {
    for testpmd in [&mut *from, &mut *to] {
        testpmd.clear_port_stats().unwrap();
    }
    from.set_forward("txonly").unwrap();
    from.set_tx_length(128).unwrap();
    to.set_forward("rxonly").unwrap();
    to.record_core_cycles(true).unwrap();
    to.start_forwarding().unwrap();
    from.start_forwarding().unwrap();
    to.wait_for_port_stats(0, "10000 packets", |stats| stats.rx_packets >= 10_000).unwrap();
    let sent = from.stop_forwarding().unwrap();
    let sent = sent.port(0).unwrap().tx_packets;
    let all = to.wait_for_port_stats(0, "the rest", |stats| stats.rx_packets >= sent).unwrap();
    assert_eq!(all.rx_packets, sent);
    assert_eq!(all.rx_bytes, 128 * sent);
    assert_eq!(all.tx_packets, 0);
    let received = to.stop_forwarding().unwrap();
    assert_eq!(received.port(0).unwrap().rx_packets, sent);
    let cycles = received.cycles.expect("recording is on");
    assert_eq!(cycles.packets, sent);
    assert!(cycles.per_packet > 1.0 && cycles.mhz > 0, "{cycles:?}");
    to.record_core_cycles(false).unwrap();
}

#[test]
fn packets_pass_both_ways_on_ordinary_pages() {
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    // The front end starts second, because it needs the socket.
    let back_end = NetVhost::new(dir.file("s"));
    let mut back_end =
        Testpmd::start(&TestpmdConfig { memory: Memory::Ordinary, ..TestpmdConfig::net_vhost(0, &back_end) })
            .unwrap();
    let front_end = VirtioUser::new(dir.file("s"));
    let mut front_end = Testpmd::start(&TestpmdConfig {
        memory: Memory::Ordinary,
        ..TestpmdConfig::virtio_user(1, &front_end)
    })
    .unwrap();
    back_end.wait_link_up(0).unwrap();
    assert!(back_end.log().contains("virtio is now ready for processing"), "{}", back_end.tail());

    one_way(&mut back_end, &mut front_end);
    one_way(&mut front_end, &mut back_end);

    // Both directions at once: packets circulate.
    back_end.set_forward("io").unwrap();
    front_end.set_forward("io").unwrap();
    front_end.clear_port_stats().unwrap();
    back_end.start_forwarding().unwrap();
    front_end.start_forwarding_tx_first(2).unwrap();
    front_end
        .wait_for_port_stats(0, "10000 round trips", |stats| stats.rx_packets.min(stats.tx_packets) >= 10_000)
        .unwrap();
    front_end.stop_forwarding().unwrap();
    let stats = front_end.port_stats(0).unwrap();
    let out = stats.tx_packets - stats.rx_packets;
    assert!(out <= 64, "of the 64 packets that go round, {out} are on their way: {stats:?}");

    front_end.quit().unwrap();
    back_end.quit().unwrap();
}

#[test]
fn testpmd_errors_are_returned() {
    let Some(_cores) = exclusive(&[Need::Testpmd]) else { return };
    let dir = TempDir::new().unwrap();
    let config = TestpmdConfig::net_vhost(0, &NetVhost::new(dir.file("s")));
    let mut testpmd = Testpmd::start(&config).unwrap();
    let error = testpmd.command("dance").unwrap_err().to_string();
    assert!(error.contains("Command not found"), "{error}");
    assert!(testpmd.set_forward("sideways").is_err());
    assert!(testpmd.stop_forwarding().is_err(), "forwarding was not on");
    assert!(testpmd.port_stats(7).is_err());
    assert!(testpmd.command("two\nlines").is_err());
    // It still answers commands.
    assert_eq!(testpmd.port_stats(0).unwrap().rx_packets, 0);
}

#[test]
fn testpmd_start_failure_is_explained() {
    let Some(()) = require(&[Need::Testpmd]) else { return };
    let front_end = VirtioUser::new("/nonexistent/socket");
    let error = Testpmd::start(&TestpmdConfig::virtio_user(0, &front_end)).unwrap_err().to_string();
    assert!(error.contains("its first prompt") && error.contains("virtio_user"), "{error}");
}

#[test]
fn teardown_releases_all_resources() {
    let Some(_cores) = exclusive(&[Need::Testpmd]) else { return };
    let dir = TempDir::new().unwrap();
    let testpmd = Testpmd::start(&TestpmdConfig::net_vhost(0, &NetVhost::new(dir.file("s")))).unwrap();
    let proc = PathBuf::from(format!("/proc/{}", testpmd.id()));
    let environment = std::fs::read(proc.join("environ")).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    let runtime = environment.split('\0').find_map(|entry| entry.strip_prefix("RUNTIME_DIRECTORY=")).unwrap();
    let runtime = PathBuf::from(runtime);
    assert!(proc.exists() && dir.file("s").exists());
    assert!(runtime.read_dir().unwrap().next().is_some(), "testpmd uses the runtime directory it is given");
    drop(testpmd);
    assert!(!proc.exists() && !dir.file("s").exists() && !runtime.exists());
}

/// Runs the benchmark with testpmd and Offcore's back end. The measured rates are not asserted.
#[test]
fn benchmark_alternates_with_testpmd() {
    use offcore_bench::end_to_end::{EndToEndOptions, Peer, run};
    let Some(_cores) = exclusive(&[Need::Testpmd, Need::Cores(2)]) else { return };
    let options = EndToEndOptions {
        pairs: 2,
        window: std::time::Duration::from_millis(50),
        peer: Some(Peer::Testpmd),
        ..EndToEndOptions::new(&[1518], true, 0, Some(1))
    };
    let mut rows = Vec::new();
    run(&options, &offcore_bench::progress::Progress::hidden(), &mut |row| rows.push(row)).unwrap();
    let [row] = &rows[..] else { panic!("{rows:?}") };
    assert_eq!(
        (row.peer.peer.as_deref(), row.figures.spread.runs, row.counts.lost),
        (Some("dpdk-testpmd"), 2, 0)
    );
    assert!(row.counts.verified > 0 && row.counts.verified <= row.counts.received, "{row:?}");
    let about = &row.ends.about_peer;
    assert!(about.peer_features.as_ref().unwrap().contains("MRG_RXBUF"), "{row:?}");
    assert!(about.peer_page_bytes.unwrap() >= 4096, "{row:?}");
    let (ratio, lower) = (row.peer.peer_ratio.unwrap(), row.peer.peer_ratio_lower.unwrap());
    assert!(lower > 0.0 && lower <= ratio, "{row:?}");
    assert!(row.peer.peer_median.unwrap() > 0.0 && row.ends.peer_cycles_per_packet.unwrap() > 0.0, "{row:?}");
}
