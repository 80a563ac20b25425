//! The workers' side of a virtio-user port: buffers out, packets in, and the other way round.

use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_mem::{BURST, Burst, HEADROOM, Packet, Pool, PoolCache};
use offcore_ring::driver::Used;
use offcore_ring::split::device::Direction;
use offcore_ring::{RingError, prefetch};
use offcore_stats::Stage;
use offcore_wire::virtio_net::{HEADER_LEN, NetHeader};

use super::cell::{Cell, Ring};
use crate::{Context, Drop, RxCounters, RxQueue, TxCounters, TxQueue, Wake, room, virtio_header};

/// Free descriptors at which an RX ring is filled up, unless it is so small that a quarter of it is less.
const FILL_AT: u16 = 32;

/// A virtqueue and the worker's present ring in it.
#[derive(Debug)]
struct Half {
    cell: Arc<Cell>,
    pool: &'static Pool,
    /// The publication that `ring` is of.
    generation: u32,
    ring: Option<Ring>,
    /// The ring's content makes no sense, so it is left alone. The back end still has its packet buffers.
    broken: bool,
}

impl Half {
    fn new(cell: Arc<Cell>, pool: &'static Pool) -> Self {
        let (generation, ring) = cell.pick_up();
        Self { cell, pool, generation, ring, broken: false }
    }

    /// The ring, if there is one that runs.
    #[inline(always)]
    fn ring(&mut self, cache: &mut PoolCache) -> Option<&mut Ring> {
        if self.cell.generation() != self.generation {
            self.follow(cache);
        }
        if self.broken { None } else { self.ring.as_mut() }
    }

    #[cold]
    fn follow(&mut self, cache: &mut PoolCache) {
        let (generation, next) = self.cell.pick_up();
        if let Some(old) = std::mem::replace(&mut self.ring, next) {
            old.reclaim(cache);
        }
        (self.generation, self.broken) = (generation, false);
    }

    #[cold]
    fn break_down(&mut self, error: RingError) {
        self.broken = true;
        self.cell.report_broken(error);
    }

    /// Packets that the back end has, or that it has returned and nobody has taken.
    fn in_flight(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.driver.in_flight().into())
    }
}

impl std::ops::Drop for Half {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.cell.give_back(self.generation, ring, self.pool);
        }
    }
}

/// Receives from one virtqueue, which is kept full of empty packet buffers.
#[derive(Debug)]
pub(super) struct VirtioRx {
    half: Half,
    counters: RxCounters,
    /// The back end has been asked to notify.
    armed: bool,
}

impl VirtioRx {
    pub(super) fn new(cell: Arc<Cell>, pool: &'static Pool, counters: RxCounters) -> Self {
        Self { half: Half::new(cell, pool), counters, armed: false }
    }

