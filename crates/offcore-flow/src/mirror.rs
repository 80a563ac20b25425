//! Port mirroring: the packets of a port are also sent to another port.
//!
//! ```text
//! worker:  port's RX queue -> MirrorRx -> ...             any worker:   RingRx \
//!                                \-- copy, stamped -> RingTx | ring |           by stamp -> mirror's TX queue
//!          ... -> MirrorTx -> port's TX queue                           RingRx /
//!                    \-- copy, stamped -> RingTx | ring |
//! ```
//! Each queue of the port is wrapped; forwarding is unchanged. Copies pass through a ring to the worker that owns the
//! mirror's TX queue. The headroom contains the time of their burst, and packets are sent in the order of these times,
//! so a capture shows an answer after its question. Between queues of one worker, the order is exact. Between workers,
//! it is as exact as rings are fast. Copies that the mirror is too slow for are dropped and counted with the rings of
//! `mirrorN`. The last eighth of the pool is reserved for forwarded packets: no copies are made while only that is
//! free.

use std::str::FromStr;

use offcore_mem::{Burst, Packet};
use offcore_port::duplicate::Duplicator;
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Accepts, Context, DropReason, RxCounters, RxQueue, TxCounters, TxQueue, Wake};
use offcore_stats::{Stage, tsc};
use offcore_wire::virtio_net;

use crate::ring::{RingRx, RingTx};
use crate::worker::task::{Task, WakeSource};

/// Bytes of a stamp. It is in front of the virtio-net header, if the packet has one.
const STAMP: usize = 8;
const STAMPED: usize = STAMP + virtio_net::HEADER_LEN;
/// This fraction of the packet buffers is not available for copies, so that a stalled mirror does not cost the ports
/// their packets. Ports may keep buffers permanently (fill rings), so the fraction is not larger.
const KEPT: usize = 8;

/// The packets of a port that are mirrored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// Packets received from the port.
    Rx,
    /// Packets sent to the port.
    Tx,
    /// All packets.
    #[default]
    Both,
}

impl Direction {
    /// Whether packets received from the port are mirrored.
    pub fn has_rx(self) -> bool {
        self != Self::Tx
    }

    /// Whether packets sent to the port are mirrored.
    pub fn has_tx(self) -> bool {
        self != Self::Rx
    }
}

impl FromStr for Direction {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "rx" => Ok(Self::Rx),
            "tx" => Ok(Self::Tx),
            "both" => Ok(Self::Both),
            _ => Err(format!("'{text}': expected rx, tx or both")),
        }
    }
}

/// A mirror of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mirror {
    pub port: usize,
    pub direction: Direction,
    /// The port to which the packets are also sent. It has no other task. Several mirrors may share it.
    pub to: usize,
}

/// The path to the worker that sends stamped packets, in the order of their stamps.
#[derive(Debug)]
pub struct Stamping {
    ring: RingTx,
}

impl Stamping {
    /// Creates a path through `ring`.
    pub fn new(ring: RingTx) -> Self {
        Self { ring }
    }

    /// Sends packets with the time `stamp` (TSC). Packets that do not fit into the ring are dropped and counted.
    pub fn send(&mut self, mut packets: Burst, stamp: u64, ctx: &mut Context<'_>) {
        for packet in &mut packets {
            // copy-ok: eight bytes of time
            packet.headroom_mut(STAMPED)[..STAMP].copy_from_slice(&stamp.to_ne_bytes());
        }
        self.ring.tx(ctx, &mut packets);
        if !packets.is_empty() {
            self.ring.counters().drop_all(DropReason::Full, &mut packets, ctx.cache);
        }
    }
}

/// The path for copies of one queue.
#[derive(Debug)]
struct Tap {
    to: Stamping,
    duplicator: Duplicator,
}

impl Tap {
    fn new(ring: RingTx) -> Self {
        Self { to: Stamping::new(ring), duplicator: Duplicator::default() }
    }

    /// Returns copies of the first packets. All packets are copied if enough buffers are free.
    fn copies(&mut self, packets: &[Packet], ctx: &mut Context<'_>) -> Burst {
        let mut copies = Burst::new();
        let pool = ctx.cache.pool();
        let buffers = |packet| pool.total_len(packet).div_ceil(pool.data_room());
        let wanted = match Packet::all_plain(packets) {
            true => packets.len(),
            false => packets.iter().map(buffers).sum(),
        };
        if ctx.cache.available() >= pool.chunks() / KEPT + wanted {
            // Missing copies are counted later, when it is known which packets must be mirrored.
            let _ = self.duplicator.duplicate(packets, ctx.cache, &mut copies);
        }
        copies
    }

    /// Sends the copies of `packets` packets. Packets without a copy are counted as dropped.
    fn send(&mut self, copies: Burst, packets: usize, stamp: u64, ctx: &mut Context<'_>) {
        if copies.len() < packets {
            self.to.ring.counters().drop(DropReason::NoBuffer, (packets - copies.len()) as u64);
        }
        self.to.send(copies, stamp, ctx);
        ctx.clock.lap(Stage::Copy);
    }
}

/// Returns the stamp of a packet that came over a ring.
fn stamp(packet: &Packet) -> u64 {
    packet.headroom_bytes(STAMPED).first_chunk().copied().map_or(0, u64::from_ne_bytes)
}

