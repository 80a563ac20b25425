//! Tests of streams: the poll events in each state, and the transfer of data.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use offcore_flow::host::serve::Serve;
use offcore_session::slot::{flags, state, wish};
use offcore_stats::time::Time;
use offcore_tcp::proto::Event;
use rustix::event::PollFlags as Bits;
use rustix::io::dup;
use rustix::net::{Shutdown, shutdown};

use crate::process::{End, Process, connect_to};
use crate::world::{Client, World};

const IN: Bits = Bits::IN;
const OUT: Bits = Bits::OUT;
const RDHUP: Bits = Bits::RDHUP;

/// The address of the peer, at a port.
fn peer(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, 2], port))
}

fn reset() -> Bits {
    IN | OUT | Bits::ERR | Bits::HUP | RDHUP
}

/// A process with a connection that was accepted at port 80.
pub(crate) fn accepted() -> (World<Serve>, Process, End, End, Client) {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    let (end, client) = another(&mut world, &process, &listener);
    (world, process, listener, end, client)
}

fn another(world: &mut World<Serve>, process: &Process, listener: &End) -> (End, Client) {
    let client = world.connect(80);
    world.run(0.1);
    (process.accept(listener).unwrap(), client)
}

fn abort(world: &mut World<Serve>, client: &Client) {
    let now = world.now;
    let (stack, out) = world.client.path.call();
    stack.abort(now, client.conn, out);
    world.run(0.1);
}

fn sessions(world: &World<Serve>) -> u64 {
    world.app.counts().sessions
}

#[test]
fn connections_are_accepted_and_echoed() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    assert_eq!((listener.bits(), listener.slot().state()), (Bits::empty(), state::LISTENING));
    let mut client = world.connect(80);
    world.run(0.1);
    assert_eq!(listener.bits(), IN);
    let mut end = process.accept(&listener).unwrap();
    assert_eq!((listener.bits(), end.bits()), (Bits::empty(), OUT));
    let identity = &end.slot().identity;
    assert_eq!((end.slot().state(), identity.family.load(Ordering::Relaxed)), (state::OPEN, 4));
    assert_eq!(identity.ports.load(Ordering::Relaxed) & 0xffff, 80);
    assert_eq!(identity.local[0].load(Ordering::Relaxed).to_ne_bytes(), [10, 0, 0, 1]);
    assert_eq!(identity.remote[0].load(Ordering::Relaxed).to_ne_bytes(), [10, 0, 0, 2]);
    world.write(&mut client, b"hello");
    world.run(0.1);
    assert_eq!(end.bits(), IN | OUT);
    assert_eq!(process.read(&mut end, 100), b"hello");
    assert_eq!(end.bits(), OUT);
    assert_eq!(process.write(&mut end, b"good day"), 8);
    world.run(0.1);
    assert_eq!(world.read(&mut client, 100), b"good day");
    drop(end);
    world.run(0.1);
    assert!(world.has_ended(&client));
    assert_eq!(sessions(&world), 1, "the listener");
    drop(listener);
    world.run(0.1);
    assert_eq!(sessions(&world), 0);
}

#[test]
fn data_before_accept_is_announced() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    let mut client = world.connect(80);
    world.write(&mut client, b"early");
    let now = world.now;
    let (stack, out) = world.client.path.call();
    stack.shutdown(now, client.conn, out).unwrap();
    world.run(0.1);
    let mut end = process.accept(&listener).unwrap();
    assert_eq!(end.bits(), IN | OUT | RDHUP);
    assert_eq!(process.read(&mut end, 100), b"early");
}

#[test]
fn unread_data_gets_one_token() {
    let (mut world, process, _listener, mut end, mut client) = accepted();
    let before = world.app.counts().tokens;
    for _ in 0..5 {
        world.write(&mut client, b"x");
        world.run(0.1);
    }
    assert_eq!(world.app.counts().tokens, before + 1);
    // Unread data is not announced again. The next byte after all data was read is.
    assert_eq!(process.read(&mut end, 3), b"xxx");
    world.run(0.1);
    assert_eq!((end.bits(), world.app.counts().tokens), (IN | OUT, before + 1));
    assert_eq!(process.read(&mut end, 3), b"xx");
    world.write(&mut client, b"y");
    world.run(0.1);
    assert_eq!((end.bits(), world.app.counts().tokens), (IN | OUT, before + 2));
}

