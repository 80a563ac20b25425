//! Forwarding from one RX queue to one TX queue.

pub mod forward;
pub mod guest_pair;

use offcore_mem::{Burst, Packet};
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Context, DropReason, RxQueue, TxQueue};
use offcore_stats::Stage;

use crate::worker::task::{Task, WakeSource, work};
use crate::worker::turns::Turns;
use forward::{Addresses, Forward, Rewrite, Source};

/// Forwards packets from one RX queue to one TX queue through packet buffers.
#[derive(Debug)]
pub struct Forwarding {
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    rules: Rules,
}

impl Forwarding {
    /// Creates a task that forwards from `rx` to `tx`.
    pub fn new(rx: Box<dyn RxQueue>, tx: Box<dyn TxQueue>, rules: Rules) -> Self {
        Self { rx, tx, rules }
    }

    /// Returns the rules, which the caller may change.
    pub fn rules(&mut self) -> &mut Rules {
        &mut self.rules
    }
}

impl Task for Forwarding {
    fn round(&mut self, ctx: &mut Context<'_>) -> usize {
        self.rules.round(&mut *self.rx, &mut *self.tx, true, ctx)
    }

    fn round_in_turns(&mut self, ctx: &mut Context<'_>, turns: &mut Turns) -> usize {
        let Self { rx, tx, rules } = self;
        rules.turn(ctx, turns, |rules, ctx| rules.round(&mut **rx, &mut **tx, true, ctx))
    }

    fn drain(&mut self, ctx: &mut Context<'_>) -> usize {
        self.rules.drain(&mut *self.rx, &mut *self.tx, 0, ctx)
    }

    fn wake_sources<'a>(&'a mut self, each: &mut dyn FnMut(WakeSource<'a>)) {
        each(WakeSource::Queue(&mut *self.rx));
    }

    fn generates(&self) -> bool {
        self.rules.source.is_some()
    }
}

/// Treatment of received packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    /// Packets are sent.
    Sent,
    /// Packets are dropped.
    Dropped,
    /// Nothing is received.
    None,
}

/// Rules for packets between two queues.
#[derive(Debug)]
pub struct Rules {
    received: Received,
    /// How sent packets are rewritten.
    pub rewrite: Rewrite,
    /// The generator of `txonly` and `flowgen`.
    source: Option<Source>,
    /// Application work per packet, in TSC ticks.
    pub work: u64,
    /// The port that is charged for turns.
    port: Option<usize>,
    /// Whether no packet of the last burst could be sent.
    stuck: bool,
}

impl Rules {
    /// Returns the rules of a forwarding mode. Mode `mac` writes `addresses`. `work` is the application work per packet
    /// in TSC ticks.
    pub fn new(mode: Forward, addresses: Addresses, work: u64) -> Self {
        let received = match mode {
            Forward::Io | Forward::Mac | Forward::Macswap => Received::Sent,
            Forward::Rxonly | Forward::Flowgen { .. } => Received::Dropped,
            Forward::Txonly { .. } => Received::None,
        };
        Self { received, ..Self::sending(Rewrite::of(mode, addresses), work) }
    }

    /// Returns rules that rewrite all received packets and send them.
    pub(crate) fn sending(rewrite: Rewrite, work: u64) -> Self {
        Self { received: Received::Sent, rewrite, source: None, work, port: None, stuck: false }
    }

    /// Sets the worker's port from which packets are received. All queues of a port share its turns.
    #[must_use]
    pub fn of_port(self, port: usize) -> Self {
        Self { port: Some(port), ..self }
    }

    /// Adds the packets of `source`, if any, to the received ones.
    #[must_use]
    pub fn with_source(self, source: Option<Source>) -> Self {
        Self { source, ..self }
    }

    /// Makes a round in a turn. If no packet could be sent, other ports do not wait for this one.
    fn turn(
        &mut self,
        ctx: &mut Context<'_>,
        turns: &mut Turns,
        round: impl FnOnce(&mut Self, &mut Context<'_>) -> usize,
    ) -> usize {
        self.stuck = false;
        turns.turn(self.port, ctx, |turns, ctx| {
            let packets = round(self, ctx);
            if self.stuck {
                turns.set_stuck();
            }
            packets
        })
    }

    /// Receives a burst from `rx` and sends it to `tx`. Without `take`, only packets already in progress are received.
    pub(crate) fn round(
        &mut self,
        rx: &mut dyn RxQueue,
        tx: &mut dyn TxQueue,
        take: bool,
        ctx: &mut Context<'_>,
    ) -> usize {
        let mut burst = Burst::new();
        if take && self.received != Received::None {
            rx.rx(ctx, &mut burst);
        } else {
            // Nothing is received, but the queue must follow its front end.
            rx.drain(ctx, &mut burst);
        }
        let received = burst.len();
        if received == 0 {
            // The time of an empty poll does not belong to any stage of a packet's path.
            ctx.clock.lap(Stage::Idle);
        }
        work(self.work, received, ctx);
        if self.received == Received::Dropped {
            ctx.cache.free_all(burst.drain(..));
        }
        self.rewrite.burst(&mut burst);
        if let Some(source) = &mut self.source {
            source.fill(ctx.cache, &mut burst, ctx.burst);
        }
        if !Packet::all_plain(&burst) {
            fall_back(tx, ctx, &mut burst);
        }
        let sent = burst.len();
        if sent == 0 {
            tx.poll(ctx);
            return received;
        }
        ctx.clock.lap(Stage::Header);
        tx.tx(ctx, &mut burst);
        if !burst.is_empty() {
            self.stuck = burst.len() == sent;
            self.handle_unsent(rx, tx, ctx, &mut burst);
        }
        received.max(sent)
    }

    /// Handles packets that did not fit into the TX queue: an RX queue that can wait takes them back, others drop them.
    #[cold]
    fn handle_unsent(
        &self,
        rx: &mut dyn RxQueue,
        tx: &mut dyn TxQueue,
        ctx: &mut Context<'_>,
        burst: &mut Burst,
    ) {
        if self.source.is_none() {
            // These packets will be received again.
            self.rewrite.undo(burst);
            rx.take_back(burst);
        }
        tx.counters().drop_all(DropReason::Full, burst, ctx.cache);
    }

    /// Forwards packets already taken from the other side. `crossing` packets are still on another path. Returns the
    /// number of packets in flight.
    pub(crate) fn drain(
        &mut self,
        rx: &mut dyn RxQueue,
        tx: &mut dyn TxQueue,
        crossing: usize,
        ctx: &mut Context<'_>,
    ) -> usize {
        let mut burst = Burst::new();
        let receiving = rx.drain(ctx, &mut burst);
        let forwarded = burst.len();
        if self.received == Received::Dropped {
            ctx.cache.free_all(burst.drain(..));
        }
        self.rewrite.burst(&mut burst);
        fall_back(tx, ctx, &mut burst);
        tx.tx(ctx, &mut burst);
        if !burst.is_empty() && tx.is_drained_by_device() {
            self.handle_unsent(rx, tx, ctx, &mut burst);
        }
        tx.counters().drop_all(DropReason::Full, &mut burst, ctx.cache);
        // A stopped queue accepts no packets, so remaining packets from the other side are forwarded first.
        let coming = crossing + receiving + forwarded;
        if coming > 0 {
            // Sent packets must complete, because the other side may wait for their buffers.
            tx.poll(ctx);
            return coming;
        }
        usize::from(!tx.stop(ctx))
    }
}
