//! `offcore bench tcp --case open-close`: measures the cost of a connection that is opened, used once and closed.
//!
//! The set-up consists of two hosts and a wire, as for segments. The timed part is the measured host's rounds including
//! its application: on the client or on the server. All connections of a window are open at the same time.

use std::cell::Cell;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context as _, Result, bail, ensure};
use offcore_dma::{Binding, Mover};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_stats::tsc;

use super::link::{SMALL_FIFO, STALLED, Side, StackSizes, address, worker};
use super::visits::{SharedTally, Tally, Visits};
use super::wire::{WireEnd, wire};
use super::{Options, PAIR, Rig, SEGMENT};
use crate::method::alternate::{Alternating, Cost, Schedule, Subject};
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::method::timed_worker::TimedWorker;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Row};

/// Default number of concurrently open connections.
pub const OPEN: usize = 10_000;
/// Divisor of the number of blocks, and minimum number of blocks. A turn has thousands of connections, so that fewer
/// blocks than in other measurements suffice.
const PART: usize = 10;
const FEWEST: usize = 4;
/// Maximum number of rounds of the far host in a turn.
const ROUNDS: usize = 64;

/// Measures everything that `options` selects and passes each finished row to `emit`. The connections in `options` are
/// open concurrently.
///
/// # Errors
/// If something cannot be set up, a connection is lost, or a byte is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let mut rig = Rig::new(options, PAIR)?;
    let pages = rig.pages();
    let blocks = options.extent.blocks.div_ceil(PART);
    progress.begin(options.connections.len() * blocks);
    for &connections in &options.connections {
        progress.say(&format!("tcp, {connections} connections opened and closed"));
        // Both hosts take turns, so that changes of the machine's state affect both equally.
        let mut cell = Alternating::new();
        for (&side, pool) in options.sides.iter().zip(&rig.pools) {
            cell.add(Site::open(side, connections, options.checksums, pool)?);
        }
        let all = options.extent.schedule(Temperature::Remote);
        let schedule = Schedule { blocks, fewest: FEWEST.min(blocks), ..all };
        cell.measure(schedule, &rig.other, &mut rig.clock, progress)
            .with_context(|| format!("{connections} connections opened and closed"))?;
        for (site, blocks) in cell.iter() {
            let mut row = Row::new("tcp", format!("open-close {}", role(site.side)), "core-cost");
            (row.tcp.connections, row.counts) = (Some(connections), Counts::all_of(site.visited));
            (row.peer.pages, row.figures.bursts_per_turn) = (pages, Some(options.extent.bursts));
            blocks.enter(&mut row, tsc::hz());
            row.figures.unit = "tsc_cycles_per_connection";
            row.clock = cell.steadiness();
            emit(row);
        }
    }
    progress.end();
    Ok(())
}

/// Returns the role of a host. The host that sends first opens the connections.
fn role(side: Side) -> &'static str {
    match side {
        Side::Send => "client",
        Side::Receive => "server",
    }
}

/// The far host.
#[derive(Debug)]
struct Far {
    worker: Worker,
    wire: WireEnd,
}

impl Far {
    /// Runs rounds until no packet arrives or leaves.
    fn run(&mut self) {
        let mut before = None;
        for _ in 0..ROUNDS {
            self.worker.round();
            let now = self.wire.packets();
            if self.wire.waiting() == 0 && before == Some(now) {
                return;
            }
            before = Some(now);
        }
    }
}

/// The measured host, the far host, and the counters of their connections.
#[derive(Debug)]
struct Site {
    side: Side,
    near: TimedWorker,
    wire: WireEnd,
    far: Arc<Mutex<Far>>,
    /// Counters of the client and of the server.
    tallies: [SharedTally; 2],
    /// Number of connections per window.
    connections: usize,
    /// Number of connections whose request and answer were checked.
    visited: u64,
}

impl Site {
    fn open(side: Side, connections: usize, checksums: bool, pool: &'static Pool) -> Result<Self> {
        let [near_wire, far_wire] = wire(pool, checksums);
        let [client, server] = [SharedTally::default(), SharedTally::default()];
        let near_is_client = side == Side::Send;
        let app = |is_client, peer| match is_client {
            true => Box::new(Visits::new(Some(address(peer)), Arc::clone(&client))),
            false => Box::new(Visits::new(None, Arc::clone(&server))),
        };
        let core = Binding::core();
        let sizes = StackSizes { segment: SEGMENT, fifo: SMALL_FIFO };
        let near = worker(1, &near_wire, app(near_is_client, 2), Mover::new(), &core, sizes, pool)?;
        let far = worker(2, &far_wire, app(!near_is_client, 1), Mover::new(), &core, sizes, pool)?;
        let mut near = TimedWorker::new(near, None, Temperature::Remote);
        near.foreign_ticks = Arc::clone(&near_wire.taken_ticks);
        let far = Arc::new(Mutex::new(Far { worker: far, wire: far_wire }));
        let tallies = [client, server];
        Ok(Self { side, near, wire: near_wire, far, tallies, connections, visited: 0 })
    }

    /// Returns the progress of all connections on both hosts, as a number that grows until they are finished, and
    /// whether they are finished.
    fn done(&self) -> Result<(usize, bool)> {
        let (mut done, mut over) = (0, true);
        for tally in &self.tallies {
            let tally = lock(tally);
            if let Some(wrong) = &tally.wrong {
                bail!("{wrong}");
            }
            let Tally { wanted, open, used, closed, left, .. } = *tally;
            done += open + used + closed;
            over &= [open, used, closed] == [wanted; 3] && left == 0;
        }
        Ok((done, over))
    }

    /// Runs the measured host until no work is pending. Returns the ticks used. Rounds without packets while the host
    /// waits for a timer are excluded.
    fn run_near(&mut self, other: &OtherCore) -> Result<u64> {
        let Self { near, wire, .. } = self;
        let start = wire.packets();
        let waits = wire.waiting() > 0;
        let before = Cell::new(start);
        let left = || {
            let now = wire.packets();
            before.replace(now) != now || wire.waiting() > 0
        };
        let ticks = near.rounds_until(1, other, left)?;
        Ok(if waits || wire.packets() != start { ticks } else { 0 })
    }
}

impl Subject for Site {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        let wanted = self.connections;
        for tally in &self.tallies {
            let left = lock(tally).left;
            *lock(tally) = Tally { wanted, to_open: wanted, left, ..Tally::default() };
        }
        let (mut ticks, mut seen, mut since) = (0, 0, Instant::now());
        loop {
            ticks += self.run_near(other)?;
            other.run_on(Temperature::Remote, &self.far, |far| {
                far.run();
                Ok(())
            })?;
            let (done, over) = self.done()?;
            if over {
                break;
            }
            if done > seen {
                (seen, since) = (done, Instant::now());
            }
            let stalled = since.elapsed() > STALLED;
            ensure!(!stalled, "connections are stalled: {:?}", self.tallies);
        }
        self.visited += wanted as u64;
        Ok(Cost { packets: wanted as u64, core: ticks, guest: 0 })
    }
}
