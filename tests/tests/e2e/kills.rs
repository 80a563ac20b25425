//! A switch is killed repeatedly in the middle of traffic. The next switch continues at the same position.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use peers::{Need, Offcore, TempDir, exclusive};
use rustix::process::Signal;

use crate::switch::{self, Copies, Report, full};

/// Frames per second from each generator, and the minimum number of frames between two kills.
const RATE: u64 = 100_000;
const EACH: u64 = 10_000;
/// Descriptors of a virtqueue. If each kill leaked the buffers of a burst, most descriptors would be lost.
const RING: u64 = 128;
/// Maximum number of packets that a kill loses without counting them: packets in the rings and in the switch, and
/// packets that were dropped after its last report.
const UNCOUNTED: u64 = 2500;

#[derive(Clone, Copy, Debug)]
struct Case {
    packed: bool,
    copies: Copies,
    /// Whether packets go from one guest to the other in one copy, or back to their sender in two copies.
    one_copy: bool,
}

impl Case {
    /// Starts the switch that is killed.
    fn switch(self, dir: &TempDir) -> Offcore {
        let ports = ["a", "b"].map(|name| format!("vhost:{}", dir.file(name).display()));
        match self.one_copy {
            true => switch::start_on(0, &ports, self.copies, 1, &[]),
            false => switch::start_on(0, &ports[..1], self.copies, 1, &["--port-topology", "loop"]),
        }
    }

    /// Starts the guests. Port 0 is connected to generator 1, and port 2 to generator 3.
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

    /// Waits until more packets have passed the switch.
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
        // The report includes the packets that the switch dropped while it had only one guest.
        switch::wait_for_report(&mut relay);
        // Kills the switch at any time between two reports.
        std::thread::sleep(Duration::from_micros(number * 7919 % 50_000));
        relay.signal(Signal::KILL).unwrap();
        dropped += switch::latest(&relay).dropped_in_all();
        assert_eq!(relay.wait().unwrap().status.signal(), Some(9), "killed");
        relay = case.switch(&dir);
    }
    case.wait_for_more(&mut guests);
    // The process ends only when all of its buffers have returned from the virtqueues, so none has leaked.
    let report = switch::stop(guests);
    dropped += switch::stop(relay).dropped_in_all() + report.dropped_in_all();
    report.assert_only_drops(&["port0 tx down", "port2 tx down", "port0 tx full", "port2 tx full"]);
    // The virtqueues stayed up from the start of the first switch.
    for down in ["port0 tx down", "port2 tx down"] {
        assert_eq!(report.drops().get(down), early.get(down), "{report}");
    }
    let lost: u64 = case.generators().iter().map(|&port| report.generator(port).lost).sum();
    assert!(lost <= dropped + kills * UNCOUNTED, "{case:?} {lost} lost, {dropped} dropped {report}");
    for &port in case.generators() {
        let found = report.generator(port);
        assert_eq!(found.verified, found.received, "{report}");
        // With one copy, a burst may have been returned to its receiver but not yet to its sender.
        let twice = if case.one_copy { 64 * kills } else { 0 };
        assert!(found.duplicates <= twice, "{case:?} {report}");
        assert_eq!(found.wrong, found.duplicates, "{case:?} {report}");
    }
}

fn killed(packed: bool, copies: Copies, one_copy: bool) {
    let Some(_cores) = exclusive(&[Need::Cores(2)]) else { return };
    kill(Case { packed, copies, one_copy }, if full() { 250 } else { 5 });
}

tests! {
    fn one_copy_on_split_rings() => killed(false, Copies::Helper, true);
    fn one_copy_on_packed_rings() => killed(true, Copies::Core, true);
    fn two_copies_on_split_rings() => killed(false, Copies::Core, false);
    fn two_copies_on_packed_rings() => killed(true, Copies::Helper, false);
}
