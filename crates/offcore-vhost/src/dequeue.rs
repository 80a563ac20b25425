//! Dequeue: packets from the guest.
//!
//! 1. Available chains are taken apart and the copies of the burst gathered: each goes, virtio-net header and payload
//!    together, into a packet buffer so that the header lands in its headroom.
//! 2. The mover makes the copies, or hands them to a channel.
//! 3. Chains whose copies are all done go back to the guest in order; the header is read from the copy.

use std::sync::Arc;

use offcore_dma::{Copy, Mover};
use offcore_mem::{BURST, Burst, HEADROOM, Packet};
use offcore_ring::RingError;
use offcore_ring::prefetch;
use offcore_ring::split::device::{Buffer, Direction};
use offcore_stats::Stage;
use offcore_wire::{ethernet, virtio_net};

use crate::cell::VringCell;
use crate::features::NET_HEADER;
use crate::vring::{Active, Chain, Context, LIST, MAX_PIECES, Taken, Vring, burst_limit};

/// What became of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Dequeued {
    /// Packets appended to the burst.
    pub packets: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Chains returned to the guest without a packet: longer than a packet buffer.
    pub too_big: usize,
    /// Likewise: too short, or with a header that asks for what was not negotiated.
    pub malformed: usize,
    /// Whether the pool had no free packet buffer: the guest's chains wait.
    pub starved: bool,
}

/// The worker's side of a virtqueue that the guest transmits to.
#[derive(Debug)]
pub struct Dequeue {
    vring: Vring,
}

impl Dequeue {
    /// Takes the worker's side of `cell`, an odd virtqueue.
    ///
    /// # Errors
    /// When another worker has it.
    pub fn attach(cell: &Arc<VringCell>, mover: &mut Mover) -> Result<Self, Taken> {
        Ok(Self { vring: Vring::attach(cell, mover)? })
    }

