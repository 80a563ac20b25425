//! The impairment port: wraps another port and deliberately loses, reorders, duplicates, corrupts, delays or
//! rate-limits its packets.
//!
//! It wraps any port. Each direction of each queue has its own random number generator, derived from the seed: in every
//! run, the same packets in the same order are treated alike. A packet that requests segmentation or has several
//! buffers counts as one packet. The limit on held packets is in packet buffers. Beyond it packets are dropped as
//! `full`, except that an inner queue that can wait is not polled meanwhile. Packets lost on purpose are counted as
//! `impaired`; blocks of this port count the other impairments, the inner port counts everything else.
//!
//! Every packet is examined individually, and held packets are sorted by departure time: this port is meant for tests,
//! not for speed.

mod line;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offcore_mem::{Burst, DeviceMemory, Packet, Pool};
use offcore_stats::page::{Block, PageError};
use offcore_stats::{Family, Label, Stage, tsc};
use offcore_wire::MacAddr;

use crate::base::PortBase;
use crate::offload_fallback::fall_back;
use crate::spec::ImpairSpec;
use crate::{
    Accepts, Context, DropReason, PeerReport, Port, PortError, QueueSetup, RxCounters, RxQueue, TxCounters,
    TxQueue, Wake, hand_over, room,
};

use line::{Count, END_OF_TIME, IMPAIR_RX, IMPAIR_TX, Line};

/// The share of the pool that all lines of a port may hold together: one buffer in this many, or [`LEAST`] per line
/// if that is more.
const SHARE: usize = 4;
/// The maximum and minimum number of packet buffers that one line may hold.
const MOST: usize = 4096;
const LEAST: usize = 64;
/// A queue that is drained keeps to its departure times for at most one second divided by this: a tenth.
const DRAIN_WITHIN: u64 = 10;
/// A queue that stops tries to send its held packets for at most one second divided by this: a tenth.
const STOP_WITHIN: u64 = 10;

/// An impairment port.
#[derive(Debug)]
pub struct ImpairPort {
    base: PortBase,
    spec: ImpairSpec,
    inner: Box<dyn Port>,
    pool: &'static Pool,
    /// Number of packets that the sending half of each queue holds.
    sending: Vec<Arc<AtomicUsize>>,
    /// Counters of the receiving and the sending halves.
    counts: [Vec<Block>; 2],
}

impl ImpairPort {
    /// Wraps `inner` with the impairments of `spec`. Its packets are chunks of `pool`.
    pub fn new(spec: &ImpairSpec, inner: Box<dyn Port>, pool: &'static Pool) -> Self {
        let queues = inner.queues();
        Self {
            base: PortBase::new(spec.to_string(), inner.mac(), queues),
            spec: spec.clone(),
            inner,
            pool,
            sending: (0..queues).map(|_| Arc::default()).collect(),
            counts: Default::default(),
        }
    }

    /// Creates the line of one half of queue `index`: 0 to receive, 1 to send.
    fn line(&mut self, index: u16, half: usize, counts: Block) -> Line {
        self.counts[half].push(counts.clone());
        let lines = 2 * usize::from(self.queues()).max(1);
        let limit = (self.pool.chunks() / SHARE / lines).clamp(LEAST, MOST);
        let number = 2 * u64::from(index) + half as u64;
        Line::new(&self.spec, number, tsc::hz(), limit, self.pool, counts)
    }
}

/// Creates the counters of one half of queue `index`.
fn block(family: &'static Family, index: u16, setup: &QueueSetup<'_>) -> Result<Block, PageError> {
    setup.stats.block(family, &[(Label::Port, &setup.port), (Label::Queue, &index)])
}

