//! Offcore's AF_XDP port between the kernel's TCP/IP stacks of two network namespaces, over veth.
//!
//! ```text
//! client: vc ── p0 :switch: p1 ── vs :server
//! ```

mod care;
mod frames;
mod refusals;

use std::time::Duration;

use peers::{Need, Netns, Offcore, exclusive, one_core};

use crate::switch::{self, Report, full, wait_for_status};

const CLIENT: &str = "10.77.0.1";
const SERVER: &str = "10.77.0.2";
const TIMEOUT: Duration = Duration::from_secs(10);

/// Three namespaces: one for the switch, and one for each of the two stacks that it connects.
#[derive(Debug)]
struct Net {
    client: Netns,
    server: Netns,
    switch: Netns,
    /// The lcores of the switch.
    lcores: String,
    queues: u16,
    mtu: u16,
}

impl Net {
    /// Creates interfaces with `queues` queues each and an MTU of `mtu` bytes, for a switch on these lcores.
    fn new(lcores: impl ToString, queues: u16, mtu: u16) -> Self {
        let netns = || Netns::new().unwrap();
        let lcores = lcores.to_string();
        let net = Self { client: netns(), server: netns(), switch: netns(), lcores, queues, mtu };
        net.connect_client();
        net.connect(&net.server, "vs", "p1", SERVER);
        net
    }

    /// Creates the pair `vc` and `p0`, and sets both up.
    fn connect_client(&self) {
        self.connect(&self.client, "vc", "p0", CLIENT);
    }

    fn connect(&self, stack: &Netns, interface: &str, port: &str, address: &str) {
        let (queues, mtu) = (self.queues.to_string(), self.mtu.to_string());
        let several = ["numtxqueues", queues.as_str(), "numrxqueues", queues.as_str()];
        let mut command = vec!["link", "add", port, "mtu", &mtu];
        command.extend(several);
        command.extend(["type", "veth", "peer", "name", interface, "netns", stack.name(), "mtu", &mtu]);
        command.extend(several);
        self.switch.ip(&command).unwrap();
        // An XDP socket does not learn which checksums are missing.
        stack.disable_offloads(interface).unwrap();
        stack.configure(interface, &format!("{address}/24")).unwrap();
        self.switch.ip(&["link", "set", port, "up"]).unwrap();
    }

    /// Starts a switch between the two ports, each with these options, and waits until both links are up.
    fn start(&self, options: &str, more: &[&str]) -> Offcore {
        let ports = ["p0", "p1"].map(|name| format!("af_xdp:{name},queues={}{options}", self.queues));
        let mut offcore = self.start_with(&ports, more);
        for (port, name) in ["p0", "p1"].into_iter().enumerate() {
            wait_for_status(&mut offcore, port, &format!("interface {name} is up"));
        }
        offcore
    }

    /// Starts a switch with these ports.
    fn start_with(&self, ports: &[impl AsRef<str>], more: &[&str]) -> Offcore {
        switch::start_in(&self.switch, &self.lcores, ports, more)
    }

    /// Pings the server with `size` bytes of payload, without fragmentation. Returns whether it answers.
    fn ping(&self, size: usize) -> bool {
        let size = size.to_string();
        let args = ["-c", "5", "-i", "0.05", "-W", "2", "-M", "do", "-s", &size, SERVER];
        let text = self.client.run("ping", &args).unwrap_or_default();
        text.contains(" 0% packet loss")
    }

    /// Pings the server until it answers.
    fn ping_until_answered(&self) {
        // The server's address must be resolved again, and the machine may be busy.
        assert!((0..20).any(|_| self.ping(56)), "no answer from the server");
    }

    /// Sends some megabytes over TCP in each direction, over several connections.
    fn streams(&self) {
        for way in [&[][..], &["-R"]] {
            let mut server = switch::iperf3_server(&self.server, &["--one-off"]);
            let bytes = if full() { "500M" } else { "20M" };
            let args = [&["--client", SERVER, "-J", "--parallel", "8", "--bytes", bytes], way].concat();
            let report: serde_json::Value =
                serde_json::from_str(&self.client.run("iperf3", &args).unwrap()).unwrap();
            let [sent, received] =
                ["sum_sent", "sum_received"].map(|sum| report["end"][sum]["bytes"].as_u64().unwrap());
            // iperf3 also counts bytes as sent that are still in buffers when the client is done.
            assert!(sent >= 20_000_000 && received >= 1_000_000, "{received} of {sent} bytes");
            server.wait_for_exit(TIMEOUT).unwrap();
        }
    }

