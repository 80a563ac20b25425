//! DPDK devices as ports and engines: every packet is checked on its way through them.
//!
//! These tests need an `offcore` with the feature `dpdk`, which `cargo xtask ci` builds if libdpdk is installed.

use std::io::Write;

use peers::require::Exclusive;
use peers::{Need, Netns, Offcore, TempDir, exclusive, require};

use crate::switch::{self, Copies};

/// Number of packets in each direction.
const PACKETS: u64 = 100_000;

/// Returns both cores for a test with these requirements if `offcore` has DPDK support. If not, checks the error
/// message and skips the test.
fn with_dpdk(needs: &[Need]) -> Option<Exclusive> {
    require(needs)?;
    let finished = Offcore::run(&["switch", "--port", "dpdk:net_nothing0", "--duration", "0.1"]).unwrap();
    assert_eq!(finished.status.code(), Some(1), "{finished:?}");
    if !finished.stderr.contains("built without DPDK") {
        return exclusive(&[]);
    }
    assert!(finished.stderr.contains("cargo build --release --features dpdk"), "{}", finished.stderr);
    for (flags, code) in [(["--eal", "-m64"], 2), (["--dma", "txq0@dmadev:dma_skeleton"], 1)] {
        let port = ["--port", "vhost:/tmp/offcore-no-dpdk.sock", "--duration", "0.1"];
        let finished = Offcore::run(&[&["switch"], &port[..], &flags].concat()).unwrap();
        let text = &finished.stderr;
        assert!(
            finished.status.code() == Some(code) && text.contains("--features dpdk"),
            "{flags:?}: {text}"
        );
    }
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "SKIP under CI=true: offcore has no DPDK");
    // Written directly to standard error, because the test harness captures `eprintln!`. A failed write does not
    // matter.
    let _ = writeln!(std::io::stderr(), "SKIP: dpdk: offcore was built without --features dpdk");
    None
}

#[test]
fn net_af_packet_verifies_every_packet() {
    let Some(_cores) = with_dpdk(&[Need::Root, Need::Ip, Need::Cores(2)]) else { return };
    let netns = Netns::new().unwrap();
    switch::quiet(&netns);
    switch::veth_in(&netns, "va", "vb");
    let port = |index, name| {
        format!("dpdk:net_af_packet{index},args=[iface={name},blocksz=65536,framesz=2048,framecnt=2048]")
    };
    let generator = |size| format!("gen:size={size},count={PACKETS},rate=50k");
    let ports = [generator(1400), port(0, "va"), generator(64), port(1, "vb")];
    let started = |more: &[&str]| switch::start_in(&netns, "0", &ports, more);
    // The driver's frames are longer than the space behind DPDK's headroom in such a buffer.
    let refused = started(&["--mbuf-size", "2048"]).wait().unwrap();
    assert!(refused.stderr.contains("use a larger --mbuf-size"), "{}", refused.stderr);
    let mut offcore = started(&["--mbuf-size", "4096"]);
    for port in [0, 2] {
        switch::wait_for_packets(&mut offcore, port, "tx", PACKETS);
    }
    let report = switch::stop(offcore);
    report.assert_only_drops(&[]);
    for port in [0, 2] {
        let found = report.generator(port);
        assert_eq!((found.sent, found.received, found.verified), (PACKETS, PACKETS, PACKETS), "{report}");
        assert_eq!((found.lost, found.wrong), (0, 0), "{report}");
    }
    assert!(report.status(1).contains("driver net_af_packet, link is up"), "{report}");
    let kernel = netns.ip(&["-s", "-j", "link", "show", "va"]).unwrap();
    let kernel: serde_json::Value = serde_json::from_str(&kernel).unwrap();
    let received = kernel[0]["stats64"]["rx"]["packets"].as_u64().unwrap();
    assert!(received >= PACKETS, "the kernel counted {received}: {kernel}");
}

#[test]
fn net_ring_passes_long_packets() {
    let Some(_cores) = with_dpdk(&[]) else { return };
    let generator = format!("gen:size=4000,count={PACKETS}");
    for eal in ["--no-huge -m 128", "--in-memory"] {
        let ports = [generator.as_str(), "dpdk:net_ring0,mtu=9000"];
        let mut offcore = switch::start(&ports, Copies::Core, 1, &["--mbuf-size", "2048", "--eal", eal]);
        switch::wait_for_packets(&mut offcore, 0, "tx", PACKETS);
        let report = switch::stop(offcore);
        report.assert_only_drops(&[]);
        let found = report.generator(0);
        assert_eq!(
            (found.received, found.verified, found.lost, found.wrong),
            (PACKETS, PACKETS, 0, 0),
            "{report}"
        );
    }
}

#[test]
fn dmadev_copies_for_vhost() {
    let Some(_cores) = with_dpdk(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let socket = dir.file("s").display().to_string();
    let generator = |size| format!("gen:size={size},count={PACKETS},rate=50k");
    let dmas = "dmas=[txq0@dmadev:dma_skeleton;rxq0@dmadev:dma_skeleton]";
    let ports = [format!("vhost:{socket},{dmas}"), generator(1024)];
    let mut back_end = switch::start_on(0, &ports, Copies::Core, 1, &[]);
    let ports = [format!("virtio-user:{socket}"), generator(256)];
    let mut front_end = switch::start_on(1, &ports, Copies::Core, 1, &[]);
    switch::wait_for_packets(&mut front_end, 1, "tx", PACKETS / 2);
    switch::wait_for_packets(&mut back_end, 1, "tx", PACKETS / 2);
    let (front_end, back_end) = (switch::stop(front_end), switch::stop(back_end));
    for report in [&front_end, &back_end] {
        let found = report.generator(1);
        assert_eq!((found.verified, found.wrong), (found.received, 0), "{report}");
    }
    let channel = &back_end.0["channels"][0];
    assert!(channel["completed"].as_u64().unwrap() > PACKETS / 2, "{back_end}");
}

#[test]
fn dpdk_refusals_name_the_remedy() {
    let Some(_cores) = with_dpdk(&[]) else { return };
    for (flags, code, words) in [
        (&["--port", "dpdk:net_nothing0"][..], 1, &["net_nothing0", "such as net_null0"][..]),
        (&["--port", "dpdk:0000:ff:1f.6"], 1, &["no PCI device 0000:ff:1f.6", "lspci"]),
        (
            &["--port", "dpdk:net_null0", "--eal", "--bogus"],
            1,
            &["--bogus", "Invalid argument", "correct --eal"],
        ),
        (&["--port", "dpdk:net_null0", "--eal", "--help"], 2, &["--eal", "ends the process"]),
        (&["--port", "dpdk:net_null0,mtu=9000", "--eal=-m 'x"], 2, &["is open at the end"]),
        (&["--port", "dpdk:net_af_packet0,args=[iface=nothing0]"], 1, &["net_af_packet0", "iface"]),
        (&["--port", "dpdk:net_null0,rx_desc=16384"], 1, &["16384", "--mbufs", "rx_desc=N"]),
    ] {
        let finished = Offcore::run(&[&["switch", "--duration", "0.1"], flags].concat()).unwrap();
        let text = &finished.stderr;
        assert_eq!(finished.status.code(), Some(code), "{flags:?}: {text}");
        assert!(words.iter().all(|word| text.contains(word)), "{flags:?}: {text}");
    }
}