    /// `rte_vhost_async_try_dequeue_burst`: returns in `burst` what has completed, and submits the copies of newly
    /// available chains.
    #[inline]
    pub fn try_dequeue(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Dequeued {
        let mut dequeued = Dequeued::default();
        if ctx.mover.ring(self.vring.queue).in_flight() > 0 {
            self.reap(ctx, burst, &mut dequeued);
        }
        if !self.vring.service(ctx.mover) {
            return dequeued;
        }
        if !self.vring.active.as_ref().is_some_and(|active| active.config.enabled) {
            // The specification of vhost-user asks for this: a disabled TX ring is drained and discarded.
            self.discard(&mut dequeued);
            return dequeued;
        }
        let room = burst.remaining_capacity().min(ctx.burst.saturating_sub(dequeued.packets));
        let by_core = match self.submit_some(ctx, room, &mut dequeued) {
            Ok(by_core) => by_core,
            Err(error) => {
                self.vring.break_down(error);
                return dequeued;
            }
        };
        if by_core {
            self.reap(ctx, burst, &mut dequeued);
        }
        dequeued
    }

    /// `rte_vhost_async_get_inflight`: packets submitted and not yet returned.
    pub fn in_flight(&self, mover: &mut Mover) -> usize {
        self.vring.in_flight(mover)
    }

    /// Returns in `burst` what has completed and submits nothing: for `rte_vhost_clear_queue`, and before
    /// [`Dequeue::close`].
    pub fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> Dequeued {
        let mut dequeued = Dequeued::default();
        self.reap(ctx, burst, &mut dequeued);
        dequeued
    }

    /// Gives the virtqueue back once nothing is in flight; returns whether it did.
    pub fn close(&mut self, ctx: &mut Context<'_>) -> bool {
        self.vring.close(ctx.mover)
    }

    /// Gathers and submits one list; returns whether the core copied it.
    #[inline]
    fn submit_some(
        &mut self,
        ctx: &mut Context<'_>,
        room: usize,
        dequeued: &mut Dequeued,
    ) -> Result<bool, RingError> {
        let plan = ctx.mover.plan(self.vring.queue);
        // Copies of the core are returned by this call, so the burst must have room for them.
        let wanted = if plan.by_core() { room } else { ctx.burst };
        let wanted = burst_limit(wanted).min(plan.packets).min(plan.copies);
        if wanted == 0 {
            return Ok(plan.by_core());
        }
        let vring = &mut self.vring;
        let Some(active) = vring.active.as_mut() else { return Ok(true) };
        let available = usize::from(active.queue.available(wanted as u16)?).min(wanted);
        if available == 0 {
            return Ok(plan.by_core());
        }
        let mut heads = [0; BURST];
        let heads = &mut heads[..available];
        active.queue.heads(heads)?;
        active.queue.prefetch_used(available);
        let pool = ctx.cache.pool();
        let data_room = (pool.data_room() + NET_HEADER) as u32;
        let max_copies = plan.copies.min(LIST);
        let ring = ctx.mover.ring(vring.queue);
        let list = &mut vring.list;
        list.clear();
        let Active { config, queue, .. } = active;
        let memory = &*config.memory;
        let mut taken = 0;
        let mut result = Ok(());
        for &head in heads.iter() {
            if list.len() == max_copies {
                break;
            }
            let Some(mut packet) = ctx.cache.take() else {
                dequeued.starved = true;
                break;
            };
            let token = vring.queue.token(ring.next_slot());
            let before = list.len();
            let dst = packet.data().as_ptr().wrapping_sub(NET_HEADER);
            let total = match queue.single(head, memory, Direction::Readable) {
                Ok(Some(Buffer { addr, len })) if len <= data_room => {
                    list.push(Copy { src: addr.as_ptr(), dst, len, token });
                    len
                }
                Ok(_) => {
                    let mut total = 0u32;
                    let walked = queue.walk(head, memory, Direction::Readable, MAX_PIECES, |piece| {
                        if let Some(end) = total.checked_add(piece.len).filter(|&end| end <= data_room)
                            && list.len() < max_copies
                        {
                            let dst = dst.wrapping_add(total as usize);
                            list.push(Copy { src: piece.addr.as_ptr(), dst, len: piece.len, token });
                            total = end;
                        } else {
                            total = u32::MAX;
                        }
                    });
                    if let Err(error) = walked {
                        list.truncate(before);
                        ctx.cache.free(packet);
                        result = Err(error);
                        break;
                    }
                    if total == u32::MAX && list.len() == max_copies && before > 0 {
                        // Its copies do not fit this list any more: the next one begins with it.
                        list.truncate(before);
                        ctx.cache.free(packet);
                        break;
                    }
                    total
                }
                Err(error) => {
                    ctx.cache.free(packet);
                    result = Err(error);
                    break;
                }
            };
            // A chain without a packet takes its place in the order all the same.
            let kept = if total > data_room {
                dequeued.too_big += 1;
                None
            } else if (total as usize) < NET_HEADER + ethernet::HEADER_LEN {
                dequeued.malformed += 1;
                None
            } else {
                packet.set_range(pool, HEADROOM, total as usize - NET_HEADER);
                Some(packet)
            };
            let copies = match kept {
                Some(_) => list.len() - before,
                None => {
                    list.truncate(before);
                    0
                }
            };
            let slot = ring.push(plan.outstanding(copies));
            vring.slots[slot].chains = 1;
            vring.slots[slot].packet = kept;
            vring.chains.push(Chain { head, written: 0 });
            taken += 1;
        }
        queue.consume(taken as u16);
        ctx.clock.lap(Stage::Virtqueue);
        vring.entered(ctx.mover, taken);
        // SAFETY: sources are ranges that the guest gave us for reading, checked against its memory, which `entered`
        // holds until the chain is published; destinations are packet buffers that `slots` owns until then.
        unsafe { ctx.mover.submit(vring.queue, plan, &vring.list, ctx.clock) };
        result.map(|()| plan.by_core())
    }

    /// Publishes what has completed, in order, and moves the packets to `burst`.
    #[inline]
    fn reap(&mut self, ctx: &mut Context<'_>, burst: &mut Burst, dequeued: &mut Dequeued) {
        let vring = &mut self.vring;
        let ring = ctx.mover.ring(vring.queue);
        let ready = ring.ready().min(burst.remaining_capacity()).min(ctx.burst);
        if ready == 0 {
            return;
        }
        let (first, mask) = (ring.oldest_slot(), ring.mask());
        let Some(active) = vring.active.as_mut() else { return };
        for i in 0..ready {
            let slot = &vring.slots[(first + i) & mask];
            if let Some(packet) = &slot.packet {
                let data = packet.data().as_ptr();
                prefetch::read(data.wrapping_sub(NET_HEADER));
                prefetch::read(data);
            }
            active.queue.push_used(vring.chains.pop().head, 0);
        }
        active.publish();
        ctx.clock.lap(Stage::Publish);
        for i in 0..ready {
            let Some(mut packet) = vring.slots[(first + i) & mask].packet.take() else { continue };
            if header_is_plain(&mut packet) {
                dequeued.packets += 1;
                dequeued.bytes += packet.len() as u64;
                burst.push(packet);
            } else {
                dequeued.malformed += 1;
                ctx.cache.free(packet);
            }
        }
        vring.left(ctx.mover, ready);
        ctx.clock.lap(Stage::Header);
    }

    /// Returns available chains of a disabled queue unread.
    #[cold]
    fn discard(&mut self, dequeued: &mut Dequeued) {
        let Some(active) = self.vring.active.as_mut() else { return };
        let mut heads = [0; BURST];
        let looked = active.queue.available(BURST as u16).and_then(|n| {
            let heads = &mut heads[..usize::from(n).min(BURST)];
            active.queue.heads(heads)?;
            Ok(heads.len())
        });
        match looked {
            Ok(0) => {}
            Ok(n) => {
                for &head in &heads[..n] {
                    active.queue.push_used(head, 0);
                }
                active.queue.consume(n as u16);
                active.publish();
                dequeued.malformed += n;
            }
            Err(error) => self.vring.break_down(error),
        }
    }
}

/// Whether the virtio-net header in the headroom asks for nothing: no offloads are negotiated.
#[inline(always)]
fn header_is_plain(packet: &mut Packet) -> bool {
    let header = packet.headroom_mut(NET_HEADER);
    header[0] & virtio_net::F_NEEDS_CSUM == 0 && header[1] == virtio_net::GSO_NONE
}
