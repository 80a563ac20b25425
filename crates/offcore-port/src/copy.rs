//! A stage that replaces received packets by copies, as the dpdk-dma sample application does between receiving and
//! sending.
//!
//! A [`CopyRx`] wraps any RX queue. It receives a burst, gathers one copy per buffer, submits the copies in one call,
//! and returns completed packets in order. A packet is returned in its new buffer when all of it has been copied. Only
//! then does the received buffer go back to the pool.
//!
//! 1. The mover's plan says which engine or core copies, and how many packets it has room for. No more packets are
//!    received.
//! 2. Received packets wait in order if the pool has no buffer for the copy or if a packet of several buffers needs
//!    more copies than fit, which is rare. Nothing more is received until the copies of these packets are submitted.
//! 3. The copy queue holds both buffers of each packet in flight. When the core copies and nothing older is in flight,
//!    packets complete at once and are not queued.

mod pieces;

use std::ops::Range;
use std::time::Duration;

use offcore_dma::mover::Plan;
use offcore_dma::{Batch, Begun, Binding, CopyQueue, Mover};
use offcore_mem::{BURST, Burst, Packet, Pool, PoolCache};
use offcore_ring::prefetch;
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{Family, Label, Stage, StageClock, counters, tsc};

use crate::{Context, PortError, RxCounters, RxQueue, Wake, hand_over, room};
use pieces::{MAX_SEGMENTS, NoCopy};

/// The time that a packet may wait for a buffer while no copy of the queue is in flight that would free one. Then it is
/// dropped: waiting packets may occupy all buffers.
const TIMEOUT: Duration = Duration::from_millis(100);

counters! {
    /// Counters of a copy stage.
    pub struct CopyCounts, enum CopyCount {
        /// Packets whose copies were begun.
        Packets = packets: Packets,
        /// Bytes of these packets.
        Bytes = bytes: Bytes,
        /// Packets dropped because they were longer than allowed.
        TooBig = too_big: Packets,
        /// Packets dropped because the pool had no buffer for a long time.
        NoBuffer = no_buffer: Packets,
        /// Polls that left packets waiting for a buffer.
        Starved = starved: Events,
    }
}

/// The counters of a copy stage.
pub static COPY: Family =
    Family::new("copy", "Packets copied by the copy stage of an RX queue.", &[&CopyCounts::COUNTERS]);

/// The parameters of a [`CopyRx`].
#[derive(Debug)]
pub struct CopySetup<'a> {
    /// The mover of the worker that will own the queue.
    pub mover: &'a mut Mover,
    pub binding: Binding,
    /// Maximum number of packets in flight, rounded up to a power of two: 1 to 32768.
    pub in_flight: usize,
    /// Maximum packet length in bytes, without FCS; longer packets are dropped. 0 means no limit.
    pub max_frame: usize,
    /// The core copies packets with fewer bytes, whatever copies the others.
    pub min_copy: usize,
    pub pool: &'static Pool,
    pub stats: &'a StatsPage,
    /// Name of the queue's port in statistics, such as `port0`, and the queue's number.
    pub port: &'a str,
    pub index: u16,
}

/// An RX queue that returns copies of another queue's packets.
#[derive(Debug)]
pub struct CopyRx {
    inner: Box<dyn RxQueue>,
    queue: CopyQueue<InFlight>,
    pending: Pending,
    /// Copied packets that were returned by `rx` and taken back.
    returned: Burst,
}

/// Packets that wait to be copied, and the settings of the copies.
#[derive(Debug)]
struct Pending {
    pool: &'static Pool,
    /// Received packets that wait to be copied.
    waiting: Burst,
    max_frame: usize,
    min_copy: usize,
    at_least: usize,
    batch: usize,
    /// The TSC value since when the first packet of `waiting` has found no buffer while nothing is in flight.
    stuck_since: Option<u64>,
    stats: Block,
}

/// A packet in flight: the source and destination buffers of its copies.
#[derive(Debug, Default)]
struct InFlight {
    source: Option<Packet>,
    copy: Option<Packet>,
}