#[test]
fn connect_succeeds_or_is_refused() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = world.listen(7);
    let mut end = process.open(&mut world, &connect_to(peer(7))).unwrap();
    assert_eq!((end.bits(), end.slot().state()), (Bits::empty(), state::CONNECTING));
    // A request before the connection is open takes effect when it is open.
    end.slot().wishes.options.store(wish::END, Ordering::Release);
    process.mark(&end);
    world.run(2.0);
    assert_eq!((end.bits(), end.slot().state(), end.slot().flags()), (OUT, state::OPEN, 0));
    let client = world.accept(listener).unwrap();
    assert!(world.events.contains(&Event::EndOfStream(client.conn)));
    assert_eq!(process.read(&mut end, 1), b"");

    let end = process.open(&mut world, &connect_to(peer(8))).unwrap();
    world.run(2.0);
    assert_eq!((end.bits(), end.error(), end.slot().flags()), (reset(), 111, flags::OVER));
    drop(end);
    let unreachable = process.open(&mut world, &connect_to(SocketAddr::from(([11, 0, 0, 1], 7))));
    assert_eq!(unreachable.err(), Some(101));
    assert_eq!(sessions(&world), 1);
}

#[test]
fn full_fifo_closes_gate() {
    let (mut world, process, _listener, mut end, mut client) = accepted();
    let bytes: Vec<u8> = (0..4 << 20).map(|at: u32| (at / 256) as u8).collect();
    let (mut written, mut read, mut closed) = (0, Vec::new(), 0);
    while read.len() < bytes.len() {
        if end.bits().contains(OUT) && written < bytes.len() {
            written += process.write(&mut end, &bytes[written..]);
            if written < bytes.len() {
                assert!(!end.bits().contains(OUT), "the gate is closed");
                closed += 1;
            }
        }
        world.turn();
        if closed > 1 || written == bytes.len() {
            read.extend(world.read(&mut client, usize::MAX));
        }
        assert!(
            world.now < Time::from_secs(600),
            "{written} written, {} read, closed {closed} times",
            read.len()
        );
    }
    assert!(read == bytes && closed > 1);
    world.run(0.1);
    assert_eq!(end.bits(), OUT);
    assert!(world.app.counts().gates >= closed);
}

#[test]
fn reset_session_lives_until_last_close() {
    let (mut world, process, _listener, mut end, mut client) = accepted();
    let other = dup(&end.fd).unwrap();
    world.write(&mut client, b"last words");
    world.run(0.1);
    abort(&mut world, &client);
    assert_eq!(end.bits(), reset());
    assert_eq!((end.error(), end.slot().flags()), (104, flags::OVER));
    // Reading tokens as usual does not release the pipe of the session.
    for _ in 0..4 {
        assert_eq!(rustix::io::read(&end.fd, &mut [0; 64]), Ok(64));
    }
    world.run(0.1);
    assert_eq!(sessions(&world), 2);
    assert_eq!(end.reader.available(), 10);
    let mut bytes = [0; 10];
    end.reader.read(&mut bytes);
    assert_eq!(&bytes, b"last words");
    process.mark(&end);
    drop(end);
    world.run(0.1);
    assert_eq!(
        (sessions(&world), world.server.path.stack.connections()),
        (2, 1),
        "there is another descriptor"
    );
    drop(other);
    world.run(0.1);
    assert_eq!((sessions(&world), world.server.path.stack.connections()), (1, 0));
}

