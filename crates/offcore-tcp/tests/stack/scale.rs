//! Many connections: the state that they leave behind, the reuse of their ports, and the independence of their timers.

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, CallError, Config, ConnId, Out};
use offcore_wire::TcpFlags;

use crate::frame::{self, Seen};
use crate::streams::content;
use crate::world::{Impairment, World};

const SECOND: Micros = Micros::from_secs(1);
const MANY: usize = 2000;

/// Returns two hosts with `ports` ephemeral ports.
fn world(ports: u16) -> World {
    let mut world = World::new(1, 1500, Config { ports: 40_000..=40_000 + ports - 1, ..Config::default() });
    world.hosts[1].listen(7, 4096);
    world.run(SECOND);
    world
}

/// Opens connections and returns both ends of each.
fn open(world: &mut World, connections: usize, to: &str) -> Vec<[ConnId; 2]> {
    let now = world.now;
    let here: Vec<ConnId> = (0..connections).map(|_| world.hosts[0].connect(now, to)).collect();
    assert!(world.run_until(10 * SECOND, |hosts| hosts[1].accepted.len() == connections));
    let mut there = std::mem::take(&mut world.hosts[1].accepted);
    let port = |conn: &ConnId| world.hosts[1].stack.info(*conn).unwrap().remote.port();
    there.sort_by_key(port);
    let mut here = here;
    here.sort_by_key(|conn| world.hosts[0].stack.info(*conn).unwrap().local.port());
    here.into_iter().zip(there).map(|(here, there)| [here, there]).collect()
}

/// Sends `len` bytes from one host on each connection, and checks that they arrive.
fn send(world: &mut World, conns: &[[ConnId; 2]], from: usize, len: usize) {
    let now = world.now;
    for (number, ends) in (0..).zip(conns) {
        world.hosts[from].send(now, ends[from], &content(number, len));
    }
    let all = |hosts: &mut [crate::host::Host; 2]| {
        conns.iter().all(|ends| hosts[1 - from].sessions[&ends[1 - from]].received.len() == len)
    };
    assert!(world.run_until(60 * SECOND, all));
    for (number, ends) in (0..).zip(conns) {
        assert!(world.hosts[1 - from].sessions[&ends[1 - from]].received == content(number, len));
    }
}

/// Closes all connections, first at host `first` and then at the other one.
fn close(world: &mut World, conns: &[[ConnId; 2]], first: usize) {
    for host in [first, 1 - first] {
        let now = world.now;
        conns.iter().for_each(|ends| world.hosts[host].release(now, ends[host]));
        world.run(SECOND / 10);
    }
}

#[test]
fn closed_connections_leave_only_time_wait() {
    let mut world = world(MANY as u16);
    let before = world.hosts.each_ref().map(|host| host.stack.memory_used());
    // The ports are the same each time. In turns, host 1 and host 0 have the connections in TIME-WAIT.
    for first in [1, 0, 0, 1] {
        let conns = open(&mut world, MANY, "10.0.0.2:7");
        send(&mut world, &conns, 0, 500);
        send(&mut world, &conns, 1, 700);
        assert_eq!(world.hosts.each_ref().map(|host| host.stack.connections()), [MANY; 2]);
        assert_eq!(world.hosts.each_ref().map(|host| host.stack.time_wait()), [(0, 0); 2]);
        close(&mut world, &conns, first);
        for (number, host) in world.hosts.iter().enumerate() {
            assert_eq!(host.stack.connections(), 0);
            let waiting = if number == first { MANY } else { 0 };
            assert_eq!((host.stack.time_wait(), host.stack.flows()), ((waiting, 0), waiting));
            assert_eq!(host.stack.memory_used(), before[number]);
        }
        world.run(SECOND);
    }
    let resets = world.trace.iter().filter_map(|(_, _, frame)| frame::read(frame));
    assert_eq!(resets.filter(|seen| seen.flags.contains(TcpFlags::RST)).count(), 0);
    // In the end, no neighbours and no timers are left.
    world.run(1300 * SECOND);
    let now = world.now;
    for host in &mut world.hosts {
        assert_eq!((host.stack.time_wait(), host.stack.flows(), host.stack.neighbours()), ((0, 0), 0, 0));
        host.stack.timers(now, &mut host.out);
        assert_eq!(host.stack.deadline(now), None);
    }
}

#[test]
fn both_ends_enter_time_wait() {
    let mut world = world(100);
    for _ in 0..3 {
        let conns = open(&mut world, 100, "10.0.0.2:7");
        send(&mut world, &conns, 0, 3000);
        let now = world.now;
        for ends in &conns {
            (0..2).for_each(|host| world.hosts[host].release(now, ends[host]));
        }
        world.run(SECOND + SECOND / 2);
        assert_eq!(world.hosts.each_ref().map(|host| host.stack.time_wait()), [(100, 0); 2]);
    }
}

#[test]
fn slow_copies_and_loss_leak_nothing() {
    let mut world = world(100);
    let before = world.hosts.each_ref().map(|host| host.stack.memory_used());
    world.hosts.iter_mut().for_each(|host| host.latency = 20);
    for round in 0..4 {
        let conns = open(&mut world, 100, "10.0.0.2:7");
        world.impairment = Impairment { loss: 20, reorder: 50, duplicate: 20, corrupt: 10 };
        send(&mut world, &conns, 0, 30_000);
        send(&mut world, &conns, 1, 30_000);
        // Every second connection is closed with more data in flight.
        let now = world.now;
        for ends in conns.iter().step_by(2) {
            (0..2).for_each(|host| world.hosts[host].send(now, ends[host], &[1; 50_000]));
        }
        close(&mut world, &conns, round % 2);
        let gone =
            |hosts: &mut [crate::host::Host; 2]| hosts.iter().all(|host| host.stack.connections() == 0);
        assert!(world.run_until(1200 * SECOND, gone));
        assert_eq!(world.hosts.each_ref().map(|host| host.stack.memory_used()), before);
        world.impairment = Impairment::default();
        world.run(61 * SECOND);
        assert_eq!(world.hosts.each_ref().map(|host| host.stack.flows()), [0; 2]);
    }
}

