//! The learning switch: Linux stacks in network namespaces, and a QEMU guest, on the ports of one `offcore switch`.

use std::time::{Duration, Instant};

use offcore_bench::peer::process::Process;
use peers::guest::{Guest, GuestConfig, Nic};
use peers::{Need, Netns, Offcore, TempDir, exclusive, one_core};
use serde_json::Value;

use crate::switch::{self, Report, full, latest, stop_with_log};

/// The longest frame on a wire with an MTU of 1500.
const FRAME: u64 = 1514;
/// Time limit for a guest to answer. QEMU retries the connection to the back end once per second.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The guest's station number.
const GUEST: usize = 9;

/// How a stack is attached to the switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attach {
    /// The stack uses the interface of a TAP port.
    Tap,
    /// The stack uses one end of a veth pair, and AF_XDP sockets use the other.
    AfXdp,
    /// Like `AfXdp`, with packet sockets.
    AfPacket,
}

impl Attach {
    fn port(self, number: usize) -> String {
        match self {
            Self::Tap => format!("tap:{}", tap(number)),
            Self::AfXdp => format!("af_xdp:sw{number}"),
            Self::AfPacket => format!("af_packet:sw{number}"),
        }
    }

    /// Creates what must exist before the switch starts.
    fn prepare(self, number: usize, home: &Netns, host: &Netns) {
        // The kernels only send packets that a test requests.
        for netns in [home, host] {
            switch::quiet(netns);
        }
        if self != Self::Tap {
            let switch_end = format!("sw{number}");
            home.veth(&switch_end, host, &tap(number)).unwrap();
            // These sockets do not learn which checksums are missing.
            host.disable_offloads(&tap(number)).unwrap();
            home.ip(&["link", "set", &switch_end, "up"]).unwrap();
            host.ip(&["link", "set", &tap(number), "up"]).unwrap();
        }
    }

    /// Completes the setup once the switch runs.
    fn finish(self, number: usize, home: &Netns, host: &Netns) {
        let interface = tap(number);
        if self == Self::Tap {
            home.ip(&["link", "set", &interface, "netns", host.name()]).unwrap();
            let quiet = format!("echo 1 >/proc/sys/net/ipv6/conf/{interface}/disable_ipv6");
            host.run("sh", &["-c", &quiet]).unwrap();
        }
        host.configure(&interface, &format!("{}/24", address(number))).unwrap();
        if self == Self::Tap {
            host.enable_offloads(&interface).unwrap();
        }
    }
}

/// Stacks on ports of a switch, each in its own namespace. The interface of host N is `tapN`.
struct Lan {
    offcore: Offcore,
    hosts: Vec<Netns>,
    /// The switch's namespace.
    _home: Netns,
}

impl Lan {
    /// Starts a switch with `hosts` TAP ports, then `ports`, and these flags. It sleeps when idle, to leave its lcore
    /// to the stacks.
    fn new(hosts: usize, ports: &[&str], more: &[&str]) -> Self {
        Self::with(0, &vec![Attach::Tap; hosts], ports, more)
    }

    /// Starts a switch with ports of these kinds. The numbers of the hosts start at `first`.
    fn with(first: usize, kinds: &[Attach], ports: &[&str], more: &[&str]) -> Self {
        let home = Netns::new().unwrap();
        let hosts: Vec<Netns> = kinds.iter().map(|_| Netns::new().unwrap()).collect();
        let attached = || (first..).zip(kinds.iter().zip(&hosts));
        attached().for_each(|(number, (kind, host))| kind.prepare(number, &home, host));
        let names: Vec<String> = attached().map(|(number, (kind, _))| kind.port(number)).collect();
        let ports: Vec<&str> = names.iter().map(String::as_str).chain(ports.iter().copied()).collect();
        let more = [&["--forward", "l2", "--idle", "sleep"], more].concat();
        let mut offcore = switch::start_in(&home, "0", &ports, &more);
        switch::wait_for_report(&mut offcore);
        attached().for_each(|(number, (kind, host))| kind.finish(number, &home, host));
        Self { offcore, hosts, _home: home }
    }