impl Port for ImpairPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn mac(&self) -> MacAddr {
        self.inner.mac()
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counts = block(&IMPAIR_RX, index, &setup)?;
        let inner = self.inner.rx_queue(index, setup)?;
        let sending = Arc::clone(&self.sending[usize::from(index)]);
        let line = self.line(index, 0, counts);
        Ok(Box::new(ImpairRx { inner, line, returned: Burst::new(), draining: None, sending }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counts = block(&IMPAIR_TX, index, &setup)?;
        let inner = self.inner.tx_queue(index, setup)?;
        let sending = Arc::clone(&self.sending[usize::from(index)]);
        let line = self.line(index, 1, counts);
        Ok(Box::new(ImpairTx { inner, line, leaving: Burst::new(), stopping: None, sending }))
    }

    fn offloads(&self) -> bool {
        self.inner.offloads()
    }

    fn memory(&self) -> Option<&DeviceMemory> {
        self.inner.memory()
    }

    fn mtu(&self) -> Option<usize> {
        self.inner.mtu()
    }

    fn tend(&mut self) {
        self.inner.tend();
    }

    fn is_waiting(&self) -> bool {
        self.inner.is_waiting()
    }

    fn failure(&self) -> Option<String> {
        self.inner.failure()
    }

    fn peer(&self) -> Option<PeerReport> {
        self.inner.peer()
    }

    fn status(&self) -> String {
        let mut status = self.inner.status();
        for (half, blocks) in ["received", "sent"].into_iter().zip(&self.counts) {
            let _ = write!(status, "; {half}:");
            for (count, separator) in Count::ALL.into_iter().zip(["", ",", ",", ",", ","]) {
                let sum: u64 = blocks.iter().map(|block| block.counter(count as usize).value()).sum();
                let _ = write!(status, "{separator} {sum} {}", count.name().replace('_', " "));
            }
        }
        status
    }
}

/// The receiving half of a queue.
#[derive(Debug)]
struct ImpairRx {
    inner: Box<dyn RxQueue>,
    line: Line,
    /// Packets that were returned by `rx` and taken back, because the other side had no room.
    returned: Burst,
    /// The time at which draining began; `None` while the queue receives.
    draining: Option<u64>,
    /// Packets that the sending half holds. No event wakes up the worker for them.
    sending: Arc<AtomicUsize>,
}

impl ImpairRx {
    /// Puts the packets that arrived at `now` into the line.
    fn hold(&mut self, come: &mut Burst, now: u64, ctx: &mut Context<'_>) {
        for packet in come.drain(..) {
            if let Err(reason) = self.line.take(packet, now, ctx.cache) {
                self.inner.counters().drop(reason, 1);
            }
        }
    }
}

impl RxQueue for ImpairRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.draining = None;
        if !self.returned.is_empty() {
            return hand_over(&mut self.returned, burst);
        }
        let most = burst.len() + room(ctx, burst);
        let mut come = Burst::new();
        // A queue that loses nothing by waiting is not polled while the line has no room for its packets.
        if !self.inner.waits() || self.line.has_room() {
            self.inner.rx(ctx, &mut come);
        }
        let now = tsc::now();
        self.hold(&mut come, now, ctx);
        self.line.give(now, most, burst);
        if !burst.is_empty() {
            ctx.clock.lap(Stage::Rx);
        }
    }

    fn counters(&self) -> &RxCounters {
        self.inner.counters()
    }

    /// Held packets keep their departure times for a while. Then they leave at once.
    fn drain(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) -> usize {
        let mut come = Burst::new();
        let left = self.inner.drain(ctx, &mut come);
        let now = tsc::now();
        self.hold(&mut come, now, ctx);
        hand_over(&mut self.returned, burst);
        if self.returned.is_empty() {
            let since = *self.draining.get_or_insert(now);
            let is_late = now.wrapping_sub(since) > tsc::hz() / DRAIN_WITHIN;
            self.line.give(if is_late { END_OF_TIME } else { now }, burst.capacity(), burst);
        }
        left + self.returned.len() + self.line.len()
    }

    fn arm(&mut self) -> Wake<'_> {
        match self.line.due() {
            _ if !self.returned.is_empty() => Wake::Now,
            Some(due) if due <= tsc::now() => Wake::Now,
            None if self.sending.load(Ordering::Relaxed) == 0 => self.inner.arm(),
            _ => Wake::Poll,
        }
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }

    /// The packets are already impaired, so they must not be returned to the inner port.
    fn take_back(&mut self, burst: &mut Burst) {
        if self.inner.waits() {
            hand_over(burst, &mut self.returned);
        }
    }

    fn waits(&self) -> bool {
        self.inner.waits()
    }
}

/// Returns packets that were never asked for again to the pool.
impl Drop for ImpairRx {
    fn drop(&mut self) {
        self.line.free_all(&mut self.returned);
    }
}

/// The sending half of a queue.
#[derive(Debug)]
struct ImpairTx {
    inner: Box<dyn TxQueue>,
    line: Line,
    /// Packets that have left the line and that the inner port had no room for yet.
    leaving: Burst,
    /// The time at which the queue began to stop.
    stopping: Option<u64>,
    sending: Arc<AtomicUsize>,
}

impl ImpairTx {
    /// Sends the packets that leave at `now`, while the inner port has room.
    fn send(&mut self, now: u64, ctx: &mut Context<'_>) {
        loop {
            self.line.give(now, self.leaving.capacity(), &mut self.leaving);
            if self.leaving.is_empty() {
                self.inner.poll(ctx);
                break;
            }
            if !Packet::all_plain(&self.leaving) {
                // A guest may have stopped accepting offloads since these packets arrived.
                fall_back(&mut *self.inner, ctx, &mut self.leaving);
            }
            self.inner.tx(ctx, &mut self.leaving);
            if !self.leaving.is_empty() {
                break;
            }
        }
        self.sending.store(self.line.len() + self.leaving.len(), Ordering::Relaxed);
    }
}

impl TxQueue for ImpairTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let now = tsc::now();
        for packet in burst.drain(..) {
            if let Err(reason) = self.line.take(packet, now, ctx.cache) {
                self.inner.counters().drop(reason, 1);
            }
        }
        self.send(now, ctx);
    }

    fn accepts(&self) -> Accepts {
        self.inner.accepts()
    }

    fn poll(&mut self, ctx: &mut Context<'_>) {
        self.send(tsc::now(), ctx);
    }

    fn counters(&self) -> &TxCounters {
        self.inner.counters()
    }

    /// Held packets leave at once. Packets that the inner port does not accept within a tenth of a second are dropped.
    fn stop(&mut self, ctx: &mut Context<'_>) -> bool {
        self.send(END_OF_TIME, ctx);
        if !self.leaving.is_empty() {
            self.inner.poll(ctx);
            let now = tsc::now();
            if now.wrapping_sub(*self.stopping.get_or_insert(now)) < tsc::hz() / STOP_WITHIN {
                return false;
            }
        }
        while !self.leaving.is_empty() {
            self.inner.counters().drop_all(DropReason::Full, &mut self.leaving, ctx.cache);
            self.send(END_OF_TIME, ctx);
        }
        self.inner.stop(ctx)
    }
}

/// Returns packets that were never sent to the pool.
impl Drop for ImpairTx {
    fn drop(&mut self) {
        self.line.free_all(&mut self.leaving);
    }
}

#[cfg(test)]
mod tests;
