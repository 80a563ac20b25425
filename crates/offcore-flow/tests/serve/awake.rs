//! Tests of applications whose marks are not read in each round.

use offcore_flow::host::App;
use offcore_flow::host::serve::Serve;
use offcore_port::Wake;
use rustix::event::PollFlags as Bits;

use crate::process::{End, Process, bind, bits};
use crate::setup::world_of_small;
use crate::world::World;

const DATAGRAM: u32 = 2;
const APPLICATIONS: usize = 60;
/// Applications that stay awake without work.
const KEPT: u64 = 16;

fn attach(world: &mut World<Serve>, path: &std::path::Path) -> (Process, End) {
    let process = Process::attach(world, path);
    let end = process.open(world, &bind(DATAGRAM, "0.0.0.0:0".parse().unwrap())).unwrap();
    (process, end)
}

/// Closes the gate of a session that has room, and marks the session: the stack then opens the gate.
fn mark(process: &Process, end: &End) {
    process.close_gate(end);
    process.mark(end);
}

#[test]
fn idle_applications_are_not_polled() {
    let (mut world, path) = world_of_small(1 << 20);
    let applications: Vec<_> = (0..APPLICATIONS).map(|_| attach(&mut world, &path)).collect();
    world.run(0.2);
    assert_eq!(world.app.counts().awake, KEPT, "marks of {APPLICATIONS} idle applications are not read");
    for (process, end) in &applications {
        mark(process, end);
        world.run(0.02);
        assert!(end.bits().contains(Bits::OUT), "a mark is found, no matter which side sleeps");
    }
    // All at once, and then one repeatedly.
    applications.iter().for_each(|(process, end)| mark(process, end));
    // The time per turn is limited.
    world.run(1.0);
    assert!(applications.iter().all(|(_, end)| end.bits().contains(Bits::OUT)));
    let mut woken = Vec::new();
    for _ in 0..20 {
        mark(&applications[0].0, &applications[0].1);
        world.run(0.01);
        woken.push(world.app.counts().woken);
    }
    assert_eq!(woken[10..], [woken[10]; 10], "a busy application stays awake");
    assert_eq!(world.app.counts().awake, KEPT);
}

#[test]
fn sleeping_applications_wake_a_sleeping_worker() {
    let (mut world, path) = world_of_small(1 << 20);
    let applications: Vec<_> = (0..APPLICATIONS).map(|_| attach(&mut world, &path)).collect();
    world.run(0.2);
    for (process, end) in &applications {
        let wakes = world.app.wakes().unwrap();
        let Wake::Event(event) = wakes.arm() else { panic!("nothing is to be done") };
        assert_eq!(bits(event) & Bits::IN, Bits::empty());
        mark(process, end);
        let Wake::Event(event) = wakes.arm() else {
            wakes.disarm();
            world.run(0.02);
            continue;
        };
        assert_eq!(bits(event) & Bits::IN, Bits::IN, "an application that is asleep writes to its eventfd");
        wakes.disarm();
        world.run(0.02);
    }
}

#[test]
fn closed_sleeping_application_is_removed() {
    let (mut world, path) = world_of_small(1 << 20);
    let mut applications: Vec<_> = (0..APPLICATIONS).map(|_| attach(&mut world, &path)).collect();
    world.run(0.2);
    // All of them belong to this process, which stays alive: closing their sockets ends them.
    applications.truncate(5);
    world.run(0.5);
    mark(&applications[0].0, &applications[0].1);
    world.run(0.02);
    assert!(applications[0].1.bits().contains(Bits::OUT));
    applications.extend((5..APPLICATIONS).map(|_| attach(&mut world, &path)));
    world.run(0.2);
    assert_eq!(world.app.counts().awake, KEPT);
    applications.iter().for_each(|(process, end)| mark(process, end));
    // The time per turn is limited.
    world.run(1.0);
    assert!(applications.iter().all(|(_, end)| end.bits().contains(Bits::OUT)));
}
