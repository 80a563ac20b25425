//! Two well-behaved guests, one guest that migrates, and a hostile one share a worker whose engine makes errors and
//! whose process is killed from time to time. The well-behaved guests lose only packets for which their rings had no
//! room, and packets in flight at a kill.
//!
//! With `OFFCORE_FULL=1` the test takes an hour.

mod hostile;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peers::{Need, Offcore, TempDir, exclusive};
use rustix::process::Signal;

use crate::migrating::Migrating;
use crate::peer::{Ends, Peer};
use crate::switch::{self, Copies, Report, full, latest};

/// Frames per second from each well-behaved guest.
const RATE: u64 = 20_000;
/// The ports of the switch: two for well-behaved guests, two between which one guest migrates, and one for the hostile
/// guest.
const PORTS: [&str; 5] = ["a", "b", "c", "d", "e"];
/// Index of the hostile guest's port.
const HOSTILE: usize = 4;
/// The virtio-user ports of the well-behaved guests, and the generators connected to them.
const GUESTS: [(usize, usize); 2] = [(0, 1), (2, 3)];
/// Errors of the engine: page faults, hardware errors, late completions, submissions that vanish. Missing completion
/// records are not combined with failures, because in a batch such a failure cannot be distinguished from success (see
/// the driver).
const FAULTS: &str = "0:profile=vhost,lcore=1,fault=page:0.001+hw:0.0001+late:0.0001:200+drop:0.000001";
/// Permitted growth of a switch's memory in KiB: allocator caches, and threads that had not all started.
const GROWTH: u64 = 8 << 10;

struct Soak {
    dir: TempDir,
    /// How long a switch runs before it is killed.
    time: Duration,
    kills: usize,
}

impl Soak {
    fn switch(&self) -> Offcore {
        let ports = PORTS.map(|name| format!("vhost:{}", self.dir.file(name).display()));
        let engine = ["--dsa-sim", FAULTS, "--dma", "txq0@dsa-sim0:wq0.0;rxq0@dsa-sim0:wq0.1"];
        self.start("0", &ports, &[&["--port-topology", "loop"], &engine[..]].concat())
    }

    fn guests(&self) -> Offcore {
        let virtio =
            |name, more| format!("virtio-user:{},queue_size=1024{more}", self.dir.file(name).display());
        let generator = |size| format!("gen:size={size},rate={RATE}");
        let ports = [virtio("a", ""), generator(1000), virtio("b", ",packed"), generator(200)];
        self.start("1", &ports, &[])
    }

    /// A run of an hour would print too many reports at the usual interval.
    fn start(&self, lcore: &str, ports: &[String], more: &[&str]) -> Offcore {
        let mut args = switch::arguments_on(lcore, ports, Copies::Core, 1, more);
        let interval = args.iter().position(|arg| arg == "--stats-interval").unwrap() + 1;
        args[interval] = if full() { "5" } else { "0.2" }.to_owned();
        Offcore::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).unwrap()
    }
}

/// Returns the number of packets for which the guests or the switch had no room.
fn dropped(switch: &Report, guests: &Report) -> u64 {
    let at = |report: &Report, ports: [usize; 2]| ports.map(|port| report.full(port)).iter().sum::<u64>();
    at(switch, [0, 1]) + at(guests, [0, 2])
}

fn lost(guests: &Report) -> u64 {
    GUESTS.iter().map(|&(_, generator)| guests.generator(generator).lost).sum()
}

fn verified(guests: &Report) -> u64 {
    GUESTS.iter().map(|&(_, generator)| guests.generator(generator).verified).sum()
}

/// Waits for the next report.
fn next(offcore: &Offcore) -> Report {
    let (before, end) = (offcore.lines().len(), Instant::now() + Duration::from_secs(60));
    while offcore.lines().len() <= before {
        assert!(Instant::now() < end, "no report for 60 s: {}", offcore.tail());
        std::thread::sleep(Duration::from_millis(100));
    }
    latest(offcore)
}

/// Returns the numbers of dropped and lost packets at a time without new drops, so that every dropped packet is already
/// counted as lost. If the machine is too busy for such a time, some dropped packets may not yet be counted as lost.
fn judged(switch: &Offcore, guests: &Offcore) -> (u64, u64) {
    let dropped = || dropped(&next(switch), &next(guests));
    let mut before = dropped();
    for _ in 0..10 {
        let lost = lost(&next(guests));
        let after = dropped();
        if before == after {
            return (before, lost);
        }
        before = after;
    }
    (before, lost(&next(guests)))
}

