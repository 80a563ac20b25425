//! Dequeue: packets from the guest.
//!
//! 1. Available chains are walked, and the copies of the burst are gathered. Each copy writes the virtio-net header and
//!    the payload to the start of a packet buffer's data. The header and the Ethernet addresses then share one cache
//!    line. When the core forwards a packet, it touches no other line of it.
//! 2. The mover makes the copies, or hands them to a channel.
//! 3. Chains whose copies are all done are returned to the guest in order. The header is read from the copy.

mod backlog;
mod gather;
pub(crate) mod headers;

use std::sync::Arc;
use std::time::Duration;

use offcore_dma::{Batch, Begun, Context, Mover};
use offcore_mem::{BURST, Burst};
use offcore_ring::device::{DeviceQueue, Direction};
use offcore_ring::{RingError, prefetch, with_queue};
use offcore_stats::{Stage, tsc};
use offcore_wire::ethernet;

use crate::cell::{VringCell, VringConfig};
use crate::features::NET_HEADER;
use crate::pieces::MAX_PIECES;
use crate::room::Allowance;
use crate::vring::{Active, InFlight, QueueBurst, Taken, Vring, burst_limit};
use backlog::Backlog;
use gather::{DequeueGather, Gathered, start_of};
use headers::{check_copies, check_headers};

/// Maximum length of a frame in bytes: a packet of 64 KiB for segmentation, with Ethernet header and two VLAN tags.
pub(crate) const MAX_FRAME: usize = 65_535 + ethernet::HEADER_LEN + 8;

/// Minimum length of a chain in bytes: the virtio-net and Ethernet headers.
const SHORTEST: usize = NET_HEADER + ethernet::HEADER_LEN;

/// How long a started queue may be disabled before the packets that the guest transmits are discarded.
const GRACE: Duration = Duration::from_millis(500);

pub use crate::vring::Arm;

/// Counters of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dequeued {
    /// Packets appended to the burst.
    pub packets: usize,
    pub bytes: u64,
    /// Chains returned to the guest without a packet because they are longer than any packet.
    pub too_big: usize,
    /// Chains returned because they are too short, or because their header requests an offload that was not negotiated.
    pub malformed: usize,
    /// Chains returned because the front end has started the queue but not enabled it.
    pub discarded: usize,
    /// Whether the pool had no free packet buffer. The guest's chains then wait.
    pub starved: bool,
}

/// The worker's side of a virtqueue that the guest transmits to.
#[derive(Debug)]
pub struct Dequeue {
    pub(crate) vring: Vring,
    /// Packets that were received, but exceed the amount of work allowed for one call.
    backlog: Backlog,
    /// The publication that disabled the started queue, and the TSC value when this was noticed.
    disabled_since: Option<(u32, u64)>,
}

impl Dequeue {
    /// Attaches to `cell`, which must be an odd virtqueue, as its worker.
    ///
    /// # Errors
    /// Fails if another worker is attached.
    pub fn attach(cell: &Arc<VringCell>, mover: &mut Mover) -> Result<Self, Taken> {
        Ok(Self { vring: Vring::attach(cell, mover)?, backlog: Backlog::default(), disabled_since: None })
    }

    /// `rte_vhost_async_try_dequeue_burst`: appends completed packets to `burst`, and submits the copies of newly
    /// available chains. Packets that cause a lot of work are spread over several calls.
    #[inline]
    pub fn try_dequeue(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Dequeued {
        let mut dequeued = Dequeued::default();
        if !self.backlog.is_empty() {
            self.deliver_backlog(ctx, burst, &mut dequeued);
            return dequeued;
        }
        if self.vring.in_flight(ctx.mover) > 0 {
            self.reap(ctx, burst, &mut dequeued);
            // A stop is acknowledged only after all packets were delivered, so that the next front end gets no packets
            // of the previous one.
            if !self.backlog.is_empty() || dequeued.packets > 0 && self.vring.is_changing() {
                return dequeued;
            }
        }
        if !self.vring.service(ctx.mover) {
            return dequeued;
        }
        if !self.vring.is_enabled() {
            self.wait_or_discard(&mut dequeued);
            return dequeued;
        }
        if let Err(error) = self.submit_some(ctx, burst, &mut dequeued) {
            self.vring.break_down(error);
        }
        dequeued
    }

    /// `rte_vhost_async_get_inflight`: returns the number of packets submitted and not yet returned.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.vring.in_flight(mover) + self.backlog.len()
    }

