//! Tests of the scheduling when a round has no time for all sessions.

use offcore_flow::host::serve::Serve;
use offcore_tcp::proto::Config;
use rustix::event::PollFlags as Bits;

use crate::process::{End, Process, bind};
use crate::setup::{path, serve_also};
use crate::world::World;

const DATAGRAM: u32 = 2;
const OTHER: u32 = 54_321;
const APPLICATIONS: usize = 6;
const SESSIONS: usize = 256;

fn open(world: &mut World<Serve>, process: &Process) -> End {
    process.open(world, &bind(DATAGRAM, "0.0.0.0:0".parse().unwrap())).unwrap()
}

/// Closes the gate of a session that has room, and marks the session: the stack then opens the gate.
fn mark(process: &Process, end: &End) {
    process.close_gate(end);
    process.mark(end);
}

#[test]
fn applications_share_their_users_turn() {
    let path = path();
    let mut world = World::new(serve_also(&path, &[OTHER]).unwrap(), Config::default());
    let mut many: Vec<(Process, Vec<End>)> = Vec::new();
    for _ in 0..APPLICATIONS {
        let process = Process::attach(&mut world, &path);
        let ends = (0..SESSIONS).map(|_| open(&mut world, &process)).collect();
        many.push((process, ends));
    }
    let other = match rustix::process::geteuid().is_root() {
        true => Process::attach_as(&mut world, &path, OTHER),
        // Without root it belongs to the same user, and takes turns with the user's other applications.
        false => Process::attach(&mut world, &path),
    };
    let end = open(&mut world, &other);
    for (process, ends) in &many {
        ends.iter().for_each(|end| mark(process, end));
    }
    mark(&other, &end);
    let before = world.app.counts().gates;
    let mut opened = vec![0];
    while opened.last() < Some(&((APPLICATIONS * SESSIONS) as u64 + 1)) {
        world.turn();
        opened.push(world.app.counts().gates - before);
        if opened.len() == 3 {
            assert!(end.bits().contains(Bits::OUT), "the other user waits: {opened:?}");
        }
        assert!(opened.len() < 10_000, "{opened:?}");
    }
    let most = opened.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(most < (APPLICATIONS * SESSIONS / 3) as u64, "in one round: {opened:?}");
    for end in many.iter().flat_map(|(_, ends)| ends) {
        assert!(end.bits().contains(Bits::OUT));
    }
}
