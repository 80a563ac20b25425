//! Tests of echo, discard and source services.

use std::net::SocketAddr;

use offcore_flow::host::App;
use offcore_flow::host::apps::streams::{Stream, Streams};
use offcore_session::Datagrams;
use offcore_session::datagram::Header;
use offcore_stats::time::Time;
use offcore_tcp::proto::{AppId, Config};

use crate::world::World;

/// Sends a datagram of 5 bytes from `port`, and returns the number of bytes that come back.
fn returned(port: u16) -> usize {
    let mut world = World::new(Streams::new(Stream::Echo, 7000), Config::default());
    let (stack, out) = world.client.path.call();
    let socket = stack.open_datagrams(AppId::OWN, None, port).unwrap();
    let mut datagrams = Datagrams::new(stack.memory(AppId::OWN), stack.slot(socket).unwrap()).unwrap();
    let to = SocketAddr::from(([10, 0, 0, 1], 7000));
    assert!(datagrams.send(&Header::new(5, to, [0; 4].into()), b"hello"));
    stack.written(Time::from_micros(1), socket, out).unwrap();
    world.run(1.0);
    assert_eq!(world.app.read, 5, "it has come");
    datagrams.receive(&mut [0; 100]).map_or(0, |header| header.len.into())
}

/// Two services that answer each other would never stop.
#[test]
fn answering_services_get_no_echo() {
    for port in [7, 11, 13, 17, 19, 37, 53, 123, 7000] {
        assert_eq!(returned(port), 0, "from port {port}");
    }
    for port in [9, 1024, 50_000] {
        assert_eq!(returned(port), 5, "from port {port}");
    }
}

/// Fast readers do not delay the worker's other work.
#[test]
fn rounds_are_bounded() {
    const ROUND: u64 = 256 << 10;
    let config = Config { send_buffer: 8 << 20, memory: 256 << 20, ..Config::default() };
    let mut world = World::new(Streams::new(Stream::Source, 19), config);
    let mut clients: Vec<_> = (0..3).map(|_| world.connect(19)).collect();
    let (mut last, mut most, mut read) = (world.app.written, 0, [0; 3]);
    for _ in 0..400 {
        world.turn();
        most = most.max(world.app.written - last);
        last = world.app.written;
        for (client, read) in clients.iter_mut().zip(&mut read) {
            *read += world.read(client, usize::MAX).len();
        }
    }
    assert!(most > ROUND / 2 && most <= ROUND + (64 << 10), "{most} bytes in a turn");
    assert!(read.iter().all(|read| *read > 1_000_000), "{read:?}");
    world.run_until(20, |world| !world.app.is_busy());
    assert!(!world.app.is_busy(), "with full FIFOs");
}

#[test]
fn echo_returns_all_data() {
    let config = Config { send_buffer: 8 << 20, memory: 256 << 20, ..Config::default() };
    let mut world = World::new(Streams::new(Stream::Echo, 7), config);
    let mut client = world.connect(7);
    let bytes: Vec<u8> = (0..3_000_000).map(|at| (at / 253) as u8 ^ at as u8).collect();
    let (mut sent, mut back) = (0, Vec::new());
    // The client does not read at first, so the echoed data waits for room.
    world.run_until(5, |world| {
        sent += world.write(&mut client, &bytes[sent..]);
        sent == bytes.len()
    });
    world.run_until(60, |world| {
        sent += world.write(&mut client, &bytes[sent..]);
        back.extend(world.read(&mut client, usize::MAX));
        back.len() >= bytes.len()
    });
    assert!(back == bytes, "{} of {} bytes came back", back.len(), bytes.len());
}
