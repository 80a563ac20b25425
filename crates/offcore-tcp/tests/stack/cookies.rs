//! SYN cookies, which are used when a listener has too many half-open connections.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::sync::Arc;

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppMemory, Cause, Config, ConnId, CookieCounts, DropReason, Out};
use offcore_wire::{TcpFlags, TcpHeader, TcpOptions};

use crate::frame::{self, Seen};
use crate::host::Host;
use crate::streams::content;
use crate::world::{Impairment, World};

const SECOND: Micros = Micros::from_secs(1);

/// Opens connections from host 0 to host 1, whose backlog is full. Each is accepted by a SYN cookie.
fn by_cookies(connections: usize) -> (World, Vec<ConnId>) {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 64);
    let like = syn(&mut world);
    let options = TcpOptions { mss: Some(1460), ..TcpOptions::default() };
    for port in 1..=64 {
        let from = [192, 168, 0, 1].into();
        assert!(ask(&mut world, forge(&like, from, port, 5, 0, TcpFlags::SYN, &options)).is_some());
    }
    let mut conns = Vec::new();
    for _ in 0..connections {
        conns.push(world.hosts[0].connect(world.now, "10.0.0.2:7"));
        world.run(SECOND / 100);
    }
    let count = connections as u64;
    assert_eq!(world.hosts[1].stack.cookies(), CookieCounts { sent: count, taken: count });
    world.trace.clear();
    (world, conns)
}

/// Returns the end at host 1 of each connection of host 0.
fn other_ends(world: &World, conns: &[ConnId]) -> Vec<ConnId> {
    let of = |conn: &ConnId| {
        let local = world.hosts[0].stack.info(*conn).unwrap().local;
        let mut there = world.hosts[1].accepted.iter().copied();
        there.find(|there| world.hosts[1].stack.info(*there).unwrap().remote == local).unwrap()
    };
    conns.iter().map(of).collect()
}

/// Sends `len` bytes in both directions on all connections, and compares them.
fn exchange(world: &mut World, conns: &[ConnId], len: usize) {
    let now = world.now;
    for (number, conn) in (0..).zip(conns) {
        world.hosts[0].send(now, *conn, &content(number, len));
    }
    let all = conns.len();
    assert!(world.run_until(100 * SECOND, |hosts| hosts[1].accepted.len() == all));
    let there = other_ends(world, conns);
    let now = world.now;
    for (number, conn) in (1000..).zip(&there) {
        world.hosts[1].send(now, *conn, &content(number, len));
    }
    let done = world.run_until(600 * SECOND, |hosts| {
        let full = |host: usize, conn: &ConnId| hosts[host].sessions[conn].received.len() == len;
        conns.iter().all(|conn| full(0, conn)) && there.iter().all(|conn| full(1, conn))
    });
    assert!(done, "all bytes arrive");
    for (number, (here, there)) in (0..).zip(conns.iter().zip(&there)) {
        assert!(world.hosts[1].sessions[there].received == content(number, len));
        assert!(world.hosts[0].sessions[here].received == content(1000 + number, len));
    }
}

/// Returns the segments of host 1 in the trace.
fn answers(world: &World) -> impl Iterator<Item = Seen> {
    let sent = world.trace.iter().filter(|(_, host, _)| *host == 1);
    sent.filter_map(|(_, _, frame)| frame::read(frame)).filter(|seen| seen.ports.0 == 7)
}

#[test]
fn syn_cookie_keeps_options() {
    let (mut world, conns) = by_cookies(16);
    exchange(&mut world, &conns, 100_000);
    let of_data: Vec<Seen> = answers(&world).filter(|seen| seen.len > 0).collect();
    // A window of 256 KiB is 1,024 in the header. A sender that lost the scale would never send a full segment.
    let full = of_data.iter().filter(|seen| seen.len == 1448).count();
    assert!(full >= 16 * (100_000 / 1448), "{full} full segments");
    assert!(of_data.iter().all(|seen| seen.options.timestamps.is_some() && seen.ecn == 2));
    assert!(answers(&world).all(|seen| !seen.flags.contains(TcpFlags::RST)));
}

