//! Ports on kernel interfaces through packet sockets, tested against the kernel's network stack in namespaces.

use std::time::Duration;

use offcore_bench::peer::process::Process;
use peers::{Need, Netns, Offcore, TempDir, exclusive, require};

use crate::copy::{read_capture, write_capture};
use crate::switch;

const NEEDS: &[Need] = &[Need::Root, Need::Ip, Need::Ping];

/// Two hosts. Each has one end of a veth pair. The other ends, `one` and `two`, are in the switch's namespace.
struct Hosts {
    first: Netns,
    second: Netns,
    middle: Netns,
}

impl Hosts {
    fn new() -> Self {
        let hosts = Self {
            first: Netns::new().unwrap(),
            second: Netns::new().unwrap(),
            middle: Netns::new().unwrap(),
        };
        hosts.first.veth("host", &hosts.middle, "one").unwrap();
        hosts.second.veth("host", &hosts.middle, "two").unwrap();
        hosts.first.configure("host", "10.77.3.1/24").unwrap();
        hosts.second.configure("host", "10.77.3.2/24").unwrap();
        for end in ["one", "two"] {
            hosts.middle.ip(&["link", "set", end, "up"]).unwrap();
        }
        hosts
    }

    fn switch(&self, ports: [&str; 2]) -> Offcore {
        let mut offcore = start_in(&self.middle, &ports);
        switch::wait_for_report(&mut offcore);
        offcore
    }

    /// Pings the second host until it answers.
    fn wait_for_answer(&self) {
        let ping = || self.first.run("ping", &["-c", "1", "-W", "1", "10.77.3.2"]).is_ok();
        switch::wait_until("an answer comes", ping);
    }

    fn ping(&self, more: &[&str]) {
        let args = [&["-c", "5", "-i", "0.1", "-W", "5"], more, &["10.77.3.2"]].concat();
        let text = self.first.run("ping", &args).unwrap();
        assert!(text.contains("5 received"), "{text}");
    }
}

fn start_in(netns: &Netns, ports: &[&str]) -> Offcore {
    switch::start_in(netns, "0", ports, &[])
}

/// The kernel's own offloads stay on: it sends packets of 64 KiB without checksums.
#[test]
fn tcp_passes_with_offloads() {
    let Some(_cores) = exclusive(&[NEEDS, &[Need::Iperf3]].concat()) else { return };
    let hosts = Hosts::new();
    let offcore = hosts.switch(["af_packet:one", "af_packet:two"]);
    hosts.wait_for_answer();
    hosts.ping(&[]);
    hosts.ping(&["-s", "20000"]);
    for direction in [&[][..], &["-R"]] {
        let _server = switch::iperf3_server(&hosts.second, &["--one-off"]);
        // A congestion control algorithm that paces sends short packets.
        let args = [&["-c", "10.77.3.2", "-n", "50M", "-C", "cubic"], direction].concat();
        let text = hosts.first.run("iperf3", &args).unwrap();
        assert!(text.contains("receiver"), "{text}");
    }
    let report = switch::stop(offcore);
    // Packets longer than the MTU have passed: 100 MB in segments of 1448 bytes would be more packets.
    assert!(report.packets(0, "rx") + report.packets(1, "rx") < 140_000, "{report}");
    // iperf3 ends when it has written 50 MiB to its socket. Some MiB may still be in the send buffer.
    assert!(report.bytes(0, "rx") > 40_000_000 && report.bytes(1, "rx") > 40_000_000, "{report}");
}

/// Python programs that send 50 datagrams in five calls with UDP_SEGMENT, and that receive them.
const SENDER: &str = "
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.setsockopt(17, 103, 1200)
s.connect((sys.argv[1], 5555))
for k in range(5): s.send(bytes([k]) * 12000)
";
const RECEIVER: &str = "
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(('', 5555))
s.settimeout(10)
print('bound', flush=True)
n = 0
try:
    while n < 50:
        d = s.recv(70000)
        n += len(d) == 1200 and len(set(d)) == 1
