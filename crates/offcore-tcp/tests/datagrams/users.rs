//! Users of a busy worker share the time for received datagrams.

use std::sync::Arc;

use offcore_session::Datagrams;
use offcore_tcp::proto::{AppMemory, ConnId, DropReason};

use crate::world::{End, World, addresses};

const PORTS: [u16; 2] = [70, 71];

/// Opens a socket of an application of another user.
fn open(end: &mut End, user: u32, port: u16) -> (ConnId, Datagrams) {
    let (stack, _) = end.path.call();
    let app = stack.add_app(AppMemory::new(4 << 20, Arc::default()).unwrap());
    stack.set_user(app, user);
    let socket = stack.open_datagrams(app, None, port).unwrap();
    (socket, Datagrams::new(stack.memory(app), stack.slot(socket).unwrap()).unwrap())
}

/// Sends datagrams of 1,000 bytes to two users of a worker: these numbers in each turn. The worker is idle between the
/// turns if `has_idle_time`. Returns the number of dropped datagrams.
fn drops(counts: [usize; 2], has_idle_time: bool) -> u64 {
    let mut world = World::new(false);
    let frame = world.frames_of(addresses(2)[0], &[7; 1000]).remove(0);
    let frames = PORTS.map(|port| {
        let mut frame = frame.clone();
        frame[36..38].copy_from_slice(&port.to_be_bytes());
        // Without a checksum (RFC 768).
        frame[40..42].fill(0);
        frame
    });
    let end = &mut world.ends[1];
    let mut sockets = [0, 1].map(|user: usize| open(end, user as u32, PORTS[user]));
    let mut received = [0; 2];
    // The set-up is long ago.
    end.turn(5_000_000);
    for turn in 1..=200 {
        let now = 10_000_000 + 100 * turn;
        for (frame, count) in frames.iter().zip(counts) {
            (0..count).for_each(|_| end.receive(now, frame));
        }
        end.turn(now);
        if has_idle_time {
            end.turn(now + 10);
        }
        for ((socket, datagrams), received) in sockets.iter_mut().zip(&mut received) {
            while datagrams.receive(&mut [0; 1000]).is_some() {
                *received += 1;
            }
            let (stack, out) = end.path.call();
            stack.consumed(now, *socket, out).unwrap();
        }
    }
    assert_eq!(received[1], 200 * counts[1], "the light user gets all datagrams");
    let drops = end.path.stack.drops().get(DropReason::UserShare);
    assert_eq!(received[0] as u64 + drops, 200 * counts[0] as u64);
    drops
}

#[test]
fn busy_worker_drops_datagrams_above_share() {
    assert!(drops([20, 1], false) > 1000);
    assert_eq!(drops([20, 1], true), 0);
    assert_eq!(drops([20, 0], false), 0);
    assert_eq!(drops([2, 1], true), 0);
}
