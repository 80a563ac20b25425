//! Packets that are given on as copies: what dpdk-dma does between receiving and sending.
//!
//! A [`CopyRx`] stands around any RX queue. It receives a burst, gathers one copy for each buffer, submits them in one
//! call, and gives on in order what has completed: the packet in its new buffer, when all of it has been copied. The
//! buffer that was received goes back to the pool then, and not before.
//!
//! 1. The mover's plan says who will copy and for how many packets there is room; no more are taken from the queue.
//! 2. What was taken waits in order, in the rare case that there is no buffer to copy it into or that a packet of
//!    several buffers has more copies than fit: then nothing more is taken until it is under way.
//! 3. Copies in flight stand in the mover's reorder ring. When the core copies and nothing older is in flight, packets
//!    are complete at once and pass it by.

mod pieces;

use std::time::Duration;

use arrayvec::ArrayVec;
use offcore_dma::mover::Plan;
use offcore_dma::{Binding, Copy, Mover, QueueId};
use offcore_mem::{BURST, Burst, Packet, Pool};
use offcore_ring::prefetch;
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{Stage, tsc};

use crate::{Context, PortError, RxCounters, RxQueue, Wake, room};
use pieces::{MAX_SEGMENTS, NoCopy};

/// Copies gathered before they are submitted, at most.
const LIST: usize = 256;
/// How long a packet may wait for a buffer to be copied into, while nothing of the queue is in flight that would set one
/// free. Then it is dropped: all buffers may be those of packets that wait.
const PATIENCE: Duration = Duration::from_millis(100);

/// Counters of a copy stage on the statistics page, whose block is called `NAME/copy`: packets and bytes of which copies
/// were begun, packets dropped because they were longer than allowed or no packet buffer was to be had, and calls that
/// left packets waiting for one.
pub const COPY_COUNTERS: [&str; 5] = ["packets", "bytes", "too_big", "no_buffer", "starved"];

/// What a [`CopyRx`] is made with.
#[derive(Debug)]
pub struct CopySetup<'a> {
    /// The mover of the worker that will own the queue.
    pub mover: &'a mut Mover,
    /// Who copies.
    pub binding: Binding,
    /// Packets in flight at most, rounded up to a power of two: 1 to 32768.
    pub in_flight: usize,
    /// Bytes of a packet, without FCS; longer ones are dropped. 0: any.
    pub max_frame: usize,
    /// Packets with fewer bytes are copied by the core, whoever copies the others.
    pub min_copy: usize,
    /// The pool of the packets.
    pub pool: &'static Pool,
    /// Where the counters go.
    pub stats: &'a StatsPage,
    /// Name of the queue in statistics, such as `port0/rx1`.
    pub name: &'a str,
}

/// An RX queue whose packets are copies of another's.
#[derive(Debug)]
pub struct CopyRx {
    inner: Box<dyn RxQueue>,
    queue: QueueId,
    pool: &'static Pool,
    slots: Box<[InFlight]>,
    list: Box<ArrayVec<Copy, LIST>>,
    /// Copies that the core makes beside the list.
    short: Box<ArrayVec<Copy, LIST>>,
    /// Received, to be copied.
    waiting: Burst,
    /// Copied and given on, and taken back.
    returned: Burst,
    max_frame: usize,
    min_copy: usize,
    at_least: usize,
    batch: usize,
    /// TSC since when the first of `waiting` has found no buffer, with nothing in flight.
    stuck_since: Option<u64>,
    stats: Block,
}

/// What a packet in flight needs when it is complete.
#[derive(Debug, Default)]
struct InFlight {
    source: Option<Packet>,
    copy: Option<Packet>,
}

