//! A switch is killed again and again in the middle of the traffic: the next one goes on where it was.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use peers::{Need, Offcore, TempDir, exclusive, require};
use rustix::process::Signal;

use crate::switch::{self, Copies, Report, full};

/// Frames that each side sends in a second, FCS included their length, and how many there are in a kill.
const RATE: u64 = 100_000;
const EACH: u64 = 10_000;
/// Descriptors of a virtqueue. Buffers of a burst that were forgotten at each kill would be most of them.
const RING: u64 = 128;
/// What may be lost at a kill without being counted: packets in the rings and in a switch's hands, and those dropped after its last report.
const UNCOUNTED: u64 = 2500;

#[derive(Clone, Copy, Debug)]
struct Case {
    packed: bool,
    copies: Copies,
    /// Whether packets go from one guest to another, in one copy, or back to where they came from, in two.
    one_copy: bool,
}

impl Case {
    /// The switch that is killed.
    fn switch(self, dir: &TempDir) -> Offcore {
        let ports = ["a", "b"].map(|name| format!("vhost:{}", dir.file(name).display()));
        match self.one_copy {
            true => switch::start_on(0, &ports, self.copies, 1, &[]),
            false => switch::start_on(0, &ports[..1], self.copies, 1, &["--port-topology", "loop"]),
        }
    }

    /// Its guests: 0 has generator 1 behind it, and 2 has generator 3.
    fn guests(self, dir: &TempDir) -> Offcore {
        let packed = if self.packed { ",packed" } else { "" };
        let virtio = |name| format!("virtio-user:{},queue_size={RING}{packed}", dir.file(name).display());
        let generator = |size| format!("gen:size={size},rate={RATE}");
        let ports = [virtio("a"), generator(1000), virtio("b"), generator(200)];
        let ports = if self.one_copy { &ports[..] } else { &ports[..2] };
        switch::start_on(1, ports, Copies::Core, ports.len() as u16 / 2, &[])
    }

    fn generators(self) -> &'static [usize] {
        if self.one_copy { &[1, 3] } else { &[1] }
    }

    /// Waits until more packets have come through the switch.
    fn wait_for_more(self, guests: &mut Offcore) {
        for &port in self.generators() {
            let received = |report: &Report| report.generator(port).received;
            let before = received(&switch::latest(guests));
            switch::wait_for(guests, "packets through the switch", before + EACH, received);
        }
    }
}

fn kill(case: Case, kills: u64) {
    let dir = TempDir::new().unwrap();
    let mut relay = case.switch(&dir);
    let mut guests = case.guests(&dir);
    switch::wait_for_report(&mut guests);
    case.wait_for_more(&mut guests);
    let early = switch::latest(&guests).drops();
    let mut dropped = 0;
    for number in 0..kills {
        case.wait_for_more(&mut guests);
        // It says what it has dropped while it had one of its guests only.
        switch::wait_for_report(&mut relay);
        // Anywhere between two reports.
        std::thread::sleep(Duration::from_micros(number * 7919 % 50_000));
        relay.signal(Signal::KILL).unwrap();
        dropped += switch::latest(&relay).dropped_in_all();
        assert_eq!(relay.wait().unwrap().status.signal(), Some(9), "killed");
        relay = case.switch(&dir);
    }
    case.wait_for_more(&mut guests);
    // It ends when it has all of its buffers back from the virtqueues, if none was forgotten.
    let report = switch::stop(guests);
    dropped += switch::stop(relay).dropped_in_all() + report.dropped_in_all();
    report.assert_only_drops(&["port0 tx down", "port2 tx down", "port0 tx full", "port2 tx full"]);
    // The virtqueues were there all the time from when the first switch was.
    for down in ["port0 tx down", "port2 tx down"] {
        assert_eq!(report.drops().get(down), early.get(down), "{report}");
    }
    let lost: u64 = case.generators().iter().map(|&port| report.generator(port).lost).sum();
    assert!(lost <= dropped + kills * UNCOUNTED, "{case:?} {lost} lost, {dropped} dropped {report}");
    for &port in case.generators() {
        let found = report.generator(port);
        assert_eq!(found.verified, found.received, "{report}");
        // In one copy a burst may have been returned to its receiver and not yet to its sender.
        let twice = if case.one_copy { 64 * kills } else { 0 };
        assert!(found.duplicates <= twice, "{case:?} {report}");
        assert_eq!(found.wrong, found.duplicates, "{case:?} {report}");
    }
}

fn killed(packed: bool, copies: Copies, one_copy: bool) {
    let Some(()) = require(&[Need::Cores(2)]) else { return };
    let _cores = exclusive();
    kill(Case { packed, copies, one_copy }, if full() { 250 } else { 5 });
}

#[test]
fn one_copy_on_split_rings() {
    killed(false, Copies::Helper, true);
}

#[test]
fn one_copy_on_packed_rings() {
    killed(true, Copies::Core, true);
}

#[test]
fn two_copies_on_split_rings() {
    killed(false, Copies::Core, false);
}

#[test]
fn two_copies_on_packed_rings() {
    killed(true, Copies::Helper, false);
}
