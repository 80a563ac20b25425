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
use offcore_dma::{Copy, Mover};
use offcore_mem::{BURST, Burst, Packet};
use offcore_ring::RingError;
use offcore_ring::split::device::{self, Buffer, Direction};
use offcore_stats::Stage;

use crate::cell::VringCell;
use crate::features::NET_HEADER;
use crate::vring::{Active, Chain, Context, LIST, MAX_PIECES, Taken, Vring, burst_limit};

/// What became of a burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Submitted {
    /// Packets taken over: in flight or already published.
    pub packets: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Packets dropped and freed because the guest's chains are too short for them.
    pub too_big: usize,
}

/// The worker's side of a virtqueue that the guest receives from.
#[derive(Debug)]
pub struct Enqueue {
    vring: Vring,
}

/// What stops a burst.
enum Stop {
    /// The packet in front cannot be delivered: drop it and go on.
    TooBig,
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
        let since = ctx.mover.reaping(vring.queue, ready);
        let Some(active) = vring.active.as_mut() else { return 0 };
        for i in 0..ready {
            let slot = &mut vring.slots[(first + i) & mask];
            for _ in 0..slot.chains {
                let chain = vring.chains.pop();
                active.queue.push_used(chain.head, chain.written);
            }
            if let Some(packet) = slot.packet.take() {
                ctx.cache.free(packet);
            }
        }
        active.publish();
        vring.left(ctx.mover, ready);
        ctx.mover.reaped(vring.queue, ready, since);
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

    /// Whether the front end has started and enabled the queue.
    #[inline(always)]
    pub fn enabled(&self) -> bool {
        self.vring.active.as_ref().is_some_and(|active| active.config.enabled)
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
        let Some(active) = active else { return Some(Stop::Full) };
        let ring = ctx.mover.ring(vring.queue);
        let mut gather = Gather::new(active, &mut vring.list, plan.copies.min(LIST));
        if let Err(error) = gather.look(wanted) {
            return Some(Stop::Broken(error));
        }
        let (first, mask) = (ring.next_slot(), ring.mask());
        let (mut taken, mut stop) = (0, None);
        for packet in &mut burst[..wanted] {
            let token = vring.queue.token(ring.next_slot());
            let before = gather.list.len();
            let chains = if NOW {
                gather.packet(packet, token, |queue, chain| queue.push_used(chain.head, chain.written))
            } else {
                gather.packet(packet, token, |_, chain| vring.chains.push(chain))
            };
            match chains {
                Ok(chains) => {
                    if !NOW {
                        let slot = ring.push(plan.outstanding(&gather.list[before..]));
                        vring.slots[slot].chains = chains;
                    }
                    taken += 1;
                    submitted.bytes += packet.len() as u64;
                }
                Err(why) => {
                    stop = Some(why);
                    break;
                }
            }
        }
        gather.finish();
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
            ctx.cache.free_all(burst.drain(..taken));
            ctx.mover.published(vring.queue, taken);
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
struct Gather<'a> {
    active: &'a mut Active,
    list: &'a mut ArrayVec<Copy, LIST>,
    /// Copies that fit.
    room: usize,
    /// Chains taken.
    ahead: u16,
    /// Chains there are.
    available: u16,
    heads: [u16; BURST],
    known: usize,
}

impl<'a> Gather<'a> {
    #[inline(always)]
    fn new(active: &'a mut Active, list: &'a mut ArrayVec<Copy, LIST>, room: usize) -> Self {
        list.clear();
        Self { active, list, room, ahead: 0, available: 0, heads: [0; BURST], known: 0 }
    }

    /// Reads the driver's index and the first heads, and fetches their descriptors ahead.
    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<(), RingError> {
        self.available = self.active.queue.available(wanted as u16)?;
        self.known = wanted.min(self.available.into());
        self.active.queue.heads(&mut self.heads[..self.known])?;
        self.active.queue.prefetch_used(self.known);
        Ok(())
    }

