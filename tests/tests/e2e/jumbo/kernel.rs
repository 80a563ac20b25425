//! The kernel's own TCP/IP stack at both ends: two network namespaces, each with a TAP interface with an MTU of 9000,
//! and a pair of ports between them.

use std::time::Duration;

use peers::one_core;

use super::*;

const TAP: &str = "tap0";
const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];

/// Starts a switch between a TAP interface in `netns` and `port`. Without offloads the interface is created before the
/// switch, which sizes its buffers for the interface's MTU at that time.
fn end(netns: &Netns, lcore: usize, port: &str, offloads: bool) -> Offcore {
    let tap = if offloads { format!("tap:{TAP}") } else { format!("tap:{TAP},offloads=off") };
    if !offloads {
        netns.ip(&["tuntap", "add", TAP, "mode", "tap"]).unwrap();
        netns.ip(&["link", "set", TAP, "mtu", "9000"]).unwrap();
    }
    let mut offcore = switch::start_in(netns, &lcore.to_string(), &[port, &tap], &["--idle", "sleep"]);
    switch::wait_for_report(&mut offcore);
    offcore
}

/// Runs a command and retries it, because the other end may not be ready yet.
fn eventually(netns: &Netns, program: &str, args: &[&str]) -> String {
    for _ in 0..20 {
        if let Ok(text) = netns.run(program, args) {
            return text;
        }
        std::thread::sleep(Duration::from_millis(500));
    }
    netns.run(program, args).unwrap()
}

fn pings_and_streams(pair: &Pair, offloads: bool) {
    let dir = TempDir::new().unwrap();
    let nets = [Netns::new().unwrap(), Netns::new().unwrap()];
    let ports = pair.ports(&dir);
    let mut ends = Vec::new();
    for lcore in 0..2 {
        ends.push(end(&nets[lcore], lcore, &ports[lcore], offloads));
        nets[lcore].configure(TAP, &format!("{}/24", ADDRESSES[lcore])).unwrap();
        nets[lcore].ip(&["link", "set", TAP, "mtu", "9000"]).unwrap();
        if offloads { nets[lcore].enable_offloads(TAP) } else { nets[lcore].disable_offloads(TAP) }.unwrap();
    }
    eventually(&nets[0], "ping", &["-c1", "-W1", ADDRESSES[1]]);
    // One frame each, with fragmentation forbidden. Then a packet in fragments of one frame each.
    for size in ["8972", "60000"] {
        let fragment = if size == "8972" { "do" } else { "dont" };
        for (from, to) in [(0, 1), (1, 0)] {
            let args = ["-c5", "-i0.1", "-W5", "-M", fragment, "-s", size, ADDRESSES[to]];
            let text = eventually(&nets[from], "ping", &args);
            assert!(text.contains(" 0% packet loss"), "{}: {text}", pair.name);
        }
    }
    let _server = switch::iperf3_server(&nets[1], &[]);
    for reverse in [false, true] {
        let mut args = vec!["-J", "-t1", "-c", ADDRESSES[1]];
        args.extend(reverse.then_some("-R"));
        // The server may be busy with the previous stream.
        let stream = || -> serde_json::Value {
            std::thread::sleep(Duration::from_millis(200));
            serde_json::from_str(&eventually(&nets[0], "iperf3", &args)).unwrap()
        };
        let report = (0..20).map(|_| stream()).find(|report| report["error"].is_null());
        let report = report.unwrap_or_else(|| panic!("{}: no stream: {:#}", pair.name, stream()));
        let bytes = report["end"]["sum_received"]["bytes"].as_u64().unwrap_or_default();
        assert!(bytes > 1_000_000, "{}: {report:#}", pair.name);
    }
    for end in ends {
        let report = switch::stop(end);
        // TCP probes the available capacity until packets are lost.
        report.assert_only_drops(&["port0 tx down", "port0 tx full", "port1 tx down", "port1 tx full"]);
        // Each end received about half of the streams' data frames, and acknowledgements of the other half.
        let mean = report.bytes(1, "rx") / report.packets(1, "rx");
        assert!(mean > 2000, "{}: frames of {mean} bytes: {report}", pair.name);
    }
}

/// The kernels' offloads pass unchanged, or are performed on the way if a pair does not support them.
#[test]
fn pings_and_streams_with_an_mtu_of_9000() {
    let needs = [Need::Root, Need::Tun, Need::Ip, Need::Ping, Need::Iperf3, Need::Ethtool, Need::Cores(2)];
    let Some(_core) = one_core(&needs) else { return };
    for (index, pair) in PAIRS.iter().enumerate() {
        for offloads in [true, false] {
            if switch::full() || offloads == index.is_multiple_of(2) {
                pings_and_streams(pair, offloads);
            }
        }
    }
}
