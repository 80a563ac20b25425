//! A long-term load test of two stacks. Connections are constantly opened, closed and reset over a link that loses,
//! reorders, duplicates and corrupts frames, with engines that fail. Fragmented datagrams are sent at the same time.
//!
//! Every byte is checked, and no resources must be left in the end. `OFFCORE_FULL=1` repeats the test with new seeds
//! for ten minutes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod client;
mod datagrams;
mod end;
mod link;
mod server;
mod session;

use std::time::{Duration, Instant};

use offcore_dma::Mode;
use offcore_dma::fault::Faults;
use offcore_stats::time::Micros;

use link::World;

const SECOND: Micros = Micros::from_secs(1);
/// Maximum number of connections at a time.
const AT_A_TIME: usize = 100;
const FULL: Duration = Duration::from_secs(600);
/// Maximum virtual time in which no connection ends. Retransmission timeouts double up to two minutes.
const NO_PROGRESS: Micros = Micros::from_secs(600);

/// Prints the seed when the test panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}", self.0);
        }
    }
}

/// Faults per mille of an engine's copies.
const FAULTS: Faults = Faults {
    seed: 0,
    error: 2,
    partial: 2,
    delay: 50,
    never: 0,
    late: 5,
    reorder: 100,
    delay_polls: 8,
    late_polls: 40,
    reset_calls: 0,
};

/// Opens, uses and ends `connections` connections.
fn play(seed: u64, connections: usize, mode: Mode, faults: Faults) -> World {
    let _seed = Seed(seed);
    let mut world = World::new(seed, mode, faults);
    world.client.left = connections;
    let mut progress = (0, world.now);
    while !world.client.is_done() {
        world.round();
        let ended = world.client.ended + world.server.ended;
        if ended != progress.0 {
            progress = (ended, world.now);
        }
        assert!(world.now - progress.1 < NO_PROGRESS, "nothing ends: {}", world.state());
    }
    world.finish();
    world
}

#[test]
fn soak_loses_and_leaks_nothing() {
    let world = play(1, 4000, Mode::Offload, FAULTS);
    let (client, server) = (&world.client, &world.server);
    // Otherwise, the test does not produce the intended load.
    assert!(client.whole > 2000 && client.aborted > 200 && server.aborted > 200, "{client:?} {server:?}");
    assert!(world.datagrams.whole > 200, "{} of {}", world.datagrams.whole, world.datagrams.sent);
    let counts = world.faults();
    assert!(counts.iter().all(|count| *count > 20), "{counts:?}");
}

#[test]
fn ten_minutes_of_new_seeds() {
    if std::env::var_os("OFFCORE_FULL").is_none() {
        return;
    }
    let began = Instant::now();
    let first = std::process::id().into();
    for seed in first.. {
        // The mover waits in real time for copies that never complete, so they are rare.
        let never = u32::from(seed % 4 == 0);
        let mode = if seed % 3 == 0 { Mode::Auto } else { Mode::Offload };
        play(seed, 1000, mode, Faults { never, ..FAULTS });
        if began.elapsed() > FULL {
            return;
        }
    }
}
