//! Receive windows with little memory: they close and reopen, and no segment inside a window is dropped.

use std::collections::HashMap;

use offcore_stats::time::Micros;
use offcore_tcp::proto::{AppId, Config, ConnId, DropReason};
use offcore_wire::TcpFlags;

use crate::frame;
use crate::host::Host;
use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const MEGABYTE: usize = 1 << 20;

/// Opens `count` connections from host 0, which has 32 MiB of memory, to port 7 of host 1, which has `memory` bytes.
fn world(memory: usize, count: usize) -> (World, Vec<[ConnId; 2]>) {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1] = Host::new(2, 1500, Config { memory, ..Config::default() });
    world.hosts[1].listen(7, count);
    let ends = (0..count).map(|_| connect(&mut world)).collect();
    (world, ends)
}

fn connect(world: &mut World) -> [ConnId; 2] {
    let now = world.now;
    let here = world.hosts[0].connect(now, "10.0.0.2:7");
    assert!(world.run_until(SECOND, |hosts| !hosts[1].accepted.is_empty()));
    [here, world.hosts[1].accepted.pop().unwrap()]
}

fn set_appetite(host: &mut Host, conn: ConnId, appetite: usize) {
    host.sessions.get_mut(&conn).unwrap().appetite = appetite;
}

fn drops(world: &World) -> u64 {
    world.hosts[1].stack.drops().get(DropReason::NoSpace)
}

#[test]
fn advertised_windows_fit_memory() {
    const LEN: usize = 400_000;
    let (mut world, ends) = world(8 * MEGABYTE, 200);
    let bytes = content(1, LEN);
    for [here, there] in &ends {
        set_appetite(&mut world.hosts[1], *there, 0);
        let now = world.now;
        world.hosts[0].send(now, *here, &bytes);
    }
    world.run(12 * SECOND);
    assert_eq!(drops(&world), 0, "segments inside of a window");
    let now = world.now;
    for [_, there] in &ends {
        set_appetite(&mut world.hosts[1], *there, usize::MAX);
        world.hosts[1].read(now, *there);
    }
    let all =
        |hosts: &mut [Host; 2]| ends.iter().all(|[_, there]| hosts[1].sessions[there].received.len() == LEN);
    let done = world.run_until(3 * SECOND, all);
    let missing: usize =
        ends.iter().map(|[_, there]| LEN - world.hosts[1].sessions[there].received.len()).sum();
    assert!(done, "{missing} bytes lack");
    assert!(ends.iter().all(|[_, there]| world.hosts[1].sessions[there].received == bytes));
    assert_eq!(drops(&world), 0, "segments inside of a window");
    let sent = ends.iter().filter_map(|[here, _]| world.hosts[0].stack.info(*here));
    assert!(sent.map(|info| info.stats).all(|stats| stats.fast + stats.timeout == 0), "retransmissions");
}

#[test]
fn advertised_window_never_shrinks() {
    let (mut world, ends) = world(4 * MEGABYTE, 100);
    for [here, there] in &ends {
        set_appetite(&mut world.hosts[1], *there, 3000);
        let now = world.now;
        world.hosts[0].send(now, *here, &content(1, 100_000));
    }
    world.run(3 * SECOND);
    for _ in 0..100 {
        let now = world.now;
        ends.iter().for_each(|[_, there]| world.hosts[1].read(now, *there));
        world.run(SECOND / 100);
    }
    let mut edges = HashMap::new();
    for (_, _, bytes) in world.trace.iter().filter(|(_, from, _)| *from == 1) {
        let Some(seen) = frame::read(bytes) else { continue };
        let scale = if seen.flags.0 & TcpFlags::SYN.0 != 0 { 0 } else { 8 };
        let edge = seen.ack.wrapping_add(u32::from(seen.window) << scale);
        let last = edges.entry(seen.ports.1).or_insert(edge);
        // The field counts units of 256 bytes, except in a SYN.
        assert!(
            edge.wrapping_sub(*last).cast_signed() > -256,
            "port {}: from {last} to {edge}",
            seen.ports.1
        );
        *last = edge;
    }
    assert!(edges.len() >= 100);
}

