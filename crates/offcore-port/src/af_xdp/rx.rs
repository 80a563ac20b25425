//! Receiving: packet buffers into the fill ring, packets out of the RX ring.

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

/// Buffers that the kernel may lack before it gets new ones, unless the ring is so small that a quarter of it is less.
const FILL_AT: usize = 32;
/// How many packets ahead their first bytes are fetched.
const AHEAD: u32 = 4;

/// The receiving half of a socket. The rings are unmapped before the socket is let go of.
#[derive(Debug)]
pub(super) struct RxHalf {
    rx: Consumer<Descriptor>,
    fill: Producer<u64>,
    lent: Lent,
    /// Buffers that the kernel shall have.
    target: usize,
    /// Whether the kernel has to be called for it to receive.
    busy_poll: bool,
    /// The buffers so far of a packet that goes on in the next descriptor.
    partial: ArrayVec<Packet, MAX_BUFFERS>,
    /// The packet that goes on has been given up.
    skipping: bool,
    pool: &'static Pool,
    socket: Arc<Socket>,
}

impl RxHalf {
    /// The half of a socket with a fill ring of `target` entries.
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

    /// Gives the kernel new buffers, when it lacks a number of them that is worth the while; whether there were enough.
    #[inline]
    pub(super) fn replenish(&mut self, cache: &mut PoolCache) -> bool {
        let lacking = self.target - self.lent.count();
        if lacking < FILL_AT.min(self.target / 4) {
            return true;
        }
        // No more than the ring has entries are lent, so there is room for every one.
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

    /// Appends up to `wanted` packets to `burst`; what was received, and what was dropped.
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

    /// Adds a buffer to the packet that is coming; the packet, when it was the last.
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

/// What came of one look at the RX ring.
#[derive(Clone, Copy, Debug, Default)]
struct Received {
    packets: u64,
    bytes: u64,
    /// Packets that are none.
    malformed: u64,
}

enum Joined {
    /// The whole packet, and its length.
    Packet(Packet, usize),
    /// It goes on.
    Nothing,
    /// It has more buffers than a packet can have.
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

    /// Nothing is on its way.
    fn drain(&mut self, _ctx: &mut Context<'_>, _burst: &mut Burst) -> usize {
        self.end.latest();
        0
    }

    /// The socket is readable as long as its RX ring has packets.
    fn arm(&mut self) -> Wake<'_> {
        if self.end.is_stale() {
            return Wake::Now;
        }
        match self.end.latest() {
            None => Wake::Never,
            // What interrupts would do is done by calls only.
            Some(half) if half.busy_poll => Wake::Poll,
            Some(half) => match half.rx.available(1) {
                0 => Wake::Event(half.socket.as_fd()),
                _ => Wake::Now,
            },
        }
    }
}
