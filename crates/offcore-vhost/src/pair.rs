//! Forwarding between two guests in one copy: payload moves from the sender's buffers straight into the receiver's.
//!
//! 1. The chains of both virtqueues are walked. The head of each packet (virtio-net header and first bytes of the
//!    frame) is read once into a private *snapshot*, which is checked and rewritten. All decisions are based on the
//!    snapshot. Whatever the sender writes into its buffers afterwards changes only its own payload.
//! 2. The mover copies the bytes behind the head, or hands the copies to a channel.
//! 3. Once the copies of a packet and of all packets before it are done, the core writes the snapshot in front of the
//!    payload and returns the chains of both guests.
//!
//! The ordinary path through a packet buffer is used for packets that need work on their payload (a checksum,
//! segmentation) and for packets with an unusual layout. It is also used for all packets while the receiver has no
//! buffers (the sender does not wait for it), while the receiver migrates, and for a while after copies were late. A
//! pair switches paths only when nothing is in flight on the other path. This keeps the order of packets and of both
//! rings.

mod gather;
mod head;

use std::time::Duration;

use offcore_dma::{Batch, Begun, Binding, Context, CopyQueue, Mode, Mover};
use offcore_ring::device::DeviceQueue;
use offcore_ring::{RingError, prefetch, with_queue};
use offcore_stats::{Stage, StageClock, tsc};

use crate::dequeue::Dequeue;
use crate::enqueue::Enqueue;
use crate::features::NET_HEADER;
use crate::room::Allowance;
use crate::vring::{Chains, Out, Vring, burst_limit};
use gather::{End, PairGather};
use head::Head;

/// Maximum number of packets of a pair in flight.
const IN_FLIGHT: usize = 256;
/// Maximum age of the oldest packet in flight. If it is exceeded, the pair uses the ordinary path for [`REST`].
const TIMEOUT: Duration = Duration::from_millis(100);
/// How long the ordinary path is used after copies were late.
const REST: Duration = Duration::from_secs(1);

/// Counters of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Forwarded {
    pub packets: usize,
    pub bytes: u64,
    /// Chains returned to the sender because they are longer than any packet.
    pub too_long: usize,
    /// Chains returned to the sender because they are too short, or because their header requests an offload that was
    /// not negotiated.
    pub malformed: usize,
    /// Packets that do not fit into the receiver's chains.
    pub too_big: usize,
    pub too_big_bytes: u64,
    pub next: Next,
}

/// The next step for the caller after [`Pair::forward`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Next {
    /// Nothing: packets use this path, or wait until they can use the other one.
    #[default]
    Nothing,
    /// Call [`Dequeue::try_dequeue`] and [`Enqueue::submit`]: packets use the ordinary path.
    Ordinary,
    /// Call [`Dequeue::drain`] and [`Enqueue::submit`]: deliver the packets on the ordinary path, and take no new ones.
    Finish,
}

/// The single-copy path from one virtqueue to another.
#[derive(Debug)]
pub struct Pair {
    copies: CopyQueue<Head>,
    /// The receiver's chains of packets that use several chains, in order.
    chains: Chains,
    binding: Binding,
    /// The publications of sender and receiver that this pair has applied.
    follows: Option<(u32, u32)>,
    /// The oldest packet in flight at the last check, and the TSC value when it was first seen.
    watched: Option<(u32, u64)>,
    /// TSC value until which the ordinary path is used.
    suspended_until: Option<u64>,
    /// Whether the next packet must use the ordinary path.
    next_is_ordinary: bool,
}

impl Pair {
    /// Creates a pair whose copies `mover` makes.
    pub fn new(mover: &mut Mover) -> Self {
        Self {
            copies: CopyQueue::open(mover, IN_FLIGHT),
            chains: Chains::new(1),
            binding: Binding::core(),
            follows: None,
            watched: None,
            suspended_until: None,
            next_is_ordinary: false,
        }
    }

    /// Publishes completed packets, and submits the copies of newly available packets. `rewrite` gets the head of each
    /// packet: at least the Ethernet header, and not more than the first 64 bytes, virtio-net header included.
    #[inline]
    pub fn forward(
        &mut self,
        ctx: &mut Context<'_>,
        from: &mut Dequeue,
        to: &mut Enqueue,
        rewrite: impl FnMut(&mut [u8]),
    ) -> Forwarded {
        let mut forwarded = Forwarded::default();
        if from.vring.lent > 0 {
            self.complete(ctx, &mut from.vring, &mut to.vring, &mut forwarded);
        }
        if !self.is_path_usable(ctx.mover, &mut from.vring, &mut to.vring) {
            if from.vring.lent == 0 {
                self.next_is_ordinary = false;
                forwarded.next = Next::Ordinary;
            }
        } else if from.in_flight(ctx.mover) > 0 || to.vring.in_flight(ctx.mover) > 0 {
            forwarded.next = Next::Finish;
        } else {
            self.take(ctx, &mut from.vring, &mut to.vring, rewrite, &mut forwarded);
        }
        forwarded
    }

