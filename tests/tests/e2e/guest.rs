//! A QEMU guest on a vhost port, switched to a TAP interface whose other end is the kernel of a network namespace.

mod idle;
mod migration;
mod offloads;
mod pair;
mod tcp;

use std::time::{Duration, Instant};

use peers::guest::{Guest, GuestConfig, Nic};
use peers::{Need, Netns, Offcore, TempDir, exclusive, one_core};
use rustix::process::Signal;

use crate::switch::{self, Copies, arguments, full, stop_with_log};

const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";
const MAC: &str = "52:54:00:00:00:02";
const TAP: &str = "tap0";
/// Time limit for a guest to answer after it was connected again. QEMU retries the connection once per second.
const TIMEOUT: Duration = Duration::from_secs(60);

const NEEDS: [Need; 8] =
    [Need::Root, Need::Tun, Need::Guest, Need::Ip, Need::Ping, Need::Iperf3, Need::Ethtool, Need::Cores(2)];

/// The configuration of a guest, a switch and a TAP interface.
#[derive(Clone, Copy, Debug)]
struct System {
    packed: bool,
    queues: u16,
    /// Whether checksum and segmentation offloads are on at the guest and at the TAP interface.
    offloads: [bool; 2],
    copies: Copies,
}

impl System {
    const PLAIN: Self = Self { packed: false, queues: 1, offloads: [false; 2], copies: Copies::Core };

    /// Starts the switch in the namespace and sets its TAP interface up.
    fn start(self, netns: &Netns, dir: &TempDir, more: &[&str]) -> Offcore {
        let Self { queues, offloads: [_, offloads], copies, .. } = self;
        let socket = format!("vhost:{},queues={queues}", dir.file("g").display());
        let args = arguments(&[&socket, &format!("tap:{TAP},queues={queues}")], copies, queues, more);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let mut offcore = Offcore::start_in(netns, &args).unwrap();
        switch::wait_for_report(&mut offcore);
        netns.configure(TAP, &format!("{HOST}/24")).unwrap();
        if offloads { netns.enable_offloads(TAP) } else { netns.disable_offloads(TAP) }.unwrap();
        offcore
    }

    /// Boots the guest on this core.
    fn boot(self, core: usize, dir: &TempDir) -> Guest {
        let Self { packed, queues, offloads: [offloads, _], .. } = self;
        let nic = Nic::new(dir.file("g"), MAC, &format!("{GUEST}/24"));
        let nics = vec![Nic { packed, queues, offloads, ..nic }];
        let config = GuestConfig { cpus: queues, core: Some(core), nics, ..GuestConfig::default() };
        let mut guest = Guest::boot(&config).unwrap();
        guest.start_iperf3_server().unwrap();
        guest
    }
}

/// Pings the guest until it answers.
fn wait_for_guest(netns: &Netns) {
    let deadline = Instant::now() + TIMEOUT;
    while netns.run("ping", &["-c1", "-W1", GUEST]).is_err() {
        assert!(Instant::now() < deadline, "the guest did not answer within {TIMEOUT:?}");
    }
}

/// Pings with 56 bytes and with 8000 bytes, which are six fragments, from the namespace and from the guest.
///
/// An emulated guest on a busy core may answer too late for `ping`, whatever the back end (dpdk-testpmd behaves the
/// same). Therefore an incomplete round is repeated. Packets that the switch loses would be in its report.
fn ping_both_ways(netns: &Netns, guest: &mut Guest) {
    for size in ["56", "8000"] {
        let complete = |text: &str| text.contains(" 0% packet loss");
        let from_host = || netns.run("ping", &["-c3", "-i0.2", "-W5", "-s", size, GUEST]).unwrap_or_default();
        assert!(
            (0..4).any(|_| complete(&from_host())),
            "no complete round of {size}-byte pings to the guest"
        );
        let command = format!("ping -A -c3 -W5 -s {size} {HOST}");
        let mut from_guest = || guest.run(&command).unwrap().text;
        assert!(
            (0..4).any(|_| complete(&from_guest())),
            "no complete round of {size}-byte pings from the guest"
        );
    }
}

