//! Pipelines of a GPU or a CPU, as a TX queue and an RX queue.
//!
//! ```text
//! worker 1: port's RX queue -> ... -> WorkTx | bursts | WorkRx -> ... -> port's TX queue: worker 2
//! ```
//! A pipeline replaces a [ring](crate::ring) between two workers. [`WorkTx`] gathers the packets of several port bursts
//! into a work burst, until that is full or its first packet has waited for the timeout. A full pipeline accepts no
//! packets. Packets that the worker's RX side cannot take back are dropped there and counted. [`WorkRx`] returns
//! processed packets in order, and takes back packets that cannot be sent.
//!
//! With buffer split, [`WorkTx`] moves the first bytes of each packet to a separate buffer, and [`WorkRx`] moves them
//! back.
//!
//! With packets in device memory ([`Memory::Direct`]), this module does not access them. (Timestamps go to the host's
//! chunk of the same number, which is otherwise unused.) Packets with several buffers are dropped (`too_big`). If a
//! device fails, its remaining packets and all later ones are dropped (`failed`).

use std::time::Duration;

use offcore_gpu::device::Memory;
use offcore_gpu::pipeline::{Back, Front, PipelineError, Setup, Worker};
use offcore_gpu::ring::Split;
use offcore_mem::{Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_port::{
    Accepts, Context, DropReason, PortError, RxCounters, RxQueue, TxCounters, TxQueue, Wake, hand_over,
};
use offcore_ring::prefetch;
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{Family, Label, Stage, counters, tsc};
use offcore_wire::dscp;

use crate::mirror::Stamping;
use crate::ring::bytes;

counters! {
    /// Counters of the work.
    pub struct WorkCounts, enum WorkCount {
        /// Bursts returned.
        Bursts = bursts: Bursts,
        /// Packets with a non-zero result.
        Hits = hits: Packets,
        /// Packets dropped by their result.
        Dropped = dropped: Packets,
        /// Packets marked by their result (IP only).
        Marked = marked: Packets,
        /// Packets steered by their result.
        Steered = steered: Packets,
        /// Whether the device has failed (1): the CPU takes over if it can.
        Failed = failed: State gauge,
        /// Packets held back because of the failure.
        Quarantined = quarantined: Packets gauge,
    }
}

/// The counters of the work.
pub(crate) static WORK: Family =
    Family::new("work", "Work of a pipeline on the packets of a queue.", &[&WorkCounts::COUNTERS]);

/// Treatment of packets by their result. With patterns, a packet with a match has a result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnHit {
    /// All packets are forwarded; matches are counted.
    #[default]
    Pass,
    /// Packets with a result get this DSCP, if they are IP.
    Mark(u8),
    /// Packets with a result are dropped.
    Drop,
    /// Only packets with a result are forwarded.
    Only,
    /// Packets with a result are sent to [`QueuesSetup::elsewhere`].
    Steer,
}

/// The parameters of a pipeline's queues, in addition to the pipeline's own.
#[derive(Debug)]
pub struct QueuesSetup<'a> {
    /// How long a packet waits for its burst to fill.
    pub burst_timeout: Duration,
    /// Treatment of packets by their result.
    pub on_hit: OnHit,
    /// The destination of [`OnHit::Steer`]. Without it, such packets are dropped.
    pub elsewhere: Option<Stamping>,
    pub stats: &'a StatsPage,
    /// Name in statistics, such as `pipeline0`.
    pub name: &'a str,
    pub index: u16,
}

/// Creates a pipeline between two workers.
///
/// # Errors
/// The errors of [`offcore_gpu::pipeline::pipeline`], or a full statistics page.
pub fn work_queues(pipeline: Setup<'_, '_>, queues: QueuesSetup<'_>) -> Result<(WorkTx, WorkRx), PortError> {
    let QueuesSetup { burst_timeout, on_hit, elsewhere, stats, name, index } = queues;
    let (pool, burst) = (pipeline.pool, pipeline.burst);
    let direct = matches!(&pipeline.worker, Worker::Device { memory: Memory::Direct, .. });
    let split = pipeline.work.split_at.map(|at| Split { pool, at });
    let refuse = |error: PipelineError| PortError::Other { port: name.into(), reason: error.to_string() };
    let (front, back) = offcore_gpu::pipeline::pipeline(pipeline).map_err(refuse)?;
    let tx = WorkTx {
        front: Some(front),
        gathered: Vec::with_capacity(burst),
        burst,
        timeout: tsc::ticks(burst_timeout),
        since: 0,
        pool,
        direct,
        split,
        counters: TxCounters::new(stats, name, index)?,
    };
    let rx = WorkRx {
        back,
        next: 0,
        on_hit,
        elsewhere,
        returned: Burst::new(),
        pool,
        direct,
        split,
        counters: RxCounters::new(stats, name, index)?,
        work: stats.block(&WORK, &[(Label::Port, &name), (Label::Queue, &index)])?,
    };
    Ok((tx, rx))
}

