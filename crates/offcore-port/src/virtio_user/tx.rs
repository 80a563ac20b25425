//! Sending to a virtqueue.

use std::mem;
use std::sync::Arc;

use offcore_mem::{Burst, Packet, Pool, PoolCache};
use offcore_ring::RingError;
use offcore_ring::split::device::Direction;
use offcore_stats::Stage;
use offcore_wire::virtio_net::HEADER_LEN;

use super::cell::{Cell, Ring};
use super::queue::{Half, add, add_chain};
use super::{MAX_FRAME, MAX_SEGMENTS};
use crate::{Accepts, Context, DropReason, TxCounters, TxQueue, offload_fallback};

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

    /// Frees packets that the back end has processed.
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

/// Why a packet was not sent.
enum Unsent {
    /// It has to wait for free descriptors.
    Full,
    /// It can never be sent.
    Never(DropReason),
}

/// Sends packets of one buffer while descriptors are free; returns the numbers of packets and bytes sent.
#[inline(always)]
fn send_plain(
    ring: &mut Ring,
    burst: &mut Burst,
    counters: &TxCounters,
    cache: &mut PoolCache,
) -> (u64, u64) {
    let takeable = burst.len().min(ring.driver.free().into());
    let (mut packets, mut bytes) = (0, 0);
    for mut packet in burst.drain(..takeable) {
        let len = packet.len();
        if packet.headroom() < HEADER_LEN {
            counters.drop(DropReason::Failed, 1);
            cache.free(packet);
            continue;
        }
        packet.headroom_mut(HEADER_LEN).fill(0); // copy-ok: the virtio-net header, which the core builds
        match add(ring, packet, HEADER_LEN + len, Direction::Readable) {
            Ok(()) => (packets, bytes) = (packets + 1, bytes + len as u64),
            Err(packet) => {
                counters.drop(DropReason::Full, 1);
                cache.free(packet);
            }
        }
    }
    (packets, bytes)
}

/// Sends packets of any kind; returns the numbers of packets and bytes sent.
#[cold]
fn send_any(ring: &mut Ring, burst: &mut Burst, counters: &TxCounters, cache: &mut PoolCache) -> (u64, u64) {
    let (mut packets, mut bytes) = (0, 0);
    let mut all = mem::take(burst).into_iter();
    while let Some(packet) = all.next() {
        match send_one(ring, packet, cache.pool()) {
            Ok(len) => (packets, bytes) = (packets + 1, bytes + len as u64),
            Err((packet, Unsent::Full)) => {
                burst.push(packet);
                burst.extend(all);
                break;
            }
            Err((packet, Unsent::Never(reason))) => {
                counters.drop(reason, 1);
                cache.free(packet);
            }
        }
    }
    (packets, bytes)
}

/// Sends one packet; returns its length.
fn send_one(ring: &mut Ring, mut packet: Packet, pool: &Pool) -> Result<usize, (Packet, Unsent)> {
    let (len, buffers) = (pool.total_len(&packet), pool.segment_count(&packet));
    let most = usize::from(ring.driver.size()).min(MAX_SEGMENTS);
    // The features may have changed since the packet was prepared for the back end.
    let unwanted = packet.has_offload() && !ring.offloads.allows(&offload_fallback::header(&packet));
    let unsent = if buffers > most || len > MAX_FRAME {
        Unsent::Never(DropReason::TooBig)
    } else if unwanted || packet.headroom() < HEADER_LEN {
        Unsent::Never(DropReason::Failed)
    } else if buffers > ring.driver.free().into() {
        Unsent::Full
    } else {
        if !packet.has_offload() {
            packet.headroom_mut(HEADER_LEN).fill(0); // copy-ok: as above
        }
        return add_chain(ring, packet, pool, Direction::Readable)
            .map(|()| len)
            .map_err(|packet| (packet, Unsent::Full));
    };
    Err((packet, unsent))
}

impl TxQueue for VirtioTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        self.reclaim(ctx.cache);
        let Some(ring) = self.half.ring(ctx.cache) else {
            self.counters.drop_all(DropReason::Down, burst, ctx.cache);
            return;
        };
        let (packets, bytes) = if Packet::all_plain(burst) {
            send_plain(ring, burst, &self.counters, ctx.cache)
        } else {
            send_any(ring, burst, &self.counters, ctx.cache)
        };
        ring.publish();
        self.counters.add(packets, bytes);
        ctx.clock.lap(Stage::Tx);
    }

    fn accepts(&self) -> Accepts {
        let offloads = self.half.ring.as_ref().map(|ring| ring.offloads).unwrap_or_default();
        Accepts { offloads, segments: true }
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
