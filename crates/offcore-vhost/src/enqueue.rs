//! Enqueue: packets to the guest.
//!
//! 1. Available chains are taken apart and the copies of the burst gathered: virtio-net header, built in the headroom,
//!    and payload in one copy.
//! 2. The mover makes the copies, or hands them to a channel.
//! 3. Packets whose copies are all done are published in order, and their buffers come back.

use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_dma::channel::Token;
use offcore_dma::mover::Plan;
use offcore_dma::reorder::ReorderRing;
use offcore_dma::{Context, Copy, Mover, QueueId};
use offcore_mem::{Burst, Packet, Pool};
use offcore_ring::device::{Chain, DeviceQueue, Direction, Wanted};
use offcore_ring::{RingError, with_queue};
use offcore_stats::Stage;
use offcore_wire::virtio_net::{NetHeader, Offloads};

use crate::cell::VringCell;
use crate::cell::VringConfig;
use crate::features::NET_HEADER;
use crate::pieces::{self, Piece, pieces_of};
use crate::vring::{Active, Chains, InFlight, LIST, MAX_PIECES, Out, Taken, Vring, burst_limit};

/// What became of a burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submitted {
    /// Packets taken over: in flight or already published.
    pub packets: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Packets dropped and freed because the guest's chains are too short for them.
    pub too_big: usize,
    /// Packets dropped and freed because they ask for an offload that the guest did not agree to:
    /// [`Enqueue::offloads`] says to which it did.
    pub unwanted: usize,
}

/// The worker's side of a virtqueue that the guest receives from.
#[derive(Debug)]
pub struct Enqueue {
    pub(crate) vring: Vring,
}

/// What stops a burst.
enum Stop {
    /// The packet in front cannot be delivered: drop it and go on.
    TooBig,
    /// The packet in front asks for what the guest does not do: likewise.
    Unwanted,
    /// No chain, or no room for a packet more in flight: later.
    Full,
    /// No room for its copies in this list or channel: the next list begins with it.
    ListFull,
    /// The queue is broken.
    Broken(RingError),
}

impl From<RingError> for Stop {
    fn from(error: RingError) -> Self {
        Self::Broken(error)
    }
}

impl Enqueue {
    /// Takes the worker's side of `cell`, an even virtqueue.
    ///
    /// # Errors
    /// When another worker has it.
    pub fn attach(cell: &Arc<VringCell>, mover: &mut Mover) -> Result<Self, Taken> {
        Ok(Self { vring: Vring::attach(cell, mover)? })
    }

    /// `rte_vhost_submit_enqueue_burst`: takes packets from the front of `burst` and submits their copies. Packets for
    /// which the guest has no chains stay in `burst`; what the channels have no room for, the core copies. Packets that
    /// are complete at once are published and freed.
    #[inline]
    pub fn submit(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Submitted {
        let mut submitted = Submitted::default();
        if !self.vring.service(ctx.mover) || !self.enabled() {
            return submitted;
        }
        let mut by_core = false;
        while !burst.is_empty() {
            let queue = self.vring.queue;
            let plan = if by_core { ctx.mover.plan_by_core(queue) } else { ctx.mover.plan(queue) };
            let before = submitted.packets;
            let now = plan.by_core() && ctx.mover.ring(self.vring.queue).in_flight() == 0;
            let stop = if now {
                self.gather::<true>(ctx, plan, burst, &mut submitted)
            } else {
                self.gather::<false>(ctx, plan, burst, &mut submitted)
            };
            match stop {
                None => by_core = false,
                Some(Stop::Full) => break,
                // One packet alone has more copies than the channel has room for.
                Some(Stop::ListFull) => by_core = submitted.packets == before,
                Some(Stop::TooBig) => {
                    ctx.cache.free(burst.remove(0));
                    submitted.too_big += 1;
                }
                Some(Stop::Unwanted) => {
                    ctx.cache.free(burst.remove(0));
                    submitted.unwanted += 1;
                }
                Some(Stop::Broken(error)) => {
                    self.vring.break_down(error);
                    break;
                }
            }
        }
        submitted
    }

    /// `rte_vhost_poll_enqueue_completed`: publishes what has completed, in order, and frees the packets; returns their
    /// number.
    #[inline]
    pub fn poll_completed(&mut self, ctx: &mut Context<'_>) -> usize {
        let ring = ctx.mover.ring(self.vring.queue);
        let ready = ring.ready();
        if ready == 0 {
            if ring.in_flight() == 0 {
                // Lets a change that waited for this happen.
                self.vring.service(ctx.mover);
            }
            return 0;
        }
        let (first, mask) = (ring.oldest_slot(), ring.mask());
        let vring = &mut self.vring;
        let Some(active) = vring.active.as_mut() else { return 0 };
        with_queue!(&mut active.queue, queue => {
            for i in 0..ready {
                let slot = &mut vring.slots[(first + i) & mask];
                for _ in 0..slot.chains {
                    let Out { chain, written } = vring.chains.pop();
                    queue.push_used(chain, written);
                }
                if let Some(packet) = slot.packet.take() {
                    ctx.cache.free(packet);
                }
            }
        });
        active.publish();
        vring.left(ctx.mover, ready);
        ctx.mover.reaped(vring.queue);
        ctx.clock.lap(Stage::Publish);
        ready
    }

    /// `rte_vhost_async_get_inflight`: packets submitted and not yet published.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.vring.in_flight(mover)
    }