/// The end that gathers bursts.
#[derive(Debug)]
pub struct WorkTx {
    /// `None` once stopped.
    front: Option<Front>,
    gathered: Vec<Packet>,
    burst: usize,
    timeout: u64,
    /// TSC of the first gathered packet.
    since: u64,
    pool: &'static Pool,
    /// Packets are in the device's memory.
    direct: bool,
    split: Option<Split>,
    counters: TxCounters,
}

impl WorkTx {
    /// Submits the gathered packets if the pipeline has room. Returns whether none are left.
    #[inline]
    fn flush(&mut self) -> bool {
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

    /// Drops packets with several buffers.
    #[cold]
    fn drop_segmented(&self, burst: &mut Burst, cache: &mut PoolCache) {
        for packet in std::mem::take(burst) {
            if packet.is_segmented() {
                self.counters.drop(DropReason::TooBig, 1);
                cache.free(packet);
            } else {
                burst.push(packet);
            }
        }
    }

    #[inline]
    fn is_due(&self) -> bool {
        !self.gathered.is_empty() && tsc::now().wrapping_sub(self.since) >= self.timeout
    }
}

impl TxQueue for WorkTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        // The queue has stopped. The worker drops and counts these packets.
        if self.front.is_none() {
            return;
        }
        if self.direct && burst.iter().any(Packet::is_segmented) {
            self.drop_segmented(burst, ctx.cache);
        }
        while !burst.is_empty() {
            if self.gathered.len() == self.burst && !self.flush() {
                break;
            }
            if self.gathered.is_empty() {
                self.since = tsc::now();
            }
            let packets = burst.len().min(self.burst - self.gathered.len());
            match self.split {
                None => self.gathered.extend(burst.drain(..packets)),
                Some(Split { at, .. }) => {
                    let packets = burst.drain(..packets);
                    self.gathered.extend(packets.map(|packet| split(packet, at, ctx.cache)));
                }
            }
        }
        if self.gathered.len() == self.burst || self.is_due() {
            self.flush();
        }
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        Accepts { segments: true, ..Accepts::default() }
    }

    fn poll(&mut self, _: &mut Context<'_>) {
        if self.is_due() {
            self.flush();
        }
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn is_drained_by_device(&self) -> bool {
        self.front.is_some()
    }

    /// The device may be told to quit only when every burst is back.
    fn stop(&mut self, _: &mut Context<'_>) -> bool {
        if !self.flush() || self.front.as_mut().is_some_and(|front| !front.is_empty()) {
            return false;
        }
        self.front = None;
        true
    }
}

/// Moves the first `at` bytes to a separate buffer. The packet is unchanged if it is not longer, if it has several
/// buffers, or if no buffer is free.
#[inline]
fn split(mut packet: Packet, at: usize, cache: &mut PoolCache) -> Packet {
    if packet.is_segmented() || packet.len() <= at {
        return packet;
    }
    let Some(mut header) = cache.take_sized(HEADROOM, at) else { return packet };
    header.bytes_mut().copy_from_slice(&packet.bytes()[..at]); // copy-ok: a header
    packet.pull(at);
    cache.pool().link(header, packet)
}

/// Undoes [`split`].
#[inline]
fn joined(mut packet: Packet, split: &Split, cache: &mut PoolCache) -> Packet {
    if split.payload(&packet).is_none_or(|(_, offset, _)| usize::from(offset) < split.at) {
        return packet;
    }
    let Some(mut rest) = split.pool.split(&mut packet) else { return packet };
    rest.push(split.at);
    rest.bytes_mut()[..split.at].copy_from_slice(packet.bytes()); // copy-ok: a header
    cache.free(packet);
    rest
}

