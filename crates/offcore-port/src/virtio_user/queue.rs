//! Code shared by the RX and TX queues of a virtio-user port.

use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_mem::{Packet, Pool, PoolCache};
use offcore_ring::RingError;
use offcore_ring::split::device::Direction;
use offcore_wire::virtio_net::HEADER_LEN;

use super::MAX_SEGMENTS;
use super::cell::{Cell, Ring};

/// A virtqueue, and the ring of it that the worker uses at present.
#[derive(Debug)]
pub(super) struct Half {
    cell: Arc<Cell>,
    pool: &'static Pool,
    /// The publication number of `ring`.
    generation: u32,
    pub(super) ring: Option<Ring>,
    /// The ring contains invalid data, so it is not used any more. The back end still has its packet buffers.
    pub(super) broken: bool,
}

impl Half {
    pub(super) fn new(cell: Arc<Cell>, pool: &'static Pool) -> Self {
        let (generation, ring) = cell.latest_publication();
        Self { cell, pool, generation, ring, broken: false }
    }

    /// Returns the ring, if one is published and not broken.
    #[inline(always)]
    pub(super) fn ring(&mut self, cache: &mut PoolCache) -> Option<&mut Ring> {
        if self.cell.generation() != self.generation {
            self.follow(cache);
        }
        if self.broken { None } else { self.ring.as_mut() }
    }

    /// Returns whether another ring was published.
    pub(super) fn is_behind(&self) -> bool {
        self.cell.generation() != self.generation
    }

    #[cold]
    fn follow(&mut self, cache: &mut PoolCache) {
        let (generation, next) = self.cell.latest_publication();
        if let Some(old) = std::mem::replace(&mut self.ring, next) {
            old.reclaim(cache);
        }
        (self.generation, self.broken) = (generation, false);
    }

    #[cold]
    pub(super) fn break_down(&mut self, error: RingError) {
        self.broken = true;
        self.cell.report_broken(error);
    }

    /// Number of packets that the back end has, or that it has returned and the queue has not taken.
    pub(super) fn in_flight(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.driver.in_flight().into())
    }
}

impl Drop for Half {
    fn drop(&mut self) {
        if let Some(ring) = self.ring.take() {
            self.cell.give_back(self.generation, ring, self.pool);
        }
    }
}

/// Makes a packet of one buffer available: `len` bytes, beginning with the header in its headroom. Returns the packet
/// if the ring has no room.
///
/// Guest addresses are addresses of this process: see `offcore_vhost::frontend`.
#[inline(always)]
pub(super) fn add(ring: &mut Ring, packet: Packet, len: usize, direction: Direction) -> Result<(), Packet> {
    let address = packet.data().as_ptr() as u64 - HEADER_LEN as u64;
    #[allow(clippy::cast_possible_truncation, reason = "a packet buffer has at most 32 KiB")]
    ring.driver.add(address, len as u32, direction, packet)
}

/// Makes a packet of at most [`MAX_SEGMENTS`] buffers available as a chain. Its first buffer begins with the header in
/// the headroom. Returns the packet if the ring has no room.
pub(super) fn add_chain(
    ring: &mut Ring,
    packet: Packet,
    pool: &Pool,
    direction: Direction,
) -> Result<(), Packet> {
    let mut buffers: ArrayVec<(u64, u32), MAX_SEGMENTS> = ArrayVec::new();
    #[allow(clippy::cast_possible_truncation, reason = "a packet buffer has at most 32 KiB")]
    pool.for_each_segment(&packet, |data, len| buffers.push((data.as_ptr() as u64, len as u32)));
    if let Some((address, len)) = buffers.first_mut() {
        (*address, *len) = (*address - HEADER_LEN as u64, *len + HEADER_LEN as u32);
    }
    ring.driver.add_chain(&buffers, direction, packet)
}