/// Returns the memory in KiB and the number of open files.
fn held(offcore: &Offcore) -> (u64, usize) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", offcore.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let memory = line.trim().trim_end_matches(" kB").parse().unwrap();
    (memory, std::fs::read_dir(format!("/proc/{}/fd", offcore.id())).unwrap().count())
}

/// Migrates guests from port to port, one after the other, until told to stop. Counts the migrations.
fn migrate(dir: &TempDir, stop: &AtomicBool, migrations: &AtomicU64) {
    for packed in [false, true].into_iter().cycle() {
        let mut guest = Migrating::new(packed, true);
        for port in ["c", "d", "c"] {
            let mut peer = Peer::negotiated(&dir.file(port));
            guest.start(&mut peer);
            guest.run(500);
            if stop.load(Ordering::Relaxed) {
                return;
            }
            guest.leave(&mut peer);
            migrations.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Runs one switch, starting when its guests' packets pass.
fn round(soak: &Soak, relay: &mut Offcore, guests: &mut Offcore, seed: u64) {
    let (stop, migrations, sessions) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let hostile = soak.dir.file("e");
    let before = std::thread::scope(|scope| {
        let ends = Ends(&stop);
        scope.spawn(|| hostile::misbehave(&hostile, seed, &stop, &sessions));
        scope.spawn(|| migrate(&soak.dir, &stop, &migrations));
        // By now the engine has failed and recovered, and each allocator has filled its caches.
        std::thread::sleep(soak.time / 4);
        let before = (judged(relay, guests), held(relay));
        let end = Instant::now() + soak.time * 3 / 4;
        while Instant::now() < end || migrations.load(Ordering::Relaxed) == 0 {
            assert!(!relay.has_ended() && !guests.has_ended(), "{}\n{}", relay.tail(), guests.tail());
            assert!(Instant::now() < end + Duration::from_secs(60), "no migration: {}", relay.tail());
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(ends);
        before
    });
    let (before, then) = before;
    let after = (judged(relay, guests).1, dropped(&next(relay), &next(guests)));
    let (lost, dropped) = (after.0 - before.1, after.1 - before.0);
    assert!(lost <= dropped, "{lost} lost, {dropped} dropped: {} {}", latest(relay), latest(guests));
    let now = held(relay);
    assert!(now.0 <= then.0 + GROWTH && now.1 <= then.1 + 32, "memory and files: {then:?}, then {now:?}");
    let (migrations, sessions) = (migrations.into_inner(), sessions.into_inner());
    // The switch returns the hostile guest's packets if they are well-formed.
    let switch = latest(relay);
    let [good, bad] = [switch.packets(HOSTILE, "rx"), switch.dropped(&format!("port{HOSTILE} rx malformed"))];
    assert!(sessions > 0 && good > 0 && bad > 0, "{sessions} hostile sessions: {switch}");
    eprintln!(
        "{} packets verified, of the last {lost} lost and {dropped} dropped, {migrations} migrations, {sessions} hostile sessions with \
         {good} packets and {bad} malformed ones",
        verified(&latest(guests))
    );
}

#[test]
fn neighbours_of_hostile_guest_lose_nothing() {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    let dir = TempDir::new().unwrap();
    let (time, kills) = if full() { (300, 12) } else { (4, 2) };
    let soak = Soak { dir, time: Duration::from_secs(time), kills };
    let mut relay = soak.switch();
    switch::wait_for_report(&mut relay);
    let mut guests = soak.guests();
    for kill in 0..soak.kills {
        let more = verified(&latest_or_first(&mut guests)) + RATE / 10;
        switch::wait_for(&mut guests, "packets through the switch", more, verified);
        switch::wait_for_report(&mut relay);
        round(&soak, &mut relay, &mut guests, kill as u64);
        if kill + 1 < soak.kills {
            relay.signal(Signal::KILL).unwrap();
            assert_eq!(relay.wait().unwrap().status.code(), None, "killed");
            relay = soak.switch();
        }
    }
    let engine = latest(&relay);
    let report = switch::stop(guests);
    let finished = relay.stop().unwrap();
    Report::last_of(&finished);
    assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
    for (port, generator) in GUESTS {
        let found = report.generator(generator);
        assert_eq!((found.wrong, found.verified), (0, found.received), "{report}");
        assert!(report.packets(port, "rx") > 0);
    }
    engine.assert_copies(Copies::Simulator, 0);
    assert!(engine.sum("channels", "failed") > 0 && engine.sum("workers", "fallbacks") > 0, "{engine}");
    assert!(!full() || verified(&report) > 100_000_000, "{report}");
}

/// Returns the last report, or waits for the first one.
fn latest_or_first(offcore: &mut Offcore) -> Report {
    switch::wait_for_report(offcore);
    latest(offcore)
}