/// The end that returns processed packets.
#[derive(Debug)]
pub struct WorkRx {
    back: Back,
    /// Packets of the current burst that have been returned or dropped.
    next: usize,
    on_hit: OnHit,
    elsewhere: Option<Stamping>,
    /// Packets that could not be sent. They are returned first.
    returned: Burst,
    pool: &'static Pool,
    /// Packets are in the device's memory.
    direct: bool,
    split: Option<Split>,
    counters: RxCounters,
    work: Block,
}

/// Counts of a burst, and its steered packets.
#[derive(Debug, Default)]
struct Hits {
    dropped: u64,
    marked: u64,
    elsewhere: Burst,
}

impl WorkRx {
    #[inline]
    fn receive(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if !self.returned.is_empty() {
            // These packets are already counted.
            return hand_over(&mut self.returned, burst);
        }
        let room = ctx.burst.min(burst.remaining_capacity());
        let Some(done) = self.back.done() else { return };
        if self.next == 0 {
            // Reversed, so that `pop` returns them in order.
            done.packets.reverse();
            self.work.counter(WorkCount::Bursts as usize).add(1);
            self.work.counter(WorkCount::Hits as usize).add(done.hits.into());
        }
        let (first, mut hits) = (burst.len(), Hits::default());
        for _ in 0..room {
            let Some(mut packet) = done.packets.pop() else { break };
            let hit = done.results[self.next] != 0;
            self.next += 1;
            // The device or another core wrote it, so its head is not in this core's cache.
            if !self.direct {
                prefetch::write(packet.data().as_ptr());
            }
            if let Some(split) = &self.split {
                packet = joined(packet, split, ctx.cache);
            }
            if let Some(packet) = hits.pass(packet, hit, self.on_hit, ctx.cache) {
                burst.push(packet);
            }
        }
        if done.packets.is_empty() {
            self.next = 0;
            self.back.retire();
            if self.back.failure().is_some() {
                self.work.counter(WorkCount::Failed as usize).set(1);
                self.work.counter(WorkCount::Quarantined as usize).set(self.back.quarantined() as u64);
                self.counters.drop(DropReason::Failed, self.back.take_lost());
            }
        }
        self.settle(hits, ctx);
        let new = &burst[first..];
        self.counters.add(new.len() as u64, bytes(self.pool, new));
        ctx.clock.lap(Stage::Rx);
    }

    /// Updates the counters and sends the steered packets.
    #[inline]
    fn settle(&mut self, mut hits: Hits, ctx: &mut Context<'_>) {
        if hits.dropped > 0 {
            self.work.counter(WorkCount::Dropped as usize).add(hits.dropped);
        }
        if hits.marked > 0 {
            self.work.counter(WorkCount::Marked as usize).add(hits.marked);
        }
        if hits.elsewhere.is_empty() {
            return;
        }
        match &mut self.elsewhere {
            Some(elsewhere) => {
                self.work.counter(WorkCount::Steered as usize).add(hits.elsewhere.len() as u64);
                elsewhere.send(hits.elsewhere, tsc::now(), ctx);
            }
            None => {
                self.work.counter(WorkCount::Dropped as usize).add(hits.elsewhere.len() as u64);
                ctx.cache.free_all(hits.elsewhere.drain(..));
            }
        }
    }
}

impl Hits {
    /// Returns the packet if it is forwarded.
    #[inline(always)]
    fn pass(
        &mut self,
        mut packet: Packet,
        hit: bool,
        on_hit: OnHit,
        cache: &mut PoolCache,
    ) -> Option<Packet> {
        match on_hit {
            OnHit::Drop if hit => {}
            OnHit::Only if !hit => {}
            OnHit::Steer if hit => {
                self.elsewhere.push(packet);
                return None;
            }
            OnHit::Mark(value) if hit => {
                self.marked += u64::from(dscp::set(packet.bytes_mut(), value));
                return Some(packet);
            }
            _ => return Some(packet),
        }
        self.dropped += 1;
        cache.free(packet);
        None
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
        usize::from(self.back.is_waiting()) + self.returned.len()
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::Poll
    }

    fn take_back(&mut self, burst: &mut Burst) {
        hand_over(burst, &mut self.returned);
    }
}

#[cfg(test)]
mod tests;