    /// The chains taken are gone.
    #[inline(always)]
    fn finish(self) {
        self.active.queue.consume(self.ahead);
    }

    #[inline(always)]
    fn head(&self, ahead: u16) -> Result<u16, RingError> {
        match self.heads[..self.known].get(usize::from(ahead)) {
            Some(&head) => Ok(head),
            None => self.active.queue.head(ahead),
        }
    }

    /// Adds the copies of one packet; `take` gets each of its chains, and their number is returned. On an error nothing
    /// is added or taken.
    #[inline(always)]
    fn packet(
        &mut self,
        packet: &mut Packet,
        token: Token,
        mut take: impl FnMut(&mut device::Queue, Chain),
    ) -> Result<u16, Stop> {
        if self.ahead == self.available {
            return Err(Stop::Full);
        }
        let total = (NET_HEADER + packet.len()) as u32;
        let head = self.head(self.ahead)?;
        let Active { config, queue, .. } = &mut *self.active;
        match queue.single(head, &config.memory, Direction::Writable)? {
            Some(Buffer { addr, len }) if len >= total => {
                if self.list.len() == self.room {
                    return Err(Stop::ListFull);
                }
                let src = write_header(packet, 1);
                self.list.push(Copy { src, dst: addr.as_ptr(), len: total, token });
                take(queue, Chain { head, written: total });
                self.ahead += 1;
                Ok(1)
            }
            _ => {
                let taken = self.packet_in_pieces(packet, token)?;
                for &chain in &taken {
                    take(&mut self.active.queue, chain);
                }
                Ok(taken.len() as u16)
            }
        }
    }

    /// A packet that takes several buffers: chains of several descriptors, or (with mergeable buffers) several chains.
    #[cold]
    fn packet_in_pieces(
        &mut self,
        packet: &mut Packet,
        token: Token,
    ) -> Result<ArrayVec<Chain, MAX_PIECES>, Stop> {
        let mut left = (NET_HEADER + packet.len()) as u32;
        let mut pieces: ArrayVec<Buffer, MAX_PIECES> = ArrayVec::new();
        let mut taken: ArrayVec<Chain, MAX_PIECES> = ArrayVec::new();
        while left > 0 {
            let ahead = self.ahead + taken.len() as u16;
            if ahead == self.available {
                // The index was only read for as many chains as there are packets.
                self.available = self.active.queue.available(ahead + 1)?;
                if ahead == self.available {
                    return Err(Stop::Full);
                }
            }
            if (!self.active.mergeable && !taken.is_empty()) || taken.is_full() {
                return Err(Stop::TooBig);
            }
            let head = self.head(ahead)?;
            let before = left;
            let Active { config, queue, .. } = &mut *self.active;
            queue.walk(head, &config.memory, Direction::Writable, MAX_PIECES, |buffer| {
                let len = buffer.len.min(left);
                if len > 0 && !pieces.is_full() {
                    pieces.push(Buffer { addr: buffer.addr, len });
                    left -= len;
                }
            })?;
            taken.push(Chain { head, written: before - left });
        }
        if self.list.len() + pieces.len() > self.room {
            return Err(Stop::ListFull);
        }
        let mut src = write_header(packet, taken.len() as u16);
        for Buffer { addr, len } in pieces {
            self.list.push(Copy { src, dst: addr.as_ptr(), len, token });
            src = src.wrapping_add(len as usize);
        }
        self.ahead += taken.len() as u16;
        Ok(taken)
    }
}

/// Builds the virtio-net header (virtio 1.2, section 5.1.6) in the headroom; returns where it starts. No offloads are
/// negotiated, so every field but `num_buffers` is zero.
#[inline(always)]
fn write_header(packet: &mut Packet, num_buffers: u16) -> *const u8 {
    let header = packet.headroom_mut(NET_HEADER);
    // copy-ok: the core builds the header
    header[..10].fill(0);
    // copy-ok: as above
    header[10..].copy_from_slice(&num_buffers.to_le_bytes());
    header.as_ptr()
}
