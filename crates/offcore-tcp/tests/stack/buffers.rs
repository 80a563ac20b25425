//! Buffer sizes: limits of unsent and of unread data, and the memory of an idle session.

use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{Buffers, Config, ConnId};
use offcore_wire::TcpFlags;

use crate::frame;
use crate::host::Host;
use crate::streams::content;
use crate::world::World;

const SECOND: Micros = Micros::from_secs(1);
const FIRST: usize = 100_000;

/// Returns two hosts with a connection between them, and both ends.
fn connected(config: Config, set: impl FnOnce(&mut Host)) -> (World, [ConnId; 2]) {
    let mut world = World::new(1, 1500, config);
    world.hosts[1].listen(7, 16);
    set(&mut world.hosts[1]);
    let now = world.now;
    let here = world.hosts[0].connect(now, "10.0.0.2:7");
    world.run(SECOND / 2);
    let there = world.hosts[1].accepted[0];
    (world, [here, there])
}

/// Writes without waiting, into free space and into space that the stack grants at once.
fn write(host: &mut Host, now: Time, conn: ConnId, bytes: &[u8]) -> usize {
    let mut done = 0;
    for _ in 0..2 {
        let Host { sessions, stack, out, .. } = host;
        done += sessions.get_mut(&conn).unwrap().writer.write(&bytes[done..]);
        stack.written(now, conn, out).unwrap();
    }
    done
}

#[test]
fn first_write_fills_the_buffer() {
    let (mut world, [here, _]) = connected(Config::default(), |_| ());
    for idle in [Micros::ZERO, 3 * SECOND] {
        world.run(idle);
        let now = world.now;
        assert_eq!(write(&mut world.hosts[0], now, here, &content(1, FIRST)), FIRST, "after {idle:?}");
        world.run(SECOND);
    }
}

#[test]
fn send_buffer_size_limits_write() {
    for size in [5000, 50_000, 1 << 20] {
        let (mut world, [here, there]) = connected(Config::default(), |_| ());
        let set = Buffers { send: size, ..Buffers::default() };
        world.hosts[0].stack.set_buffers(here, set);
        world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 0;
        let now = world.now;
        let taken = write(&mut world.hosts[0], now, here, &content(1, 2 << 20));
        assert_eq!(taken, size as usize);
    }
}

#[test]
fn receive_buffer_size_sets_window() {
    // Connections inherit the listener's size. A later change does not affect them.
    let set = Buffers { receive: 20_000, ..Buffers::default() };
    let (mut world, [here, there]) = connected(Config::default(), |host| {
        host.stack.set_listener_buffers(host.listener.unwrap(), set);
    });
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 0;
    let now = world.now;
    world.hosts[0].send(now, here, &content(1, 1 << 20));
    world.run(10 * SECOND);
    let unread = world.hosts[1].stack.unread(there);
    assert!((19_500..=20_000).contains(&unread), "{unread}");
    let windows = world.trace.iter().filter(|(_, from, _)| *from == 1);
    let windows = windows.filter_map(|(_, _, frame)| frame::read(frame)).map(|seen| seen.window);
    assert_eq!(windows.max(), Some(20_000), "that of the SYN; others are scaled");
    // A larger size takes effect with the next read.
    world.hosts[1].stack.set_buffers(there, Buffers { receive: 200_000, ..Buffers::default() });
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 10_000;
    let now = world.now;
    world.hosts[1].read(now, there);
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 0;
    world.run(10 * SECOND);
    assert!(world.hosts[1].stack.unread(there) > 190_000);
}

#[test]
fn window_clamp_bounds_a_growing_window() {
    let set = Buffers { clamp: 20_000, ..Buffers::default() };
    let (mut world, [here, there]) = connected(Config::default(), |host| {
        host.stack.set_listener_buffers(host.listener.unwrap(), set);
    });
    let now = world.now;
    world.hosts[0].send(now, here, &content(1, 1 << 20));
    assert!(world.run_until(60 * SECOND, |hosts| hosts[1].sessions[&there].received.len() == 1 << 20));
    let windows = world.trace.iter().filter(|(_, from, _)| *from == 1);
    let windows = windows.filter_map(|(_, _, frame)| frame::read(frame)).filter(|seen| seen.len == 0);
    let scaled = windows
        .map(|seen| u32::from(seen.window) << if seen.flags.intersects(TcpFlags::SYN) { 0 } else { 8 });
    assert!((19_500..=20_000).contains(&scaled.max().unwrap()));
}

#[test]
fn unsent_bytes_are_limited() {
    let (mut world, [here, there]) = connected(Config::default(), |_| ());
    world.hosts[0].stack.set_buffers(here, Buffers { unsent: 10_000, ..Buffers::default() });
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = 0;
    let now = world.now;
    world.hosts[0].send(now, here, &content(1, 1 << 20));
    world.run(10 * SECOND);
    // The peer's window is full.
    let sent = world.hosts[1].stack.unread(there) as usize;
    let written = world.hosts[0].sessions[&here].sent;
    assert!((sent + 10_000..=sent + 14_096).contains(&written), "{written} of which {sent} are sent");
    assert_eq!(world.hosts[0].stack.room(here).unwrap().free, 0, "more than half is not sent");
    world.hosts[1].sessions.get_mut(&there).unwrap().appetite = usize::MAX;
    let now = world.now;
    world.hosts[1].read(now, there);
    assert!(world.run_until(60 * SECOND, |hosts| hosts[1].sessions[&there].received.len() == 1 << 20));
}
