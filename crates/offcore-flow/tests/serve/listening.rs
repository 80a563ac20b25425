//! Tests of listeners whose programs do not accept.

use rustix::io::ioctl_fionread;

use crate::process::{End, Process};

const PORT: u16 = 80;
const BACKLOG: u32 = 16;
const CLIENTS: usize = 60;
/// Minimum number of connections with a session.
const MIN_SESSIONS: usize = 64;

/// Number of bytes of messages in a listener's queue.
fn queued(listener: &End) -> u64 {
    ioctl_fionread(&listener.fd).unwrap()
}

#[test]
fn full_queue_waits_for_room() {
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, PORT, BACKLOG);
    let _clients: Vec<_> = (0..CLIENTS).map(|_| world.connect(PORT)).collect();
    world.run(1.0);
    let full = queued(&listener);
    let mut accepted = vec![process.accept(&listener).unwrap()];
    let left = queued(&listener);
    assert!(left < full);
    world.run(1.0);
    assert_eq!(queued(&listener), left, "the stack tries again without an event");
    // The kernel reports room when three quarters of the queue are free.
    let at_first = (full / (full - left)) as usize;
    while let Some(end) = process.accept(&listener) {
        accepted.push(end);
        world.run(0.1);
    }
    assert!(accepted.len() > at_first, "{} of {at_first}", accepted.len());
    let _again = world.connect(PORT);
    world.run(0.1);
    assert!(process.accept(&listener).is_some());
}

/// A peer in the network cannot use up the descriptors of a user: only a part of the connections gets a session before
/// the program accepts them.
#[test]
fn unaccepted_connections_have_no_sessions() {
    const MANY: usize = 400;
    let (mut world, path) = crate::setup::world();
    let process = Process::attach(&mut world, &path);
    let listener = process.listen(&mut world, PORT, MANY as u32);
    let _clients: Vec<_> = (0..MANY).map(|_| world.connect(PORT)).collect();
    world.run(1.0);
    let sessions = world.app.counts().sessions as usize;
    assert!((MIN_SESSIONS..MANY / 2).contains(&sessions), "{sessions} sessions");
    let mut accepted = Vec::new();
    for _ in 0..MANY {
        accepted.extend(std::iter::from_fn(|| process.accept(&listener)));
        world.run(0.1);
    }
    assert_eq!(accepted.len(), MANY, "no connection is lost");
}
