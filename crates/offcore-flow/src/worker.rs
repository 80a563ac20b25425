//! The loop of one lcore: poll completions, then one round of each task, run to completion on the worker's own queues.

pub mod idle;
pub mod stats;
pub mod task;
pub(crate) mod threads;
pub mod turns;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offcore_dma::{ChannelId, Mover};
use offcore_mem::PoolCache;
use offcore_port::Context;
use offcore_stats::page::Block;
use offcore_stats::{Stage, StageClock};

use idle::Sleeper;
use stats::MoverBlocks;
use task::Task;
use turns::Turns;

/// Rounds between two updates of the channel counters on the statistics page.
const PUBLISH_EVERY: u32 = 1024;
/// The same in consecutive sleeps. Counters are also updated before the first of these.
const PUBLISH_ASLEEP: u32 = 100;
/// A worker that stops gives up if nothing has moved for this long.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

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
    pub mover_stats: MoverBlocks,
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
            mover_stats: MoverBlocks::private(),
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

    fn publish_stats(&mut self) {
        self.tasks.iter_mut().for_each(|task| task.publish());
        self.mover_stats.publish(&self.mover);
        for (id, channel) in self.mover.channels() {
            let Some((_, block)) = self.channel_stats.iter().find(|(known, _)| *known == id) else {
                continue;
            };
            stats::publish_channel(block, channel);
        }
    }
}