except socket.timeout: pass
print(n)
";

/// Returns whether all datagrams arrive at `address` of the second host.
fn segmented_datagrams_pass(hosts: &Hosts, address: &str) {
    let mut command = hosts.second.command("python3");
    command.args(["-c", RECEIVER]);
    let mut receiver = Process::spawn("a receiver", command).unwrap();
    let mut says = |what: &str| {
        let said = |text: &str| text.lines().any(|line| line == what).then_some(());
        receiver.wait_for(0, Duration::from_secs(20), what, said).unwrap();
    };
    says("bound");
    hosts.first.run("python3", &["-c", SENDER, address]).unwrap();
    says("50");
}

/// A veth interface passes the datagrams of a UDP_SEGMENT call as one packet. QUIC servers send like this.
#[test]
fn segmented_udp_passes() {
    let Some(_cores) = exclusive(&[NEEDS, &[Need::Python]].concat()) else { return };
    let hosts = Hosts::new();
    for ports in [
        ["af_packet:one", "af_packet:two"],
        // The worker segments the packets, because the kernel does not do so with `qdisc_bypass`.
        ["af_packet:one", "af_packet:two,qdisc_bypass"],
    ] {
        let offcore = hosts.switch(ports);
        hosts.wait_for_answer();
        segmented_datagrams_pass(&hosts, "10.77.3.2");
        switch::stop(offcore).assert_only_drops(&["port0 tx down", "port1 tx down"]);
    }
}

/// VXLAN between containers: the kernel does not segment the packets, and its offload header describes only the inner
/// packet.
#[test]
fn unsegmented_tunnel_packets_pass() {
    let Some(_cores) = exclusive(&[NEEDS, &[Need::Python, Need::Iperf3]].concat()) else { return };
    let hosts = Hosts::new();
    for (netns, number) in [(&hosts.first, 1), (&hosts.second, 2)] {
        let [local, remote] = [number, 3 - number].map(|number| format!("10.77.3.{number}"));
        let vxlan = ["type", "vxlan", "id", "42", "dstport", "4789", "local", &local, "remote", &remote];
        netns.ip(&[&["link", "add", "tunnel"][..], &vxlan].concat()).unwrap();
        netns.configure("tunnel", &format!("10.77.4.{number}/24")).unwrap();
    }
    let offcore = hosts.switch(["af_packet:one", "af_packet:two"]);
    hosts.wait_for_answer();
    segmented_datagrams_pass(&hosts, "10.77.4.2");
    let _server = switch::iperf3_server(&hosts.second, &["--one-off"]);
    let text = hosts.first.run("iperf3", &["-c", "10.77.4.2", "-n", "50M", "-C", "cubic"]).unwrap();
    assert!(text.contains("receiver"), "{text}");
    let report = switch::stop(offcore);
    report.assert_only_drops(&["port0 tx down", "port1 tx down"]);
    // The port received packets longer than the MTU and sent packets of ordinary length.
    assert!(report.packets(0, "rx") < 30_000 && report.packets(1, "tx") > 35_000, "{report}");
}

#[test]
fn jumbo_frames_pass() {
    let Some(()) = require(NEEDS) else { return };
    let hosts = Hosts::new();
    for (netns, end) in
        [(&hosts.first, "host"), (&hosts.second, "host"), (&hosts.middle, "one"), (&hosts.middle, "two")]
    {
        netns.ip(&["link", "set", end, "mtu", "9000"]).unwrap();
    }
    let offcore = hosts.switch(["af_packet:one", "af_packet:two,slots=64"]);
    hosts.wait_for_answer();
    hosts.ping(&["-M", "do", "-s", "8972"]);
    switch::stop(offcore).assert_only_drops(&[]);
}

