//! Tests of datagram sockets with a peer.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use offcore_flow::host::serve::Serve;
use offcore_session::Datagrams;
use offcore_session::datagram::Header;
use offcore_session::message::{Call, NONE, Question};
use offcore_tcp::proto::AppId;
use rustix::event::PollFlags as Bits;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::process::{End, Process, bind, connect_to, send_with};
use crate::setup::world;
use crate::world::World;

const DATAGRAM: u32 = 2;
/// A closed port of the peer.
const NOBODY: u16 = 9001;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn number(error: Errno) -> u32 {
    error.raw_os_error() as u32
}

/// A request for a datagram socket with this peer.
pub(crate) fn joined(peer: &str) -> Question {
    let mut question = Question::new(Call::Connect, NONE, DATAGRAM);
    (question.local, question.remote) = (Some(address("0.0.0.0:0")), Some(address(peer)));
    question
}

fn ends(end: &End) -> ([u32; 2], [u8; 4]) {
    let identity = &end.slot().identity;
    let ports = identity.ports.load(Ordering::Relaxed);
    ([ports & 0xffff, ports >> 16], identity.local[0].load(Ordering::Relaxed).to_ne_bytes())
}

/// Sends a datagram to the closed port, and waits for the error.
fn send_to_closed_port(world: &mut World<Serve>, process: &Process, end: &End) {
    let mut ours = Datagrams::new(&process.memory, end.place).unwrap();
    let peer = SocketAddr::new(address("10.0.0.2:1").ip(), NOBODY);
    assert!(ours.send(&Header::new(1, peer, address("0.0.0.0:0").ip()), b"x"));
    process.mark(end);
    world.run(2.0);
}

/// Takes the token, like an application that has found no data.
fn take_token(end: &End) {
    assert!(recv(&end.fd, &mut [0; 64], RecvFlags::DONTWAIT).is_ok());
    end.slot().wake.taken();
}

#[test]
fn econnrefused_is_reported_once() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let end = process.open(&mut world, &joined("10.0.0.2:9001")).unwrap();
    let (first, second) = (Some(number(Errno::CONNREFUSED)), None);
    // The first datagrams only cause address resolution on both hosts.
    for _ in 0..2 {
        send_to_closed_port(&mut world, &process, &end);
    }
    assert_eq!(end.slot().identity.take_failure(), first);
    take_token(&end);
    for _ in 0..3 {
        assert_eq!(end.bits(), Bits::OUT);
        send_to_closed_port(&mut world, &process, &end);
        assert_eq!(end.bits(), Bits::IN | Bits::OUT);
        let identity = &end.slot().identity;
        assert_eq!([identity.take_failure(), identity.take_failure()], [first, second]);
        take_token(&end);
    }
    // An application that takes the token but not the error marks the session.
    send_to_closed_port(&mut world, &process, &end);
    take_token(&end);
    assert_eq!(end.bits(), Bits::OUT);
    process.mark(&end);
    world.run(0.1);
    assert_eq!(end.bits(), Bits::IN | Bits::OUT);
    // A second error replaces an unread one.
    send_to_closed_port(&mut world, &process, &end);
    send_to_closed_port(&mut world, &process, &end);
    assert_eq!(end.slot().identity.take_failure(), first);
    assert_eq!(end.slot().identity.take_failure(), second);
    end.slot().identity.return_failure(7);
    assert_eq!(end.slot().identity.take_failure(), Some(7), "one that could not be told");
    let counts = world.app.counts();
    assert_eq!((counts.misused, counts.sessions), (0, 1));
}

#[test]
fn datagram_peer_can_change() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let end = process.open(&mut world, &joined("10.0.0.2:9000")).unwrap();
    let ([ours, peer], local) = ends(&end);
    assert_eq!((peer, local), (9000, [10, 0, 0, 1]), "from where its datagrams go");
    let ask = |world: &mut _, peer: Option<&str>| {
        let mut question = joined("0.0.0.0:0");
        (question.number, question.remote) = (end.number(), peer.map(address));
        process.ask(world, &question, &[]).0.error
    };
    assert_eq!(ask(&mut world, None), 0);
    assert_eq!(ends(&end), ([ours, 0], [0; 4]));
    send_to_closed_port(&mut world, &process, &end);
    assert_eq!((end.bits(), end.slot().identity.take_failure()), (Bits::OUT, None), "it has no peer");
    assert_eq!(ask(&mut world, Some("10.0.0.2:9002")), 0);
    assert_eq!(ends(&end), ([ours, 9002], [10, 0, 0, 1]));

    // A datagram from another sender does not occupy the FIFO.
    let stack = &mut world.client.path.stack;
    let sockets = [9002, 9003].map(|port| stack.open_datagrams(AppId::OWN, None, port).unwrap());
    for socket in sockets {
        let stack = &mut world.client.path.stack;
        let mut theirs = Datagrams::new(stack.memory(AppId::OWN), stack.slot(socket).unwrap()).unwrap();
        let peer = SocketAddr::new(address("10.0.0.1:1").ip(), ours as u16);
        let local = address("0.0.0.0:0").ip();
        assert!(theirs.send(&Header::new(4, peer, local), b"ping"));
        let now = world.now;
        let (stack, out) = world.client.path.call();
        stack.written(now, socket, out).unwrap();
        world.run(2.0);
    }
    let mut ours = Datagrams::new(&process.memory, end.place).unwrap();
    assert_eq!(ours.receive(&mut [0; 9]).map(|header| header.peer), Some(address("10.0.0.2:9002")));
    assert_eq!(ours.receive(&mut [0; 9]), None);
}

#[test]
fn unroutable_peer_opens_no_socket() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let (no_way, own) = (number(Errno::NETUNREACH), number(Errno::OPNOTSUPP));
    for (peer, error) in [("192.168.7.7:1", no_way), ("10.0.0.1:1", own)] {
        assert_eq!(process.open(&mut world, &joined(peer)).err(), Some(error), "{peer}");
    }
    let mut question = bind(DATAGRAM, address("0.0.0.0:53"));
    question.remote = Some(address("192.168.7.7:1"));
    assert_eq!(process.open(&mut world, &question).err(), Some(no_way));
    question.remote = Some(address("10.0.0.2:1"));
    let end = process.open(&mut world, &question).unwrap();
    assert_eq!(ends(&end), ([53, 0], [0; 4]), "it is not connected");
    let mut question = connect_to(address("10.0.0.1:1"));
    question.number = end.number();
    assert_eq!(process.ask(&mut world, &question, &[]).0.error, 0, "the stack answers at its own addresses");
    assert_eq!(world.app.counts().sessions, 1);
}

#[test]
fn closed_socket_frees_port_immediately() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let question = bind(DATAGRAM, address("10.0.0.1:53"));
    let first = process.open(&mut world, &question).unwrap();
    assert_eq!(process.open(&mut world, &question).err(), Some(number(Errno::ADDRINUSE)));
    // The stack receives the request before it notices the close.
    send_with(process.socket.as_fd(), &question.to_bytes(), &[]);
    drop(first);
    process.open(&mut world, &question).unwrap();
    assert_eq!(world.app.counts().sessions, 1);
}
