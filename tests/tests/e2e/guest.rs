//! A QEMU guest on a vhost port, switched to a TAP interface whose other end is the kernel of a network namespace.

mod idle;
mod migration;
mod offloads;
mod pair;
mod tcp;

use std::time::{Duration, Instant};

use peers::guest::{Guest, GuestConfig, Nic};
use peers::{Need, Netns, Offcore, TempDir, exclusive, one_core, require};
use rustix::process::Signal;

use crate::switch::{self, Copies, arguments, full, stop_with_log};

const HOST: &str = "10.77.0.1";
const GUEST: &str = "10.77.0.2";
const MAC: &str = "52:54:00:00:00:02";
const TAP: &str = "tap0";
/// How long a guest that was just connected again may take to answer: QEMU looks for the back end once a second.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the system of a guest, a switch and a TAP interface is like.
#[derive(Clone, Copy, Debug)]
struct System {
    packed: bool,
    queues: u16,
    /// Whether checksums and segmentation are left to the other side by the guest, and by the TAP interface.
    offloads: [bool; 2],
    copies: Copies,
}

impl System {
    const PLAIN: Self = Self { packed: false, queues: 1, offloads: [false; 2], copies: Copies::Core };

    /// The switch in the namespace, with its TAP interface up.
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

    /// The guest on this core.
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

/// What every test here needs.
fn needed() -> Option<()> {
    let needs = [Need::Root, Need::Tun, Need::Guest, Need::Ip, Need::Ping, Need::Iperf3, Need::Ethtool];
    require(&[&needs[..], &[Need::Cores(2)]].concat())
}

/// Pings the guest until it answers.
fn wait_for_guest(netns: &Netns) {
    let deadline = Instant::now() + TIMEOUT;
    while netns.run("ping", &["-c1", "-W1", GUEST]).is_err() {
        assert!(Instant::now() < deadline, "the guest did not answer within {TIMEOUT:?}");
    }
}

/// Pings of 56 and of 8000 bytes, which are six fragments, from the namespace and from the guest.
///
/// A guest in software emulation on a busy core may answer too late for `ping` whatever the back end is (dpdk-testpmd's
/// is no different), so a round that is not complete is made again; that packets were lost by the switch would be in
/// its report.
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

/// Which way a TCP stream goes, seen from the namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    ToGuest,
    FromGuest,
}

/// A TCP stream of a second. The guest's server may still be busy with the stream before, and then refuses the
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

/// Stops the switch; its report says that packets went both ways and that nothing was malformed.
fn stop(offcore: Offcore, copies: Copies) {
    let (report, _) = stop_with_log(offcore);
    for (port, half) in [(0, "rx"), (0, "tx"), (1, "rx"), (1, "tx")] {
        assert!(report.packets(port, half) > 100, "{report}");
    }
    // A guest or a kernel that is slower than the other drops what it has no room for, and TCP sends it again.
    report.assert_only_drops(&["port0 tx full", "port0 tx down", "port1 tx full", "port1 tx down"]);
    report.assert_copies(copies, report.packets(0, "rx") + report.packets(0, "tx"));
}

/// One guest all the while: its machine is restarted, and the switch is killed and started again.
fn through_reboots_and_restarts(system: System, core: usize, more: &[&str]) {
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    let mut offcore = system.start(&netns, &dir, more);
    let mut guest = system.boot(core, &dir);
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);
    // Only what came before both ends were up, with buffers, had nowhere to go: pings are all answered.
    switch::latest(&offcore).assert_only_drops(&["port0 tx down", "port0 tx full", "port1 tx down"]);
    iperf_both_ways(&netns);

    guest.reboot().unwrap();
    guest.start_iperf3_server().unwrap();
    wait_for_guest(&netns);
    ping_both_ways(&netns, &mut guest);

    for _ in 0..if full() { 10 } else { 1 } {
        offcore.signal(Signal::KILL).unwrap();
        // Its interface goes with it.
        assert_eq!(offcore.wait().unwrap().status.code(), None, "killed");
        offcore = system.start(&netns, &dir, more);
        if system.packed {
            // Where a back end that was killed had been in a packed ring is known to nobody: only the driver can begin
            // a new one.
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
    let Some(()) = needed() else { return };
    let _cores = exclusive();
    through_reboots_and_restarts(System::PLAIN, 1, &[]);
    if full() {
        through_reboots_and_restarts(System { copies: Copies::Helper, ..System::PLAIN }, 1, &[]);
    }
}

#[test]
fn a_guest_with_packed_rings() {
    let Some(()) = needed() else { return };
    let core = one_core();
    // A helper that polled would take half of the guest's core.
    let helped = System { packed: true, copies: Copies::Helper, ..System::PLAIN };
    through_reboots_and_restarts(helped, core.number(), switch::idle());
    if full() {
        through_reboots_and_restarts(System { packed: true, ..System::PLAIN }, core.number(), &[]);
    }
}