    /// Takes returned buffers and appends the packets in them to `burst`; how many buffers were taken.
    #[inline]
    fn receive(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let wanted = room(ctx, burst);
        let Some(ring) = self.half.ring(ctx.cache) else { return 0 };
        let mut returned = ArrayVec::new();
        let error = collect(ring, wanted, &mut returned).err();
        let taken = returned.len();
        let (mut packets, mut bytes) = (0, 0);
        for (mut packet, len) in returned {
            match accept(ring, &mut packet, len, ctx.cache.pool()) {
                Ok(()) => {
                    (packets, bytes) = (packets + 1, bytes + packet.len() as u64);
                    burst.push(packet);
                }
                Err(reason) => {
                    if let Some(reason) = reason {
                        self.counters.drop(reason, 1);
                    }
                    ctx.cache.free(packet);
                }
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

    /// Makes empty packet buffers available, when there is room for a number of them that is worth the while.
    #[inline]
    fn fill(&mut self, ctx: &mut Context<'_>) {
        let Some(ring) = self.half.ring(ctx.cache) else { return };
        if ring.driver.free() < (ring.driver.size() / 4).clamp(1, FILL_AT) {
            return;
        }
        let len = ctx.cache.pool().data_room() + HEADER_LEN;
        while ring.driver.free() > 0 {
            let Some(packet) = ctx.cache.take() else {
                self.counters.starved(1);
                break;
            };
            if let Err(packet) = add(ring, packet, len, Direction::Writable) {
                ctx.cache.free(packet);
                break;
            }
        }
        ring.publish();
    }
}

/// Collects up to `wanted` returned buffers and what the back end says that it wrote into each.
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

/// Makes a returned buffer a packet; otherwise says why it is none, unless that has been counted already. `len` is what
/// the back end says that it wrote.
#[inline(always)]
fn accept(ring: &mut Ring, packet: &mut Packet, len: u32, pool: &Pool) -> Result<(), Option<Drop>> {
    if ring.rest > 0 {
        ring.rest -= 1;
        return Err(None);
    }
    let frame_len = (len as usize).checked_sub(HEADER_LEN).filter(|&len| len <= pool.data_room());
    packet.set_range(pool, HEADROOM, frame_len.ok_or(Drop::Malformed)?);
    let header = packet.headroom_mut(HEADER_LEN).first_chunk().map(NetHeader::from_bytes).unwrap_or_default();
    if ring.mergeable && header.num_buffers != 1 {
        return Err(Some(merged(ring, header.num_buffers)));
    }
    if virtio_header::apply(header, packet) { Ok(()) } else { Err(Some(Drop::Malformed)) }
}

/// Notes that a packet takes `buffers` buffers, which is one of them too many or no sensible number.
#[cold]
fn merged(ring: &mut Ring, buffers: u16) -> Drop {
    if buffers == 0 || buffers > ring.driver.size() {
        return Drop::Malformed;
    }
    ring.rest = buffers - 1;
    Drop::TooBig
}

/// Makes `len` bytes, which begin with the header in the packet's headroom, available; the packet, if there is no room.
///
/// Guest addresses are addresses of this process: see `offcore_vhost::frontend`.
#[inline(always)]
fn add(ring: &mut Ring, packet: Packet, len: usize, direction: Direction) -> Result<(), Packet> {
    let address = packet.data().as_ptr() as u64 - HEADER_LEN as u64;
    #[allow(clippy::cast_possible_truncation, reason = "a packet buffer has at most 32 KiB")]
    ring.driver.add(address, len as u32, direction, packet)
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
        if self.half.cell.generation() != self.half.generation {
            return Wake::Now;
        }
        let Some(ring) = self.half.ring.as_mut().filter(|_| !self.half.broken) else { return Wake::Never };
        ring.ask_for_notification();
        self.armed = true;
        // Whatever was returned before the back end saw that is not notified.
        match ring.driver.used() {
            Ok(0) => Wake::Event(ring.call()),
            // The next round takes it, or breaks the ring.
            Ok(_) | Err(_) => Wake::Now,
        }
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed)
            && let Some(ring) = &mut self.half.ring
        {
            ring.refuse_notification();
        }
    }
}

/// Sends to one virtqueue.
#[derive(Debug)]
pub(super) struct VirtioTx {
    half: Half,
    counters: TxCounters,
}

impl VirtioTx {
    pub(super) fn new(cell: Arc<Cell>, pool: &'static Pool, counters: TxCounters) -> Self {
        Self { half: Half::new(cell, pool), counters }
    }

    /// Frees what the back end has sent.
    #[inline]
    fn reclaim(&mut self, cache: &mut PoolCache) {
        let Some(ring) = self.half.ring(cache) else { return };
        if ring.driver.in_flight() == 0 {
            return;
        }
        if let Err(error) = free_used(ring, cache) {
            self.half.break_down(error);
        }
    }
}

#[inline(always)]
fn free_used(ring: &mut Ring, cache: &mut PoolCache) -> Result<(), RingError> {
    ring.driver.used()?;
    while let Some(used) = ring.driver.pop()? {
        cache.free(used.token);
    }
    Ok(())
}

impl TxQueue for VirtioTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        self.reclaim(ctx.cache);
        let Some(ring) = self.half.ring(ctx.cache) else {
            self.counters.drop_all(Drop::Down, burst, ctx.cache);
            return;
        };
        let takeable = burst.len().min(ring.driver.free().into());
        let (mut packets, mut bytes) = (0, 0);
        for mut packet in burst.drain(..takeable) {
            let len = packet.len();
            if packet.headroom() < HEADER_LEN {
                self.counters.drop(Drop::Failed, 1);
                ctx.cache.free(packet);
                continue;
            }
            packet.headroom_mut(HEADER_LEN).fill(0); // copy-ok: the virtio-net header, which the core builds
            match add(ring, packet, HEADER_LEN + len, Direction::Readable) {
                Ok(()) => (packets, bytes) = (packets + 1, bytes + len as u64),
                Err(packet) => {
                    self.counters.drop(Drop::Full, 1);
                    ctx.cache.free(packet);
                }
            }
        }
        ring.publish();
        self.counters.add(packets, bytes);
        ctx.clock.lap(Stage::Tx);
    }

    fn poll(&mut self, ctx: &mut Context<'_>) {
        self.reclaim(ctx.cache);
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }

    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        self.reclaim(ctx.cache);
        self.half.broken || self.half.in_flight() == 0
    }
}