    /// Publishes completed packets and takes no new ones. Returns the number of packets still in flight.
    pub fn drain(
        &mut self,
        ctx: &mut Context<'_>,
        from: &mut Dequeue,
        to: &mut Enqueue,
    ) -> (Forwarded, usize) {
        let mut forwarded = Forwarded::default();
        if from.vring.lent > 0 {
            self.complete(ctx, &mut from.vring, &mut to.vring, &mut forwarded);
        }
        (forwarded, from.vring.lent)
    }

    /// Returns whether packets may use this path once nothing is in flight on the other one. Applies changes published
    /// in the cells of both virtqueues.
    #[inline(always)]
    fn is_path_usable(&mut self, mover: &mut Mover, from: &mut Vring, to: &mut Vring) -> bool {
        // Both are always called, so that changes of either cell are picked up.
        let serviced = from.service(mover) & to.service(mover);
        serviced
            && from.is_enabled()
            && to.is_enabled()
            && !self.next_is_ordinary
            && !to.is_logged()
            && !self.rests()
            && self.is_up_to_date(mover, from, to)
    }

    #[inline(always)]
    fn rests(&mut self) -> bool {
        self.suspended_until.is_some_and(|until| {
            let over = tsc::now() >= until;
            if over {
                self.suspended_until = None;
            }
            !over
        })
    }

    /// Makes sure that the pair uses the current channels of both virtqueues.
    #[inline(always)]
    fn is_up_to_date(&mut self, mover: &mut Mover, from: &Vring, to: &Vring) -> bool {
        self.follows == Some((from.applied, to.applied)) || self.follow(mover, from, to)
    }

    #[cold]
    fn follow(&mut self, mover: &mut Mover, from: &Vring, to: &Vring) -> bool {
        let Some(receiver) = &to.active else { return false };
        // Changes are applied only when nothing is in flight.
        self.chains = Chains::new(receiver.queue.size().into());
        let mut channels: Vec<_> = to.binding.channels.clone();
        channels
            .extend(from.binding.channels.iter().filter(|channel| !to.binding.channels.contains(channel)));
        channels.truncate(offcore_dma::mover::MAX_CHANNELS_PER_QUEUE);
        let mode = if to.binding.mode == Mode::Cpu { from.binding.mode } else { to.binding.mode };
        let weight = to.binding.weight.max(from.binding.weight);
        let binding = Binding { weight, ..Binding::new(mode, channels) };
        // Rebinding resets mode `auto`, so it is avoided if the binding is the same.
        if binding != self.binding {
            let bound = self.copies.bind(mover, &binding);
            debug_assert!(bound.is_ok(), "the virtqueues are bound to them");
            if bound.is_err() {
                return false;
            }
            self.binding = binding;
        }
        self.follows = Some((from.applied, to.applied));
        true
    }

    /// Takes newly available packets and submits their copies.
    #[inline(always)]
    fn take(
        &mut self,
        ctx: &mut Context<'_>,
        from: &mut Vring,
        to: &mut Vring,
        mut rewrite: impl FnMut(&mut [u8]),
        forwarded: &mut Forwarded,
    ) {
        let mut plan = self.copies.plan(ctx.mover);
        let end = loop {
            let wanted = burst_limit(ctx.burst);
            let mut call = PairBurst { from, to, chains: &mut self.chains, clock: ctx.clock, forwarded };
            let (taken, end) = match self.copies.begin(ctx.mover, &mut plan) {
                Begun::Immediate(batch) => call.submit(batch, wanted, &mut rewrite),
                Begun::Queued(batch) => call.submit(batch, wanted, &mut rewrite),
            };
            if !matches!(end, End::NoRoom) || taken > 0 || plan.by_core() {
                break end;
            }
            // The first packet alone has more copies than the channel has room for.
            plan = self.copies.plan_by_core(ctx.mover);
        };
        match end {
            End::Done | End::NoRoom => {}
            End::Ordinary => {
                self.next_is_ordinary = from.lent > 0;
                forwarded.next = if from.lent == 0 { Next::Ordinary } else { Next::Nothing };
            }
            End::Sender(error) => self.break_down(from, error),
            End::Receiver(error) => self.break_down(to, error),
        }
    }