#[test]
fn half_close_ends_one_direction() {
    let (mut world, process, _listener, mut end, mut client) = accepted();
    let now = world.now;
    let (stack, out) = world.client.path.call();
    stack.shutdown(now, client.conn, out).unwrap();
    world.run(0.1);
    assert_eq!((end.bits(), end.slot().flags()), (IN | OUT | RDHUP, flags::ENDED));
    assert_eq!(process.write(&mut end, b"still"), 5);
    world.run(0.1);
    assert_eq!(world.read(&mut client, 100), b"still");
    assert!(!world.has_ended(&client));
    end.slot().wishes.options.store(wish::END, Ordering::Release);
    process.mark(&end);
    world.run(0.1);
    assert!(world.has_ended(&client));
    assert_eq!((end.bits(), end.error()), (IN | OUT | RDHUP, 0));
    assert_eq!(end.slot().flags(), flags::ENDED | flags::OVER);
    drop(end);
    wait_for_sessions_left(&mut world, 1);

    // The server's stream ends first.
    let listener = process.listen(&mut world, 81, 1);
    let mut client = world.connect(81);
    world.run(0.1);
    let mut end = process.accept(&listener).unwrap();
    end.slot().wishes.options.store(wish::END, Ordering::Release);
    process.write(&mut end, b"bye");
    world.run(0.1);
    assert_eq!(world.read(&mut client, 100), b"bye");
    assert!(world.has_ended(&client));
    assert_eq!(end.bits(), OUT);
    world.write(&mut client, b"answer");
    world.run(0.1);
    assert_eq!(process.read(&mut end, 100), b"answer");
    let now = world.now;
    let (stack, out) = world.client.path.call();
    stack.close(now, client.conn, out);
    world.run(0.1);
    assert_eq!(end.bits(), IN | OUT | RDHUP);
}

#[test]
fn data_before_close_is_sent() {
    let (mut world, _process, _listener, mut end, mut client) = accepted();
    // The session is not marked, as if the process was killed before.
    assert_eq!(end.writer.write(b"last"), 4);
    drop(end);
    world.run(0.1);
    assert_eq!(world.read(&mut client, 100), b"last");
    assert!(world.has_ended(&client) && !world.is_closed(&client));
}

#[test]
fn unread_data_or_zero_linger_resets() {
    for linger in [false, true] {
        let (mut world, _process, _listener, end, mut client) = accepted();
        if linger {
            end.slot().wishes.options.store(wish::RESET, Ordering::Release);
        } else {
            world.write(&mut client, b"unread");
            world.run(0.1);
        }
        drop(end);
        world.run(0.1);
        assert!(world.is_closed(&client) && !world.has_ended(&client), "linger: {linger}");
        assert_eq!((sessions(&world), world.server.path.stack.connections()), (1, 0));
    }
}

#[test]
fn invalid_index_resets_only_its_session() {
    let (mut world, process, listener, end, client) = accepted();
    let (mut other, mut other_client) = another(&mut world, &process, &listener);
    // The index exceeds the received data.
    process.spoil_head(&end, 12_345);
    process.mark(&end);
    world.run(0.1);
    assert_eq!((end.bits(), end.error()), (reset(), 104));
    assert!(world.is_closed(&client));
    assert_eq!(world.app.counts().misused, 1);
    world.write(&mut other_client, b"fine");
    world.run(0.1);
    assert_eq!(process.read(&mut other, 100), b"fine");
    assert_eq!(process.write(&mut other, b"too"), 3);
    world.run(0.1);
    assert_eq!(world.read(&mut other_client, 100), b"too");
    drop(end);
    world.run(0.1);
    assert_eq!(sessions(&world), 2);
}

/// Connects until the queue of a listener is full, and a few more times. The excess connections wait in the stack.
fn fill_queue(world: &mut World<Serve>) -> Vec<Client> {
    let mut clients = Vec::new();
    loop {
        let before = sessions(world);
        clients.push(world.connect(80));
        world.run(0.1);
        if sessions(world) == before {
            break;
        }
    }
    clients.extend((0..8).map(|_| world.connect(80)));
    world.run(0.2);
    clients
}

#[test]
fn full_accept_queue_holds_connections() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    let clients = fill_queue(&mut world);
    let before = sessions(&world);
    assert!(before >= 16, "{before} sessions");
    world.run(0.2);
    assert_eq!(sessions(&world), before, "nothing is made for what cannot be passed on");
    let mut ends = Vec::new();
    while ends.len() < clients.len() {
        while let Some(end) = process.accept(&listener) {
            ends.push(end);
        }
        world.turn();
        assert!(world.now < Time::from_secs(60), "{} of {}", ends.len(), clients.len());
    }
    assert_eq!(sessions(&world), 1 + clients.len() as u64);
    assert_eq!(world.app.counts().refused, 0);
}

#[test]
fn closed_listener_resets_unaccepted_connections() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 16);
    let clients = fill_queue(&mut world);
    drop(listener);
    world.run(0.5);
    let ended = |client| world.is_closed(client) || world.has_ended(client);
    assert!(clients.iter().all(ended));
    assert_eq!(sessions(&world), 0);
}

