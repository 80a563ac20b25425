//! Receiving from a virtqueue: empty buffers are made available, filled ones are received.

use std::mem;
use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_ring::driver::Used;
use offcore_ring::split::device::Direction;
use offcore_ring::{RingError, prefetch};
use offcore_stats::Stage;
use offcore_wire::ethernet;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM};

use super::cell::{Cell, Ring};
use super::merging::Merging;
use super::queue::{Half, add, add_chain};
use crate::{Context, DropReason, RxCounters, RxQueue, Wake, room, virtio_header};

/// Number of free descriptors at which an RX ring is refilled, limited to a quarter of the ring.
const FILL_AT: u16 = 32;

/// Receives from one virtqueue, which is kept full of empty packet buffers.
#[derive(Debug)]
pub(super) struct VirtioRx {
    half: Half,
    /// Length of the longest frame, in bytes, that a chain has room for without mergeable buffers.
    longest: usize,
    counters: RxCounters,
    /// Whether the back end was asked to notify.
    armed: bool,
}

impl VirtioRx {
    pub(super) fn new(cell: Arc<Cell>, pool: &'static Pool, longest: usize, counters: RxCounters) -> Self {
        Self { half: Half::new(cell, pool), longest, counters, armed: false }
    }

    /// Takes returned buffers and appends the packets in them to `burst`; returns the number of buffers taken.
    #[inline]
    fn receive(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let wanted = room(ctx, burst);
        let Some(ring) = self.half.ring(ctx.cache) else { return 0 };
        let mut returned = ArrayVec::new();
        let error = collect(ring, wanted, &mut returned).err();
        let taken = returned.len();
        let (mut packets, mut bytes) = (0, 0);
        for (mut packet, len) in returned {
            if is_ordinary(ring, &mut packet, len, ctx.cache.pool()) {
                (packets, bytes) = (packets + 1, bytes + packet.len() as u64);
                burst.push(packet);
                continue;
            }
            match accept(ring, packet, len, ctx.cache) {
                Ok(None) => {}
                Ok(Some(packet)) => {
                    let len = ctx.cache.pool().total_len(&packet);
                    (packets, bytes) = (packets + 1, bytes + len as u64);
                    burst.push(packet);
                }
                Err(reason) => self.counters.drop(reason, 1),
            }
        }
        if packets > 0 {
            self.counters.add(packets, bytes);
        }
        if let Some(error) = error {
            self.half.break_down(error);
        }
        taken
    }

    /// Makes empty packet buffers available if enough descriptors are free.
    #[inline]
    fn fill(&mut self, ctx: &mut Context<'_>) {
        let Some(ring) = self.half.ring(ctx.cache) else { return };
        if ring.driver.free() < (ring.driver.size() / 4).clamp(1, FILL_AT) {
            return;
        }
        let room = ctx.cache.pool().data_room();
        let filled = if !ring.mergeable && self.longest > room {
            fill_with_chains(ring, ctx.cache, self.longest)
        } else {
            fill_with_buffers(ring, ctx.cache, room + HEADER_LEN)
        };
        if !filled {
            self.counters.starved(1);
        }
        ring.publish();
    }
}

/// Makes single buffers available until the ring is full; returns whether the pool had enough buffers.
#[inline(always)]
fn fill_with_buffers(ring: &mut Ring, cache: &mut PoolCache, len: usize) -> bool {
    while ring.driver.free() > 0 {
        let Some(packet) = cache.take() else { return false };
        if let Err(packet) = add(ring, packet, len, Direction::Writable) {
            cache.free(packet);
            break;
        }
    }
    true
}

/// Like [`fill_with_buffers`], but with chains of several buffers that have room for a frame of `longest` bytes.
fn fill_with_chains(ring: &mut Ring, cache: &mut PoolCache, longest: usize) -> bool {
    let pool = cache.pool();
    let buffers = longest.div_ceil(pool.data_room());
    while usize::from(ring.driver.free()) >= buffers {
        let Some(packet) = cache.take_chain(HEADROOM, longest) else { return false };
        if let Err(packet) = add_chain(ring, packet, pool, Direction::Writable) {
            cache.free(packet);
            break;
        }
    }
    true
}

