//! Packets that are given on as copies: what dpdk-dma does between receiving and sending.
//!
//! A [`CopyRx`] stands around any RX queue. It receives a burst, gathers one copy for each buffer, submits them in one
//! call, and gives on in order what has completed: the packet in its new buffer, when all of it has been copied. The
//! buffer that was received goes back to the pool then, and not before.
//!
//! 1. The mover's plan says who will copy and for how many packets there is room; no more are taken from the queue.
//! 2. What was taken waits in order, in the rare case that there is no buffer to copy it into or that a packet of
//!    several buffers has more copies than fit: then nothing more is taken until it is under way.
//! 3. Both buffers of a packet are its holder in the copy queue. When the core copies and nothing older is in flight,
//!    packets are complete at once and need none.

mod pieces;

use std::ops::Range;
use std::time::Duration;

use offcore_dma::mover::Plan;
use offcore_dma::{Batch, Begun, Binding, CopyQueue, Mover};
use offcore_mem::{BURST, Burst, Packet, Pool, PoolCache};
use offcore_ring::prefetch;
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{Stage, StageClock, named, tsc};

use crate::{Context, PortError, RxCounters, RxQueue, Wake, hand_over, room};
use pieces::{MAX_SEGMENTS, NoCopy};

/// How long a packet may wait for a buffer to be copied into, while nothing of the queue is in flight that would set one
/// free. Then it is dropped: all buffers may be those of packets that wait.
const TIMEOUT: Duration = Duration::from_millis(100);

named! {
    /// Counters of a copy stage on the statistics page, whose block is called `NAME/copy`.
    pub enum CopyCount {
        /// Packets of which copies were begun.
        Packets = "packets",
        /// Their bytes.
        Bytes = "bytes",
        /// Packets dropped because they were longer than allowed.
        TooBig = "too_big",
        /// Packets dropped because no packet buffer was to be had.
        NoBuffer = "no_buffer",
        /// Calls that left packets waiting for a packet buffer.
        Starved = "starved",
    }
}

/// What a [`CopyRx`] is made with.
#[derive(Debug)]
pub struct CopySetup<'a> {
    /// The mover of the worker that will own the queue.
    pub mover: &'a mut Mover,
    pub binding: Binding,
    /// Packets in flight at most, rounded up to a power of two: 1 to 32768.
    pub in_flight: usize,
    /// Bytes of a packet, without FCS; longer ones are dropped. 0: any.
    pub max_frame: usize,
    /// Packets with fewer bytes are copied by the core, whoever copies the others.
    pub min_copy: usize,
    pub pool: &'static Pool,
    pub stats: &'a StatsPage,
    /// Name of the queue in statistics, such as `port0/rx1`.
    pub name: &'a str,
}

/// An RX queue whose packets are copies of another's.
#[derive(Debug)]
pub struct CopyRx {
    inner: Box<dyn RxQueue>,
    queue: CopyQueue<InFlight>,
    pending: Pending,
    /// Copied and given on, and taken back.
    returned: Burst,
}

/// What waits to be copied, and how it is.
#[derive(Debug)]
struct Pending {
    pool: &'static Pool,
    /// Received, to be copied.
    waiting: Burst,
    max_frame: usize,
    min_copy: usize,
    at_least: usize,
    batch: usize,
    /// TSC since when the first of `waiting` has found no buffer, with nothing in flight.
    stuck_since: Option<u64>,
    stats: Block,
}

/// A packet in flight: the buffers that its copies read and write.
#[derive(Debug, Default)]
struct InFlight {
    source: Option<Packet>,
    copy: Option<Packet>,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gathered {
    /// As many packets as were allowed; whether some of them may be complete already and wait in the queue.
    Some { complete: bool },
    /// Nothing: the first packet has more copies than fit.
    NoRoom,
    /// The pool has run dry.
    Starved,
}

impl CopyRx {
    /// A copy stage around `inner`.
    ///
    /// # Errors
    /// When the mover does not have the channels, numbers are out of range, or the statistics page is full.
    pub fn new(inner: Box<dyn RxQueue>, setup: CopySetup<'_>) -> Result<Self, PortError> {
        let CopySetup { mover, binding, in_flight, max_frame, min_copy, pool, stats, name } = setup;
        let refuse = |reason: String| PortError::Other { port: name.into(), reason };
        if !(1..=32768).contains(&in_flight) {
            return Err(refuse(format!("{in_flight} packets in flight: expected 1 to 32768")));
        }
        let stats = stats.block(&format!("{name}/copy"), &CopyCount::NAMES)?;
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

    /// Copies at least `bytes` of every packet of one buffer, as far as the buffer has them: what follows a shorter packet
    /// there is copied, too, and belongs to no packet.
    #[must_use]
    pub fn with_at_least(mut self, bytes: usize) -> Self {
        self.pending.at_least = bytes;
        self
    }

    /// Submits the copies of at most `packets` packets at a time, 1 to 64.
    #[must_use]
    pub fn with_batch(mut self, packets: usize) -> Self {
        self.pending.batch = packets.clamp(1, BURST);
        self
    }

    /// Packets that were taken from the queue and not yet given on.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.queue.in_flight(mover) + self.pending.waiting.len() + self.returned.len()
    }

    /// Copies what waits, in batches; what is complete at once, or has become complete meanwhile, is given on.
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

    /// Gives on what has completed, in order, and frees the buffers that it was received in.
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
                // Its addresses are rewritten next; an engine has left them far away.
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
    /// Gathers and submits one batch. Packets that are complete then go to `burst`.
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
            // Short packets of several buffers fill the core's list before there are as many packets.
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
        let complete = batch.has_copies_of_the_core();
        if taken > 0 {
            if !IMMEDIATE {
                for (index, source) in waiting.drain(..taken).enumerate() {
                    batch.holder(index).source = Some(source);
                }
            }
            // SAFETY: sources and destinations are packet buffers of a pool that lives as long as the process. A packet's
            // holder has the handles of both; or, when the copies are complete at the end of this call, they are in
            // `waiting`, and in `burst`, which nobody reads before the call is over.
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

    /// Adds packets of one buffer that an engine may copy, nearly all, until one comes that is none; their number and
    /// bytes.
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
            // SAFETY: no more are entered than there is room for.
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

    /// A buffer for the copy of a packet of one, and the bytes to be copied; none when the pool has run dry.
    #[inline(always)]
    fn buffer_for(&self, source: &Packet, cache: &mut PoolCache) -> Option<(Packet, usize)> {
        let (offset, len) = (source.headroom(), source.len());
        let copy = cache.take_sized(offset, len)?;
        Some((copy, len.max(self.at_least.min(self.pool.chunk_size() - offset))))
    }

    /// Adds any packet, number `index` of those that wait; its bytes.
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

    /// Drops what was received and is longer than allowed.
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

    /// The pool has no buffer to copy the first packet into. It waits, since what is in flight will set some free.
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

    /// The copies: younger packets are in flight, so the queue itself must not get them back.
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