    /// Appends completed packets to `burst` without submitting new copies, for `rte_vhost_clear_queue`. Changes by the
    /// front end take effect once nothing is left.
    pub fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Dequeued {
        let mut dequeued = Dequeued::default();
        match self.backlog.is_empty() {
            true => self.reap(ctx, burst, &mut dequeued),
            false => self.deliver_backlog(ctx, burst, &mut dequeued),
        }
        if dequeued.packets == 0 {
            self.vring.service(ctx.mover);
        }
        dequeued
    }

    /// Delivers packets that were received earlier.
    #[cold]
    fn deliver_backlog(&mut self, ctx: &Context<'_>, burst: &mut Burst, dequeued: &mut Dequeued) {
        self.backlog.deliver_backlog(ctx.burst, burst, ctx.cache.pool(), dequeued);
    }

    /// Prepares to sleep: asks the guest to kick when it transmits, and then checks once more for chains.
    pub fn arm(&mut self) -> Arm<'_> {
        if self.vring.is_changing() || !self.backlog.is_empty() {
            return Arm::Now;
        }
        let broken = self.vring.is_broken();
        match self.vring.active.as_mut().filter(|active| active.config.enabled) {
            Some(active) if !broken => active.arm(),
            _ => Arm::Never,
        }
    }

    /// Asks the guest to stop kicking. Call this after a sleep.
    pub fn disarm(&mut self) {
        if let Some(active) = &mut self.vring.active {
            active.disarm();
        }
    }

    /// Submits the copies of newly available chains.
    #[inline]
    fn submit_some(
        &mut self,
        ctx: &mut Context<'_>,
        burst: &mut Burst,
        dequeued: &mut Dequeued,
    ) -> Result<(), RingError> {
        let Self { vring: Vring { copies, active, chains, cell, .. }, backlog, .. } = self;
        let Some(active) = active.as_mut() else { return Ok(()) };
        let Context { mover, cache, clock, burst: most } = &mut *ctx;
        let (most, already) = (*most, dequeued.packets);
        let mut call = QueueBurst { active, cell, chains, cache, clock, burst, done: dequeued };
        let mut plan = copies.plan(mover);
        if !plan.by_core() {
            let wanted = burst_limit(most).min(plan.copies);
            if let Begun::Queued(batch) = copies.begin(mover, &mut plan)
                && call.submit(batch, wanted, backlog)? == Gathered::Some
            {
                return Ok(());
            }
            // The first chain alone has more copies than the channel has room for.
            plan = copies.plan_by_core(mover);
        }
        let room = call.burst.remaining_capacity().min(most.saturating_sub(already));
        match copies.begin(mover, &mut plan) {
            Begun::Immediate(batch) => call.submit(batch, room, backlog).map(drop),
            Begun::Queued(batch) => {
                let result = call.submit(batch, room, backlog);
                self.reap(ctx, burst, dequeued);
                result.map(drop)
            }
        }
    }

    /// Publishes completed packets in order and moves them to `burst`.
    #[inline]
    fn reap(&mut self, ctx: &mut Context<'_>, burst: &mut Burst, dequeued: &mut Dequeued) {
        let Self { vring: Vring { copies, active, chains, cell, .. }, backlog, .. } = self;
        let mut ready = copies.ready(ctx.mover);
        let done = ready.len();
        let packets = done.min(burst.remaining_capacity()).min(ctx.burst);
        if packets == 0 {
            return;
        }
        let Some(active) = active.as_mut() else { return };
        let offloads = active.offloads;
        // Packets of the next call are prefetched as well: the engine's cache lines arrive while this burst is
        // processed.
        for index in packets..done.min(packets + ctx.burst) {
            if let Some(packet) = &ready.holder(index).packet {
                prefetch::write(start_of(packet));
            }
        }
        let first_new = burst.len();
        with_queue!(&mut active.queue, queue => {
            for index in 0..packets {
                if let Some(packet) = ready.holder(index).packet.take() {
                    prefetch::write(start_of(&packet));
                    burst.push(packet);
                }
                queue.push_used(chains.pop().chain, 0);
            }
        });
        active.publish();
        let left = ready.retire(packets);
        active.hold(cell, left);
        ctx.clock.lap(Stage::Publish);
        check_headers(burst, first_new, offloads, ctx.cache, dequeued, backlog);
        ctx.clock.lap(Stage::Header);
    }

    /// Handles a disabled queue. The vhost-user specification requires that a disabled TX ring is drained and its
    /// packets are discarded. A ring is also disabled for a moment while it is started, and packets in it are then not
    /// lost.
    #[cold]
    fn wait_or_discard(&mut self, dequeued: &mut Dequeued) {
        let (now, applied) = (tsc::now(), self.vring.applied);
        match self.disabled_since {
            // Enabling or restarting the queue would have been another publication.
            Some((publication, since)) if publication == applied => {
                if now.wrapping_sub(since) > tsc::ticks(GRACE) {
                    self.discard(dequeued);
                }
            }
            _ => self.disabled_since = Some((applied, now)),
        }
    }

    /// Returns available chains of a disabled queue unread.
    #[cold]
    fn discard(&mut self, dequeued: &mut Dequeued) {
        let Some(active) = self.vring.active.as_mut() else { return };
        let (chains, result) = with_queue!(&mut active.queue, queue => discard(queue, &active.config));
        if chains > 0 {
            active.publish();
            dequeued.discarded += chains;
        }
        if let Err(error) = result {
            self.vring.break_down(error);
        }
    }
}