#[test]
fn port_is_reused_after_one_second() {
    let mut world = world(1);
    let conns = open(&mut world, 1, "10.0.0.2:7");
    send(&mut world, &conns, 0, 100);
    close(&mut world, &conns, 0);
    let now = world.now;
    let to = "10.0.0.2:7".parse().unwrap();
    assert_eq!(
        world.hosts[0].stack.connect(now, AppId::OWN, None, to, &mut Out::default()),
        Err(CallError::NoPort)
    );
    world.run(SECOND);
    let conns = open(&mut world, 1, "10.0.0.2:7");
    send(&mut world, &conns, 0, 100);
    assert_eq!(world.hosts[0].stack.time_wait(), (0, 0));
}

/// Returns the last SYN of a host in the trace.
fn syn(world: &World, host: usize) -> Seen {
    let sent = world.trace.iter().rev().filter(|(_, from, _)| *from == host);
    sent.filter_map(|(_, _, frame)| frame::read(frame))
        .find(|seen| seen.flags.contains(TcpFlags::SYN))
        .unwrap()
}

#[test]
fn next_isn_exceeds_last_sequence() {
    // RFC 9293, 3.4.3: 8 MB in less than a second are faster than the initial sequence number clock.
    const LEN: usize = 8 << 20;
    for first in [0, 1] {
        let mut world = world(1);
        let conns = open(&mut world, 1, "10.0.0.2:7");
        let old = syn(&world, first).seq;
        send(&mut world, &conns, first, LEN);
        close(&mut world, &conns, first);
        world.run(SECOND);
        let conns = open(&mut world, 1, "10.0.0.2:7");
        let ahead = syn(&world, first).seq.wrapping_sub(old);
        assert!(ahead as usize > LEN + (1 << 16) && ahead < 1 << 30, "{ahead}");
        send(&mut world, &conns, first, 1000);
    }
}

#[test]
fn time_wait_outlives_listener() {
    let mut world = world(1);
    let conns = open(&mut world, 1, "10.0.0.2:7");
    close(&mut world, &conns, 1);
    world.run(SECOND);
    let now = world.now;
    let listener = world.hosts[1].listener.unwrap();
    world.hosts[1].stack.unlisten(now, listener, &mut Out::default());
    let conn = world.hosts[0].connect(now, "10.0.0.2:7");
    world.run(SECOND);
    assert_eq!(world.hosts[0].sessions[&conn].closed, Some(offcore_tcp::proto::Cause::Refused));
    assert_eq!(world.hosts[1].stack.time_wait(), (1, 0));
}

/// Returns the times at which a connection retransmits while all its data is lost for 20 s and `others` send every half
/// second.
fn retransmissions(others: usize, swallows: fn(&[u8]) -> bool) -> Vec<Micros> {
    const START: Time = Time::from_secs(5);
    let mut world = world(4000);
    world.hosts[1].listen(8, 16);
    let others = open(&mut world, others, "10.0.0.2:7");
    let one = open(&mut world, 1, "10.0.0.2:8")[0];
    world.run(START - world.now);
    world.trace.clear();
    world.swallows = swallows;
    world.hosts[0].send(START, one[0], &content(7, 1000));
    for _ in 0..40 {
        let now = world.now;
        others.iter().for_each(|ends| world.hosts[0].send(now, ends[0], b"and another"));
        world.run(SECOND / 2);
    }
    let sent = world.trace.iter().filter_map(|(at, _, frame)| Some((at, frame::read(frame)?)));
    let times =
        sent.filter(|(_, seen)| seen.ports.1 == 8 && seen.len > 0).map(|(at, _)| *at - START).collect();
    world.swallows = |_| false;
    let all = |hosts: &mut [crate::host::Host; 2]| {
        let received = |ends: &[ConnId; 2]| hosts[1].sessions[&ends[1]].received.len();
        received(&one) == 1000 && others.iter().all(|ends| received(ends) == 40 * 11)
    };
    assert!(world.run_until(60 * SECOND, all), "what was lost comes in the end");
    times
}

#[test]
fn timers_stay_exact_under_load() {
    let to_one = |frame: &[u8]| frame::read(frame).is_some_and(|seen| seen.ports.1 == 8 && seen.len > 0);
    let to_all = |frame: &[u8]| frame::read(frame).is_some_and(|seen| seen.ports.1 < 9 && seen.len > 0);
    // One more connection resolves the neighbours first, so that the round-trip times are comparable.
    let alone = retransmissions(1, to_one);
    // Expected are a tail loss probe, and timeouts that start at 200 ms and double.
    assert!(alone.len() >= 7, "{alone:?}");
    for beside in [retransmissions(MANY, to_one), retransmissions(MANY, to_all)] {
        assert_eq!(beside.len(), alone.len());
        let apart = alone.iter().zip(&beside).map(|(alone, beside)| alone.get().abs_diff(beside.get())).max();
        assert!(apart < Some(200), "{apart:?} µs: {alone:?}, {beside:?}");
    }
}