    fn ping(&self, from: usize, to: &str) -> bool {
        self.hosts[from].run("ping", &["-c2", "-i0.2", "-W5", to]).is_ok()
    }

    /// Runs a TCP stream from a host to the address of an iperf3 server.
    fn stream(&self, from: usize, to: &str, more: &[&str]) {
        let args = [&["-J", "-c", to], more].concat();
        let mut report = Value::Null;
        for _ in 0..20 {
            let text = self.hosts[from].run("iperf3", &args);
            report = serde_json::from_str(&text.unwrap_or_default()).unwrap_or_default();
            let bytes = report["end"]["sum_received"]["bytes"].as_u64().unwrap_or_default();
            if report["error"].is_null() && bytes > 100_000 {
                return;
            }
            // The server may still be busy with the previous stream.
            std::thread::sleep(Duration::from_millis(200));
        }
        panic!("no stream from host {from} to {to}: {report:#}");
    }

    fn serve(&self, host: usize) -> Process {
        switch::iperf3_server(&self.hosts[host], &[])
    }

    /// Stops the switch. Its log must have no unexpected warnings.
    fn stop(self) -> Report {
        stop_with_log(self.offcore).0
    }
}

fn tap(number: usize) -> String {
    format!("tap{number}")
}

fn address(number: usize) -> String {
    format!("10.77.2.{}", number + 1)
}

const NEEDS: [Need; 7] =
    [Need::Root, Need::Tun, Need::Ip, Need::Ping, Need::Ethtool, Need::Iperf3, Need::Tcpdump];

/// Returns a counter of a bridge port.
fn count(report: &Report, port: usize, name: &str) -> u64 {
    let ports = report.0["bridge"]["ports"].as_array().unwrap_or_else(|| panic!("no bridge in {report}"));
    let of = ports.iter().find(|of| of["port"] == format!("port{port}"));
    of.and_then(|of| of[name].as_u64()).unwrap_or_else(|| panic!("no {name} of port {port} in {report}"))
}

/// Asserts that there are only expected drops: packets that were sent before an interface was up, and packets that TCP
/// retransmits because a queue of the other side or a socket buffer was full.
fn assert_only_usual_drops(report: &Report) {
    let drops = report.drops();
    let usual = |drop: &String| drop.ends_with(" tx down") || drop.ends_with(" full");
    assert!(drops.keys().all(usual), "dropped {drops:?}: {report}");
}

#[test]
fn three_stacks_reach_each_other() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let lan = Lan::new(3, &[], &[]);
    for from in 0..3 {
        for to in (0..3).filter(|to| *to != from) {
            assert!(lan.ping(from, &address(to)), "{from} to {to}: {}", lan.offcore.tail());
        }
    }
    let neighbours = lan.hosts[0].ip(&["neigh", "show"]).unwrap();
    assert_eq!(neighbours.matches("lladdr").count(), 2, "{neighbours}");
    let time = if full() { "10" } else { "1" };
    let _servers = [1, 2].map(|host| lan.serve(host));
    lan.stream(0, &address(1), &["-t", time]);
    lan.stream(1, &address(2), &["-t", time, "-R"]);
    let report = lan.stop();
    assert_only_usual_drops(&report);
    for port in 0..3 {
        let counts = ["learned", "moved", "not_learned"].map(|name| count(&report, port, name));
        assert_eq!(counts, [1, 0, 0], "{report}");
    }
    assert_eq!(report.0["bridge"]["addresses"], 3, "{report}");
    // The first host resolves the addresses of both other hosts.
    assert!(count(&report, 0, "flooded") >= 2, "{report}");
    // The kernel leaves segmentation to the port, and the switch passes large packets on.
    let mean = report.bytes(1, "tx") / report.packets(1, "tx");
    assert!(mean > FRAME, "packets of {mean} bytes: {report}");
}

