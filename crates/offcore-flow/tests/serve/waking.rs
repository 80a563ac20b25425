//! Tests of session ends with too many waiters, which are expensive to wake.

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use offcore_session::message::{Call, Hello, KEY, NONE, Question, VERSION};
use offcore_session::slot::state;
use offcore_stats::time::Micros;
use offcore_tcp::proto::Config;
use rustix::event::epoll::{CreateFlags, EventData, EventFlags, add, create};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::process::{Process, bind, greet, knock_as, listen};
use crate::setup::{path, serve_also};
use crate::world::World;

const OTHER: u32 = 54_321;
/// Number of duplicates of an end, and number of epoll sets that contain all of them.
const COPIES: usize = 250;
const SETS: usize = 250;
/// Number of other sessions of the application. Closing them takes longer than a round.
const SESSIONS: u64 = 4000;
const DATAGRAM: u32 = 2;

#[test]
fn slow_wakeups_end_only_their_application() {
    if !rustix::process::geteuid().is_root() {
        return println!("SKIP: slow_wakeups_end_only_their_application: needs root");
    }
    let path = path();
    let mut world = World::new(serve_also(&path, &[OTHER]).unwrap(), Config::default());
    let honest = Process::attach(&mut world, &path);
    let theirs = honest.listen(&mut world, 81, 8);
    let process = Process::attach_as(&mut world, &path, OTHER);
    let second = Process::attach_as(&mut world, &path, OTHER);
    let listener = process.listen(&mut world, 8080, 8);
    let queue = second.listen(&mut world, 8082, 8);
    let mut client = world.connect(8080);
    world.run(0.1);
    let end = process.accept(&listener).unwrap();
    let copies: Vec<_> = (0..COPIES).map(|_| end.fd.try_clone().unwrap()).collect();
    let sets: Vec<OwnedFd> = (0..SETS).map(|_| create(CreateFlags::CLOEXEC).unwrap()).collect();
    for set in &sets {
        for copy in &copies {
            add(set, copy, EventData::new_u64(0), EventFlags::IN | EventFlags::ET).unwrap();
        }
    }
    // The other sessions of the application are closed in its turns.
    let others: Vec<_> = (0..SESSIONS)
        .map(|_| process.open(&mut world, &bind(DATAGRAM, "0.0.0.0:0".parse().unwrap())).unwrap())
        .collect();
    let (mut tokens, mut most) = (0, 0);
    while world.app.counts().applications == 3 {
        let (before, until) = (world.app.counts().tokens, world.now + Micros::from_millis(50));
        if !world.is_closed(&client) {
            world.write(&mut client, b"x");
        }
        while world.now < until {
            let sessions = world.app.counts().sessions;
            world.turn();
            most = most.max(sessions.saturating_sub(world.app.counts().sessions));
        }
        tokens += world.app.counts().tokens - before;
        let _ = recv(&end.fd, &mut [0; 8], RecvFlags::DONTWAIT);
        end.slot().wake.taken();
        assert!(tokens < 1000, "it is woken up again and again");
    }
    assert!((3..50).contains(&tokens), "{tokens}");
    assert!(most < SESSIONS / 2, "{most} sessions end in a round");
    drop(others);
    let start = Instant::now();
    while !world.is_closed(&client) {
        assert!(start.elapsed() < Duration::from_secs(30), "the peer does not hear of its end");
        world.run(0.1);
    }
    // The user must wait before it can begin new sessions; other users need not.
    let refused = Some(Errno::ACCESS.raw_os_error() as u32);
    assert_eq!(second.open(&mut world, &listen(8081, 1)).err(), refused);
    let before = world.app.counts().sessions;
    world.connect(8082);
    world.run(0.1);
    assert!(second.accept(&queue).is_none(), "connections of peers wait as well");
    assert_eq!(world.app.counts().sessions, before);
    let hello = Hello { version: VERSION, key: [0; KEY] }.to_bytes();
    let socket = knock_as(&path, OTHER).unwrap();
    assert!(greet(&mut world, &socket, &hello).is_none(), "its processes must try again");
    assert_eq!(theirs.slot().state(), state::LISTENING);
    let (answer, _) = honest.ask(&mut world, &Question::new(Call::Segments, NONE, 0), &[]);
    assert_eq!(answer.error, 0);
    honest.listen(&mut world, 8081, 1);
    world.connect(81);
    world.run(0.1);
    let accepted = honest.accept(&theirs).unwrap();
    assert_eq!(accepted.slot().identity.error.load(Ordering::Relaxed), 0);
}