    /// Returns whether interface `port` of the switch has an XDP program.
    fn has_program(&self, port: &str) -> bool {
        self.switch.ip(&["-d", "link", "show", "dev", port]).unwrap().contains("xdp")
    }

    fn assert_no_programs(&self) {
        assert!(!self.has_program("p0") && !self.has_program("p1"), "an XDP program was left behind");
    }
}

const NEEDS: [Need; 5] = [Need::Root, Need::Ip, Need::Ping, Need::Ethtool, Need::Iperf3];

/// Stops the switch. There must be no errors, and the switch must remove everything that it created.
fn stop(offcore: Offcore, net: &Net) -> Report {
    let report = switch::stop(offcore);
    net.assert_no_programs();
    report
}

/// Both stacks reach each other through ports with these options. The status line must contain `expected`.
fn stacks_talk(net: &Net, options: &str, more: &[&str], expected: &str) -> Report {
    let mut offcore = net.start(options, more);
    wait_for_status(&mut offcore, 1, expected);
    net.ping_until_answered();
    net.streams();
    assert!(net.has_program("p0") && net.has_program("p1"));
    stop(offcore, net)
}

#[test]
fn stacks_communicate_in_every_xdp_mode() {
    let Some(core) = one_core(&NEEDS) else { return };
    for (mode, expected) in [
        ("", "copy mode, program in the driver"),
        (",mode=copy", "copy mode, program in the driver"),
        (",mode=skb", "copy mode, generic program"),
        (",need_wakeup=off,ring_size=256,promisc=off", "copy mode, program in the driver"),
        (",busy_poll=64", "copy mode, program in the driver"),
    ] {
        stacks_talk(&Net::new(core.number(), 1, 1500), mode, &[], expected);
    }
}

#[test]
fn flows_spread_over_the_queues() {
    let Some(core) = one_core(&NEEDS) else { return };
    let report = stacks_talk(&Net::new(core.number(), 2, 1500), "", &[], "queues 0 to 1: copy mode");
    for port in [0, 1] {
        for half in ["rx", "tx"] {
            let packets = report.packets_by_queue(port, half);
            assert!(packets.len() == 2 && packets.iter().all(|&n| n > 0), "{half} {packets:?}: {report}");
        }
    }
}

#[test]
fn two_workers_may_share_a_socket() {
    let Some(_cores) = exclusive(&[&NEEDS[..], &[Need::Cores(2)]].concat()) else { return };
    stacks_talk(&Net::new("0,1", 2, 1500), "", &[], "queues 0 to 1");
}

#[test]
fn packets_wake_a_worker_that_sleeps() {
    let Some(core) = one_core(&NEEDS) else { return };
    stacks_talk(&Net::new(core.number(), 1, 1500), "", &["--idle", "sleep"], "copy mode");
}

#[test]
fn packets_of_other_queues_go_to_the_kernel() {
    let Some(core) = one_core(&NEEDS) else { return };
    let net = Net::new(core.number(), 2, 1500);
    net.switch.ip(&["address", "add", "10.77.0.9/24", "dev", "p0"]).unwrap();
    let mut offcore = net.start_with(&["af_xdp:p0,first=1,force", "af_xdp:p1"], &[]);
    wait_for_status(&mut offcore, 0, "queue 1: copy mode");
    // The XDP program passes the packets of queue 0 to the kernel. Datagrams from many ports are spread over both
    // queues. The kernel answers the ones that reach it, because no socket listens at their port.
    let errors = || {
        let text = net.switch.run("nstat", &["-asz", "UdpNoPorts"]).unwrap();
        let count = text.split_whitespace().skip_while(|word| *word != "UdpNoPorts").nth(1);
        count.unwrap().parse::<u64>().unwrap()
    };
    // ARP requests would all use the same queue.
    let mac = net.switch.run("cat", &["/sys/class/net/p0/address"]).unwrap();
    net.client.ip(&["neighbour", "replace", "10.77.0.9", "lladdr", mac.trim(), "dev", "vc"]).unwrap();
    let before = errors();
    for port in 0..64 {
        let to = format!("echo > /dev/udp/10.77.0.9/{}", 9000 + port);
        net.client.run("bash", &["-c", &to]).unwrap();
    }
    let taken = switch::wait_for_packets(&mut offcore, 0, "rx", 1).packets(0, "rx");
    assert!(errors() > before, "nothing came through to the kernel, and {taken} packets to the port");
    stop(offcore, &net);
}