/// The outcome of gathering a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gathered {
    /// The batch has as many packets as allowed. `complete` says whether some of them may already have completed in the
    /// queue.
    Some { complete: bool },
    /// The batch is empty: the first packet needs more copies than fit.
    NoRoom,
    /// The pool has no free buffer.
    Starved,
}

impl CopyRx {
    /// Creates a copy stage around `inner`.
    ///
    /// # Errors
    /// If the mover does not have the channels, numbers are out of range, or the statistics page is full.
    pub fn new(inner: Box<dyn RxQueue>, setup: CopySetup<'_>) -> Result<Self, PortError> {
        let CopySetup { mover, binding, in_flight, max_frame, min_copy, pool, stats, port, index } = setup;
        let refuse = |reason: String| PortError::Other { port: format!("{port}/rx{index}"), reason };
        if !(1..=32768).contains(&in_flight) {
            return Err(refuse(format!("{in_flight} packets in flight: expected 1 to 32768")));
        }
        let stats = stats.block(&COPY, &[(Label::Port, &port), (Label::Queue, &index)])?;
        let mut queue = CopyQueue::open(mover, in_flight);
        queue.bind(mover, &binding).map_err(|error| refuse(error.to_string()))?;
        let pending = Pending {
            pool,
            waiting: Burst::new(),
            max_frame: if max_frame == 0 { usize::MAX } else { max_frame },
            min_copy,
            at_least: 0,
            batch: BURST,
            stuck_since: None,
            stats,
        };
        Ok(Self { inner, queue, pending, returned: Burst::new() })
    }

    /// Copies at least `bytes` of every packet that has one buffer, limited to the buffer's size: the bytes behind a
    /// shorter packet are copied, too, although they do not belong to a packet.
    #[must_use]
    pub fn with_at_least(mut self, bytes: usize) -> Self {
        self.pending.at_least = bytes;
        self
    }

    /// Submits the copies of at most `packets` packets at a time: 1 to 64.
    #[must_use]
    pub fn with_batch(mut self, packets: usize) -> Self {
        self.pending.batch = packets.clamp(1, BURST);
        self
    }

    /// Returns the number of packets that were received from the inner queue and not yet returned.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.queue.in_flight(mover) + self.pending.waiting.len() + self.returned.len()
    }

    /// Copies the waiting packets in batches. Packets that complete at once, or have completed meanwhile, go to
    /// `burst`.
    #[inline]
    fn copy_waiting(&mut self, ctx: &mut Context<'_>, mut plan: Plan, burst: &mut Burst) {
        let Self { queue, pending, .. } = self;
        let mut reap = false;
        loop {
            let Context { mover, cache, clock, .. } = &mut *ctx;
            let gathered = match queue.begin(mover, &mut plan) {
                Begun::Immediate(batch) => pending.gather(batch, cache, clock, burst),
                Begun::Queued(batch) => pending.gather(batch, cache, clock, burst),
            };
            match gathered {
                Gathered::Some { complete } => reap |= complete,
                Gathered::NoRoom => {
                    plan = queue.plan_by_core(mover);
                    continue;
                }
                Gathered::Starved => {
                    pending.starved(cache, queue.in_flight(mover));
                    break;
                }
            }
            if pending.waiting.is_empty() {
                break;
            }
            plan = queue.plan(mover);
            if plan.packets == 0 || burst.is_full() {
                break;
            }
        }
        if reap {
            self.reap(ctx, burst);
        }
    }

    /// Appends completed packets to `burst`, in order, and frees their source buffers.
    #[inline]
    fn reap(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let most = room(ctx, burst);
        let mut ready = self.queue.ready(ctx.mover);
        let packets = ready.len().min(most);
        if packets == 0 {
            return;
        }
        for index in 0..packets {
            let InFlight { source, copy } = ready.holder(index);
            if let Some(copy) = copy.take() {
                // The packet's addresses are rewritten next, and an engine's writes may have bypassed the CPU caches.
                prefetch::write(copy.data().as_ptr());
                burst.push(copy);
            }
            if let Some(source) = source.take() {
                ctx.cache.free(source);
            }
        }
        ready.retire(packets);
        ctx.clock.lap(Stage::Publish);
    }
}

