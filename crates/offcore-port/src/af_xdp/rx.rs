//! Receiving: packet buffers are put into the fill ring, and packets are taken out of the RX ring.

use std::os::fd::AsFd;
use std::sync::Arc;

use arrayvec::ArrayVec;
use offcore_mem::{Burst, Packet, Pool, PoolCache};
use offcore_ring::prefetch;
use offcore_stats::Stage;
use offcore_wire::ethernet;

use super::MAX_BUFFERS;
use super::lent::Lent;
use super::rings::{CONTINUED, Consumer, Descriptor, Producer};
use super::socket::Socket;
use crate::base::cell::End;
use crate::{Context, DropReason, RxCounters, RxQueue, Wake, room};

/// Number of missing buffers at which the kernel gets new ones, limited to a quarter of the ring.
const FILL_AT: usize = 32;
/// Prefetch distance in packets.
const AHEAD: u32 = 4;

/// The receiving half of a socket. The rings are unmapped before the reference to the socket is dropped.
#[derive(Debug)]
pub(super) struct RxHalf {
    rx: Consumer<Descriptor>,
    fill: Producer<u64>,
    lent: Lent,
    /// Number of buffers that the kernel should have.
    target: usize,
    /// Whether the kernel only receives when it is called.
    busy_poll: bool,
    /// The buffers received so far of a packet that continues in the next descriptor.
    partial: ArrayVec<Packet, MAX_BUFFERS>,
    /// Whether the rest of the present packet is skipped.
    skipping: bool,
    pool: &'static Pool,
    socket: Arc<Socket>,
}

impl RxHalf {
    /// Creates the receiving half of a socket with a fill ring of `target` entries.
    pub(super) fn new(
        pool: &'static Pool,
        socket: Arc<Socket>,
        rx: Consumer<Descriptor>,
        fill: Producer<u64>,
        target: usize,
        busy_poll: bool,
    ) -> Self {
        let lent = Lent::new(pool);
        let (partial, skipping) = (ArrayVec::new(), false);
        Self { rx, fill, lent, target, busy_poll, partial, skipping, pool, socket }
    }

    /// Gives the kernel new buffers if it lacks enough of them; returns whether the pool had sufficient buffers.
    #[inline]
    pub(super) fn replenish(&mut self, cache: &mut PoolCache) -> bool {
        let lacking = self.target - self.lent.count();
        if lacking < FILL_AT.min(self.target / 4) {
            return true;
        }
        // At most as many buffers are lent as the ring has entries, so the ring has room for all of them.
        for _ in 0..lacking.min(self.fill.free(lacking)) {
            let Some(packet) = cache.take() else {
                self.fill.publish();
                return false;
            };
            self.fill.push(self.lent.lend(packet));
        }
        self.fill.publish();
        true
    }

    /// Appends up to `wanted` packets to `burst`; returns the numbers of received and dropped packets.
    #[inline]
    fn receive(&mut self, wanted: usize, burst: &mut Burst, cache: &mut PoolCache) -> Received {
        let mut received = Received::default();
        let available = self.rx.available(wanted).min(wanted);
        for _ in 0..available {
            if let Some(next) = self.rx.peek(AHEAD) {
                let address = self.pool.memory().0.as_ptr().wrapping_add(next.addr as usize);
                prefetch::read(address);
            }
            let descriptor = self.rx.pop();
            let Some(packet) = self.lent.reclaim(descriptor.addr, descriptor.len as usize) else {
                received.malformed += 1;
                continue;
            };
            let (packet, len) =
                if descriptor.options & CONTINUED == 0 && self.partial.is_empty() && !self.skipping {
                    let len = packet.len();
                    (packet, len)
                } else {
                    let last = descriptor.options & CONTINUED == 0;
                    match self.join(packet, last, cache) {
                        Joined::Packet(packet, len) => (packet, len),
                        Joined::Nothing => continue,
                        Joined::TooMany => {
                            received.malformed += 1;
                            continue;
                        }
                    }
                };
            if len < ethernet::HEADER_LEN {
                received.malformed += 1;
                cache.free(packet);
                continue;
            }
            received.packets += 1;
            received.bytes += len as u64;
            burst.push(packet);
        }
        if available > 0 {
            self.rx.release();
        }
        received
    }

    /// Adds a buffer to the present packet; returns the packet if it was the last buffer.
    #[cold]
    fn join(&mut self, buffer: Packet, last: bool, cache: &mut PoolCache) -> Joined {
        if self.skipping {
            self.skipping = !last;
            cache.free(buffer);
            return Joined::Nothing;
        }
        if let Err(full) = self.partial.try_push(buffer) {
            cache.free(full.element());
            cache.free_all(self.partial.drain(..));
            self.skipping = !last;
            return Joined::TooMany;
        }
        if !last {
            return Joined::Nothing;
        }
        let len = self.partial.iter().map(Packet::len).sum();
        let mut buffers = self.partial.drain(..).rev();
        let Some(mut packet) = buffers.next() else { return Joined::Nothing };
        for front in buffers {
            packet = self.pool.link(front, packet);
        }
        Joined::Packet(packet, len)
    }
}

impl Drop for RxHalf {
    fn drop(&mut self) {
        if !self.partial.is_empty() {
            self.pool.cache().free_all(self.partial.drain(..));
        }
        self.socket.leave(self.lent.take());
    }
}

/// Result of one poll of the RX ring.
#[derive(Clone, Copy, Debug, Default)]
struct Received {
    packets: u64,
    bytes: u64,
    /// Invalid packets.
    malformed: u64,
}

enum Joined {
    /// The complete packet and its length.
    Packet(Packet, usize),
    /// The packet is not complete yet.
    Nothing,
    /// The packet has too many buffers.
    TooMany,
}

/// Receives from one queue of an interface.
#[derive(Debug)]
pub(super) struct XdpRx {
    end: End<RxHalf>,
    counters: RxCounters,
}

impl XdpRx {
    pub(super) fn new(end: End<RxHalf>, counters: RxCounters) -> Self {
        Self { end, counters }
    }
}

impl RxQueue for XdpRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let wanted = room(ctx, burst);
        let Some(half) = self.end.latest() else { return };
        let received = half.receive(wanted, burst, ctx.cache);
        if !half.replenish(ctx.cache) {
            self.counters.starved(1);
        }
        if half.busy_poll && received.packets == 0 || half.fill.needs_wakeup() {
            half.socket.receive();
        }
        if received.malformed > 0 {
            self.counters.drop(DropReason::Malformed, received.malformed);
        }
        if received.packets > 0 {
            self.counters.add(received.packets, received.bytes);
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    /// No packets are in flight.
    fn drain(&mut self, _ctx: &mut Context<'_>, _burst: &mut Burst) -> usize {
        self.end.latest();
        0
    }

    /// The socket is readable while its RX ring contains packets.
    fn arm(&mut self) -> Wake<'_> {
        if self.end.is_stale() {
            return Wake::Now;
        }
        match self.end.latest() {
            None => Wake::Never,
            // In this mode packets are only received by calls, not by interrupts.
            Some(half) if half.busy_poll => Wake::Poll,
            Some(half) => match half.rx.available(1) {
                0 => Wake::Event(half.socket.as_fd()),
                _ => Wake::Now,
            },
        }
    }
}