#[test]
fn syn_cookie_keeps_sack() {
    let (mut world, conns) = by_cookies(4);
    let now = world.now;
    world.impairment = Impairment { loss: 30, ..Impairment::default() };
    let there = other_ends(&world, &conns);
    for conn in &conns {
        world.hosts[0].send(now, *conn, &content(3, 300_000));
    }
    let all =
        |hosts: &mut [Host; 2]| there.iter().all(|conn| hosts[1].sessions[conn].received.len() == 300_000);
    assert!(world.run_until(100 * SECOND, all));
    for conn in conns {
        let port = world.hosts[0].stack.info(conn).unwrap().local.port();
        let mut its = answers(&world).filter(|seen| seen.ports.1 == port);
        assert!(its.any(|seen| !seen.options.sack.is_empty()), "holes are reported");
    }
}

#[test]
fn full_backlog_completes_handshakes_later() {
    // All connections arrive at once, and 40 fit. The first ACKs of the others are dropped, and their data completes
    // the handshake later.
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 40);
    world.hosts[0].connect(Time::from_micros(1), "10.0.0.2:9");
    world.run(SECOND);
    let now = world.now;
    let conns: Vec<ConnId> = (0..100).map(|_| world.hosts[0].connect(now, "10.0.0.2:7")).collect();
    exchange(&mut world, &conns, 20_000);
    assert!(world.hosts[1].stack.cookies().taken > 0);
    assert!(world.hosts[1].stack.drops().get(DropReason::Backlog) > 0);
    assert!(answers(&world).all(|seen| !seen.flags.contains(TcpFlags::RST)));
}

/// Returns a SYN of host 0 as a template for forged segments.
fn syn(world: &mut World) -> Vec<u8> {
    world.hosts[0].connect(world.now, "10.0.0.2:9");
    world.run(SECOND);
    let of_tcp = |frame: &[u8]| frame::read(frame).is_some();
    world.trace.iter().find(|(_, host, frame)| *host == 0 && of_tcp(frame)).unwrap().2.clone()
}

fn header(src_port: u16, seq: u32, ack: u32, flags: TcpFlags) -> TcpHeader {
    TcpHeader { src_port, dst_port: 7, seq, ack, flags, window: 5000, urgent: 0 }
}

/// Passes a frame to host 1 and returns its answer.
fn ask(world: &mut World, frame: Vec<u8>) -> Option<Seen> {
    let now = world.now;
    world.hosts[1].receive(now, &mut [frame]);
    let answers = std::mem::take(&mut world.hosts[1].frames);
    answers.iter().find_map(|frame| frame::read(frame))
}

#[test]
fn only_valid_cookie_opens_connection() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 1);
    let like = syn(&mut world);
    let plain = TcpOptions { mss: Some(1300), ..TcpOptions::default() };
    let from = Ipv4Addr::new(192, 168, 7, 7);
    let make = |port, seq, ack, flags| forge(&like, from, port, seq, ack, flags, &plain);
    // The first connection stays half open and fills the backlog.
    assert!(ask(&mut world, make(1, 100, 0, TcpFlags::SYN)).is_some());
    let cookie = ask(&mut world, make(2, 100, 0, TcpFlags::SYN)).unwrap();
    assert_eq!(cookie.flags, TcpFlags::SYN | TcpFlags::ACK);
    assert_eq!(cookie.ack, 101);
    assert!(
        cookie.options.timestamps.is_none() && !cookie.options.sack_permitted,
        "there is no place for it"
    );
    assert_eq!(cookie.options.window_scale, None);
    let right = cookie.seq.wrapping_add(1);
    for (port, seq, ack) in [(2, 101, right ^ 16), (2, 102, right), (3, 101, right)] {
        let answer = ask(&mut world, make(port, seq, ack, TcpFlags::ACK)).unwrap();
        assert_eq!((answer.flags, answer.seq), (TcpFlags::RST, ack), "a guess is refused");
    }
    assert_eq!(world.hosts[1].stack.cookies().taken, 0);
    // Out-of-order data may belong to a connection whose first segments were lost, so it must not cause a reset.
    let mut data = make(2, 102, right, TcpFlags::ACK);
    frame::append(&mut data, b"data");
    assert!(ask(&mut world, data).is_none());
    assert!(ask(&mut world, make(2, 101, right, TcpFlags::ACK)).is_none());
    assert_eq!(world.hosts[1].stack.cookies(), CookieCounts { sent: 1, taken: 1 });
    let conn = world.hosts[1].accepted[0];
    assert_eq!(world.hosts[1].stack.info(conn).unwrap().mss, 1300);
    // Later, the cookie has expired.
    world.run(130 * SECOND);
    let now = world.now;
    world.hosts[1].stack.abort(now, conn, &mut Out::default());
    for bytes in [b"".as_slice(), b"data"] {
        let mut late = make(2, 101, right, TcpFlags::ACK);
        frame::append(&mut late, bytes);
        assert_eq!(ask(&mut world, late).unwrap().flags, TcpFlags::RST);
    }
}