impl Pending {
    /// Gathers and submits one batch. Packets that complete at once go to `burst`.
    #[inline(always)]
    fn gather<const IMMEDIATE: bool>(
        &mut self,
        mut batch: Batch<'_, InFlight, IMMEDIATE>,
        cache: &mut PoolCache,
        clock: &mut StageClock,
        burst: &mut Burst,
    ) -> Gathered {
        let most = self.waiting.len().min(self.batch).min(batch.packets()).min(match IMMEDIATE {
            true => burst.remaining_capacity(),
            false => BURST,
        });
        let (mut taken, mut bytes) = (0, 0);
        let gathered = loop {
            let singles = self.singles(taken..most, &mut batch, cache, burst);
            (taken, bytes) = (taken + singles.0, bytes + singles.1);
            // Short packets of several buffers can fill the core's list before the batch has all packets.
            if taken == most || batch.room() == 0 {
                break None;
            }
            match self.packet(taken, &mut batch, cache, burst) {
                Ok(len) => (taken, bytes) = (taken + 1, bytes + len),
                Err(NoCopy::Starved) => break Some(Gathered::Starved),
                Err(NoCopy::ListFull) => break (taken == 0).then_some(Gathered::NoRoom),
            }
        };
        let waiting = &mut self.waiting;
        let complete = batch.has_core_copies();
        if taken > 0 {
            if !IMMEDIATE {
                for (index, source) in waiting.drain(..taken).enumerate() {
                    batch.holder(index).source = Some(source);
                }
            }
            // SAFETY: Sources and destinations are packet buffers of a pool that lives as long as the process. The
            // packet's holder owns the handles of both. If the copies complete within this call, the handles are in
            // `waiting` and in `burst`, and neither is read before the call returns.
            unsafe { batch.submit(clock) };
            if IMMEDIATE {
                cache.free_front(waiting, taken);
            }
            self.stuck_since = None;
            self.stats.counter(CopyCount::Packets as usize).add(taken as u64);
            self.stats.counter(CopyCount::Bytes as usize).add(bytes as u64);
        }
        gathered.unwrap_or(Gathered::Some { complete })
    }

    /// Adds packets that have one buffer and may be copied by an engine, which is the common case, up to the first
    /// other packet. Returns the number of packets and bytes.
    #[inline(always)]
    fn singles<const IMMEDIATE: bool>(
        &self,
        packets: Range<usize>,
        batch: &mut Batch<'_, InFlight, IMMEDIATE>,
        cache: &mut PoolCache,
        burst: &mut Burst,
    ) -> (usize, usize) {
        let room = batch.room();
        let mut list = batch.singles();
        let (mut run, mut bytes) = (0, 0);
        for source in self.waiting[packets].iter().take(room) {
            if !source.is_plain() || source.len() < self.min_copy {
                break;
            }
            let Some((copy, bytes_of_it)) = self.buffer_for(source, cache) else { break };
            // SAFETY: No more packets are entered than there is room for.
            match unsafe { list.enter(source.data().as_ptr(), copy.data().as_ptr(), bytes_of_it as u32) } {
                None => burst.push(copy),
                Some(holder) => holder.copy = Some(copy),
            }
            bytes += bytes_of_it;
            run += 1;
        }
        list.finish();
        (run, bytes)
    }

    /// Returns a buffer for the copy of a packet of one buffer, and the number of bytes to copy. `None` if the pool is
    /// empty.
    #[inline(always)]
    fn buffer_for(&self, source: &Packet, cache: &mut PoolCache) -> Option<(Packet, usize)> {
        let (offset, len) = (source.headroom(), source.len());
        let copy = cache.take_sized(offset, len)?;
        Some((copy, len.max(self.at_least.min(self.pool.chunk_size() - offset))))
    }