#[test]
fn two_workers_share_the_forwarding_table() {
    let Some(_alone) = exclusive(&[&NEEDS[..], &[Need::Cores(2)]].concat()) else { return };
    let home = Netns::new().unwrap();
    let ports = ["tap:tap0,queues=2", "tap:tap1,queues=2"];
    let mut offcore = switch::start_in(&home, "0,1", &ports, &["--forward", "l2"]);
    switch::wait_for_report(&mut offcore);
    let hosts = [0, 1].map(|number| {
        let host = Netns::new().unwrap();
        home.ip(&["link", "set", &tap(number), "netns", host.name()]).unwrap();
        host.configure(&tap(number), &format!("{}/24", address(number))).unwrap();
        host
    });
    let lan = Lan { offcore, hosts: hosts.into(), _home: home };
    assert!(lan.ping(0, &address(1)) && lan.ping(1, &address(0)));
    let _server = lan.serve(1);
    lan.stream(0, &address(1), &["-t", "1", "-P", "8"]);
    let report = lan.stop();
    assert_only_usual_drops(&report);
    for (port, half) in [(0, "rx"), (0, "tx"), (1, "rx"), (1, "tx")] {
        assert!(report.packets_by_queue(port, half).iter().sum::<u64>() > 100, "{report}");
    }
    assert!(report.packets_by_queue(0, "rx").iter().all(|&packets| packets > 0), "{report}");
}

#[test]
fn a_station_that_moves_is_followed() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let mut lan = Lan::new(3, &[], &[]);
    let mac = "02:00:00:00:77:01";
    let bring = |lan: &Lan, host: usize| {
        let tap = tap(host);
        lan.hosts[host].ip(&["link", "set", &tap, "down"]).unwrap();
        lan.hosts[host].ip(&["link", "set", &tap, "address", mac]).unwrap();
        lan.hosts[host].ip(&["address", "flush", "dev", &tap]).unwrap();
        lan.hosts[host].configure(&tap, "10.77.2.50/24").unwrap();
    };
    bring(&lan, 1);
    assert!(lan.ping(0, "10.77.2.50") && lan.ping(1, &address(0)));
    lan.hosts[1].ip(&["link", "set", &tap(1), "down"]).unwrap();
    bring(&lan, 2);
    // The switch learns the moved host's port from its next packet.
    assert!(lan.ping(2, &address(0)));
    assert!(lan.ping(0, "10.77.2.50"));
    switch::wait_for(&mut lan.offcore, "the station to move", 1, |report| count(report, 2, "moved"));
    let report = lan.stop();
    assert_eq!(count(&report, 1, "moved"), 0, "{report}");
}

/// Two switches, connected by a trunk between a vhost port and a virtio-user port. Each has one host in VLAN 10 and one
/// in VLAN 20.
#[test]
fn vlans_are_isolated_and_trunked() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let dir = TempDir::new().unwrap();
    let (socket, capture_file) = (dir.file("trunk"), dir.file("trunk.pcap"));
    let mirror = format!("2=pcap:-,{}", capture_file.display());
    let rules = ["--vlan", "0=access:10", "--vlan", "1=access:20", "--vlan", "2=trunk:10,20"];
    let back_end = format!("vhost:{}", socket.display());
    let left = Lan::with(0, &[Attach::Tap; 2], &[&back_end], &[&rules[..], &["--mirror", &mirror]].concat());
    let right = Lan::with(2, &[Attach::Tap; 2], &[&format!("virtio-user:{}", socket.display())], &rules);
    let deadline = Instant::now() + TIMEOUT;
    while !left.ping(0, &address(2)) {
        assert!(Instant::now() < deadline, "{}{}", left.offcore.tail(), right.offcore.tail());
    }
    assert!(left.ping(1, &address(3)) && right.ping(0, &address(0)) && right.ping(1, &address(1)));
    let fails = |lan: &Lan, host: usize, to: usize| {
        lan.hosts[host].run("ping", &["-c1", "-W1", &address(to)]).is_err()
    };
    assert!(fails(&left, 0, 1) && fails(&left, 0, 3) && fails(&left, 1, 2) && fails(&right, 0, 1));
    // Tags are also added to and removed from large packets and packets with missing checksums.
    let _servers = [left.serve(0), left.serve(1)];
    right.stream(0, &address(0), &["-t", "1"]);
    right.stream(1, &address(1), &["-t", "1", "-R"]);
    for lan in [left, right] {
        let report = lan.stop();
        assert_eq!(report.0["bridge"]["addresses"], 4, "{report}");
        let drops = report.drops();
        assert!(
            drops.keys().all(|drop| !drop.contains("malformed") && !drop.contains("failed")),
            "{drops:?}"
        );
    }
    let lines = capture(&capture_file, &["-e", "-vv"]);
    assert!(lines.iter().any(|line| line.contains("vlan 10,")), "{:?}", lines.first());
    assert!(lines.iter().any(|line| line.contains("vlan 20,")));
    assert!(lines.iter().all(|line| !line.contains("ethertype IPv4") || line.contains("vlan ")));
    assert!(lines.iter().all(|line| !line.contains("incorrect")));
}

