//! Tests of data written to a session without the library: it is sent, or its loss is counted.

use std::sync::atomic::Ordering;

use offcore_flow::host::serve::Serve;
use offcore_stats::time::Time;
use rustix::event::PollFlags as Bits;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use crate::datagrams::joined;
use crate::process::{End, Process, bind};
use crate::setup::world;
use crate::streams::accepted;
use crate::world::{Client, World};

/// Writes like a program without the preload library. Returns the number of bytes written.
fn raw(end: &End, bytes: &[u8]) -> usize {
    send(&end.fd, bytes, SendFlags::DONTWAIT).unwrap_or(0)
}

fn received(world: &mut World<Serve>, client: &mut Client) -> Vec<u8> {
    world.run(0.1);
    world.read(client, 1 << 20)
}

#[test]
fn raw_write_follows_library_data() {
    let (mut world, process, listener, mut end, mut client) = accepted();
    assert_eq!(process.write(&mut end, b"first,"), 6);
    assert_eq!(raw(&end, b"sec\0ond,"), 8);
    assert_eq!(raw(&end, b"\0"), 1);
    assert_eq!(received(&mut world, &mut client), b"first,sec\0ond,\0");
    assert_eq!(raw(&end, b"third"), 5);
    assert_eq!(received(&mut world, &mut client), b"third");
    let counts = world.app.counts();
    assert_eq!((counts.relayed, counts.unsent, counts.misused), (14, 0, 0));
    // A listener cannot send.
    assert_eq!(raw(&listener, b"lost"), 4);
    world.run(0.1);
    assert_eq!((world.app.counts().relayed, world.app.counts().unsent), (14, 4));
    world.connect(80);
    world.run(0.1);
    assert!(process.accept(&listener).is_some());
}

#[test]
fn raw_datagram_writes_reach_the_peer() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let end = process.open(&mut world, &joined("10.0.0.2:9001")).unwrap();
    // The peer's port is closed, and the peer answers with an error. Before that, both hosts resolve each other's
    // address.
    for _ in 0..2 {
        assert_eq!(raw(&end, b"metric:1|c\0"), 11);
        world.run(2.0);
    }
    assert_eq!(end.slot().identity.take_failure(), Some(Errno::CONNREFUSED.raw_os_error() as u32));
    let long = vec![0; 1400];
    assert_eq!(raw(&end, &long), long.len());
    world.run(0.1);
    assert_eq!((world.app.counts().relayed, world.app.counts().unsent), (1422, 0));
    // An unconnected socket has no destination.
    let lone = process.open(&mut world, &bind(2, "10.0.0.1:53".parse().unwrap())).unwrap();
    assert_eq!(raw(&lone, b"lost"), 4);
    world.run(0.1);
    assert_eq!((world.app.counts().relayed, world.app.counts().unsent), (1422, 4));
}

#[test]
fn held_lock_defers_raw_write() {
    let (mut world, process, _listener, end, mut client) = accepted();
    let lock = &end.slot().wishes.writing;
    lock.store(u64::from(process.welcome.owner) << 1, Ordering::Relaxed);
    assert_eq!(raw(&end, b"later"), 5);
    assert_eq!(received(&mut world, &mut client), b"");
    lock.store(0, Ordering::Relaxed);
    assert_eq!(received(&mut world, &mut client), b"later");
    assert_eq!(lock.load(Ordering::Relaxed), 0);
    // A lock of a dead process is ignored.
    lock.store(u64::from(process.welcome.owner + (1 << 10)) << 1, Ordering::Relaxed);
    assert_eq!(raw(&end, b"at once"), 7);
    assert_eq!(received(&mut world, &mut client), b"at once");
}

#[test]
fn pending_raw_write_delays_close() {
    let (mut world, process, _listener, mut end, mut client) = accepted();
    let mut sent: Vec<u8> = Vec::new();
    // Fill the peer's window and the FIFO.
    let mut full = 0;
    while full < 50 {
        let bytes: Vec<u8> = (0..60_000).map(|at| ((sent.len() + at) % 251) as u8).collect();
        let written = end.writer.write(&bytes);
        sent.extend(&bytes[..written]);
        process.mark(&end);
        world.run(0.1);
        full = if written == 0 { full + 1 } else { 0 };
    }
    assert_eq!((process.write(&mut end, &[7]), end.bits()), (0, Bits::empty()));
    let tail = [b"tail\0".repeat(99), b"end".to_vec()].concat();
    assert_eq!(raw(&end, &tail), tail.len());
    world.run(0.5);
    assert_eq!(world.app.counts().relayed, 0, "there is no room");
    drop(end);
    world.run(0.5);
    assert_eq!(world.app.counts().sessions, 2, "it has something to send");
    let mut there = Vec::new();
    while !world.has_ended(&client) {
        there.extend(received(&mut world, &mut client));
        assert!(world.now < Time::from_secs(100));
    }
    there.extend(world.read(&mut client, 1 << 20));
    sent.extend(&tail);
    assert_eq!(there.len(), sent.len());
    assert!(there == sent);
    let counts = world.app.counts();
    assert_eq!((counts.sessions, counts.relayed, counts.unsent), (1, tail.len() as u64, 0));
}