    /// Adds waiting packet number `index`, of any kind; returns its length in bytes.
    fn packet<const IMMEDIATE: bool>(
        &self,
        index: usize,
        batch: &mut Batch<'_, InFlight, IMMEDIATE>,
        cache: &mut PoolCache,
        burst: &mut Burst,
    ) -> Result<usize, NoCopy> {
        let source = &self.waiting[index];
        let (copy, bytes) = if source.is_plain() {
            let (copy, bytes) = self.buffer_for(source, cache).ok_or(NoCopy::Starved)?;
            batch.copy(source.data().as_ptr(), copy.data().as_ptr(), bytes as u32);
            (copy, bytes)
        } else {
            pieces::copy(source, cache, batch)?
        };
        let packet = InFlight { source: None, copy: Some(copy) };
        let short = self.min_copy > 0 && self.pool.total_len(source) < self.min_copy;
        let entered = if short { batch.enter_by_core(packet) } else { batch.enter(packet) };
        burst.extend(entered.and_then(|packet| packet.copy));
        Ok(bytes)
    }

    /// Drops received packets that are longer than allowed.
    #[inline]
    fn check_lengths(&mut self, cache: &mut PoolCache) {
        let longest = self.max_frame;
        if self.waiting.iter().any(|packet| packet.is_segmented() || packet.len() > longest) {
            self.drop_too_long(cache);
        }
    }

    #[cold]
    fn drop_too_long(&mut self, cache: &mut PoolCache) {
        let pool = self.pool;
        for packet in self.waiting.take() {
            if pool.total_len(&packet) > self.max_frame || pool.segment_count(&packet) > MAX_SEGMENTS {
                self.stats.counter(CopyCount::TooBig as usize).add(1);
                cache.free(packet);
            } else {
                self.waiting.push(packet);
            }
        }
    }

    /// The pool has no buffer for the first packet's copy. The packet waits, because copies in flight will free
    /// buffers.
    #[cold]
    fn starved(&mut self, cache: &mut PoolCache, in_flight: usize) {
        self.stats.counter(CopyCount::Starved as usize).add(1);
        if in_flight > 0 {
            self.stuck_since = None;
            return;
        }
        let now = tsc::now();
        if now.wrapping_sub(*self.stuck_since.get_or_insert(now)) > tsc::ticks(TIMEOUT) {
            cache.free(self.waiting.remove(0));
            self.stats.counter(CopyCount::NoBuffer as usize).add(1);
        }
    }
}

impl RxQueue for CopyRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if !self.returned.is_empty() {
            return hand_over(&mut self.returned, burst);
        }
        if self.queue.in_flight(ctx.mover) > 0 {
            self.reap(ctx, burst);
        }
        let plan = self.queue.plan(ctx.mover);
        if self.pending.waiting.is_empty() {
            let wanted = room(ctx, burst).min(plan.packets).min(plan.copies);
            if wanted == 0 {
                return;
            }
            let Context { mover, cache, clock, .. } = ctx;
            let mut inner = Context { mover, cache, clock, burst: wanted };
            self.inner.rx(&mut inner, &mut self.pending.waiting);
            self.pending.check_lengths(ctx.cache);
            if self.pending.waiting.is_empty() {
                return;
            }
        }
        self.copy_waiting(ctx, plan, burst);
    }

    fn counters(&self) -> &RxCounters {
        self.inner.counters()
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let mut left = 0;
        if self.returned.is_empty() {
            self.reap(ctx, burst);
            if self.pending.waiting.is_empty() {
                left = self.inner.drain(ctx, &mut self.pending.waiting);
                self.pending.check_lengths(ctx.cache);
            }
            let plan = self.queue.plan(ctx.mover);
            if !self.pending.waiting.is_empty() && plan.packets > 0 && !burst.is_full() {
                self.copy_waiting(ctx, plan, burst);
            }
        } else {
            hand_over(&mut self.returned, burst);
        }
        left + self.in_flight(ctx.mover)
    }

    fn arm(&mut self) -> Wake<'_> {
        match self.pending.waiting.is_empty() && self.returned.is_empty() {
            true => self.inner.arm(),
            false => Wake::Now,
        }
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    /// The copies are kept here: younger packets are in flight, so the inner queue must not get these back.
    fn take_back(&mut self, burst: &mut Burst) {
        if self.inner.waits() {
            hand_over(burst, &mut self.returned);
        }
    }

    fn waits(&self) -> bool {
        self.inner.waits()
    }
}

#[cfg(test)]
mod tests;