/// What became of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gathered {
    /// As many packets as were allowed.
    Some,
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
        let stats = stats.block(&format!("{name}/copy"), &COPY_COUNTERS)?;
        let queue = mover.open_queue(in_flight);
        mover.bind(queue, binding.mode, &binding.channels).map_err(|error| refuse(error.to_string()))?;
        mover.set_weight(queue, binding.weight);
        let slots = mover.ring(queue).mask() + 1;
        Ok(Self {
            inner,
            queue,
            pool,
            slots: (0..slots).map(|_| InFlight::default()).collect(),
            list: Box::default(),
            short: Box::default(),
            waiting: Burst::new(),
            returned: Burst::new(),
            max_frame: if max_frame == 0 { usize::MAX } else { max_frame },
            min_copy,
            at_least: 0,
            batch: BURST,
            stuck_since: None,
            stats,
        })
    }

    /// Copies at least `bytes` of every packet of one buffer, as far as the buffer has them: what follows a shorter packet
    /// there is copied, too, and belongs to no packet.
    #[must_use]
    pub fn with_at_least(mut self, bytes: usize) -> Self {
        self.at_least = bytes;
        self
    }

    /// Submits the copies of at most `packets` packets at a time, 1 to 64.
    #[must_use]
    pub fn with_batch(mut self, packets: usize) -> Self {
        self.batch = packets.clamp(1, BURST);
        self
    }

    /// Packets that were taken from the queue and not yet given on.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        mover.ring(self.queue).in_flight() + self.waiting.len() + self.returned.len()
    }

    /// Copies what waits, in lists; what is complete at once, or has become complete meanwhile, is given on.
    #[inline]
    fn copy_waiting(&mut self, ctx: &mut Context<'_>, mut plan: Plan, burst: &mut Burst) {
        let mut reap = false;
        loop {
            let by_core = plan.by_core();
            let now = by_core && ctx.mover.ring(self.queue).in_flight() == 0;
            let gathered = match now {
                true => self.gather::<true>(ctx, plan, burst),
                false => self.gather::<false>(ctx, plan, burst),
            };
            reap |= !now && (by_core || !self.short.is_empty());
            match gathered {
                Gathered::Some => {}
                Gathered::NoRoom => {
                    plan = ctx.mover.plan_by_core(self.queue);
                    continue;
                }
                Gathered::Starved => {
                    self.starved(ctx);
                    break;
                }
            }
            if self.waiting.is_empty() {
                break;
            }
            plan = ctx.mover.plan(self.queue);
            if plan.packets == 0 || burst.is_full() {
                break;
            }
        }
        if reap {
            self.reap(ctx, burst);
        }
    }

    /// Gathers and submits one list. Packets that are complete when their copies are (`NOW`: the core makes them, and
    /// nothing older is in flight) go to the burst, others into the reorder ring.
    #[inline(always)]
    fn gather<const NOW: bool>(
        &mut self,
        ctx: &mut Context<'_>,
        mut plan: Plan,
        burst: &mut Burst,
    ) -> Gathered {
        let Self { queue, pool, slots, list, short, waiting, min_copy, at_least, batch, .. } = self;
        let most = waiting.len().min(*batch).min(if NOW { burst.remaining_capacity() } else { plan.packets });
        let room = plan.copies.min(LIST);
        let size = pool.chunk_size();
        list.clear();
        short.clear();
        let ring = ctx.mover.ring(*queue);
        let (first, mask) = (ring.next_slot(), ring.mask());
        let shortest = if NOW || plan.by_core() { 0 } else { *min_copy };
        let (mut taken, mut bytes, mut gathered) = (0, 0, Gathered::Some);
        for source in &waiting[..most] {
            let token = if NOW { 0 } else { queue.token(ring.next_slot()) };
            let before = list.len();
            // Short packets of several buffers fill the core's list before there are as many packets.
            if before == room || short.is_full() {
                break;
            }
            let len = source.len();
            let copy = if source.is_plain() {
                let offset = source.headroom();
                let Some(copy) = ctx.cache.take_sized(offset, len) else {
                    gathered = Gathered::Starved;
                    break;
                };
                let bytes_of_it = len.max((*at_least).min(size - offset));
                let (src, dst) = (source.data().as_ptr(), copy.data().as_ptr());
                let intent = Copy { src, dst, len: bytes_of_it as u32, token };
                bytes += bytes_of_it;
                if !NOW && len < shortest {
                    short.push(intent);
                } else {
                    list.push(intent);
                }
                copy
            } else {
                let by_core = !NOW && shortest > 0 && pool.total_len(source) < shortest;
                let (list, room) = if by_core { (&mut *short, LIST) } else { (&mut *list, room) };
                match pieces::copy(source, ctx.cache, token, room, list) {
                    Ok((copy, total)) => {
                        bytes += total;
                        copy
                    }
                    Err(NoCopy::Starved) => {
                        gathered = Gathered::Starved;
                        break;
                    }
                    Err(NoCopy::ListFull) => {
                        if taken == 0 {
                            gathered = Gathered::NoRoom;
                        }
                        break;
                    }
                }
            };
            taken += 1;
            if NOW {
                burst.push(copy);
            } else {
                // What the core is going to make, below, has no outstanding copy.
                let copies = &list[before..];
                let slot = ring.push(if copies.is_empty() { 0 } else { plan.outstanding(copies) });
                slots[slot].copy = Some(copy);
            }
        }
        if taken == 0 {
            return gathered;
        }
        if !NOW {
            for (i, source) in waiting.drain(..taken).enumerate() {
                slots[(first + i) & mask].source = Some(source);
            }
        }
        if !list.is_empty() {
            // SAFETY: sources and destinations are packet buffers of a pool that lives as long as the process. The handles
            // of both are in `slots` until the packet is ready; or, when the copies are complete at the end of this call,
            // in `waiting`, and in `burst`, which nobody reads before the call is over.
            unsafe { ctx.mover.submit(*queue, plan, list, ctx.clock) };
        }
        if !short.is_empty() {
            let plan = ctx.mover.plan_core(*queue);
            // SAFETY: as above.
            unsafe { ctx.mover.submit(*queue, plan, short, ctx.clock) };
        }
        if NOW {
            ctx.cache.free_front(waiting, taken);
        }
        self.stuck_since = None;
        self.stats.counter(0).add(taken as u64);
        self.stats.counter(1).add(bytes as u64);
        gathered
    }

    /// Gives on what has completed, in order, and frees the buffers that it was received in.
    #[inline]
    fn reap(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let ring = ctx.mover.ring(self.queue);
        let ready = ring.ready().min(room(ctx, burst));
        if ready == 0 {
            return;
        }
        let ring = ctx.mover.ring(self.queue);
        let (first, mask) = (ring.oldest_slot(), ring.mask());
        for i in 0..ready {
            let InFlight { source, copy } = &mut self.slots[(first + i) & mask];
            if let Some(copy) = copy.take() {
                // Its addresses are rewritten next; an engine has left them far away.
                prefetch::write(copy.data().as_ptr());
                burst.push(copy);
            }
            if let Some(source) = source.take() {
                ctx.cache.free(source);
            }
        }
        ctx.mover.ring(self.queue).retire(ready);
        ctx.mover.reaped(self.queue);
        ctx.clock.lap(Stage::Publish);
    }

    /// Drops what was received from `first` on and is longer than allowed.
    #[inline]
    fn check_lengths(&mut self, ctx: &mut Context<'_>) {
        let longest = self.max_frame;
        if self.waiting.iter().any(|packet| packet.is_segmented() || packet.len() > longest) {
            self.drop_too_long(ctx);
        }
    }

    #[cold]
    fn drop_too_long(&mut self, ctx: &mut Context<'_>) {
        let pool = self.pool;
        for packet in self.waiting.take() {
            if pool.total_len(&packet) > self.max_frame || pool.segment_count(&packet) > MAX_SEGMENTS {
                self.stats.counter(2).add(1);
                ctx.cache.free(packet);
            } else {
                self.waiting.push(packet);
            }
        }
    }

    /// The pool has no buffer to copy the first packet into. It waits, since what is in flight will set some free.
    #[cold]
    fn starved(&mut self, ctx: &mut Context<'_>) {
        self.stats.counter(4).add(1);
        if ctx.mover.ring(self.queue).in_flight() > 0 {
            self.stuck_since = None;
            return;
        }
        let now = tsc::now();
        if now.wrapping_sub(*self.stuck_since.get_or_insert(now)) > tsc::ticks(PATIENCE) {
            ctx.cache.free(self.waiting.remove(0));
            self.stats.counter(3).add(1);
        }
    }
}

