//! A guest's own TCP against `offcore tcp` and `offcore epping`, each on a vhost port of the guest.

use std::fs;

use peers::{Guest, GuestConfig, Need, Nic, Offcore, TempDir, exclusive};

use super::offloads::{FRAME, fresh_report, mean_length, set_offloads};
use super::pair::Side;
use crate::switch;

/// Number of lines of the served file. `seq` creates it on both sides.
const LINES: u32 = 250_000;

/// A guest whose interface `ethN` is in the network 10.77.N.0/24, with a host behind each interface.
struct System {
    dir: TempDir,
    guest: Guest,
    /// The echo server.
    echo: Offcore,
    /// The file server.
    files: Offcore,
}

/// Returns the port of the host behind interface `number`.
fn port(dir: &TempDir, number: usize) -> String {
    let socket = dir.file(&format!("g{number}")).display().to_string();
    format!("vhost:{socket},addr=10.77.{number}.1/24,addr=fd77:{number}::1/64")
}

/// Starts a host behind an interface, with these flags.
fn host(dir: &TempDir, number: usize, command: &str, more: &[&str]) -> Offcore {
    let port = port(dir, number);
    let args = [command, "--port", &port, "--lcores", "0", "--stats-interval", "0.2", "--format", "json"];
    let mut offcore = Offcore::start(&[&args[..], more].concat()).unwrap();
    switch::wait_for_report(&mut offcore);
    offcore
}

impl System {
    fn start(Side { packed, offloads }: Side) -> Self {
        let dir = TempDir::new().unwrap();
        let want: String = (1..=LINES).map(|line| format!("{line}\n")).collect();
        fs::write(dir.file("file"), want).unwrap();
        let app = format!("http:{}:8080", dir.path().display());
        let echo = host(&dir, 0, "tcp", &["--idle", "sleep"]);
        let files = host(&dir, 1, "tcp", &["--idle", "sleep", "--app", &app]);
        let nics = (0..2).map(|number| {
            let nic = Nic::new(
                dir.file(&format!("g{number}")),
                &format!("52:54:00:00:02:0{number}"),
                &format!("10.77.{number}.2/24"),
            );
            Nic { packed, offloads, ..nic }
        });
        let config = GuestConfig {
            core: Some(1),
            nics: nics.collect(),
            kernel_args: String::new(),
            ..GuestConfig::default()
        };
        let mut guest = Guest::boot(&config).unwrap();
        for number in 0..2 {
            let address = format!("ip address add fd77:{number}::2/64 dev eth{number}");
            guest
                .check(&format!("echo 0 >/proc/sys/net/ipv6/conf/eth{number}/accept_dad; {address}"))
                .unwrap();
            for address in [format!("10.77.{number}.1"), format!("fd77:{number}::1")] {
                let ping = format!("for i in $(seq 20); do ping -c1 -W1 {address} && exit; done; exit 1");
                guest.check(&ping).unwrap();
            }
        }
        guest.check(&format!("seq {LINES} >/tmp/want")).unwrap();
        // The nc of Busybox would send only a thousand bytes at a time.
        let script = "dd if=/tmp/want bs=64k & head -c $(stat -c %s /tmp/want) >/tmp/back$1";
        let write = format!("printf '%s\\n' '#!/bin/sh' '{script}' >/tmp/echo; chmod +x /tmp/echo");
        guest.check(&write).unwrap();
        Self { dir, guest, echo, files }
    }

    /// The host echoes all data of the guest, over two connections of each protocol at the same time.
    fn echo(&mut self) {
        let each = "nc $to 7 -e /tmp/echo $n && cmp /tmp/want /tmp/back$n || touch /tmp/failed";
        let ways = "10.77.0.1 fd77:0::1 10.77.0.1 fd77:0::1";
        let all =
            format!("n=0; for to in {ways}; do n=$((n+1)); ({each}) & done; wait; test ! -e /tmp/failed");
        self.guest.check(&all).unwrap();
    }

    /// The guest downloads the file and compares it.
    fn files(&mut self) {
        for address in ["10.77.1.1", "[fd77:1::1]"] {
            let command = format!("wget -q -O /tmp/got http://{address}:8080/file && cmp /tmp/want /tmp/got");
            self.guest.check(&command).unwrap();
        }
    }

    /// Runs both between two reports. Returns whether the guest sent packets longer than the MTU allows, and whether it
    /// received some.
    fn exchange(&mut self) -> [bool; 2] {
        let before = [fresh_report(&mut self.echo), fresh_report(&mut self.files)];
        self.echo();
        self.files();
        let after = [fresh_report(&mut self.echo), fresh_report(&mut self.files)];
        let lengths =
            [mean_length(&before[0], &after[0], 0, "rx"), mean_length(&before[1], &after[1], 0, "tx")];
        lengths.map(|length| length > FRAME)
    }
}

/// Connects to the guest, which echoes everything, from a host that replaces the one at `eth1`.
fn call(guest: &mut Guest, dir: &TempDir) {
    guest.check("nc -ll -p 7 -e cat >/dev/null 2>&1 &").unwrap();
    let mut offcore = host(dir, 1, "epping", &["-c", "10.77.1.2:7", "-l", "100000", "-n", "7", "--verify"]);
    switch::wait_for(&mut offcore, "bytes that came back", 3_000_000, |report| report.bytes(0, "rx"));
    let finished = offcore.stop().unwrap();
    assert!(finished.status.success(), "{finished:?}");
    let summary = finished.lines.iter().rev().find_map(|line| line.json.as_ref()).unwrap();
    assert!(summary["returned"].as_u64() > Some(2_000_000), "{summary}");
    assert_eq!(summary["wrong"], 0, "{summary}");
}

fn guest_and_host(side: Side) {
    let Some(_cores) = exclusive(&[Need::Root, Need::Guest, Need::Cores(2)]) else { return };
    let mut system = System::start(side);
    assert_eq!(system.exchange(), [side.offloads; 2], "{side:?}");
    if side.offloads {
        for interface in ["eth0", "eth1"] {
            set_offloads(&mut system.guest, interface, false);
        }
        assert_eq!(system.exchange(), [false, true], "{side:?}");
    }
    let System { dir, mut guest, echo, files } = system;
    switch::stop(echo);
    switch::stop(files);
    if !side.packed {
        call(&mut guest, &dir);
    }
}

tests! {
    fn tcp_of_a_guest_with_offloads() => guest_and_host(Side { packed: false, offloads: true });
    fn tcp_of_a_guest_without_offloads() => guest_and_host(Side { packed: true, offloads: false });
}