fn forge(
    like: &[u8],
    from: Ipv4Addr,
    port: u16,
    seq: u32,
    ack: u32,
    flags: TcpFlags,
    options: &TcpOptions,
) -> Vec<u8> {
    frame::forge(like, from, &header(port, seq, ack, flags), options)
}

/// Returns a SYN with a random source address. Half of the addresses belong to the link, where each needs neighbour
/// resolution.
fn flood(chance: &mut SplitMix, like: &[u8]) -> Vec<u8> {
    let random = chance.next();
    let [a, b, c, d, ..] = random.to_be_bytes();
    let from = if d % 2 == 0 { [10, 0, 0, 3 + a % 200] } else { [(a % 100) + 20, b, c, d] };
    let options = TcpOptions { mss: Some(1460), sack_permitted: true, ..TcpOptions::default() };
    forge(like, from.into(), random as u16 | 1, (random >> 20) as u32, 0, TcpFlags::SYN, &options)
}

#[test]
fn syn_flood_spares_honest_clients() {
    const BACKLOG: usize = 256;
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, BACKLOG);
    let like = syn(&mut world);
    let before = world.hosts[1].stack.memory_used();
    let mut chance = SplitMix::new(9);
    let mut honest = Vec::new();
    // 100,000 SYNs arrive within a second, and a legitimate connection is opened every 100 ms.
    for burst in 0..1000 {
        let now = world.now;
        if burst % 100 == 50 {
            honest.push(world.hosts[0].connect(now, "10.0.0.2:7"));
        }
        let mut frames: Vec<Vec<u8>> = (0..100).map(|_| flood(&mut chance, &like)).collect();
        world.hosts[1].receive(now, &mut frames);
        world.run(Micros::from_millis(1));
        let stack = &world.hosts[1].stack;
        assert!(stack.flows() <= BACKLOG + honest.len(), "{} flows", stack.flows());
        assert!(stack.neighbours() <= 256 && stack.connections() <= honest.len());
    }
    let CookieCounts { sent, taken } = world.hosts[1].stack.cookies();
    assert!(sent > 99_000 && taken == 10, "{sent} sent, {taken} taken");
    assert!(world.hosts[1].stack.memory_used() <= before + 10 * (64 << 10));
    exchange(&mut world, &honest, 10_000);
    for conn in honest {
        assert_eq!(world.hosts[0].sessions[&conn].closed, None::<Cause>);
    }
    // All half-open connections have timed out.
    world.run(120 * SECOND);
    assert_eq!(world.hosts[1].stack.flows(), 10);
}

/// Sends 4,000 SYNs from different endpoints to each of the ports of host 1. Returns the numbers of half-open
/// connections and of SYN cookies that they cause.
fn send_syns(world: &mut World, like: &[u8], ports: RangeInclusive<u16>) -> (u64, u64) {
    let counts = |world: &mut World| {
        let counts = world.hosts[1].stack.counts();
        (counts.half_open, counts.cookies_sent)
    };
    let before = counts(world);
    for (to, number) in ports.flat_map(|to| (1..=4000).map(move |number| (to, number))) {
        let header = TcpHeader { dst_port: to, ..header(number, 5, 0, TcpFlags::SYN) };
        let from = [192, 168, 0, 1].into();
        world.hosts[1]
            .receive(Time::from_secs(1), &mut [frame::forge(like, from, &header, &TcpOptions::NONE)]);
        world.hosts[1].frames.clear();
    }
    let after = counts(world);
    (after.0 - before.0, after.1 - before.1)
}

