//! The loop of one lcore: poll completions, then one round of each task, run to completion on the worker's own queues.

pub mod idle;
pub mod task;
pub(crate) mod threads;
pub mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offcore_dma::channel::ChannelStats;
use offcore_dma::mover::{self, Decision, MoverStats, Way};
use offcore_dma::{ChannelId, Mover};
use offcore_mem::PoolCache;
use offcore_port::Context;
use offcore_stats::named::joined;
use offcore_stats::page::Block;
use offcore_stats::{Stage, StageClock};

use idle::Sleeper;
use task::Task;
use turns::Turns;

/// Rounds between two updates of the channel counters on the statistics page.
const PUBLISH_EVERY: u32 = 1024;
/// The same in consecutive sleeps. Counters are also updated before the first of these.
const PUBLISH_ASLEEP: u32 = 100;
/// A worker that stops gives up if nothing has moved for this long.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the names of [`CLASS_COUNTERS`] for these classes.
macro_rules! class_counters {
    ($($class:literal),*) => {
        [
            $(
                concat!("auto_", $class, "_by_core"),
                concat!("auto_", $class, "_by_engine"),
                concat!("auto_", $class, "_held"),
                concat!("auto_", $class, "_changes"),
                concat!("auto_", $class, "_way"),
                concat!("auto_", $class, "_reason"),
                concat!("auto_", $class, "_core_ticks"),
                concat!("auto_", $class, "_engine_ticks"),
            )*
        ]
    };
}

/// Counters of one channel on the statistics page.
pub const CHANNEL_COUNTERS: [&str; ChannelStats::NAMES.len() + 1] =
    joined(ChannelStats::NAMES, ["in_flight"]);
/// Counters of one worker's mover on the statistics page: the mover's own, then [`CLASS_COUNTERS`] for every size class
/// of mode `auto`. A class is named after the bytes of its longest copy.
pub const MOVER_COUNTERS: [&str; MoverStats::NAMES.len() + mover::CLASSES * CLASS_COUNTERS.len()] = joined(
    MoverStats::NAMES,
    class_counters![
        "64", "128", "256", "512", "1024", "2048", "4096", "8192", "16384", "32768", "65536", "max"
    ],
);
/// Counters of a size class. The first four are sums over all queues of the worker: copies made by the core, copies
/// made by an engine, copies of the core that waited for older copies of an engine, and changes of the choice. The
/// others describe the queue with the most copies in the class: its choice (0 none so far, 1 the core, 2 an engine),
/// the number of the reason ([`Reason::ALL`](offcore_dma::mover::Reason::ALL)), and both costs in TSC ticks per copy.
pub const CLASS_COUNTERS: [&str; 8] =
    ["by_core", "by_engine", "held", "changes", "way", "reason", "core_ticks", "engine_ticks"];

/// The work of one lcore.
#[derive(Debug)]
pub struct Worker {
    /// Dropped first. Afterwards, no engine works for the tasks' queues.
    pub mover: Mover,
    pub tasks: Vec<Box<dyn Task>>,
    /// Maximum packets per queue and round, 1 to 64.
    pub burst: usize,
    /// Free packet buffers.
    pub cache: PoolCache,
    pub clock: StageClock,
    pub turns: Turns,
    /// The block for the mover's counters.
    pub mover_stats: Block,
    /// The block for each channel's counters.
    pub channel_stats: Vec<(ChannelId, Block)>,
}

impl Worker {
    /// Creates a worker with bursts of 32 packets and private counters.
    pub fn new(tasks: Vec<Box<dyn Task>>, mover: Mover, cache: PoolCache) -> Self {
        Self {
            tasks,
            burst: 32,
            mover,
            cache,
            clock: StageClock::private(),
            turns: Turns::private(),
            mover_stats: Block::private(&MOVER_COUNTERS),
            channel_stats: Vec::new(),
        }
    }