    /// Gives the virtqueue back once nothing is in flight; returns whether it did. Completed packets must be polled for
    /// meanwhile.
    pub fn close(&mut self, ctx: &mut Context<'_>) -> bool {
        self.vring.close(ctx.mover)
    }

    /// Whether the front end has started and enabled the queue, and not asked since for its end: what then stays in a
    /// burst is not late but lost.
    #[inline(always)]
    pub fn enabled(&self) -> bool {
        self.vring.is_enabled()
    }

    /// What packets may leave to the guest: [`Packet::set_offload`].
    pub fn offloads(&self) -> Offloads {
        self.vring.active.as_ref().map(|active| active.offloads).unwrap_or_default()
    }

    /// Gathers and submits one list of copies; says why it ended before the end of the burst. With `NOW` the core makes
    /// the copies and nothing older is in flight, so the packets are complete, published and freed at once.
    #[inline(always)]
    fn gather<const NOW: bool>(
        &mut self,
        ctx: &mut Context<'_>,
        mut plan: Plan,
        burst: &mut Burst,
        submitted: &mut Submitted,
    ) -> Option<Stop> {
        let wanted = burst_limit(burst.len()).min(plan.packets);
        let vring = &mut self.vring;
        let active = vring.active.as_mut().filter(|_| wanted > 0);
        let Some(Active { queue, config, mergeable, offloads }) = active else { return Some(Stop::Full) };
        let ring = ctx.mover.ring(vring.queue);
        let (first, mask) = (ring.next_slot(), ring.mask());
        let pool = ctx.cache.pool();
        vring.list.clear();
        let mut order = Order {
            id: vring.queue,
            ring,
            plan: &mut plan,
            slots: &mut vring.slots,
            chains: &mut vring.chains,
        };
        let (taken, stop) = with_queue!(queue, queue => {
            let mut gather = Gather {
                queue,
                config,
                mergeable: *mergeable,
                offloads: *offloads,
                pool,
                list: &mut vring.list,
                room: order.plan.copies.min(LIST),
                ahead: 0,
                known: 0,
            };
            gather.burst::<NOW>(&mut burst[..wanted], &mut order, submitted)
        });
        ctx.clock.lap(Stage::Virtqueue);
        if taken == 0 {
            return stop;
        }
        submitted.packets += taken;
        if !NOW {
            vring.entered(ctx.mover, taken);
        }
        // SAFETY: sources are packet buffers whose handles stay in `burst` during this call and go into `slots` below,
        // to come out when the packet is ready; destinations are ranges that the guest gave us for writing, checked
        // against its memory, which is held by `entered` until the packet is published, or by `active` when the copies
        // are complete at the end of this call.
        unsafe { ctx.mover.submit(vring.queue, plan, &vring.list, ctx.clock) };
        if NOW {
            if let Some(active) = vring.active.as_mut() {
                active.publish();
            }
            ctx.cache.free_front(burst, taken);
            ctx.clock.lap(Stage::Publish);
        } else {
            for (i, packet) in burst.drain(..taken).enumerate() {
                vring.slots[(first + i) & mask].packet = Some(packet);
            }
        }
        stop
    }
}