/// Direction of a TCP stream, seen from the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToGuest,
    FromGuest,
}

/// Runs a TCP stream for a second. The guest's server may still be busy with the previous stream, and then refuses the
/// next one.
fn iperf(netns: &Netns, way: Way) {
    let mut args = vec!["-J", "-c", GUEST, "-P", "4", "-t", if full() { "20" } else { "1" }];
    if way == Way::FromGuest {
        args.push("-R");
    }
    let stream = || -> serde_json::Value {
        let text = netns.run("iperf3", &args).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"));
        serde_json::from_str(&text).unwrap()
    };
    let mut report = stream();
    for _ in 0..20 {
        if report["error"].is_null() {
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
        report = stream();
    }
    let bytes = report["end"]["sum_received"]["bytes"].as_u64().unwrap_or_default();
    assert!(report["error"].is_null() && bytes > 100_000, "{bytes} bytes arrived: {report:#}");
}

fn iperf_both_ways(netns: &Netns) {
    iperf(netns, Way::ToGuest);
    iperf(netns, Way::FromGuest);
}

/// Stops the switch. Its report must have packets in both directions and no malformed descriptors.
fn stop(offcore: Offcore, copies: Copies) {
    let (report, _) = stop_with_log(offcore);
    for (port, half) in [(0, "rx"), (0, "tx"), (1, "rx"), (1, "tx")] {
        assert!(report.packets(port, half) > 100, "{report}");
    }
    // If the guest or the kernel is slower than the other, its full queue drops packets, and TCP sends them again.
    report.assert_only_drops(&["port0 tx full", "port0 tx down", "port1 tx full", "port1 tx down"]);
    report.assert_copies(copies, report.packets(0, "rx") + report.packets(0, "tx"));
}

/// Uses one guest throughout: its machine is restarted, and the switch is killed and started again.
fn through_reboots_and_restarts(system: System, core: usize, more: &[&str]) {
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let mut offcore = system.start(&netns, &dir, more);
    let mut guest = system.boot(core, &dir);
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);
    // Only packets that arrived before both ends were up with buffers were dropped. All pings are answered.
    switch::latest(&offcore).assert_only_drops(&["port0 tx down", "port0 tx full", "port1 tx down"]);
    iperf_both_ways(&netns);

    guest.reboot().unwrap();
    guest.start_iperf3_server().unwrap();
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);

    for _ in 0..if full() { 10 } else { 1 } {
        offcore.signal(Signal::KILL).unwrap();
        // The TAP interface is deleted with the switch.
        assert_eq!(offcore.wait().unwrap().status.code(), None, "killed");
        offcore = system.start(&netns, &dir, more);
        if system.packed {
            // The position of a killed back end in a packed ring is lost. Only the driver can start a new ring.
            guest.reboot().unwrap();
            guest.start_iperf3_server().unwrap();
        }
        wait_for_guest(&netns);
        ping_both_ways(&netns, &mut guest);
        iperf_both_ways(&netns);
    }
    stop(offcore, system.copies);
}

#[test]
fn a_guest_with_split_rings() {
    let Some(_cores) = exclusive(&NEEDS) else { return };
    through_reboots_and_restarts(System::PLAIN, 1, &[]);
    if full() {
        through_reboots_and_restarts(System { copies: Copies::Helper, ..System::PLAIN }, 1, &[]);
    }
}

#[test]
fn a_guest_with_packed_rings() {
    let Some(core) = one_core(&NEEDS) else { return };
    // A helper that busy-polls would use half of the guest's core.
    let helped = System { packed: true, copies: Copies::Helper, ..System::PLAIN };
    through_reboots_and_restarts(helped, core.number(), switch::idle());
    if full() {
        through_reboots_and_restarts(System { packed: true, ..System::PLAIN }, core.number(), &[]);
    }
}
