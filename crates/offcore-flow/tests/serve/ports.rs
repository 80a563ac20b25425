//! Tests of address and port assignment: overlapping addresses belong to one user.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use offcore_flow::host::serve::Serve;
use offcore_session::message::{Call, NONE, Question, SHARE_ADDRESS, SHARE_PORT};
use offcore_tcp::proto::Config;
use rustix::io::Errno;

use crate::process::{End, Process, bind};
use crate::setup::{path, serve_also, world};
use crate::world::World;

const STREAM: u32 = 1;
const DATAGRAM: u32 = 2;
const OTHER: u32 = 54_321;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn listen_at(text: &str, shares: bool) -> Question {
    let mut question = Question::new(Call::Listen, NONE, 16);
    question.value |= if shares { SHARE_PORT } else { 0 };
    question.local = Some(address(text));
    question
}

/// A server that admits another user, a process of root, and a process of the other user; `None` without root
/// privileges.
fn two_users(name: &str) -> Option<(World<Serve>, Process, Process)> {
    if !rustix::process::geteuid().is_root() {
        println!("SKIP: {name}: needs root");
        return None;
    }
    let path = path();
    let mut world = World::new(serve_also(&path, &[OTHER]).unwrap(), Config::default());
    let ours = Process::attach(&mut world, &path);
    let theirs = Process::attach_as(&mut world, &path, OTHER);
    Some((world, ours, theirs))
}

/// Makes a bound session listen. Returns the error number.
fn listen_bound(world: &mut World<Serve>, process: &Process, end: &End, shares: bool) -> u32 {
    let value = 16 | if shares { SHARE_PORT } else { 0 };
    process.ask(world, &Question::new(Call::Listen, end.number(), value), &[]).0.error
}

#[test]
fn listener_excludes_other_users() {
    let Some((mut world, ours, theirs)) = two_users("listener_excludes_other_users") else {
        return;
    };
    let in_use = Errno::ADDRINUSE.raw_os_error() as u32;
    // Bound before the listener, without an effect.
    let bound = theirs.open(&mut world, &bind(STREAM, address("10.0.0.1:8080"))).unwrap();
    let own = ours.open(&mut world, &bind(STREAM, address("10.0.0.1:8080"))).unwrap();
    let listener = ours.open(&mut world, &listen_at("0.0.0.0:8080", false)).unwrap();
    for shares in [false, true] {
        assert_eq!(listen_bound(&mut world, &theirs, &bound, shares), in_use);
        assert_eq!(listen_bound(&mut world, &ours, &own, shares), in_use, "as in Linux");
    }
    // Only sessions of the same user can share.
    let shared = ours.open(&mut world, &listen_at("0.0.0.0:8081", true)).unwrap();
    for (text, shares) in [("10.0.0.1:8081", true), ("10.0.0.1:8081", false), ("[::]:8081", true)] {
        assert_eq!(theirs.open(&mut world, &listen_at(text, shares)).err(), Some(in_use), "{text}");
    }
    assert_eq!(theirs.open(&mut world, &bind(STREAM, address("10.0.0.1:8081"))).err(), Some(in_use));
    assert_eq!(ours.open(&mut world, &listen_at("10.0.0.1:8081", false)).err(), Some(in_use), "as in Linux");
    let clients = [8080, 8081].map(|port| world.connect(port));
    world.run(0.1);
    assert!(ours.accept(&listener).is_some() && ours.accept(&shared).is_some() && clients.len() == 2);
    // Sessions of one user may use both addresses.
    let one = ours.open(&mut world, &listen_at("10.0.0.1:8081", true)).unwrap();
    world.connect(8081);
    world.run(0.1);
    assert!(ours.accept(&one).is_some());
    // A closed listener does not conflict, even before the stack has noticed the close.
    drop(listener);
    assert_eq!(listen_bound(&mut world, &theirs, &bound, false), 0);
}

#[test]
fn listeners_at_a_port_are_limited() {
    let (mut world, path) = world();
    let process = Process::attach(&mut world, &path);
    let listeners: Vec<End> =
        (0..1024).map(|_| process.open(&mut world, &listen_at("0.0.0.0:8080", true)).unwrap()).collect();
    let again = |world: &mut World<_>| process.open(world, &listen_at("0.0.0.0:8080", true)).err();
    assert_eq!(again(&mut world), Some(Errno::NOBUFS.raw_os_error() as u32));
    assert!(process.open(&mut world, &listen_at("0.0.0.0:8081", true)).is_ok(), "another port");
    drop(listeners);
    process.look();
    // A thread of the stack queries the kernel whether they are closed.
    let start = Instant::now();
    while again(&mut world).is_some() {
        assert!(start.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn datagram_socket_excludes_other_users() {
    let Some((mut world, ours, theirs)) = two_users("datagram_socket_excludes_other_users") else {
        return;
    };
    let in_use = Some(Errno::ADDRINUSE.raw_os_error() as u32);
    let shared = DATAGRAM | SHARE_ADDRESS;
    let [any, one] = ["0.0.0.0:5353", "10.0.0.1:5353"].map(|to| bind(shared, address(to)));
    let all = ours.open(&mut world, &any).unwrap();
    assert_eq!(theirs.open(&mut world, &one).err(), in_use);
    // The second socket of the same user needs the option as well.
    assert_eq!(ours.open(&mut world, &bind(DATAGRAM, address("10.0.0.1:5353"))).err(), in_use);
    let own = ours.open(&mut world, &one).unwrap();
    drop(all);
    assert_eq!(theirs.open(&mut world, &any).err(), in_use);
    drop(own);
    theirs.open(&mut world, &any).unwrap();
}
