//! Users of one stack share the time for packets.

use std::sync::Arc;

use offcore_stats::time::Micros;
use offcore_tcp::proto::{AppId, AppMemory, Config, ConnId, Out, Stack};

use crate::host::Host;
use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const MEGABYTE: usize = 1 << 20;
/// Maximum number of packets per turn.
const PACKETS: usize = 32;

fn add_app(stack: &mut Stack, user: u32) -> AppId {
    let app = stack.add_app(AppMemory::new(16 * MEGABYTE, Arc::default()).unwrap());
    stack.set_user(app, user);
    app
}

/// Creates a world in which `host` has one application of each of two users. Connects `counts` connections to these
/// applications. Returns both ends of each connection, the end at host 0 first.
fn connect(host: usize, counts: [usize; 2]) -> (World, [Vec<[ConnId; 2]>; 2]) {
    let mut world = World::new(1, 1500, Config::default());
    let apps = [1, 2].map(|user| add_app(&mut world.hosts[host].stack, user));
    for (app, port) in apps.into_iter().zip([7, 8]) {
        world.hosts[host].stack.listen(app, None, port, 256, false).unwrap();
    }
    let conns = [0, 1].map(|user: usize| {
        (0..counts[user])
            .map(|_| {
                let (now, other) = (world.now, 1 - host);
                let to = format!("10.0.0.{}:{}", host + 1, 7 + user);
                let there = world.hosts[other].connect(now, &to);
                assert!(world.run_until(SECOND, |hosts| !hosts[host].accepted.is_empty()));
                let here = world.hosts[host].accepted.pop().unwrap();
                if host == 0 { [here, there] } else { [there, here] }
            })
            .collect()
    });
    (world, conns)
}

/// Returns the number of plans for each user in the next turn of host 0.
fn plans(world: &mut World, conns: &[Vec<[ConnId; 2]>; 2]) -> [usize; 2] {
    let (now, mut out) = (world.now, Out::default());
    let stack = &mut world.hosts[0].stack;
    stack.tx(now, PACKETS, &mut out);
    let counts = [0, 1].map(|user: usize| {
        let is_of_user = |conn: ConnId| conns[user].iter().any(|ends| ends[0] == conn);
        out.plans.iter().filter(|plan| is_of_user(plan.conn)).count()
    });
    for plan in out.plans.drain(..).rev() {
        stack.give_up(&plan, &mut Out::default());
    }
    counts
}

#[test]
fn users_send_in_turn() {
    let (mut world, conns) = connect(0, [24, 1]);
    // Both users have packets in the same periods.
    for _ in 0..10 {
        let now = world.now;
        for ends in conns.iter().flatten() {
            world.hosts[0].send(now, ends[0], &content(1, 20_000));
        }
        world.run(Micros::from_millis(2));
    }
    let now = world.now;
    for ends in conns.iter().flatten() {
        let Host { stack, sessions, .. } = &mut world.hosts[0];
        let session = sessions.get_mut(&ends[0]).unwrap();
        assert_eq!(session.writer.write(&content(2, 7_240)), 7_240);
        stack.written(now, ends[0], &mut Out::default()).unwrap();
    }
    let turns: Vec<_> = (0..4).map(|_| plans(&mut world, &conns)).collect();
    // The single connection of the second user has five segments. It does not wait for the 24 others.
    assert_eq!(turns[0], [20, 5], "{turns:?}");
    assert!(turns.iter().all(|[first, second]| *first > 0 && first + second <= PACKETS), "{turns:?}");
}

/// Sends data from host 0 to the first user of host 1, and to the second user if it `competes`, as much as the windows
/// permit. Host 1 is always busy. Returns the number of bytes that each user has received after 50 virtual
/// milliseconds.
fn receive_beside(counts: [usize; 2], competes: bool) -> [usize; 2] {
    let (mut world, conns) = connect(1, counts);
    world.delay = Micros::from_millis(1);
    world.hosts[1].is_busy = true;
    // After this time, the users no longer compete.
    world.run(2 * SECOND);
    let bytes = content(3, 8 * MEGABYTE);
    let now = world.now;
    for (user, ends) in conns.iter().enumerate() {
        for [here, _] in ends.iter().filter(|_| user == 0 || competes) {
            world.hosts[0].send(now, *here, &bytes);
        }
    }
    world.run(SECOND / 20);
    let received = conns.each_ref().map(|ends| {
        ends.iter().map(|[_, there]| world.hosts[1].sessions[there].received.len()).sum::<usize>()
    });
    // Nothing is lost, and the limit is removed.
    let all = |hosts: &mut [Host; 2]| {
        let is_complete = |[_, there]: &[ConnId; 2]| hosts[1].sessions[there].received.len() == bytes.len();
        conns[0].iter().all(is_complete)
    };
    assert!(world.run_until(600 * SECOND, all));
    assert!(conns[0].iter().all(|[_, there]| world.hosts[1].sessions[there].received == bytes));
    received
}