#[test]
fn connections_inherit_listener_options() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, 80, 4);
    let wishes = &listener.slot().wishes;
    wishes.options.store(wish::NO_DELAY | wish::KEEP_ALIVE, Ordering::Relaxed);
    for (word, value) in [(&wishes.keep_idle, 1), (&wishes.keep_interval, 1), (&wishes.keep_count, 2)] {
        word.store(value, Ordering::Relaxed);
    }
    world.connect(80);
    world.run(0.1);
    let end = process.accept(&listener).unwrap();
    assert_eq!(end.slot().wishes.options.load(Ordering::Relaxed), wish::NO_DELAY | wish::KEEP_ALIVE);
    // The peer vanishes silently. Only the keep-alive probes can detect that.
    world.cut = true;
    world.run(10.0);
    assert_eq!((end.bits(), end.error() != 0), (reset(), true));
}

fn end(world: &mut World<Serve>, client: &Client) {
    let now = world.now;
    let (stack, out) = world.client.path.call();
    stack.shutdown(now, client.conn, out).unwrap();
    world.run(0.1);
}

/// Waits for queries to the kernel whether sessions are closed, which take real time instead of the virtual time of the
/// world.
fn wait_for_close_queries(world: &mut World<Serve>) {
    for _ in 0..50 {
        world.turn();
        sleep(Duration::from_millis(1));
    }
}

/// Waits until `left` sessions are left.
fn wait_for_sessions_left(world: &mut World<Serve>, left: u64) {
    let start = Instant::now();
    while sessions(world) != left {
        assert!(start.elapsed() < Duration::from_secs(30), "{} sessions", sessions(world));
        wait_for_close_queries(world);
    }
}

#[test]
fn shutdown_does_not_close_session() {
    let (mut world, process, listener, mut end_of, mut client) = accepted();
    world.write(&mut client, b"not read yet");
    end(&mut world, &client);
    // Like the system call: `poll` reports that both directions are shut down.
    end_of.slot().wishes.options.store(wish::END, Ordering::Release);
    process.mark(&end_of);
    shutdown(&end_of.fd, Shutdown::Write).unwrap();
    assert_eq!(end_of.bits(), IN | OUT | RDHUP | Bits::HUP);
    wait_for_close_queries(&mut world);
    assert_eq!(sessions(&world), 2);
    assert!(world.has_ended(&client));
    assert_eq!(process.read(&mut end_of, 100), b"not read yet");
    drop(end_of);
    wait_for_sessions_left(&mut world, 1);

    // Both directions at once, by the application alone.
    let (end_of, _client) = another(&mut world, &process, &listener);
    end_of.slot().wishes.options.store(wish::END | wish::NO_READ, Ordering::Release);
    process.mark(&end_of);
    shutdown(&end_of.fd, Shutdown::Both).unwrap();
    wait_for_close_queries(&mut world);
    assert_eq!(sessions(&world), 2);
    drop(end_of);
    wait_for_sessions_left(&mut world, 1);

    // A listener that is shut down no longer listens, but keeps its address.
    listener.slot().wishes.options.store(wish::END | wish::NO_READ, Ordering::Release);
    shutdown(&listener.fd, Shutdown::Both).unwrap();
    wait_for_close_queries(&mut world);
    assert_eq!((listener.slot().state(), sessions(&world)), (state::BOUND, 1));
    process.listen(&mut world, 80, 1);
}

#[test]
fn reset_after_fin_is_reported() {
    let (mut world, process, _listener, mut end_of, mut client) = accepted();
    world.write(&mut client, b"last");
    end(&mut world, &client);
    abort(&mut world, &client);
    // The end of the pair was shut down before, so it cannot show an error.
    assert_eq!(end_of.bits(), IN | OUT | Bits::HUP | RDHUP);
    assert_eq!((end_of.error(), end_of.slot().flags()), (32, flags::ENDED | flags::OVER));
    assert_eq!(process.read(&mut end_of, 100), b"last");
    wait_for_close_queries(&mut world);
    assert_eq!(sessions(&world), 2);
    drop(end_of);
    wait_for_sessions_left(&mut world, 1);
    assert_eq!((sessions(&world), world.server.path.stack.connections()), (1, 0));
}
