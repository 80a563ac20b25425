//! Users of a busy worker share the time for received datagrams.

use std::sync::Arc;

use offcore_session::Datagrams;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppMemory, ConnId, DropReason};

use crate::world::{End, World, addresses};

/// Time between two turns of the worker.
const TURN: Micros = Micros::new(100);
/// Number of turns of the worker in a test.
const TURNS: u64 = 2000;

/// A user with one socket.
struct User {
    socket: ConnId,
    datagrams: Datagrams,
    /// A datagram of 1,000 bytes to the socket.
    frame: Vec<u8>,
    received: u64,
}

/// Adds `count` users to host 2, each with one socket.
fn users(world: &mut World, count: u16) -> Vec<User> {
    let frame = world.frames_of(addresses(2)[0], &[7; 1000]).remove(0);
    let open = |number: u16| {
        let (stack, _) = world.ends[1].path.call();
        let app = stack.add_app(AppMemory::new(4 << 20, Arc::default()).unwrap());
        stack.set_user(app, number.into());
        let socket = stack.open_datagrams(app, None, 100 + number).unwrap();
        let datagrams = Datagrams::new(stack.memory(app), stack.slot(socket).unwrap()).unwrap();
        let mut frame = frame.clone();
        frame[36..38].copy_from_slice(&(100 + number).to_be_bytes());
        // Without a checksum (RFC 768).
        frame[40..42].fill(0);
        User { socket, datagrams, frame, received: 0 }
    };
    let users = (0..count).map(open).collect();
    // After this time, the work of the set-up no longer counts.
    world.ends[1].turn(Time::from_secs(5));
    users
}

impl User {
    fn read(&mut self, end: &mut End, now: Time) {
        while self.datagrams.receive(&mut [0; 1000]).is_some() {
            self.received += 1;
        }
        let (stack, out) = end.path.call();
        stack.consumed(now, self.socket, out).unwrap();
    }
}

fn dropped(end: &End) -> u64 {
    end.path.stack.drops().get(DropReason::UserShare)
}

/// Sends `counts` datagrams to the two users of a worker in each turn. With `has_idle_time`, the worker is idle between
/// the turns. Returns the number of dropped datagrams.
fn drops(counts: [u64; 2], has_idle_time: bool) -> u64 {
    let mut world = World::new(false);
    let mut users = users(&mut world, 2);
    let end = &mut world.ends[1];
    for turn in 1..=TURNS {
        let now = Time::from_secs(10) + TURN * turn;
        for (user, count) in users.iter().zip(counts) {
            (0..count).for_each(|_| end.receive(now, &user.frame));
        }
        end.turn(now);
        if has_idle_time {
            end.turn(now + Micros::new(10));
        }
        users.iter_mut().for_each(|user| user.read(end, now));
    }
    assert_eq!(users[1].received, TURNS * counts[1], "the light user gets all datagrams");
    assert_eq!(users[0].received + dropped(end), TURNS * counts[0]);
    dropped(end)
}

#[test]
fn busy_worker_drops_datagrams_above_share() {
    assert!(drops([20, 2], false) > 10 * TURNS);
    assert_eq!(drops([20, 2], true), 0);
    assert_eq!(drops([20, 0], false), 0);
    assert_eq!(drops([2, 1], true), 0);
}

/// Sends 20 datagrams in each turn to a heavy user, and one in 100 turns to each of some light users. The worker has
/// time for exactly that, or is always busy, with calls that take this time in each turn. Returns the percentage that
/// the heavy user receives.
fn received_beside(light: u16, calls: Option<Micros>) -> u64 {
    let mut world = World::new(false);
    let mut users = users(&mut world, 1 + light);
    let end = &mut world.ends[1];
    for turn in 1..=TURNS {
        let now = Time::from_secs(10) + TURN * turn;
        if turn % 100 == 0 {
            users[1..].iter().for_each(|user| end.receive(now, &user.frame));
        }
        let before = dropped(end);
        (0..20).for_each(|_| end.receive(now, &users[0].frame));
        let accepted = 20 - (dropped(end) - before);
        end.turn(now);
        if let Some(time) = calls {
            end.path.stack.record_calls(time);
        } else if accepted < 20 {
            // The rest of the time is idle.
            end.turn(now + TURN * accepted / 20);
        }
        users.iter_mut().for_each(|user| user.read(end, now));
    }
    100 * users[0].received / (20 * TURNS)
}

#[test]
fn light_users_leave_work_to_heavy_user() {
    for light in [1, 10] {
        for (calls, least) in [(None, 75), (Some(Micros::ZERO), 25), (Some(TURN * 2 / 3), 100)] {
            let received = received_beside(light, calls);
            assert!(received >= least, "{received} % beside {light} users, calls {calls:?}");
        }
    }
    assert_eq!(received_beside(0, Some(Micros::ZERO)), 100);
}

#[test]
fn limit_ends_without_competition() {
    let mut world = World::new(false);
    let mut users = users(&mut world, 2);
    let end = &mut world.ends[1];
    let mut turn = |end: &mut End, now: Time, counts: [usize; 2]| {
        for (user, count) in users.iter().zip(counts) {
            (0..count).for_each(|_| end.receive(now, &user.frame));
        }
        end.turn(now);
        users.iter_mut().for_each(|user| user.read(end, now));
    };
    (1..=200).for_each(|number| turn(end, Time::from_secs(10) + TURN * number, [20, 2]));
    let before = dropped(end);
    assert!(before > 0);
    // The worker gets one burst per second, and sleeps between the bursts.
    for second in 11..=20 {
        turn(end, Time::from_secs(second), [0, 0]);
        turn(end, Time::from_secs(second) + TURN, [20, 0]);
    }
    assert_eq!(dropped(end), before);
}