/// Takes chains apart and gathers the copies of one list.
struct Gather<'a, Q> {
    queue: &'a mut Q,
    config: &'a VringConfig,
    mergeable: bool,
    offloads: Offloads,
    pool: &'static Pool,
    list: &'a mut ArrayVec<Copy, LIST>,
    /// Copies that fit.
    room: usize,
    /// Entries taken.
    ahead: u16,
    /// Entries that are known to be available.
    known: u16,
}

/// Where packets stand that are not complete at once.
struct Order<'a> {
    id: QueueId,
    ring: &'a mut ReorderRing,
    plan: &'a mut Plan,
    slots: &'a mut [InFlight],
    chains: &'a mut Chains,
}

impl Order<'_> {
    /// The token of the next packet's copies.
    #[inline(always)]
    fn token(&self) -> Token {
        self.id.token(self.ring.next_slot())
    }

    /// Enters a packet that `copies` make and that takes `chains` chains.
    #[inline(always)]
    fn enter(&mut self, copies: &[Copy], chains: u16) {
        let slot = self.ring.push(self.plan.outstanding(copies));
        self.slots[slot].chains = chains;
    }
}

impl<Q: DeviceQueue> Gather<'_, Q> {
    /// Adds one packet after the other until one does not fit; how many did, and why it ended.
    #[inline(always)]
    fn burst<const NOW: bool>(
        &mut self,
        packets: &mut [Packet],
        order: &mut Order<'_>,
        submitted: &mut Submitted,
    ) -> (usize, Option<Stop>) {
        self.known = match self.queue.look(packets.len()) {
            Ok(known) => known as u16,
            Err(error) => return (0, Some(Stop::Broken(error))),
        };
        self.queue.prefetch_used(self.known.into());
        let mut taken = 0;
        let stop = loop {
            taken += self.singles::<NOW>(&mut packets[taken..], order, submitted);
            let Some(packet) = packets.get_mut(taken) else { break None };
            match self.packet::<NOW>(packet, order) {
                Ok(()) => {
                    taken += 1;
                    submitted.bytes += self.pool.total_len(packet) as u64;
                }
                Err(why) => break Some(why),
            }
        };
        self.queue.consume(self.ahead);
        (taken, stop)
    }

    /// Adds packets that each fit one chain of one buffer, nearly all, until one comes that does not; their number.
    #[inline(always)]
    fn singles<const NOW: bool>(
        &mut self,
        packets: &mut [Packet],
        order: &mut Order<'_>,
        submitted: &mut Submitted,
    ) -> usize {
        let Self { queue, config, list, ahead, room, offloads, .. } = self;
        let first = list.len();
        let most = packets.len().min(room.saturating_sub(first)).min(list.remaining_capacity());
        let wanted = Wanted { direction: Direction::Writable, least: NET_HEADER as u32, most: u32::MAX };
        let singles = queue.singles(*ahead, most as u16, &config.memory, wanted);
        // SAFETY: inside the vector's array, or where that ends.
        let mut copy = unsafe { list.as_mut_ptr().add(first) };
        let (mut run, mut bytes) = (0, 0);
        for (packet, to) in packets.iter_mut().zip(singles) {
            let len = (NET_HEADER + packet.len()) as u32;
            let plain = packet.is_plain();
            if to.len() < len || (!plain && (packet.is_segmented() || !is_wanted(packet, offloads))) {
                break;
            }
            let src = if plain {
                let header = packet.headroom_mut(NET_HEADER);
                // copy-ok: the header of an ordinary packet in one chain, which the core builds
                header.copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
                header.as_ptr()
            } else {
                write_header(packet, 1)
            };
            let token = if NOW { 0 } else { order.token() };
            let made = Copy { src, dst: to.addr().as_ptr(), len, token };
            // SAFETY: no more singles than there is room for were asked for.
            unsafe {
                copy.write(made);
                copy = copy.add(1);
            }
            if NOW {
                to.set_written(len);
            } else {
                order.enter(std::slice::from_ref(&made), 1);
                order.chains.push(Out { chain: Chain::one(to.id()), written: len });
            }
            bytes += u64::from(len);
            run += 1;
        }
        // SAFETY: so many more were just written.
        unsafe { list.set_len(first + run) };
        if NOW {
            queue.push_used_singles(*ahead, run as u16, Direction::Writable);
        }
        *ahead += run as u16;
        submitted.bytes += bytes - (NET_HEADER * run) as u64;
        run
    }

    /// Adds any packet, whatever chains it takes. On an error nothing is added or taken.
    #[cold]
    fn packet<const NOW: bool>(&mut self, packet: &mut Packet, order: &mut Order<'_>) -> Result<(), Stop> {
        if self.ahead >= self.known && !self.queue.has(self.ahead)? {
            return Err(Stop::Full);
        }
        if packet.has_offload() && !is_wanted(packet, &self.offloads) {
            return Err(Stop::Unwanted);
        }
        let first = self.list.len();
        let taken = self.packet_in_pieces(packet, order.token())?;
        for &out in &taken {
            if NOW {
                self.queue.push_used(out.chain, out.written);
            } else {
                order.chains.push(out);
            }
        }
        if !NOW {
            order.enter(&self.list[first..], taken.len() as u16);
        }
        Ok(())
    }

    /// A packet that takes several buffers: chains of several descriptors, or (with mergeable buffers) several chains.
    fn packet_in_pieces(
        &mut self,
        packet: &mut Packet,
        token: Token,
    ) -> Result<ArrayVec<Out, MAX_PIECES>, Stop> {
        if packet.is_segmented() && self.pool.segment_count(packet) > MAX_PIECES {
            return Err(Stop::TooBig);
        }
        let from = pieces_of(self.pool, packet);
        let mut left = from.iter().map(|piece| piece.len).sum::<u32>();
        let mut to: ArrayVec<Piece, MAX_PIECES> = ArrayVec::new();
        let mut taken: ArrayVec<Out, MAX_PIECES> = ArrayVec::new();
        // Of all chains together: who offers many empty buffers has the packet dropped, and nobody waits for it meanwhile.
        let mut most = MAX_PIECES;
        let mut ahead = self.ahead;
        while left > 0 {
            // Only as many entries were looked at as there are packets.
            if ahead >= self.known && !self.queue.has(ahead)? {
                return Err(Stop::Full);
            }
            if (!self.mergeable && !taken.is_empty()) || to.is_full() || most == 0 {
                return Err(Stop::TooBig);
            }
            let before = left;
            let memory = &self.config.memory;
            let walked = self.queue.walk(ahead, memory, Direction::Writable, &mut most, |buffer| {
                let len = buffer.len.min(left);
                if len > 0 && !to.is_full() {
                    to.push(Piece { addr: buffer.addr.as_ptr(), len });
                    left -= len;
                }
            });
            let chain = match walked {
                Err(RingError::TooManyBuffers { .. }) if !taken.is_empty() => return Err(Stop::TooBig),
                walked => walked?,
            };
            taken.push(Out { chain, written: before - left });
            ahead += chain.entries;
        }
        if self.list.len() + from.len() + to.len() - 1 > self.room {
            return Err(Stop::ListFull);
        }
        write_header(packet, taken.len() as u16);
        let list = &mut *self.list;
        pieces::copies(&from, &to, token, |copy| list.push(copy));
        self.ahead = ahead;
        Ok(taken)
    }
}

/// Whether the guest still takes what a packet asks for: it may have changed its mind since the packet was made ready.
#[inline(always)]
fn is_wanted(packet: &Packet, offloads: &Offloads) -> bool {
    let header = packet.headroom_bytes(NET_HEADER).first_chunk().map(NetHeader::from_bytes);
    header.is_some_and(|header| offloads.allows(&header))
}

/// Builds the virtio-net header (virtio 1.2, section 5.1.6) in the headroom; returns where it starts. That of a packet
/// which asks for something is there already, all but `num_buffers`.
#[inline(always)]
fn write_header(packet: &mut Packet, num_buffers: u16) -> *const u8 {
    let asks = packet.has_offload();
    let header = packet.headroom_mut(NET_HEADER);
    if !asks {
        // copy-ok: the core builds the header
        header[..10].fill(0);
    }
    // copy-ok: as above
    header[10..].copy_from_slice(&num_buffers.to_le_bytes());
    header.as_ptr()
}
