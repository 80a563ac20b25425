//! Tests of addresses, and of information about sessions.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use offcore_session::Datagrams;
use offcore_session::datagram::Header;
use offcore_session::message::{Call, Question, SHARE_PORT};
use offcore_session::slot::state;
use offcore_tcp::proto::AppId;
use rustix::event::PollFlags as Bits;
use rustix::io::Errno;

use crate::process::{End, Process, bind, connect_to, listen};
use crate::setup::world;

const STREAM: u32 = 1;
const DATAGRAM: u32 = 2;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn errno(error: Errno) -> Option<u32> {
    Some(error.raw_os_error() as u32)
}

fn port(end: &End) -> u16 {
    end.slot().identity.ports.load(Ordering::Relaxed) as u16
}

#[test]
fn bound_stream_listens_or_connects() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let refused = |world: &mut _, question: &Question| process.open(world, question).err();
    assert_eq!(refused(&mut world, &bind(STREAM, address("10.9.9.9:80"))), errno(Errno::ADDRNOTAVAIL));
    let end = process.open(&mut world, &bind(STREAM, address("10.0.0.1:80"))).unwrap();
    assert_eq!((end.slot().state(), end.bits(), port(&end)), (state::BOUND, Bits::empty(), 80));
    let (answer, _) = process.ask(&mut world, &Question::new(Call::Listen, end.number(), 8), &[]);
    assert_eq!((answer.error, answer.session), (0, end.session));
    assert_eq!(end.slot().state(), state::LISTENING);
    let (answer, _) = process.ask(&mut world, &Question::new(Call::Info, end.number(), 0), &[]);
    assert_eq!(answer.info[0], 10, "LISTEN");
    world.connect(80);
    world.run(0.1);
    let connection = process.accept(&end).unwrap();
    let (answer, _) = process.ask(&mut world, &Question::new(Call::Info, connection.number(), 0), &[]);
    assert_eq!(answer.info[0], 1, "ESTABLISHED");
    let [_, _, ours, theirs, under_way, ..] = answer.info;
    assert!(ours > 1000 && under_way == 0, "{:?}", answer.info);
    assert_eq!(theirs, 536, "the peer has sent no segment");
    for taken in ["10.0.0.1:80", "0.0.0.0:80"] {
        assert_eq!(refused(&mut world, &bind(STREAM, address(taken))), errno(Errno::ADDRINUSE));
    }
    assert_eq!(refused(&mut world, &listen(80, 1)), errno(Errno::ADDRINUSE));

    // Without a requested port, each session gets a different one.
    let any: Vec<_> =
        (0..3).map(|_| process.open(&mut world, &bind(STREAM, address("0.0.0.0:0"))).unwrap()).collect();
    let mut ports: Vec<_> = any.iter().map(port).collect();
    ports.sort_unstable();
    ports.dedup();
    assert!(ports.len() == 3 && ports[0] >= 32768);
    // A connected session stays the same, and keeps its port.
    let listener = world.listen(7);
    let mut question = connect_to(address("10.0.0.2:7"));
    question.number = any[0].number();
    let (answer, _) = process.ask(&mut world, &question, &[]);
    assert_eq!((answer.error, answer.session), (0, any[0].session));
    world.run(2.0);
    assert_eq!((any[0].slot().state(), any[0].bits()), (state::OPEN, Bits::OUT));
    let peer = world.accept(listener).unwrap();
    let from = world.client.path.stack.info(peer.conn).unwrap().remote;
    assert_eq!(from, SocketAddr::from(([10, 0, 0, 1], port(&any[0]))));
    let (answer, _) = process.ask(&mut world, &question, &[]);
    assert_eq!(Some(answer.error), errno(Errno::ISCONN));
    drop((any, end, connection));
    world.run(0.1);
    assert_eq!(world.app.counts().sessions, 0);
}

#[test]
fn listeners_share_a_port() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let mut question = listen(80, 16 | SHARE_PORT);
    let listeners: Vec<_> = (0..2).map(|_| process.open(&mut world, &question).unwrap()).collect();
    let clients: Vec<_> = (0..16).map(|_| world.connect(80)).collect();
    world.run(0.1);
    let accepted = listeners.iter().map(|listener| {
        let ends: Vec<_> = std::iter::from_fn(|| process.accept(listener)).collect();
        ends.len()
    });
    let accepted: Vec<_> = accepted.collect();
    assert_eq!(accepted.iter().sum::<usize>(), clients.len());
    assert!(accepted.iter().all(|accepted| *accepted > 0), "{accepted:?}");
    question.value = 16;
    assert_eq!(process.open(&mut world, &question).err(), errno(Errno::ADDRINUSE));
}

#[test]
fn datagrams_are_received_and_sent() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let end = process.open(&mut world, &bind(DATAGRAM, address("0.0.0.0:53"))).unwrap();
    assert_eq!((end.bits(), end.slot().identity.kind.load(Ordering::Relaxed)), (Bits::OUT, DATAGRAM));
    let mut ours = Datagrams::new(&process.memory, end.place).unwrap();
    let stack = &mut world.client.path.stack;
    let socket = stack.open_datagrams(AppId::OWN, None, 9000).unwrap();
    let mut theirs = Datagrams::new(stack.memory(AppId::OWN), stack.slot(socket).unwrap()).unwrap();
    let to = Header::new(4, address("10.0.0.1:53"), address("0.0.0.0:0").ip());
    // The first datagram triggers address resolution.
    for _ in 0..2 {
        assert!(theirs.send(&to, b"ping"));
        let now = world.now;
        let (stack, out) = world.client.path.call();
        stack.written(now, socket, out).unwrap();
        world.run(2.0);
    }
    assert_eq!(end.bits(), Bits::IN | Bits::OUT);
    let mut bytes = [0; 10];
    let header = ours.receive(&mut bytes).unwrap();
    assert_eq!((&bytes[..4], header.peer), (&b"ping"[..], address("10.0.0.2:9000")));
    assert!(ours.send(&header, b"pong"));
    process.mark(&end);
    world.run(2.0);
    assert!(theirs.receive(&mut bytes).is_some_and(|header| header.peer == address("10.0.0.1:53")));

    // The socket can get a peer later.
    let mut question = connect_to(address("10.0.0.2:9000"));
    question.number = end.number();
    assert_eq!(process.ask(&mut world, &question, &[]).0.error, 0);
    assert_eq!(end.slot().identity.ports.load(Ordering::Relaxed), 9000 << 16 | 53);
    let again = process.open(&mut world, &bind(DATAGRAM, address("0.0.0.0:53")));
    assert_eq!(again.err(), errno(Errno::ADDRINUSE));
    let any = process.open(&mut world, &bind(DATAGRAM, address("10.0.0.1:0"))).unwrap();
    assert!(port(&any) >= 32768);
    drop((end, any));
    world.run(0.1);
    assert_eq!(world.app.counts().sessions, 0);
    process.open(&mut world, &bind(DATAGRAM, address("0.0.0.0:53"))).unwrap();
}
