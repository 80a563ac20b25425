//! A host on several workers. The worker that receives a packet passes it through a ring to the worker that owns the
//! packet's flow.
//!
//! ```text
//! port's queue 0 -> worker 0 -+-> its stack -------------> port's queue 0
//!                             \-- ring --> worker 1's stack --> port's queue 1, or a ring to worker 0, which sends it
//! ```
//! A worker that is too slow fills its rings, and further packets for it are dropped. Other workers never wait.

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

/// Maximum number of own packets per port that a busy worker keeps: the absolute limit, and the divisor for a share
/// of the pool's chunks.
const BACKLOG: usize = 1024;
const BACKLOG_SHARE: usize = 16;

/// The rings of one worker for one port.
#[derive(Debug, Default)]
pub struct Rings {
    /// To the other workers, by worker number.
    pub to: Vec<Option<RingTx>>,
    /// From other workers: packets of this worker's flows.
    pub from: Vec<RingRx>,
    /// From workers without a queue of the port: packets to send.
    pub relayed: Vec<RingRx>,
}

/// The state of one worker for a port, in addition to its queues.
#[derive(Debug)]
pub struct Spread {
    pub rings: Rings,
    /// The offloads that the port accepts, for workers that send through this one.
    pub takes: Arc<Takes>,
    backlog: VecDeque<Packet>,
    /// Packets being distributed: by worker, and packets for all workers.
    bursts: Vec<Burst>,
    all: Burst,
    duplicator: Duplicator,
}

impl Spread {
    /// Creates the state without packets.
    pub fn new(rings: Rings, takes: Arc<Takes>) -> Self {
        let bursts = rings.to.iter().map(|_| Burst::new()).collect();
        let (backlog, all, duplicator) = (VecDeque::new(), Burst::new(), Duplicator::default());
        Self { rings, takes, backlog, bursts, all, duplicator }
    }

    /// Passes packets of `burst` to the workers that own them, and keeps this worker's packets in the backlog.
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

    /// Takes this worker's packets from the backlog if the stack is `open` for more. Packets beyond the limit of the
    /// backlog are dropped, and counted in `counters`.
    pub fn take_own(&mut self, ctx: &mut Context<'_>, burst: &mut Burst, open: bool, counters: &RxCounters) {
        let taken = if open { self.backlog.len().min(BURST) } else { 0 };
        burst.extend(self.backlog.drain(..taken));
        let most = BACKLOG.min(ctx.cache.pool().chunks() / BACKLOG_SHARE / self.bursts.len());
        if self.backlog.len() > most {
            counters.drop(DropReason::Full, (self.backlog.len() - most) as u64);
            ctx.cache.free_all(self.backlog.drain(most..));
        }
    }

    /// Passes reassembled packets to the workers that own them. Returns their number.
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

    /// Moves packets from other workers to the send queue `queue`, while it is short.
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

    /// Frees the remaining packets after all workers are done. Returns the rings that other workers may still use; the
    /// caller drains them until they are released.
    pub fn end(self, ctx: &mut Context<'_>) -> impl Iterator<Item = RingRx> {
        ctx.cache.free_all(self.backlog);
        self.rings.from.into_iter().chain(self.rings.relayed)
    }
}

/// The offloads that a port accepts, stored by the worker that sends to it, for the workers that send through that
/// worker.
#[derive(Debug, Default)]
pub struct Takes(AtomicU32);

impl Takes {
    /// Stores the accepted offloads.
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

/// The TX queue of a worker without a queue of the port. Another worker sends the packets.
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

/// The number of workers that still need each other's queues.
pub type Unfinished = Arc<AtomicUsize>;