#[test]
fn unread_data_does_not_block_readers() {
    let (mut world, ends) = world(4 * MEGABYTE, 100);
    let (reader, hoarders) = ends.split_last().unwrap();
    for [here, there] in hoarders {
        set_appetite(&mut world.hosts[1], *there, 0);
        let now = world.now;
        world.hosts[0].send(now, *here, &content(2, 400_000));
    }
    world.run(5 * SECOND);
    let (now, bytes) = (world.now, content(1, 500_000));
    world.hosts[0].send(now, reader[0], &bytes);
    let all = |hosts: &mut [Host; 2]| hosts[1].sessions[&reader[1]].received.len() == bytes.len();
    assert!(world.run_until(10 * SECOND, all));
    assert!(world.hosts[1].sessions[&reader[1]].received == bytes);
    // The answer is sent, too.
    let now = world.now;
    world.hosts[1].send(now, reader[1], &content(3, 50_000));
    let all = |hosts: &mut [Host; 2]| hosts[0].sessions[&reader[0]].received.len() == 50_000;
    assert!(world.run_until(10 * SECOND, all));
    assert_eq!(drops(&world), 0, "segments inside of a window");
}

#[test]
fn active_connection_gets_idle_memory() {
    let (mut world, ends) = world(4 * MEGABYTE, 500);
    world.run(3 * SECOND);
    let ([here, there], bytes) = (ends[499], content(1, 2_000_000));
    let now = world.now;
    world.hosts[0].send(now, here, &bytes);
    let all = |hosts: &mut [Host; 2]| hosts[1].sessions[&there].received.len() == bytes.len();
    assert!(world.run_until(SECOND, all));
    let windows =
        world.trace.iter().filter(|(_, from, _)| *from == 1).filter_map(|(_, _, bytes)| frame::read(bytes));
    let largest = windows.filter(|seen| !seen.flags.0 & TcpFlags::SYN.0 != 0).map(|seen| seen.window).max();
    assert!(largest >= Some(u16::MAX >> 8), "{largest:?}");
}

#[test]
fn idle_windows_leave_memory_to_writers() {
    let (mut world, ends) = world(8 * MEGABYTE, 200);
    let bytes = content(4, 100_000);
    for [_, there] in &ends {
        let now = world.now;
        world.hosts[1].send(now, *there, &bytes);
    }
    world.run(SECOND / 10);
    let (now, host) = (world.now, &mut world.hosts[1]);
    ends.iter().for_each(|[_, there]| host.send(now, *there, &bytes));
    let used = host.stack.memory_used_by(AppId::OWN);
    assert!(used > 4 * MEGABYTE, "{used} bytes of written data");
    let all = |hosts: &mut [Host; 2]| {
        ends.iter().all(|[here, _]| hosts[0].sessions[here].received.len() == 2 * bytes.len())
    };
    assert!(world.run_until(3 * SECOND, all));
}

/// Idle connections receive a byte each. Their windows were granted one after the other.
#[test]
fn woken_windows_leave_memory_to_writers() {
    let (mut world, _) = world(8 * MEGABYTE, 1);
    let mut ends = Vec::new();
    for _ in 0..20 {
        let fresh: Vec<_> = (0..4).map(|_| connect(&mut world)).collect();
        for _ in 0..4 {
            let now = world.now;
            fresh.iter().for_each(|[here, _]| world.hosts[0].send(now, *here, b"question"));
            world.run(SECOND / 20);
        }
        ends.extend(fresh);
        world.run(2 * SECOND);
    }
    let now = world.now;
    ends.iter().for_each(|[here, _]| world.hosts[0].send(now, *here, b"?"));
    world.run(SECOND / 20);
    let (now, bytes) = (world.now, content(5, 100_000));
    ends.iter().for_each(|[_, there]| world.hosts[1].send(now, *there, &bytes));
    let all = |hosts: &mut [Host; 2]| {
        ends.iter().all(|[here, _]| hosts[0].sessions[here].received.len() == bytes.len())
    };
    assert!(world.run_until(5 * SECOND, all));
}

/// The application reads all data while another connection waits for memory.
#[test]
fn full_window_opens_after_a_wait() {
    for mtu in [1500, 9000] {
        let mut world = World::new(1, mtu, Config::default());
        world.hosts[1].listen(7, 2);
        let [reader, writer] = [(); 2].map(|()| connect(&mut world));
        let bytes = content(6, 2_000_000);
        set_appetite(&mut world.hosts[1], reader[1], 0);
        let now = world.now;
        world.hosts[0].send(now, reader[0], &bytes);
        world.run(3 * SECOND);
        let now = world.now;
        world.hosts[1].send(now, writer[1], &bytes);
        set_appetite(&mut world.hosts[1], reader[1], usize::MAX);
        world.hosts[1].read(now, reader[1]);
        let all = |hosts: &mut [Host; 2]| hosts[1].sessions[&reader[1]].received.len() == bytes.len();
        assert!(world.run_until(2 * SECOND, all), "MTU {mtu}");
    }
}