#[test]
fn busy_worker_limits_windows() {
    let alone = receive_beside([16, 1], false);
    let [many, single] = receive_beside([16, 1], true);
    assert!(many < 4 * single, "16 connections of one user received {many} bytes, one of another {single}");
    assert!(many < alone[0] / 2, "{many} bytes, {} without another user", alone[0]);
}

#[test]
fn reused_number_belongs_to_new_user() {
    let (mut world, conns) = connect(0, [1, 24]);
    world.hosts[1].listen(9, 16);
    // All connections are ready, but the interface is held.
    world.hosts[0].stack.hold(0, true);
    let now = world.now;
    for ends in conns.iter().flatten() {
        let Host { stack, sessions, .. } = &mut world.hosts[0];
        assert_eq!(sessions.get_mut(&ends[0]).unwrap().writer.write(&content(2, 4_000)), 4_000);
        stack.written(now, ends[0], &mut Out::default()).unwrap();
    }
    // The first user's connection ends. A new connection of the second user gets its number.
    let [ended, peer] = conns[0][0];
    let Host { stack, out, .. } = &mut world.hosts[1];
    stack.abort(now, peer, out);
    world.run(2 * SECOND);
    let now = world.now;
    let Host { stack, out, .. } = &mut world.hosts[0];
    stack.close(now, ended, out);
    assert!(stack.slot(ended).is_none());
    let app = stack.app(conns[1][0][0]).unwrap();
    let new = world.hosts[0].connect_for(app, now, "10.0.0.2:9");
    world.run(Micros::from_millis(10));
    let now = world.now;
    let Host { stack, sessions, .. } = &mut world.hosts[0];
    assert!(sessions.get_mut(&new).unwrap().writer.write(&content(2, 4096)) > 0);
    stack.written(now, new, &mut Out::default()).unwrap();
    stack.hold(0, false);
    let mut out = Out::default();
    stack.tx(now, PACKETS, &mut out);
    assert!(out.plans.len() > 4);
    assert!(out.plans.iter().all(|plan| plan.conn != new), "24 connections of its user precede it");
}

#[test]
fn short_turn_continues_first() {
    let (mut world, conns) = connect(0, [48, 48]);
    // Both users have packets in the same periods.
    for _ in 0..10 {
        let now = world.now;
        conns.iter().flatten().for_each(|ends| world.hosts[0].send(now, ends[0], &[1; 1448]));
        world.run(Micros::from_millis(2));
    }
    let now = world.now;
    for ends in conns.iter().flatten() {
        let Host { stack, sessions, .. } = &mut world.hosts[0];
        assert_eq!(sessions.get_mut(&ends[0]).unwrap().writer.write(&[2; 1448]), 1448);
        stack.written(now, ends[0], &mut Out::default()).unwrap();
    }
    // The work of a turn is less than a call's packets: the second user's turn is cut short.
    let (mut out, mut counts) = (Out::default(), [0; 2]);
    world.hosts[0].stack.tx(now, PACKETS, &mut out);
    for _ in 0..2 {
        for (user, ends) in conns.iter().enumerate() {
            counts[user] +=
                out.plans.iter().filter(|plan| ends.iter().any(|ends| ends[0] == plan.conn)).count();
        }
        out.clear();
        world.hosts[0].stack.tx(now, PACKETS, &mut out);
    }
    assert_eq!(counts, [PACKETS; 2]);
}

#[test]
fn limit_reopens_closed_window() {
    let (mut world, conns) = connect(1, [9, 1]);
    world.hosts[1].is_busy = true;
    let closed = conns[0][0];
    world.hosts[1].sessions.get_mut(&closed[1]).unwrap().appetite = 0;
    let bytes = content(5, 16 * MEGABYTE);
    let now = world.now;
    world.hosts[0].send(now, closed[0], &bytes);
    world.run(SECOND);
    let compete = |world: &mut World, steps: usize| {
        for _ in 0..steps {
            let now = world.now;
            conns[0][1..].iter().for_each(|ends| world.hosts[0].send(now, ends[0], &content(6, 20_000)));
            world.hosts[0].send(now, conns[1][0][0], &content(7, 5_000));
            world.run(Micros::from_millis(10));
        }
    };
    // The peer probes the closed window while the user has a limit.
    compete(&mut world, 100);
    assert!(world.hosts[1].sessions[&closed[1]].received.is_empty());
    let now = world.now;
    world.hosts[1].sessions.get_mut(&closed[1]).unwrap().appetite = usize::MAX;
    world.hosts[1].read(now, closed[1]);
    compete(&mut world, 300);
    assert_eq!(world.hosts[1].sessions[&closed[1]].received.len(), bytes.len());
}