/// An RX queue whose packets are mirrored.
#[derive(Debug)]
pub struct MirrorRx {
    inner: Box<dyn RxQueue>,
    tap: Tap,
    /// Packets that were mirrored and then taken back. They are received first.
    seen: usize,
}

impl MirrorRx {
    /// Wraps `inner`. Copies of its packets go into `ring`.
    pub fn new(inner: Box<dyn RxQueue>, ring: RingTx) -> Self {
        Self { inner, tap: Tap::new(ring), seen: 0 }
    }

    /// Mirrors the received packets, which start at index `first` of the burst.
    fn mirror(&mut self, first: usize, ctx: &mut Context<'_>, burst: &Burst) {
        let seen = self.seen.min(burst.len() - first);
        self.seen -= seen;
        let new = &burst[first + seen..];
        if !new.is_empty() {
            let copies = self.tap.copies(new, ctx);
            self.tap.send(copies, new.len(), tsc::now(), ctx);
        }
    }
}

impl RxQueue for MirrorRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let first = burst.len();
        self.inner.rx(ctx, burst);
        self.mirror(first, ctx, burst);
    }

    fn counters(&self) -> &RxCounters {
        self.inner.counters()
    }

    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let first = burst.len();
        let left = self.inner.drain(ctx, burst);
        self.mirror(first, ctx, burst);
        left
    }

    fn arm(&mut self) -> Wake<'_> {
        self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    fn take_back(&mut self, burst: &mut Burst) {
        let before = burst.len();
        self.inner.take_back(burst);
        self.seen += before - burst.len();
    }

    fn waits(&self) -> bool {
        self.inner.waits()
    }
}

/// A TX queue whose packets are mirrored. All packets that it accepts are mirrored, even if the other side does not get
/// them.
#[derive(Debug)]
pub struct MirrorTx {
    inner: Box<dyn TxQueue>,
    tap: Tap,
}

impl MirrorTx {
    /// Wraps `inner`. Copies of its packets go into `ring`.
    pub fn new(inner: Box<dyn TxQueue>, ring: RingTx) -> Self {
        Self { inner, tap: Tap::new(ring) }
    }
}

impl TxQueue for MirrorTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        // Copies are made first, because accepted packets no longer belong to this worker.
        let stamp = tsc::now();
        let mut copies = self.tap.copies(burst, ctx);
        let (before, counted) = (burst.len(), self.inner.counters().packets());
        self.inner.tx(ctx, burst);
        // A link that is down accepts packets but drops all of them.
        let taken = match self.inner.counters().packets() == counted {
            true => 0,
            false => before - burst.len(),
        };
        ctx.cache.free_all(copies.drain(taken.min(copies.len())..));
        self.tap.send(copies, taken, stamp, ctx);
    }

    fn accepts(&self) -> Accepts {
        self.inner.accepts()
    }

    fn poll(&mut self, ctx: &mut Context<'_>) {
        self.inner.poll(ctx);
    }

    fn counters(&self) -> &TxCounters {
        self.inner.counters()
    }

    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        self.inner.stop(ctx)
    }
}

/// One ring, and its received packets in reverse order.
#[derive(Debug)]
struct Input {
    ring: RingRx,
    waiting: Burst,
}

impl Input {
    /// Returns the stamp of the oldest packet, if any.
    fn next(&mut self, ctx: &mut Context<'_>) -> Option<u64> {
        if self.waiting.is_empty() {
            self.ring.rx(ctx, &mut self.waiting);
            self.waiting.reverse();
        }
        self.waiting.last().map(stamp)
    }
}

/// The sending end of a mirror, on the worker that owns its TX queue.
#[derive(Debug)]
pub struct MirrorOut {
    inputs: Vec<Input>,
    tx: Box<dyn TxQueue>,
}

impl MirrorOut {
    /// Creates a task that sends packets from `rings` to `tx`.
    pub fn new(rings: Vec<RingRx>, tx: Box<dyn TxQueue>) -> Self {
        let inputs = rings.into_iter().map(|ring| Input { ring, waiting: Burst::new() }).collect();
        Self { inputs, tx }
    }
}

impl Task for MirrorOut {
    fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        let mut burst = Burst::new();
        while burst.len() < ctx.burst {
            let oldest = self.inputs.iter_mut().filter_map(|input| Some((input.next(ctx)?, input)));
            let Some((_, input)) = oldest.min_by_key(|(stamp, _)| *stamp) else { break };
            burst.extend(input.waiting.pop());
        }
        let packets = burst.len();
        if packets == 0 {
            self.tx.poll(ctx);
            ctx.clock.lap(Stage::Idle);
            return 0;
        }
        fall_back(&mut *self.tx, ctx, &mut burst);
        self.tx.tx(ctx, &mut burst);
        self.tx.counters().drop_all(DropReason::Full, &mut burst, ctx.cache);
        packets
    }

    /// Returns the remaining packets, plus one for each queue that is still mirrored.
    fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        let mut left = self.round(ctx);
        for input in &mut self.inputs {
            left += input.waiting.len();
            if input.waiting.is_empty() {
                left += input.ring.drain(ctx, &mut input.waiting) + input.waiting.len();
                input.waiting.reverse();
            }
        }
        // A stopped queue accepts no packets. Until then, the round above polls it.
        if left > 0 {
            return left;
        }
        usize::from(!self.tx.stop(ctx))
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>)) {
        self.inputs.iter_mut().for_each(|input| each(WakeSource::Queue(&mut input.ring)));
    }
}

#[cfg(test)]
mod tests;
