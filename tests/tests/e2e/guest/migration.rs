//! A guest is migrated from one QEMU to another, and from one switch to another, while packets flow.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use peers::guest::{Guest, GuestConfig, Nic};
use peers::{Netns, Offcore, TempDir, one_core};

use super::{GUEST, HOST, MAC, NEEDS, wait_for_guest};
use crate::switch::{self, Copies, arguments, stop_with_log};

/// Time limit for QEMU to copy the memory of an emulated guest.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Starts switch `number`, between a socket and a TAP interface in the namespace's bridge.
fn start(netns: &Netns, dir: &TempDir, number: usize, copies: Copies) -> Offcore {
    let tap = format!("tap{number}");
    let ports = [format!("vhost:{}", dir.file(&format!("g{number}")).display()), format!("tap:{tap}")];
    let args = arguments(&ports, copies, 1, switch::idle());
    let mut offcore = Offcore::start_in(netns, &args.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
    switch::wait_for_report(&mut offcore);
    netns.ip(&["link", "set", &tap, "master", "br0", "up"]).unwrap();
    netns.disable_offloads(&tap).unwrap();
    offcore
}

/// Starts QEMU `number` on its switch's socket.
fn qemu(dir: &TempDir, core: usize, number: usize, packed: bool, args: &[String]) -> Guest {
    let nic = Nic::new(dir.file(&format!("g{number}")), MAC, &format!("{GUEST}/24"));
    let nics = vec![Nic { packed, ..nic }];
    Guest::spawn(&GuestConfig { core: Some(core), nics, args: args.to_vec(), ..GuestConfig::default() })
        .unwrap()
}

/// Sends a command to QEMU's monitor. Returns the output up to the next prompt.
fn ask(monitor: &mut BufReader<UnixStream>, command: &str) -> String {
    monitor.get_mut().write_all(format!("{command}\n").as_bytes()).unwrap();
    let mut answer = Vec::new();
    // The monitor prints the prompt once before the answer, followed by the echoed command.
    for _ in 0..2 {
        while !answer.ends_with(b"(qemu) ") {
            assert!(monitor.read_until(b' ', &mut answer).unwrap() > 0, "QEMU has ended");
        }
        if answer.len() > b"(qemu) ".len() + command.len() {
            break;
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// Sends numbered lines to the guest's port 7000 until told to stop. Returns the number of lines.
fn stream(stop: &AtomicBool) -> u64 {
    let mut stream = TcpStream::connect((GUEST, 7000)).unwrap();
    stream.set_write_timeout(Some(TIMEOUT)).unwrap();
    let mut lines = 0;
    while !stop.load(Ordering::Relaxed) {
        stream.write_all(format!("{lines}\n").as_bytes()).unwrap();
        lines += 1;
        if lines % 100 == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    lines
}

fn migrate(packed: bool, copies: Copies) {
    let Some(core) = one_core(&NEEDS) else { return };
    let (dir, netns) = (TempDir::new().unwrap(), Netns::new().unwrap());
    netns.ip(&["link", "add", "br0", "type", "bridge"]).unwrap();
    netns.configure("br0", &format!("{HOST}/24")).unwrap();
    let switches = [0, 1].map(|number| start(&netns, &dir, number, copies));
    let [monitor, incoming] = ["monitor", "incoming"].map(|name| dir.file(name).display().to_string());
    let to_monitor = ["-monitor".into(), format!("unix:{monitor},server=on,wait=off")];
    let mut first = qemu(&dir, core.number(), 0, packed, &to_monitor);
    first.wait_ready().unwrap();
    wait_for_guest(&netns);
    let mut second = qemu(&dir, core.number(), 1, packed, &["-incoming".into(), format!("unix:{incoming}")]);
    // Checks that each line is one greater than the previous line.
    let count = "nc -l -p 7000 | awk '$1 != NR - 1 { print \"line\", NR, \"is\", $1; exit } END { print NR }' >/tmp/count";
    first.check(&format!("({count}) >/dev/null 2>&1 </dev/null & sleep 1")).unwrap();
    let stop = AtomicBool::new(false);
    let lines = std::thread::scope(|scope| {
        let sender = scope.spawn(|| netns.within(|| Ok(stream(&stop))).unwrap());
        std::thread::sleep(Duration::from_secs(1));
        let mut monitor = BufReader::new(UnixStream::connect(monitor).unwrap());
        ask(&mut monitor, &format!("migrate -d unix:{incoming}"));
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let status = ask(&mut monitor, "info migrate");
            if status.contains("completed") {
                break;
            }
            let failed = status.contains("failed") || Instant::now() > deadline;
            assert!(!failed, "{status}\n{}\n{}", first.tail(), second.tail());
            std::thread::sleep(Duration::from_millis(200));
        }
        drop(first);
        std::thread::sleep(Duration::from_secs(2));
        stop.store(true, Ordering::Relaxed);
        sender.join().unwrap()
    });
    wait_for_guest(&netns);
    let wait = "for i in $(seq 60); do [ -s /tmp/count ] && break; sleep 1; done";
    let counted = second.check(&format!("{wait}; cat /tmp/count")).unwrap();
    assert_eq!(counted.trim(), lines.to_string(), "{}", second.tail());
    for switch in switches {
        let (report, log) = stop_with_log(switch);
        // A slow guest receives many lines in one packet.
        assert!(report.packets(0, "rx") > 10 && report.packets(0, "tx") > 10, "{report}");
        report.assert_copies(copies, report.packets(0, "rx") + report.packets(0, "tx"));
        assert!(!log.contains("broken"), "{log}");
    }
}

tests! {
    fn a_guest_with_split_rings_migrates() => migrate(false, Copies::Helper);
    fn a_guest_with_packed_rings_migrates() => migrate(true, Copies::Core);
}