    /// Runs until `stop` is set, then finishes the packets in flight. With a `sleeper`, the worker sleeps when idle.
    /// Returns the number of unfinished packets.
    pub fn run(mut self, mut sleeper: Option<Sleeper>, stop: &Arc<AtomicBool>) -> usize {
        let mut until_publish = PUBLISH_EVERY;
        while !stop.load(Ordering::Relaxed) {
            let packets = self.round();
            until_publish -= 1;
            if let Some(sleeper) = &mut sleeper
                && sleeper.is_due(packets)
                && self.mover.in_flight() == 0
            {
                if sleeper.in_a_row().is_multiple_of(PUBLISH_ASLEEP) {
                    until_publish = PUBLISH_EVERY;
                    self.publish_stats();
                }
                sleeper.sleep(&mut self.tasks);
                self.turns.slept();
            }
            if until_publish == 0 {
                until_publish = PUBLISH_EVERY;
                self.publish_stats();
            }
        }
        let left = self.drain();
        self.publish_stats();
        left
    }

    /// Runs one round of every task. Returns the number of packets received or generated.
    pub fn round(&mut self) -> usize {
        self.clock.begin();
        self.mover.poll(&mut self.clock);
        let Self { mover, cache, clock, burst, tasks, turns, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: *burst };
        // A single task that serves a single port has the core to itself.
        let shared = tasks.len() > 1 || tasks.first().is_some_and(|task| task.shares());
        let packets = match shared && turns.begin() {
            false => tasks.iter_mut().map(|task| task.round(&mut ctx)).sum(),
            true => {
                turns.round(|turns| tasks.iter_mut().map(|task| task.round_in_turns(&mut ctx, turns)).sum())
            }
        };
        self.mover.end_round();
        self.clock.end(if packets > 0 { Stage::Header } else { Stage::Idle });
        packets
    }

    /// Drains every task until nothing is left in flight, or nothing moves any more. Returns how much is left. A
    /// finished task is dropped at once, because mirrors on all workers only finish when the queues that they copy from
    /// are gone.
    fn drain(&mut self) -> usize {
        let mut last = usize::MAX;
        let mut progress = Instant::now();
        loop {
            self.mover.poll(&mut self.clock);
            let Self { mover, cache, clock, burst, tasks, .. } = self;
            let mut ctx = Context { mover, cache, clock, burst: *burst };
            let mut left = 0;
            tasks.retain_mut(|task| {
                let of_it = task.drain(&mut ctx);
                left += of_it;
                of_it > 0
            });
            if left == 0 {
                return 0;
            }
            if left != last {
                (last, progress) = (left, Instant::now());
            } else if progress.elapsed() > DRAIN_TIMEOUT {
                return left;
            }
        }
    }

    /// Returns the values of [`CLASS_COUNTERS`] for every class.
    fn decisions(&self) -> [[u64; CLASS_COUNTERS.len()]; mover::CLASSES] {
        let mut classes = [(0, Decision::default()); mover::CLASSES];
        for queue in self.mover.queues() {
            for ((most, sum), one) in classes.iter_mut().zip(self.mover.decisions(queue).classes) {
                let copies = one.by_core + one.by_engine;
                let shown = if copies > *most { one } else { *sum };
                *sum = Decision {
                    by_core: sum.by_core + one.by_core,
                    by_engine: sum.by_engine + one.by_engine,
                    held_by_order: sum.held_by_order + one.held_by_order,
                    changes: sum.changes + one.changes,
                    ..shown
                };
                *most = copies.max(*most);
            }
        }
        classes.map(|(copies, of)| {
            let way = match of.way {
                _ if copies == 0 => 0,
                Way::Core => 1,
                Way::Engine => 2,
            };
            let [core, engine] = [of.core_ticks, of.engine_ticks].map(|ticks| ticks.round() as u64);
            [of.by_core, of.by_engine, of.held_by_order, of.changes, way, of.reason as u64, core, engine]
        })
    }

    fn publish_stats(&mut self) {
        self.tasks.iter_mut().for_each(|task| task.publish());
        self.mover_stats
            .set(self.mover.stats().values().into_iter().chain(self.decisions().into_iter().flatten()));
        for (id, channel) in self.mover.channels() {
            let Some((_, block)) = self.channel_stats.iter().find(|(known, _)| *known == id) else {
                continue;
            };
            block.set(channel.stats().values().into_iter().chain([channel.in_flight() as u64]));
        }
    }
}