/// Returns frames of all lengths. Some have one VLAN tag, some have two.
fn frames() -> Vec<Vec<u8>> {
    let frame = |n: usize| {
        let tags: &[u8] = match n % 4 {
            1 => &[0x81, 0x00, 0x60, 0x07],
            2 => &[0x88, 0xa8, 0x00, 0x05, 0x81, 0x00, 0x00, 0x09],
            _ => &[],
        };
        let len = 60 + n * 37 % 1455;
        let mut frame = [&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8], tags, &[0x88, 0xb5]].concat();
        let payload = (frame.len()..len.max(64) + tags.len()).map(|i| (i * 7 + i / 256 + n * 3) as u8);
        frame.extend(payload.collect::<Vec<_>>());
        frame
    };
    (0..500).map(frame).collect()
}

/// Returns the test's frames in a capture file, without other packets from the wire.
fn frames_of(file: String) -> Vec<Vec<u8>> {
    let mut frames = read_capture(file.as_ref());
    frames.retain(|frame| frame.starts_with(&[2, 0, 0, 0, 0, 9]));
    frames
}

/// Frames go from a file over a veth pair into a file. tcpdump at the receiving end must see the same bytes.
#[test]
fn frames_arrive_tags_included() {
    let Some(()) = require(&[NEEDS, &[Need::Tcpdump]].concat()) else { return };
    let dir = TempDir::new().unwrap();
    let frames = frames();
    let file = |name: &str| dir.file(name).display().to_string();
    write_capture(file("in").as_ref(), &frames);
    let netns = Netns::new().unwrap();
    switch::veth_in(&netns, "left", "right");
    let tcpdump = switch::tcpdump(&netns, "right", file("seen").as_ref(), &[]);
    let (input, output) = (format!("pcap:{}", file("in")), format!("pcap:-,{}", file("out")));
    let ports = [input.as_str(), "af_packet:left", "af_packet:right", &output];
    let mut offcore = start_in(&netns, &ports);
    switch::wait_for_packets(&mut offcore, 3, "tx", frames.len() as u64);
    let report = switch::stop(offcore);
    switch::wait_until("tcpdump has written", || frames_of(file("seen")).len() >= frames.len());
    drop(tcpdump);
    for name in ["out", "seen"] {
        let found = frames_of(file(name));
        let differing = found.iter().zip(&frames).position(|(a, b)| a != b);
        assert_eq!((found.len(), differing), (frames.len(), None), "{name}: {report}");
    }
    // The kernel's own packets arrive from `left` and cannot be written to a file.
    report.assert_only_drops(&["port0 tx down"]);
}

/// Each packet is delivered to exactly one queue and no packet is lost. With `hash`, both queues receive packets.
#[test]
fn fanout_spreads_packets_over_queues() {
    const PACKETS: u64 = 20_000;
    let Some(_cores) = exclusive(&[NEEDS, &[Need::Cores(2)]].concat()) else { return };
    for fanout in ["hash", "lb", "rollover"] {
        let netns = Netns::new().unwrap();
        switch::veth_in(&netns, "left", "right");
        let source = format!("gen:size=128,count={PACKETS},rate=50000,flows=64");
        let right = format!("af_packet:right,queues=2,fanout={fanout}");
        let ports = [source.as_str(), "af_packet:left", &right, "gen:size=128,count=1,queues=2"];
        let mut offcore = start_in(&netns, &ports);
        switch::wait_for_packets(&mut offcore, 2, "rx", PACKETS);
        let report = switch::stop(offcore);
        let found = report.generator(3);
        assert_eq!((found.received, found.verified), (PACKETS, PACKETS), "{fanout}: {report}");
        let by_queue = report.packets_by_queue(2, "rx");
        assert!(
            fanout == "rollover" || by_queue.iter().all(|&packets| packets > 0),
            "{fanout}: {by_queue:?}"
        );
        if fanout == "lb" {
            assert!(by_queue[0].abs_diff(by_queue[1]) <= 100, "{by_queue:?}");
        }
    }
}

