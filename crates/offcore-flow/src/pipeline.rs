//! Pipelines of a GPU, or of a CPU in its place, as a TX queue and an RX queue.
//!
//! ```text
//! worker 1: port's RX queue -> ... -> WorkTx | bursts | WorkRx -> ... -> port's TX queue: worker 2
//! ```
//! They go where a [ring](crate::ring) between two workers goes. [`WorkTx`] gathers the packets of several port bursts into
//! one of the work's, until that is full or its first packet has waited for long enough. When there is no room for more it
//! takes no more: what its worker's RX side cannot take back is dropped there and counted. [`WorkRx`] gives on what is done,
//! in order.

use std::time::Duration;

use offcore_gpu::pipeline::{Back, Front, PipelineError, Setup};
use offcore_mem::{Burst, Packet, Pool};
use offcore_port::{Accepts, Context, PortError, RxCounters, RxQueue, TxCounters, TxQueue, Wake};
use offcore_ring::prefetch;
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{Stage, tsc};

use crate::ring::bytes;

/// Counters of the work, in the statistics page, whose block is called `NAME/workN`: bursts that came back, packets in
/// them whose result was not 0, and packets that were dropped for their result.
pub const WORK_COUNTERS: [&str; 3] = ["bursts", "hits", "dropped"];

/// What becomes of packets by their result. With patterns, those with a result are those in which one occurs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnHit {
    /// All go on; they are counted.
    #[default]
    Pass,
    /// Packets with a result are dropped.
    Drop,
    /// Only packets with a result go on.
    Only,
}

/// What a pipeline's queues are made with, beside the pipeline.
#[derive(Debug)]
pub struct QueuesSetup<'a> {
    /// How long a packet waits for others of its burst.
    pub burst_timeout: Duration,
    /// What becomes of packets by their result.
    pub on_hit: OnHit,
    /// Where the counters go.
    pub stats: &'a StatsPage,
    /// Name in statistics, such as `pipeline0`.
    pub name: &'a str,
    /// The queue whose packets it takes.
    pub index: u16,
}

/// A pipeline between two workers.
///
/// # Errors
/// What [`offcore_gpu::pipeline::pipeline`] says, or the statistics page is full.
pub fn work_queues(pipeline: Setup<'_, '_>, queues: QueuesSetup<'_>) -> Result<(WorkTx, WorkRx), PortError> {
    let QueuesSetup { burst_timeout, on_hit, stats, name, index } = queues;
    let (pool, burst) = (pipeline.pool, pipeline.burst);
    let refuse = |error: PipelineError| PortError::Other { port: name.into(), reason: error.to_string() };
    let (front, back) = offcore_gpu::pipeline::pipeline(pipeline).map_err(refuse)?;
    let tx = WorkTx {
        front: Some(front),
        gathered: Vec::with_capacity(burst),
        burst,
        timeout: tsc::ticks(burst_timeout),
        since: 0,
        pool,
        counters: TxCounters::new(stats, name, index)?,
    };
    let rx = WorkRx {
        back,
        next: 0,
        on_hit,
        pool,
        counters: RxCounters::new(stats, name, index)?,
        work: stats.block(&format!("{name}/work{index}"), &WORK_COUNTERS)?,
    };
    Ok((tx, rx))
}

/// The half that gathers bursts.
#[derive(Debug)]
pub struct WorkTx {
    /// Until it is stopped.
    front: Option<Front>,
    gathered: Vec<Packet>,
    burst: usize,
    timeout: u64,
    /// TSC when the first of the gathered packets came.
    since: u64,
    pool: &'static Pool,
    counters: TxCounters,
}

impl WorkTx {
    /// Hands on what is gathered, if there is room for it; whether nothing is left.
    #[inline]
    fn hand_on(&mut self) -> bool {
        let Some(front) = &mut self.front else { return self.gathered.is_empty() };
        if self.gathered.is_empty() {
            return true;
        }
        let bytes = bytes(self.pool, &self.gathered);
        let packets = self.gathered.len() as u64;
        if !front.submit(&mut self.gathered) {
            return false;
        }
        self.counters.add(packets, bytes);
        true
    }

    #[inline]
    fn is_due(&self) -> bool {
        !self.gathered.is_empty() && tsc::now().wrapping_sub(self.since) >= self.timeout
    }
}

impl TxQueue for WorkTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        while !burst.is_empty() {
            if self.gathered.len() == self.burst && !self.hand_on() {
                break;
            }
            if self.gathered.is_empty() {
                self.since = tsc::now();
            }
            let packets = burst.len().min(self.burst - self.gathered.len());
            self.gathered.extend(burst.drain(..packets));
        }
        if self.gathered.len() == self.burst || self.is_due() {
            self.hand_on();
        }
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: true, ..Accepts::default() }
    }

    fn poll(&mut self, _: &mut Context<'_>) {
        if self.is_due() {
            self.hand_on();
        }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    /// Everything has to be back before a device can be told to end.
    fn stop(&mut self, _: &mut Context<'_>) -> bool {
        if !self.hand_on() || self.front.as_mut().is_some_and(|front| !front.is_empty()) {
            return false;
        }
        self.front = None;
        true
    }
}

/// The half that gives on what is done.
#[derive(Debug)]
pub struct WorkRx {
    back: Back,
    /// Packets of the burst that is done that have been given on or dropped.
    next: usize,
    on_hit: OnHit,
    pool: &'static Pool,
    counters: RxCounters,
    work: Block,
}

impl WorkRx {
    #[inline]
    fn receive(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let room = ctx.burst.min(burst.remaining_capacity());
        let Some(done) = self.back.done() else { return };
        if self.next == 0 {
            // From here on the last is the next.
            done.packets.reverse();
            self.work.counter(0).add(1);
            self.work.counter(1).add(done.hits.into());
        }
        let (first, mut dropped) = (burst.len(), 0);
        while burst.len() - first < room {
            let Some(packet) = done.packets.pop() else { break };
            let hit = done.results[self.next] != 0;
            self.next += 1;
            if self.on_hit == OnHit::Pass || hit == (self.on_hit == OnHit::Only) {
                // Whoever worked on it has left its head far away.
                prefetch::write(packet.data().as_ptr());
                burst.push(packet);
            } else {
                dropped += 1;
                ctx.cache.free(packet);
            }
        }
        if done.packets.is_empty() {
            self.next = 0;
            self.back.retire();
        }
        if dropped > 0 {
            self.work.counter(2).add(dropped);
        }
        let new = &burst[first..];
        self.counters.add(new.len() as u64, bytes(self.pool, new));
        ctx.clock.lap(Stage::Rx);
    }
}

impl RxQueue for WorkRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.receive(ctx, burst);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        self.receive(ctx, burst);
        usize::from(self.back.is_waiting())
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::Poll
    }
}

#[cfg(test)]
mod tests;
