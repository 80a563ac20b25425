//! From one RX queue to one TX queue.

pub mod forward;
pub mod guest_pair;

use offcore_mem::{Burst, Packet};
use offcore_port::offload_fallback::fall_back;
use offcore_port::{Context, DropReason, RxQueue, TxQueue};
use offcore_stats::Stage;

use crate::worker::task::{Task, WakeSource, work};
use crate::worker::turns::Turns;
use forward::{Addresses, Forward, Rewrite, Source};

/// Packets from one RX queue to one TX queue, through packet buffers.
#[derive(Debug)]
pub struct Forwarding {
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    rules: Rules,
}

impl Forwarding {
    /// From `rx` to `tx`.
    pub fn new(rx: Box<dyn RxQueue>, tx: Box<dyn TxQueue>, rules: Rules) -> Self {
        Self { rx, tx, rules }
    }

    /// What is done with the packets, to be changed.
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

/// What becomes of received packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Received {
    /// They are sent.
    Sent,
    /// They are dropped.
    Dropped,
    /// There are none: nothing is received.
    None,
}

/// What is done with packets between two queues.
#[derive(Debug)]
pub struct Rules {
    received: Received,
    /// What is rewritten of those that are sent.
    pub rewrite: Rewrite,
    /// The generator of `txonly` and `flowgen`.
    source: Option<Source>,
    /// Application work per packet, in TSC ticks.
    pub work: u64,
    /// Whose turns these are.
    port: Option<usize>,
    /// Whether none of the last packets could be sent.
    stuck: bool,
}

impl Rules {
    /// Those of a forwarding mode, with the addresses that `mac` writes, and `work` TSC ticks of application work per packet.
    pub fn new(mode: Forward, addresses: Addresses, work: u64) -> Self {
        let received = match mode {
            Forward::Io | Forward::Mac | Forward::Macswap => Received::Sent,
            Forward::Rxonly | Forward::Flowgen { .. } => Received::Dropped,
            Forward::Txonly { .. } => Received::None,
        };
        Self { received, ..Self::sending(Rewrite::of(mode, addresses), work) }
    }

    /// What is received is rewritten so and sent.
    pub(crate) fn sending(rewrite: Rewrite, work: u64) -> Self {
        Self { received: Received::Sent, rewrite, source: None, work, port: None, stuck: false }
    }

    /// For what comes from the worker's port of this number, whose queues have turns together.
    #[must_use]
    pub fn of_port(self, port: usize) -> Self {
        Self { port: Some(port), ..self }
    }

    /// With packets of `source`, if there is one, beside what is received.
    #[must_use]
    pub fn with_source(self, source: Option<Source>) -> Self {
        Self { source, ..self }
    }

    /// Makes a round in a turn. If none of its packets could be sent, nobody shall wait for the next ones.
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

    /// Takes a burst from `rx`, or only what was on its way already unless `take`, and sends it to `tx`.
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
            // Nothing is received, but the queue has to follow its front end.
            rx.drain(ctx, &mut burst);
        }
        let received = burst.len();
        if received == 0 {
            // What a poll that found nothing took belongs to no stage of a packet's way.
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
            self.left_over(rx, tx, ctx, &mut burst);
        }
        received.max(sent)
    }

    /// There is no room for these: whoever can wait takes them back, the others' are dropped.
    #[cold]
    fn left_over(
        &self,
        rx: &mut dyn RxQueue,
        tx: &mut dyn TxQueue,
        ctx: &mut Context<'_>,
        burst: &mut Burst,
    ) {
        if self.source.is_none() {
            // They will come this way again.
            self.rewrite.undo(burst);
            rx.take_back(burst);
        }
        tx.counters().drop_all(DropReason::Full, burst, ctx.cache);
    }

    /// Forwards what was already taken from the other side, of which `crossing` packets are on another way; returns how
    /// many packets are still in flight.
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
        tx.counters().drop_all(DropReason::Full, &mut burst, ctx.cache);
        // A queue that has stopped takes no more: first comes what is still to come from the other side.
        let coming = crossing + receiving + forwarded;
        if coming > 0 {
            // What it has sent goes on meanwhile: its buffers may be what the other side waits for.
            tx.poll(ctx);
            return coming;
        }
        usize::from(!tx.stop(ctx))
    }
}
