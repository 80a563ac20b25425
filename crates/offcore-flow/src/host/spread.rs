//! A host on several workers: each packet goes to the worker whose flow it is of, by a ring from the one that received it.
//!
//! ```text
//! port's queue 0 -> worker 0 -+-> its stack -------------> port's queue 0
//!                             \-- ring --> worker 1's stack --> port's queue 1, or a ring to worker 0, which sends it
//! ```
//! A worker that does not come to its packets fills its rings, and loses what comes then; nobody waits for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use offcore_mem::{BURST, Burst, Packet};
use offcore_port::duplicate::Duplicator;
use offcore_port::{Accepts, Context, DropReason, RxCounters, RxQueue, TxCounters, TxQueue};
use offcore_ring::prefetch;
use offcore_stats::Stage;
use offcore_tcp::path::{Path, SendQueue, head_of};
use offcore_tcp::proto::{Owner, Stack};
use offcore_wire::virtio_net::Offloads;

use crate::ring::{RingRx, RingTx};

/// Packets of its own, of each port, that a worker keeps which has no time for them: at most, and what part of the pool.
const BACKLOG: usize = 1024;
const BACKLOG_SHARE: usize = 16;

/// Rings of one worker, for one port.
#[derive(Debug, Default)]
pub struct Rings {
    /// To the other workers, by number.
    pub to: Vec<Option<RingTx>>,
    /// From them: packets of this worker's flows.
    pub from: Vec<RingRx>,
    /// From workers without a queue of the port: packets to be sent.
    pub relayed: Vec<RingRx>,
}

/// What one worker has beside its queues of a port.
#[derive(Debug)]
pub struct Spread {
    pub rings: Rings,
    /// What the port takes, for workers that send by this one.
    pub takes: Arc<Takes>,
    backlog: VecDeque<Packet>,
    /// What is being dealt: by worker, and what all are to have.
    bursts: Vec<Burst>,
    all: Burst,
    duplicator: Duplicator,
}

impl Spread {
    /// With nothing to do yet.
    pub fn new(rings: Rings, takes: Arc<Takes>) -> Self {
        let bursts = rings.to.iter().map(|_| Burst::new()).collect();
        let (backlog, all, duplicator) = (VecDeque::new(), Burst::new(), Duplicator::default());
        Self { rings, takes, backlog, bursts, all, duplicator }
    }

    /// Gives other workers what is theirs of `burst`, and keeps what is this one's.
    pub fn deal(&mut self, ctx: &mut Context<'_>, stack: &Stack, burst: &mut Burst) {
        if burst.is_empty() {
            return;
        }
        for packet in burst.iter() {
            prefetch::read(packet.data().as_ptr());
        }
        let this = stack.share().worker;
        for packet in burst.drain(..) {
            match stack.owner(head_of(&packet), ctx.cache.pool().total_len(&packet)) {
                Owner::Worker(worker) if worker != this => self.bursts[worker as usize].push(packet),
                Owner::Worker(_) | Owner::Anybody => self.backlog.push_back(packet),
                Owner::All => self.all.push(packet),
            }
        }
        for (to, theirs) in self.rings.to.iter_mut().zip(&mut self.bursts) {
            let Some(to) = to else { continue };
            if !self.all.is_empty() {
                let missing = self.duplicator.duplicate(&self.all, ctx.cache, theirs);
                to.counters().drop(DropReason::NoBuffer, missing as u64);
            }
            if !theirs.is_empty() {
                to.tx(ctx, theirs);
                to.counters().drop_all(DropReason::Full, theirs, ctx.cache);
            }
        }
        self.backlog.extend(self.all.drain(..));
        ctx.clock.lap(Stage::Rx);
    }

    /// Takes what is this worker's, when it is `open` for it. What is too much to be kept until then is dropped, which
    /// `counters` are told.
    pub fn take_own(&mut self, ctx: &mut Context<'_>, burst: &mut Burst, open: bool, counters: &RxCounters) {
        let taken = if open { self.backlog.len().min(BURST) } else { 0 };
        burst.extend(self.backlog.drain(..taken));
        let most = BACKLOG.min(ctx.cache.pool().chunks() / BACKLOG_SHARE / self.bursts.len());
        if self.backlog.len() > most {
            counters.drop(DropReason::Full, (self.backlog.len() - most) as u64);
            ctx.cache.free_all(self.backlog.drain(most..));
        }
    }

    /// Gives other workers the packets of theirs that this one has put together of fragments; how many.
    pub fn deal_whole(&mut self, ctx: &mut Context<'_>, path: &mut Path, iface: u8) -> usize {
        let mut burst = Burst::new();
        let mut whole = 0;
        loop {
            path.take_elsewhere(iface, &mut burst);
            if burst.is_empty() {
                return whole;
            }
            whole += burst.len();
            self.deal(ctx, &path.stack, &mut burst);
        }
    }

    /// Moves packets that other workers want to be sent to `queue`, while that is not long.
    pub fn relay(&mut self, ctx: &mut Context<'_>, queue: &mut SendQueue) -> usize {
        let mut burst = Burst::new();
        let mut relayed = 0;
        for ring in &mut self.rings.relayed {
            if queue.len() > BURST {
                break;
            }
            ring.rx(ctx, &mut burst);
            relayed += burst.len();
            burst.drain(..).for_each(|packet| queue.push_back(packet));
        }
        relayed
    }

    /// All workers are done. What was left to this one is freed; the rings that others may not have left yet are to be
    /// emptied until they have.
    pub fn end(self, ctx: &mut Context<'_>) -> impl Iterator<Item = RingRx> {
        ctx.cache.free_all(self.backlog);
        self.rings.from.into_iter().chain(self.rings.relayed)
    }
}

/// What a port takes, told by the worker that sends to it to those that send by that worker.
#[derive(Debug, Default)]
pub struct Takes(AtomicU32);

impl Takes {
    /// Tells it.
    pub fn set(&self, accepts: Accepts) {
        let Accepts { offloads: Offloads { checksum, tso4, tso6, ecn, uso }, segments } = accepts;
        let bits = [checksum, tso4, tso6, ecn, uso, segments].into_iter().zip(0..);
        self.0.store(bits.map(|(bit, at)| u32::from(bit) << at).sum(), Ordering::Relaxed);
    }

    fn get(&self) -> Accepts {
        let bits = self.0.load(Ordering::Relaxed);
        let [checksum, tso4, tso6, ecn, uso, segments] = [0, 1, 2, 3, 4, 5].map(|at| bits >> at & 1 != 0);
        Accepts { offloads: Offloads { checksum, tso4, tso6, ecn, uso }, segments }
    }
}

/// A TX queue of a worker that has none of the port: another worker sends what it is given.
#[derive(Debug)]
pub struct RelayTx {
    pub ring: RingTx,
    pub takes: Arc<Takes>,
}

impl TxQueue for RelayTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        self.ring.tx(ctx, burst);
    }

    fn accepts(&self) -> Accepts {
        self.takes.get()
    }

    fn counters(&self) -> &TxCounters {
        self.ring.counters()
    }
}

/// Workers that still need each other's queues.
pub type Unfinished = Arc<AtomicUsize>;