impl RxQueue for CopyRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if !self.returned.is_empty() {
            hand_over(&mut self.returned, burst);
            return;
        }
        if ctx.mover.ring(self.queue).in_flight() > 0 {
            self.reap(ctx, burst);
        }
        let plan = ctx.mover.plan(self.queue);
        if self.waiting.is_empty() {
            let wanted = room(ctx, burst).min(plan.packets).min(plan.copies);
            if wanted == 0 {
                return;
            }
            let Context { mover, cache, clock, .. } = ctx;
            let mut inner = Context { mover, cache, clock, burst: wanted };
            self.inner.rx(&mut inner, &mut self.waiting);
            self.check_lengths(ctx);
            if self.waiting.is_empty() {
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
            if self.waiting.is_empty() {
                left = self.inner.drain(ctx, &mut self.waiting);
                self.check_lengths(ctx);
            }
            let plan = ctx.mover.plan(self.queue);
            if !self.waiting.is_empty() && plan.packets > 0 && !burst.is_full() {
                self.copy_waiting(ctx, plan, burst);
            }
        } else {
            hand_over(&mut self.returned, burst);
        }
        left + self.in_flight(ctx.mover)
    }

    fn arm(&mut self) -> Wake<'_> {
        match self.waiting.is_empty() && self.returned.is_empty() {
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

/// Moves packets, in order, as many as there is room for.
fn hand_over(from: &mut Burst, to: &mut Burst) {
    let packets = from.len().min(to.remaining_capacity());
    to.extend(from.drain(..packets));
}

#[cfg(test)]
mod tests;