impl QueueBurst<'_, Dequeued> {
    /// Gathers and submits at most `wanted` packets. If their copies are immediate, also publishes them.
    ///
    /// # Errors
    /// Fails if the driver violates the virtio specification. Chains before the invalid one are submitted.
    #[inline(always)]
    fn submit<const IMMEDIATE: bool>(
        &mut self,
        mut batch: Batch<'_, InFlight, IMMEDIATE>,
        wanted: usize,
        backlog: &mut Backlog,
    ) -> Result<Gathered, RingError> {
        let Self { active, cell, chains, cache, clock, burst, done: dequeued } = self;
        let Active { queue, config, offloads, .. } = &mut **active;
        let offloads = *offloads;
        let first_new = burst.len();
        let wanted = wanted.min(batch.packets());
        let allowance = Allowance::new();
        let gather = DequeueGather { config, batch: &mut batch, cache, burst, chains, dequeued, allowance };
        let (taken, result) = with_queue!(queue, queue => gather.burst(queue, wanted));
        if taken == 0 {
            return result;
        }
        clock.lap(Stage::Virtqueue);
        if !IMMEDIATE {
            active.hold(cell, batch.in_flight());
        }
        // SAFETY: sources are readable ranges of the guest, checked against its memory. `hold` keeps the memory until
        // the chain is published; if the copies complete within this call, `active` keeps it. Destinations are packet
        // buffers that the holders own, or packets in `burst`, which are not read before the call returns.
        let list = unsafe { batch.submit(clock) };
        if IMMEDIATE {
            active.publish();
            clock.lap(Stage::Publish);
            if list.len() == burst.len() - first_new {
                // SAFETY: each packet is one copy, which has just been made into its buffer, headers included.
                unsafe { check_copies(list, burst, first_new, offloads, cache, dequeued, backlog) };
            } else {
                check_headers(burst, first_new, offloads, cache, dequeued, backlog);
            }
            clock.lap(Stage::Header);
        }
        result
    }
}

/// Takes a burst of chains and returns them unread. Returns their number, and an error if the driver violated the
/// virtio specification after them.
#[cold]
fn discard<Q: DeviceQueue>(queue: &mut Q, config: &VringConfig) -> (usize, Result<(), RingError>) {
    let known = match queue.look(BURST) {
        Ok(known) => known as u16,
        Err(error) => return (0, Err(error)),
    };
    let (mut ahead, mut chains, mut result) = (0, 0, Ok(()));
    while ahead < known {
        match queue.walk(ahead, &config.memory, Direction::Readable, &mut { MAX_PIECES }, |_| ()) {
            Ok(chain) => {
                queue.push_used(chain, 0);
                ahead += chain.entries;
                chains += 1;
            }
            Err(error) => {
                result = Err(error);
                break;
            }
        }
    }
    queue.consume(ahead);
    (chains, result)
}