    #[cold]
    fn break_down(&mut self, vring: &mut Vring, error: RingError) {
        vring.break_down(error);
    }

    /// Publishes completed packets: writes their heads and returns their chains.
    #[inline(always)]
    fn complete(
        &mut self,
        ctx: &mut Context<'_>,
        from: &mut Vring,
        to: &mut Vring,
        forwarded: &mut Forwarded,
    ) {
        let Self { copies, chains, .. } = self;
        let mut ready = copies.ready(ctx.mover);
        let packets = ready.len();
        if packets == 0 {
            let oldest = ready.oldest();
            return self.watch(oldest);
        }
        self.watched = None;
        for index in 0..packets {
            prefetch::write(ready.holder(index).place());
        }
        let (Some(sender), Some(receiver)) = (&mut from.active, &mut to.active) else { return };
        with_queue!(&mut sender.queue, tx => with_queue!(&mut receiver.queue, rx => {
            for index in 0..packets {
                let head = ready.holder(index);
                tx.push_used(head.from, 0);
                if head.chains == 0 {
                    continue;
                }
                // SAFETY: the receiver's memory is held until `give_back` below, and the places of the head are within
                // it.
                unsafe { head.write() };
                if head.chains == 1 {
                    rx.push_used(head.to, head.frame + NET_HEADER as u32);
                } else {
                    for _ in 0..head.chains {
                        let Out { chain, written } = chains.pop();
                        rx.push_used(chain, written);
                    }
                }
                forwarded.packets += 1;
                forwarded.bytes += u64::from(head.frame);
            }
        }));
        receiver.publish();
        sender.publish();
        from.give_back(packets);
        to.give_back(packets);
        ready.retire(packets);
        ctx.clock.lap(Stage::Publish);
    }

    /// Checks whether the oldest packet in flight takes too long.
    #[cold]
    fn watch(&mut self, oldest: u32) {
        let now = tsc::now();
        match self.watched {
            Some((watched, since)) if watched == oldest => {
                if now.wrapping_sub(since) > tsc::ticks(TIMEOUT) {
                    self.suspended_until = Some(now + tsc::ticks(REST));
                }
            }
            _ => self.watched = Some((oldest, now)),
        }
    }
}

/// Everything that one call needs to take packets.
struct PairBurst<'a> {
    from: &'a mut Vring,
    to: &'a mut Vring,
    chains: &'a mut Chains,
    clock: &'a mut StageClock,
    forwarded: &'a mut Forwarded,
}

impl PairBurst<'_> {
    /// Gathers and submits at most `wanted` packets. If their copies are immediate, also publishes them. Returns the
    /// number of packets and why the batch ended.
    #[inline(always)]
    fn submit<const IMMEDIATE: bool>(
        &mut self,
        mut batch: Batch<'_, Head, IMMEDIATE>,
        wanted: usize,
        rewrite: &mut impl FnMut(&mut [u8]),
    ) -> (usize, End) {
        let Self { from, to, chains, clock, forwarded } = self;
        let (Some(sender), Some(receiver)) = (&mut from.active, &mut to.active) else {
            return (0, End::Done);
        };
        let wanted = wanted.min(batch.packets());
        let mut gather = PairGather {
            batch: &mut batch,
            chains,
            sender: &sender.config,
            receiver: &receiver.config,
            asks: sender.offloads,
            accepts: receiver.offloads,
            mergeable: receiver.mergeable,
            room: &mut receiver.room,
            allowance: Allowance::new(),
            forwarded,
        };
        let (taken, end) = with_queue!(&mut sender.queue, tx => with_queue!(&mut receiver.queue, rx =>
            gather.burst(tx, rx, wanted, rewrite)));
        if taken == 0 {
            return (0, end);
        }
        clock.lap(Stage::Virtqueue);
        if IMMEDIATE {
            for index in 0..taken {
                // SAFETY: `active` holds the receiver's memory, and the places of the head are within it.
                unsafe { batch.holder(index).write() };
            }
        } else {
            from.lend(taken);
            to.lend(taken);
        }
        // SAFETY: sources are readable ranges of the sender and destinations are writable ranges of the receiver. Each
        // was checked against its guest's memory. `lend` holds the memory until the packet is published; if the copies
        // complete within this call, `active` holds it.
        unsafe { batch.submit(clock) };
        if IMMEDIATE {
            let (Some(sender), Some(receiver)) = (&mut from.active, &mut to.active) else {
                return (taken, end);
            };
            receiver.publish();
            sender.publish();
            clock.lap(Stage::Publish);
        }
        (taken, end)
    }
}