#[test]
fn traffic_resumes_after_link_loss() {
    let Some(()) = require(NEEDS) else { return };
    let hosts = Hosts::new();
    let mut offcore = hosts.switch(["af_packet:one", "af_packet:two,queues=1"]);
    hosts.wait_for_answer();
    for _ in 0..3 {
        hosts.middle.ip(&["link", "set", "one", "down"]).unwrap();
        switch::wait_for_status(&mut offcore, 0, "is down");
        hosts.middle.ip(&["link", "set", "one", "up"]).unwrap();
        hosts.wait_for_answer();
    }
    switch::wait_for_status(&mut offcore, 0, "link lost 3 times");
    // The other end is down: the port has no carrier, and packets sent to it are counted as dropped.
    hosts.first.ip(&["link", "set", "host", "down"]).unwrap();
    switch::wait_for_status(&mut offcore, 0, "has no carrier");
    hosts
        .second
        .ip(&["neigh", "replace", "10.77.3.1", "lladdr", "02:00:00:00:00:01", "dev", "host"])
        .unwrap();
    let _ = hosts.second.run("ping", &["-c", "1", "-W", "1", "10.77.3.1"]);
    switch::wait_for(&mut offcore, "packets dropped", 1, |report| report.dropped("port0 tx down"));
    hosts.second.ip(&["neigh", "delete", "10.77.3.1", "dev", "host"]).unwrap();

    hosts.middle.ip(&["link", "delete", "one"]).unwrap();
    switch::wait_for_status(&mut offcore, 0, "is gone");
    hosts.first.veth("host", &hosts.middle, "one").unwrap();
    hosts.first.configure("host", "10.77.3.1/24").unwrap();
    hosts.middle.ip(&["link", "set", "one", "up"]).unwrap();
    switch::wait_for_status(&mut offcore, 0, "re-created 1 times");
    hosts.wait_for_answer();
    hosts.ping(&["-s", "5000"]);
    let (report, log) = switch::stop_with_log(offcore);
    assert!(!log.contains("ERROR"), "{log}");
    let drops = report.drops();
    assert!(drops.iter().all(|(which, &packets)| packets == 0 || which == "port0 tx down"), "{report}");
}

/// A port may be opened before its link is up. A queue without a partner on the other port receives no packets.
#[test]
fn a_link_that_comes_up_later_is_used() {
    let Some(()) = require(NEEDS) else { return };
    let hosts = Hosts::new();
    hosts.middle.ip(&["link", "set", "two", "down"]).unwrap();
    let mut offcore = hosts.switch(["af_packet:one", "af_packet:two,queues=2"]);
    switch::wait_for_status(&mut offcore, 1, "is down");
    hosts.middle.ip(&["link", "set", "two", "up"]).unwrap();
    hosts.wait_for_answer();
    switch::stop(offcore);
}

#[test]
fn the_interfaces_of_a_namespace_are_listed() {
    let Some(()) = require(NEEDS) else { return };
    let netns = Netns::new().unwrap();
    netns.veth("left", &netns, "right").unwrap();
    netns.configure("left", "10.77.4.1/24").unwrap();
    let list = |format: &str| {
        let offcore = Offcore::start_in(&netns, &["port", "list", "--format", format]).unwrap();
        offcore.wait().unwrap()
    };
    let finished = list("json");
    let left =
        finished.lines.iter().filter_map(|line| line.json.as_ref()).find(|json| json["name"] == "left");
    let left = left.unwrap_or_else(|| panic!("{}", finished.stdout));
    assert_eq!((&left["driver"], &left["mtu"]), (&"veth".into(), &1500.into()), "{left}");
    assert_eq!(left["addresses"][0], "10.77.4.1/24", "{left}");
    assert_eq!(left["in_use"][0], "address 10.77.4.1/24", "{left}");
    assert_eq!(left["ports"], serde_json::json!(["af_packet:left"]), "{left}");
    let table = list("table").stdout;
    assert!(table.contains("right: is down: ip link set right up"), "{table}");
    assert_eq!(table.lines().filter(|line| line.contains("af_packet:")).count(), 3, "{table}");
}
