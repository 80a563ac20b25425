//! Applications that close a connection that the peer has already ended.

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{Cause, Config, ConnId, KeepAlive, Out};

use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);

/// State of a connection when its peer resets it.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    Nothing,
    /// The application has not read all bytes.
    Unread,
    /// The application has written bytes. Some of them are being copied.
    Unsent,
    /// As `Unsent`, but copies lack buffers.
    Starved,
}

/// Returns a connection that the peer has reset.
fn reset(left: Left) -> (World, ConnId) {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    world.run(SECOND);
    let (there, now) = (world.hosts[1].accepted[0], world.now);
    let host = &mut world.hosts[0];
    let wanted = KeepAlive { idle: SECOND, interval: SECOND, probes: 3 };
    host.stack.set_keepalive(now, here, Some(wanted), &mut Out::default()).unwrap();
    match left {
        Left::Nothing => {}
        Left::Unread => {
            host.sessions.get_mut(&here).unwrap().appetite = 0;
            world.hosts[1].send(now, there, b"nobody reads this");
            world.run(SECOND / 2);
        }
        Left::Unsent | Left::Starved => {
            host.latency = 200;
            host.send(now, here, &content(1, 200_000));
            world.run(Micros::new(20));
            world.hosts[0].starved = if left == Left::Starved { 50 } else { 0 };
        }
    }
    let now = world.now;
    world.hosts[1].sessions.remove(&there);
    let host = &mut world.hosts[1];
    host.stack.abort(now, there, &mut host.out);
    host.receive(now, &mut []);
    let is_over = |hosts: &mut [crate::host::Host; 2]| hosts[0].sessions[&here].closed.is_some();
    assert!(world.run_until(SECOND, is_over), "{left:?}");
    assert_eq!(world.hosts[0].sessions[&here].closed, Some(Cause::Reset));
    (world, here)
}

#[test]
fn reset_connection_sends_nothing() {
    for left in [Left::Nothing, Left::Unread, Left::Unsent, Left::Starved] {
        for aborts in [false, true] {
            let (mut world, here) = reset(left);
            world.trace.clear();
            let (host, now) = (&mut world.hosts[0], world.now);
            host.frames.clear();
            if aborts {
                host.sessions.remove(&here);
                host.stack.abort(now, here, &mut host.out);
                host.receive(now, &mut []);
            } else {
                host.release(now, here);
            }
            world.run(200 * SECOND);
            let sent = world.trace.iter().filter(|(_, by, frame)| *by == 0 && frame[23] == 6).count();
            assert_eq!(sent, 0, "{left:?}, aborts {aborts}");
            let stack = &world.hosts[0].stack;
            assert_eq!((stack.connections(), stack.info(here)), (0, None), "{left:?}, aborts {aborts}");
        }
    }
}

/// Returns a connection with much unsent data and one planned packet.
fn planned() -> (World, ConnId, Out) {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let here = world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:7");
    world.run(SECOND);
    let (host, mut out) = (&mut world.hosts[0], Out::default());
    host.send(world.now, here, &content(1, 10_000));
    host.stack.tx(world.now, 1, &mut out);
    assert_eq!(out.plans.len(), 1);
    (world, here, out)
}

#[test]
fn abandoned_plan_frees_aborted_connection() {
    let (mut world, here, mut out) = planned();
    let stack = &mut world.hosts[0].stack;
    stack.abort(world.now, here, &mut out);
    // The reset waits for the planned packet, but only for a limited time.
    assert_eq!(stack.info(here).unwrap().state, "ESTABLISHED");
    stack.timers(world.now + 2 * SECOND, &mut out);
    assert_eq!(stack.info(here).unwrap().state, "CLOSED");
    assert_eq!(stack.connections(), 1, "its copy is in flight");
    let plan = out.plans.pop().unwrap();
    stack.give_up(&plan, &mut out);
    assert_eq!(stack.connections(), 0);
}

#[test]
fn closed_connection_plans_no_segments() {
    let (mut world, here, mut out) = planned();
    let (there, now) = (world.hosts[1].accepted[0], world.now);
    let host = &mut world.hosts[1];
    host.stack.abort(now, there, &mut host.out);
    let mut resets: Vec<_> = host.out.controls.drain(..).map(|control| control.bytes().to_vec()).collect();
    world.hosts[0].receive(now, &mut resets);
    let stack = &mut world.hosts[0].stack;
    assert_eq!(stack.info(here).unwrap().state, "CLOSED");
    stack.tx(now, 64, &mut out);
    assert_eq!(out.plans.len(), 1, "what there was");
}