/// Returns the lines that tcpdump prints for a capture.
fn capture(path: &std::path::Path, more: &[&str]) -> Vec<String> {
    let mut command = std::process::Command::new("tcpdump");
    command.args(["-nn", "-t", "-r"]).arg(path).args(more);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

#[test]
fn mirror_has_its_ports_packets() {
    let Some(_core) = one_core(&NEEDS) else { return };
    let dir = TempDir::new().unwrap();
    let (all, sent) = (dir.file("all.pcap"), dir.file("sent.pcap"));
    let mirrors = [format!("0=pcap:-,{}", all.display()), format!("1:tx=pcap:-,{}", sent.display())];
    let lan = Lan::new(3, &[], &["--mirror", &mirrors[0], "--mirror", &mirrors[1]]);
    let ping = |host: usize, to: usize, count: &str| {
        lan.hosts[host].run("ping", &["-c", count, "-i0.2", "-W5", &address(to)]).unwrap();
    };
    ping(0, 1, "5");
    ping(2, 1, "1");
    let pinged = latest(&lan.offcore);
    let _server = lan.serve(1);
    lan.stream(0, &address(1), &["-n", "8M"]);
    let report = lan.stop();
    assert_eq!((report.full(3), report.full(4)), (0, 0), "{report}");
    let lost = |name: &str| report.drops().keys().any(|drop| drop.starts_with(name));
    assert!(!lost("mirror"), "{report}");

    let lines = capture(&all, &["icmp"]);
    // The only packet of host 2 that port 0 sends is the broadcast that resolves host 1's address.
    let expected: Vec<String> =
        (1..=5).flat_map(|n| [format!("echo request, {n}"), format!("echo reply, {n}")]).collect();
    let found = lines.iter().map(|line| {
        let what = if line.contains("echo request") { "echo request" } else { "echo reply" };
        let number = line.split("seq ").nth(1).and_then(|rest| rest.split(',').next()).unwrap_or_default();
        format!("{what}, {number}")
    });
    assert_eq!(found.collect::<Vec<_>>(), expected, "{lines:?}");
    let arp = capture(&all, &["arp"]);
    assert!(arp[0].contains("Request who-has 10.77.2.2 tell 10.77.2.1"), "{arp:?}");
    assert!(arp.iter().any(|line| line.contains("Request who-has 10.77.2.2 tell 10.77.2.3")), "{arp:?}");
    // Nothing was segmented before the stream, so each packet counts once. Everything captured before is in the file
    // now.
    let before = pinged.packets(0, "rx") + pinged.packets(0, "tx");
    assert!(capture(&all, &[]).len() as u64 >= before, "{pinged}");
    let tcp = capture(&all, &["-vv", "tcp"]);
    assert!(tcp.len() > 500 && tcp.iter().all(|line| !line.contains("incorrect")), "{} lines", tcp.len());
    let lengths = capture(&all, &["greater", "1515"]);
    assert!(lengths.is_empty(), "{} packets are longer than a wire takes", lengths.len());
    // Port 0 received as many bytes of the stream as port 1 sent.
    let to_server = |path| {
        let lines = capture(path, &["tcp dst port 5201 and ip src 10.77.2.1"]);
        let length = |line: &String| line.rsplit("length ").next().and_then(|n| n.trim().parse::<u64>().ok());
        lines.iter().filter_map(length).sum::<u64>()
    };
    assert_eq!(to_server(&all), to_server(&sent));
    assert!(to_server(&sent) > 1_000_000, "{} bytes", to_server(&sent));
    assert!(capture(&sent, &["ip src 10.77.2.2"]).is_empty(), "only what is sent to port 1 is wanted");
}

#[test]
fn a_storm_is_limited() {
    let Some(_alone) = exclusive(&NEEDS) else { return };
    // The generator sends its packets to an unknown address.
    let mut lan = Lan::new(2, &["gen:size=64,count=200000,rate=100k"], &["--flood-limit", "1000"]);
    let limited = |report: &Report| count(report, 2, "flood_limited") + count(report, 2, "flooded");
    switch::wait_for(&mut lan.offcore, "the storm to end", 200_000, limited);
    assert!(lan.ping(0, &address(1)), "{}", lan.offcore.tail());
    let report = lan.stop();
    let flooded = count(&report, 2, "flooded");
    assert!((1_000..100_000).contains(&flooded), "{flooded} of 200000 packets were flooded: {report}");
    assert_eq!(flooded + count(&report, 2, "flood_limited"), 200_000, "{report}");
}

/// A guest and two stacks on ports of these kinds. All of them reach each other by pings and TCP streams.
fn a_guest_and_two_stacks(kinds: [Attach; 2]) {
    let Some(core) = one_core(&[&NEEDS[..], &[Need::Guest, Need::Cores(2)]].concat()) else { return };
    let dir = TempDir::new().unwrap();
    let lan = Lan::with(0, &kinds, &[&format!("vhost:{}", dir.file("g").display())], &[]);
    let nic = Nic::new(dir.file("g"), "52:54:00:00:02:09", &format!("{}/24", address(GUEST)));
    let config = GuestConfig {
        core: Some(core.number()),
        nics: vec![Nic { offloads: true, ..nic }],
        ..GuestConfig::default()
    };
    let mut guest = Guest::boot(&config).unwrap();
    guest.start_iperf3_server().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while !lan.ping(0, &address(GUEST)) {
        assert!(Instant::now() < deadline, "the guest did not answer within {TIMEOUT:?}");
    }
    for host in [0, 1] {
        assert!(lan.ping(host, &address(GUEST)) && lan.ping(host, &address(1 - host)));
        let ping = format!("ping -A -c3 -W5 {}", address(host));
        assert!(
            (0..4).any(|_| guest.run(&ping).unwrap().text.contains(" 0% packet loss")),
            "{}",
            guest.tail()
        );
    }
    let _servers = [0, 1].map(|host| lan.serve(host));
    let time = if full() { "20" } else { "1" };
    for host in [0, 1] {
        lan.stream(host, &address(GUEST), &["-t", time]);
        lan.stream(host, &address(GUEST), &["-t", time, "-R"]);
    }
    lan.stream(0, &address(1), &["-t", time]);
    let report = lan.stop();
    assert_only_usual_drops(&report);
    assert_eq!(report.0["bridge"]["addresses"], 3, "{report}");
    for port in 0..3 {
        assert!(report.packets(port, "rx") > 100 && report.packets(port, "tx") > 100, "{report}");
    }
}

tests! {
    fn a_guest_and_two_stacks_on_tap_ports() => a_guest_and_two_stacks([Attach::Tap, Attach::Tap]);
    /// Three kinds of ports with different offloads.
    fn a_guest_and_stacks_on_af_xdp_and_tap() => a_guest_and_two_stacks([Attach::AfXdp, Attach::Tap]);
    fn a_guest_and_stacks_on_af_packet_and_tap() => a_guest_and_two_stacks([Attach::AfPacket, Attach::Tap]);
}