#[test]
fn users_share_half_open_connections() {
    const ALL: u64 = 1 << 16;
    let mut world = World::new(1, 1500, Config::default());
    let like = syn(&mut world);
    let listen = |world: &mut World, user, ports: RangeInclusive<u16>| {
        let stack = &mut world.hosts[1].stack;
        let app = stack.add_app(AppMemory::new(1 << 20, Arc::default()).unwrap());
        stack.set_user(app, user);
        ports.map(|port| stack.listen(app, None, port, 4096, false).unwrap()).collect::<Vec<_>>()
    };
    let listeners = listen(&mut world, 1, 1..=20);
    assert_eq!(send_syns(&mut world, &like, 1..=20), (ALL, 80_000 - ALL), "of one user");
    listen(&mut world, 2, 21..=30);
    assert_eq!(send_syns(&mut world, &like, 21..=30), (ALL / 2, 40_000 - ALL / 2), "of another user");
    // The first user's new connections get half.
    for listener in listeners {
        world.hosts[1].stack.unlisten(Time::from_secs(1), listener, &mut Out::default());
    }
    assert_eq!(world.hosts[1].stack.counts().half_open, ALL / 2);
    listen(&mut world, 1, 31..=40);
    assert_eq!(send_syns(&mut world, &like, 31..=40), (ALL / 2, 40_000 - ALL / 2));
}

#[test]
fn new_listener_gets_no_old_handshakes() {
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, 16);
    let like = syn(&mut world);
    let options = TcpOptions { mss: Some(1460), ..TcpOptions::default() };
    let make = |seq, ack, flags| forge(&like, [10, 0, 0, 1].into(), 99, seq, ack, flags, &options);
    let half = ask(&mut world, make(5, 0, TcpFlags::SYN)).unwrap();
    let (now, old) = (world.now, world.hosts[1].listener.unwrap());
    world.hosts[1].stack.unlisten(now, old, &mut Out::default());
    assert_eq!(world.hosts[1].stack.flows(), 0);
    world.hosts[1].listen(8, 16);
    assert_eq!(world.hosts[1].listener, Some(old), "the number is the same");
    let answer = ask(&mut world, make(6, half.seq.wrapping_add(1), TcpFlags::ACK)).unwrap();
    assert_eq!(answer.flags, TcpFlags::RST);
    assert!(world.hosts[1].accepted.is_empty());
}

/// A listener has a queue of half-open connections and a queue of connections to accept.
#[test]
fn listener_queues_are_bounded() {
    const QUEUE: u16 = 4096;
    let mut world = World::new(1, 1500, Config::default());
    world.hosts[1].listen(7, usize::MAX);
    world.hosts[1].accepts_none = true;
    let like = syn(&mut world);
    let options = TcpOptions { mss: Some(1460), ..TcpOptions::default() };
    let make = |port, seq, ack, flags| forge(&like, [192, 168, 7, 7].into(), port, seq, ack, flags, &options);
    let begin = |world: &mut World, ports: RangeInclusive<u16>| {
        let mut answer = |port| ask(world, make(port, 100, 0, TcpFlags::SYN)).unwrap().seq;
        ports.map(|port| (port, answer(port))).collect::<Vec<_>>()
    };
    let queues = |world: &mut World| {
        let Host { stack, listener, .. } = &mut world.hosts[1];
        (stack.counts().half_open, stack.listener_info(listener.unwrap()).unwrap().waiting)
    };
    let complete = |world: &mut World, (port, seq): (u16, u32)| {
        ask(world, make(port, 101, seq.wrapping_add(1), TcpFlags::ACK));
        queues(world)
    };
    let first = begin(&mut world, 1..=QUEUE);
    let cookies = begin(&mut world, 5001..=5010);
    assert_eq!(queues(&mut world), (QUEUE.into(), 0));
    assert_eq!(world.hosts[1].stack.cookies().sent, 10);
    for answered in &first[..4000] {
        complete(&mut world, *answered);
    }
    let more = begin(&mut world, 6001..=6010);
    let mut last = first[4000..].iter().chain(&more).map(|answered| complete(&mut world, *answered));
    assert_eq!(last.nth(95), Some((10, QUEUE.into())), "the queue is full");
    assert!(last.all(|lengths| lengths == (10, QUEUE.into())), "the others stay half open");
    for answered in cookies {
        assert_eq!(complete(&mut world, answered), (10, QUEUE.into()), "a cookie");
    }
    assert!(ask(&mut world, make(7001, 100, 0, TcpFlags::SYN)).is_none(), "no answer to a further SYN");
}