/// Collects up to `wanted` returned buffers, each with the number of bytes that the back end claims to have written.
#[inline(always)]
fn collect(
    ring: &mut Ring,
    wanted: usize,
    returned: &mut ArrayVec<(Packet, u32), BURST>,
) -> Result<(), RingError> {
    while returned.len() < wanted {
        match ring.driver.pop()? {
            Some(Used { token, len }) => {
                let data = token.data().as_ptr();
                prefetch::read(data.wrapping_sub(HEADER_LEN));
                prefetch::read(data);
                returned.push((token, len));
            }
            None if ring.driver.used()? == 0 => break,
            None => {}
        }
    }
    Ok(())
}

/// Turns a returned buffer into a packet in the common case: the packet has one buffer, and its header requests no
/// offload. `len` is the number of bytes that the back end claims to have written. Returns whether this was the case.
#[inline(always)]
fn is_ordinary(ring: &Ring, packet: &mut Packet, len: u32, pool: &Pool) -> bool {
    let frame_len = (len as usize).wrapping_sub(HEADER_LEN);
    if ring.merging.is_some()
        || packet.is_segmented()
        || !(ethernet::HEADER_LEN..=pool.data_room()).contains(&frame_len)
    {
        return false;
    }
    packet.set_range(pool, HEADROOM, frame_len);
    let header = packet.headroom_bytes(HEADER_LEN);
    let asks = header[0] & VIRTIO_NET_HDR_F_NEEDS_CSUM | header[1];
    asks == 0 && (!ring.mergeable || header[10..] == [1, 0])
}

/// Handles any other returned chain: returns a complete packet, `None` for a part of an incomplete packet, or the
/// reason for dropping it.
#[cold]
fn accept(
    ring: &mut Ring,
    mut packet: Packet,
    len: u32,
    cache: &mut PoolCache,
) -> Result<Option<Packet>, DropReason> {
    if let Some(mut merging) = ring.merging.take() {
        merging.add(packet, len, cache);
        if merging.left > 0 {
            ring.merging = Some(merging);
            return Ok(None);
        }
        let header = merging.header;
        let packet = merging.finish(cache)?;
        return finish(ring, header, packet, cache).map(Some);
    }
    let pool = cache.pool();
    let several = packet.is_segmented();
    let most = if several { pool.total_len(&packet) } else { pool.data_room() };
    let Some(frame_len) = (len as usize).checked_sub(HEADER_LEN).filter(|&len| len <= most) else {
        cache.free(packet);
        return Err(DropReason::Malformed);
    };
    if several {
        cache.truncate(&mut packet, frame_len);
    } else {
        packet.set_range(pool, HEADROOM, frame_len);
    }
    let header =
        packet.headroom_bytes(HEADER_LEN).first_chunk().map(NetHeader::from_bytes).unwrap_or_default();
    if !ring.mergeable || header.num_buffers == 1 {
        return finish(ring, header, packet, cache).map(Some);
    }
    if header.num_buffers == 0 || header.num_buffers > ring.driver.size() {
        cache.free(packet);
        return Err(DropReason::Malformed);
    }
    ring.merging = Some(Merging::new(header, packet, cache));
    Ok(None)
}

/// Applies the header of a complete packet.
fn finish(
    ring: &Ring,
    header: NetHeader,
    mut packet: Packet,
    cache: &mut PoolCache,
) -> Result<Packet, DropReason> {
    if virtio_header::apply(header, &mut packet, cache.pool(), ring.offloads) {
        return Ok(packet);
    }
    cache.free(packet);
    Err(DropReason::Malformed)
}

impl RxQueue for VirtioRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let taken = self.receive(ctx, burst);
        self.fill(ctx);
        if taken > 0 {
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        self.receive(ctx, burst);
        let left = self.half.ring(ctx.cache).map_or(Ok(0), |ring| ring.driver.used());
        left.map_or(0, usize::from)
    }

    fn arm(&mut self) -> Wake<'_> {
        if self.half.is_behind() {
            return Wake::Now;
        }
        let Some(ring) = self.half.ring.as_mut().filter(|_| !self.half.broken) else { return Wake::Never };
        ring.driver.set_notification(true);
        self.armed = true;
        // Chains that were returned before the back end saw the request cause no notification.
        match ring.driver.used() {
            Ok(0) => Wake::Event(ring.call()),
            // The next round takes the chains or detects that the ring is broken.
            Ok(_) | Err(_) => Wake::Now,
        }
    }

    fn disarm(&mut self) {
        if mem::take(&mut self.armed)
            && let Some(ring) = &mut self.half.ring
        {
            ring.refuse_notification();
        }
    }
}
