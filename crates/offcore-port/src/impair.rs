//! The impairment port: another port, whose packets are lost, overtaken, doubled, damaged, late or slow on purpose.
//!
//! It wraps any port. Each direction of each queue has random numbers of its own, made of the seed: the same packets in
//! the same order are treated alike in every run. A packet that is to be segmented, or has several buffers, is one
//! packet. What a packet waits for is counted in packet buffers; where more would be held than may be, it is dropped as
//! `full`. Packets lost on purpose are `impaired`. All else that is counted is counted by the port inside.
//!
//! A burst that comes is looked at packet by packet, and what is held sorted by when it leaves: this port is for tests,
//! and not fast.

mod line;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offcore_mem::{Burst, DeviceMemory, Packet, Pool};
use offcore_stats::page::Block;
use offcore_stats::{Stage, tsc};
use offcore_wire::MacAddr;

use crate::base::PortBase;
use crate::offload_fallback::fall_back;
use crate::spec::ImpairSpec;
use crate::{
    Accepts, Context, DropReason, PeerReport, Port, PortError, QueueSetup, RxCounters, RxQueue, TxCounters,
    TxQueue, Wake, hand_over, room,
};

use line::{Count, END_OF_TIME, Line};

/// What part of the pool the lines of a port may hold together: one buffer in this many.
const SHARE: usize = 4;
/// Packet buffers that one line may hold, at most and at least.
const MOST: usize = 4096;
const LEAST: usize = 64;
/// A second by this is how long a queue that is drained keeps to its times, at most: a tenth.
const DRAIN_WITHIN: u64 = 10;
/// A second by this is how long a queue that stops tries to send what it holds: a tenth.
const STOP_WITHIN: u64 = 10;

/// An impairment port.
#[derive(Debug)]
pub struct ImpairPort {
    base: PortBase,
    spec: ImpairSpec,
    inner: Box<dyn Port>,
    pool: &'static Pool,
    /// Packets that the sending half of each queue holds.
    sending: Vec<Arc<AtomicUsize>>,
    /// What the receiving and the sending halves count.
    counts: [Vec<Block>; 2],
}

impl ImpairPort {
    /// `inner`, impaired as `spec` says. Its packets are chunks of `pool`.
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

    /// The line of one half of queue `index`, 0 to receive and 1 to send.
    fn line(&mut self, index: u16, half: usize, counts: Block) -> Line {
        self.counts[half].push(counts.clone());
        let lines = 2 * usize::from(self.queues()).max(1);
        let limit = (self.pool.chunks() / SHARE / lines).clamp(LEAST, MOST);
        let number = 2 * u64::from(index) + half as u64;
        Line::new(&self.spec, number, tsc::hz(), limit, self.pool, counts)
    }
}

impl Port for ImpairPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn mac(&self) -> MacAddr {
        self.inner.mac()
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counts = setup.stats.block(&format!("{}/impair_rx{index}", setup.port), &Count::NAMES)?;
        let inner = self.inner.rx_queue(index, setup)?;
        let sending = Arc::clone(&self.sending[usize::from(index)]);
        let line = self.line(index, 0, counts);
        Ok(Box::new(ImpairRx { inner, line, returned: Burst::new(), draining: None, sending }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counts = setup.stats.block(&format!("{}/impair_tx{index}", setup.port), &Count::NAMES)?;
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
    /// Given and taken back, because the other side had no room.
    returned: Burst,
    /// Since when the queue has been drained, and not received from.
    draining: Option<u64>,
    /// Packets that the sending half holds: nobody else wakes the worker up for them.
    sending: Arc<AtomicUsize>,
}

impl ImpairRx {
    /// Puts what has come at `now` into the line.
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
        // Who waits is not asked for what there is no room for.
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

    /// What is held comes at its time for a while, and then at once.
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

    /// What was given has been impaired, so the port inside must not get it back.
    fn take_back(&mut self, burst: &mut Burst) {
        if self.inner.waits() {
            hand_over(burst, &mut self.returned);
        }
    }

    fn waits(&self) -> bool {
        self.inner.waits()
    }
}

/// The pool gets back what was never asked for again.
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
    /// Have left the line, and the port inside had no room for them yet.
    leaving: Burst,
    /// Since when the queue has been stopping.
    stopping: Option<u64>,
    sending: Arc<AtomicUsize>,
}

impl ImpairTx {
    /// Sends what leaves at `now`, as far as there is room.
    fn send(&mut self, now: u64, ctx: &mut Context<'_>) {
        loop {
            self.line.give(now, self.leaving.capacity(), &mut self.leaving);
            if self.leaving.is_empty() {
                self.inner.poll(ctx);
                break;
            }
            if !Packet::all_plain(&self.leaving) {
                // A guest may have ceased to accept what it did when they came.
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

    /// What is held goes at once. What the port inside has no room for within a tenth of a second is dropped.
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

/// The pool gets back what was never sent.
impl Drop for ImpairTx {
    fn drop(&mut self) {
        self.line.free_all(&mut self.leaving);
    }
}

#[cfg(test)]
mod tests;
