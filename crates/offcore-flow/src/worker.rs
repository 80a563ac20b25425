//! One lcore's loop: poll completions, receive, rewrite, send; run to completion on its own queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offcore_dma::mover::{self, Decision, Way};
use offcore_dma::{ChannelId, Mover};
use offcore_mem::{Burst, Packet, PoolCache};
use offcore_port::settle::settle;
use offcore_port::vhost::{Next, OneCopy};
use offcore_port::{Context, DropReason, RxQueue, TxQueue};
use offcore_stats::page::Block;
use offcore_stats::{Stage, StageClock, tsc};

use crate::bridge::Bridge;
use crate::forward::{self, Addresses, Forward, Source, rewrite};
use crate::idle::Sleeper;
use crate::mirror::MirrorOut;

/// Rounds between two updates of the channel counters on the statistics page.
const PUBLISH_EVERY: u32 = 1024;
/// The same in sleeps, the first of which comes after something was done.
const PUBLISH_ASLEEP: u32 = 100;
/// A worker that stops gives up when nothing has moved for this long.
const DRAIN_PATIENCE: Duration = Duration::from_secs(10);

/// The names of [`MOVER_COUNTERS`] for these classes.
macro_rules! mover_counters {
    ($($class:literal),*) => {
        [
            "core_copies", "core_bytes", "fallbacks", "overflow", "resets", "quarantined", "faults",
            "out_of_service", "channels_out", "probes", "held_by_order",
            $(
                concat!("auto_", $class, "_by_core"),
                concat!("auto_", $class, "_by_engine"),
                concat!("auto_", $class, "_held"),
                concat!("auto_", $class, "_changes"),
                concat!("auto_", $class, "_way"),
                concat!("auto_", $class, "_reason"),
                concat!("auto_", $class, "_core_ticks"),
                concat!("auto_", $class, "_engine_ticks"),
            )*
        ]
    };
}

/// Counters of one channel on the statistics page.
pub const CHANNEL_COUNTERS: [&str; 5] = ["submitted", "completed", "failed", "bytes", "in_flight"];
/// Counters of one worker's mover on the statistics page: its own, then for every size class of mode `auto` those of
/// [`CLASS_COUNTERS`], the class named by the bytes of its longest copy.
pub const MOVER_COUNTERS: [&str; OWN + mover::CLASSES * CLASS_COUNTERS.len()] = mover_counters![
    "64", "128", "256", "512", "1024", "2048", "4096", "8192", "16384", "32768", "65536", "max"
];
/// What is told of a size class, over all queues of the worker: how many copies the core made, how many an engine, how
/// many of the core's waited for older ones of an engine, and how often the choice changed; and of the queue with most
/// copies of the class who copies (0 no one so far, 1 the core, 2 an engine), the number of the reason
/// ([`Reason::ALL`](offcore_dma::mover::Reason::ALL)), and both costs in TSC ticks a copy.
pub const CLASS_COUNTERS: [&str; 8] =
    ["by_core", "by_engine", "held", "changes", "way", "reason", "core_ticks", "engine_ticks"];
/// Counters of the mover itself.
const OWN: usize = 11;

/// Packets from one RX queue to one TX queue.
#[derive(Debug)]
pub struct Stream {
    /// Where packets come from; unused by `txonly`.
    pub rx: Box<dyn RxQueue>,
    /// Where they go to; unused by `rxonly`.
    pub tx: Box<dyn TxQueue>,
    /// Addresses for `mac`.
    pub addresses: Addresses,
    /// The generator of `txonly` and `flowgen`.
    pub source: Option<Source>,
    /// From a guest to a guest: the way in one copy, taken whenever it can be.
    pub one_copy: Option<OneCopy>,
}

/// One lcore's work.
#[derive(Debug)]
pub struct Worker {
    /// Its streams.
    pub streams: Vec<Stream>,
    /// Its part of the learning switch, in mode `l2`.
    pub bridges: Vec<Bridge>,
    /// The mirrors that it sends to.
    pub mirrors: Vec<MirrorOut>,
    /// What to do with packets.
    pub forward: Forward,
    /// Packets a round takes from one queue, 1 to 64.
    pub burst: usize,
    /// Application work per packet, in TSC ticks.
    pub work: u64,
    /// Its engines.
    pub mover: Mover,
    /// Its free packet buffers.
    pub cache: PoolCache,
    /// Its stage clock.
    pub clock: StageClock,
    /// Where the mover's counters go.
    pub mover_stats: Block,
    /// Where each channel's counters go.
    pub channel_stats: Vec<(ChannelId, Block)>,
}

impl Worker {
    /// Runs until `stop` is set, then finishes what is in flight; with a `sleeper` it sleeps when there is nothing to do.
    /// Returns the number of packets that could not be finished.
    pub fn run(mut self, mut sleeper: Option<Sleeper>, stop: &Arc<AtomicBool>) -> usize {
        let mut until_publish = PUBLISH_EVERY;
        while !stop.load(Ordering::Relaxed) {
            let packets = self.round();
            until_publish -= 1;
            if let Some(sleeper) = &mut sleeper
                && sleeper.is_due(packets)
                && self.mover.in_flight() == 0
            {
                if sleeper.in_a_row().is_multiple_of(PUBLISH_ASLEEP) {
                    until_publish = PUBLISH_EVERY;
                    self.publish_stats();
                }
                let generates = self.streams.iter().any(|stream| stream.source.is_some());
                sleeper.sleep(generates, self.rx_queues());
                self.rx_queues().for_each(|queue| queue.disarm());
            }
            if until_publish == 0 {
                until_publish = PUBLISH_EVERY;
                self.publish_stats();
            }
        }
        let left = self.drain();
        self.publish_stats();
        left
    }

    /// One round over every stream; returns the packets received or generated.
    pub fn round(&mut self) -> usize {
        self.clock.begin();
        self.mover.poll(&mut self.clock);
        let mut packets = 0;
        let Self { mover, cache, clock, burst, .. } = self;
        let mut ctx = Context { mover, cache, clock, burst: *burst };
        for stream in &mut self.streams {
            packets += stream.round(self.forward, self.work, &mut ctx);
        }
        for bridge in &mut self.bridges {
            packets += bridge.round(&mut ctx, |packets, ctx| work(self.work, packets, ctx));
        }
        for mirror in &mut self.mirrors {
            packets += mirror.round(&mut ctx);
        }
        self.mover.end_round();
        self.clock.end(if packets > 0 { Stage::Header } else { Stage::Idle });
        packets
    }

    /// Every queue that it receives from.
    fn rx_queues(&mut self) -> impl Iterator<Item = &mut dyn RxQueue> {
        let streams = self.streams.iter_mut().map(|stream| &mut *stream.rx as &mut dyn RxQueue);
        let bridges = self.bridges.iter_mut().flat_map(Bridge::inputs);
        let bridges = bridges.map(|input| &mut *input.rx as &mut dyn RxQueue);
        streams.chain(bridges).chain(self.mirrors.iter_mut().flat_map(MirrorOut::rings))
    }

    fn drain(&mut self) -> usize {
        let left = self.drain_until(|worker, ctx| {
            let streams: usize = worker.streams.iter_mut().map(|s| s.drain(worker.forward, ctx)).sum();
            let bridges: usize = worker.bridges.iter_mut().map(|bridge| bridge.drain(ctx)).sum();
            worker.mirrors.iter_mut().for_each(|mirror| _ = mirror.round(ctx));
            streams + bridges
        });
        if left > 0 {
            return left;
        }
        // Their queues go first: mirrors, here and on other workers, are done when nothing can come any more.
        self.streams.clear();
        self.bridges.clear();
        self.drain_until(|worker, ctx| worker.mirrors.iter_mut().map(|mirror| mirror.drain(ctx)).sum())
    }

    /// Calls `drain` until it says that nothing is left in flight; what is left when nothing moves any more.
    fn drain_until(&mut self, drain: impl Fn(&mut Work<'_>, &mut Context<'_>) -> usize) -> usize {
        let mut last = usize::MAX;
        let mut progress = Instant::now();
        loop {
            self.mover.poll(&mut self.clock);
            let Self { mover, cache, clock, burst, streams, bridges, mirrors, forward, .. } = self;
            let mut ctx = Context { mover, cache, clock, burst: *burst };
            let left = drain(&mut Work { streams, bridges, mirrors, forward: *forward }, &mut ctx);
            if left == 0 {
                return 0;
            }
            if left != last {
                (last, progress) = (left, Instant::now());
            } else if progress.elapsed() > DRAIN_PATIENCE {
                tracing::error!(left, "packets in flight were never completed");
                return left;
            }
        }
    }

    /// The values of [`CLASS_COUNTERS`] for every class.
    fn decisions(&self) -> [[u64; CLASS_COUNTERS.len()]; mover::CLASSES] {
        let mut classes = [(0, Decision::default()); mover::CLASSES];
        for queue in self.mover.queues() {
            for ((most, sum), one) in classes.iter_mut().zip(self.mover.decisions(queue).classes) {
                let copies = one.by_core + one.by_engine;
                let shown = if copies > *most { one } else { *sum };
                *sum = Decision {
                    by_core: sum.by_core + one.by_core,
                    by_engine: sum.by_engine + one.by_engine,
                    held_by_order: sum.held_by_order + one.held_by_order,
                    changes: sum.changes + one.changes,
                    ..shown
                };
                *most = copies.max(*most);
            }
        }
        classes.map(|(copies, of)| {
            let way = match of.way {
                _ if copies == 0 => 0,
                Way::Core => 1,
                Way::Engine => 2,
            };
            let [core, engine] = [of.core_ticks, of.engine_ticks].map(|ticks| ticks.round() as u64);
            [of.by_core, of.by_engine, of.held_by_order, of.changes, way, of.reason as u64, core, engine]
        })
    }

    fn publish_stats(&self) {
        let stats = self.mover.stats();
        let values = [
            stats.core_copies,
            stats.core_bytes,
            stats.fallbacks,
            stats.overflow,
            stats.resets,
            stats.quarantined,
            stats.faults,
            stats.out_of_service,
            stats.channels_out,
            stats.probes,
            stats.held_by_order,
        ];
        let decisions = self.decisions().into_iter().flatten();
        for (i, value) in values.into_iter().chain(decisions).enumerate() {
            self.mover_stats.counter(i).set(value);
        }
        for (id, channel) in self.mover.channels() {
            let Some((_, block)) = self.channel_stats.iter().find(|(known, _)| *known == id) else {
                continue;
            };
            let stats = channel.stats();
            let in_flight = channel.in_flight() as u64;
            let values = [stats.submitted, stats.completed, stats.failed, stats.bytes, in_flight];
            for (i, value) in values.into_iter().enumerate() {
                block.counter(i).set(value);
            }
        }
    }
}

/// What a worker works on.
struct Work<'a> {
    streams: &'a mut [Stream],
    bridges: &'a mut [Bridge],
    mirrors: &'a mut [MirrorOut],
    forward: Forward,
}

impl Stream {
    fn round(&mut self, forward: Forward, work: u64, ctx: &mut Context<'_>) -> usize {
        let (packets, next) = self.in_one_copy(forward, ctx);
        self::work(work, packets, ctx);
        match next {
            Next::Nothing if packets > 0 => packets,
            Next::Nothing => {
                ctx.clock.lap(Stage::Idle);
                0
            }
            Next::Ordinary => packets + self.ordinary(forward, work, true, ctx),
            Next::Finish => packets + self.ordinary(forward, work, false, ctx),
        }
    }

    /// From a guest to a guest in one copy; how many packets have arrived, and what else is to be done.
    fn in_one_copy(&mut self, forward: Forward, ctx: &mut Context<'_>) -> (usize, Next) {
        let Self { rx, tx, addresses, one_copy, .. } = self;
        let Some(one_copy) = one_copy else { return (0, Next::Ordinary) };
        let (rx, tx) = (&mut **rx, &mut **tx);
        match forward {
            Forward::Io => one_copy.forward(ctx, rx, tx, |_| ()),
            Forward::Mac => one_copy.forward(ctx, rx, tx, |frame| forward::set_addresses(addresses, frame)),
            Forward::Macswap => one_copy.forward(ctx, rx, tx, forward::swap_addresses),
            Forward::Rxonly | Forward::Txonly | Forward::Flowgen | Forward::Copy | Forward::L2 => {
                (0, Next::Ordinary)
            }
        }
    }

    /// Through packet buffers; takes no new packets unless `take`.
    fn ordinary(&mut self, forward: Forward, work: u64, take: bool, ctx: &mut Context<'_>) -> usize {
        let mut burst = Burst::new();
        if take && forward != Forward::Txonly {
            self.rx.rx(ctx, &mut burst);
        } else {
            // Nothing is received, but the queue has to follow its front end.
            self.rx.drain(ctx, &mut burst);
        }
        let received = burst.len();
        if received == 0 {
            // What a poll that found nothing took belongs to no stage of a packet's way.
            ctx.clock.lap(Stage::Idle);
        }
        self::work(work, received, ctx);
        match forward {
            Forward::Rxonly => ctx.cache.free_all(burst.drain(..)),
            Forward::Flowgen => ctx.cache.free_all(burst.drain(..)),
            Forward::Txonly | Forward::Io | Forward::Mac | Forward::Macswap | Forward::Copy | Forward::L2 => {
                rewrite(forward, &self.addresses, &mut burst);
            }
        }
        if let Some(source) = &mut self.source {
            source.fill(ctx.cache, &mut burst, ctx.burst);
        }
        if !Packet::all_plain(&burst) {
            settle(&mut *self.tx, ctx, &mut burst);
        }
        let sent = burst.len();
        if sent == 0 {
            self.tx.poll(ctx);
            return received;
        }
        ctx.clock.lap(Stage::Header);
        self.tx.tx(ctx, &mut burst);
        if !burst.is_empty() {
            self.left_over(forward, ctx, &mut burst);
        }
        received.max(sent)
    }

    /// There is no room for these: whoever can wait takes them back, the others' are dropped.
    #[cold]
    fn left_over(&mut self, forward: Forward, ctx: &mut Context<'_>, burst: &mut Burst) {
        if self.source.is_none() {
            if forward == Forward::Macswap {
                // They will come this way again.
                rewrite(forward, &self.addresses, burst);
            }
            self.rx.take_back(burst);
        }
        self.tx.counters().drop_all(DropReason::Full, burst, ctx.cache);
    }

    /// Forwards what was already taken from the other side; returns how many packets are still in flight.
    fn drain(&mut self, forward: Forward, ctx: &mut Context<'_>) -> usize {
        let (rx, tx) = (&mut *self.rx, &mut *self.tx);
        let crossing = self.one_copy.as_mut().map_or(0, |one_copy| one_copy.drain(ctx, rx, tx));
        let mut burst = Burst::new();
        let receiving = self.rx.drain(ctx, &mut burst);
        let forwarded = burst.len();
        if matches!(forward, Forward::Rxonly | Forward::Flowgen) {
            ctx.cache.free_all(burst.drain(..));
        } else {
            rewrite(forward, &self.addresses, &mut burst);
            settle(&mut *self.tx, ctx, &mut burst);
            self.tx.tx(ctx, &mut burst);
            self.tx.counters().drop_all(DropReason::Full, &mut burst, ctx.cache);
        }
        // A queue that has stopped takes no more: first comes what is still to come from the other side.
        let coming = crossing + receiving + forwarded;
        if coming > 0 {
            // What it has sent goes on meanwhile: its buffers may be what the other side waits for.
            self.tx.poll(ctx);
            return coming;
        }
        usize::from(!self.tx.stop(ctx))
    }
}

/// Stands for the application's own work on so many packets, in ticks each: what asynchronous copies hide behind.
#[inline]
fn work(ticks: u64, packets: usize, ctx: &mut Context<'_>) {
    if ticks > 0 && packets > 0 {
        spin(ticks * packets as u64);
        ctx.clock.lap(Stage::Application);
    }
}

#[inline]
fn spin(ticks: u64) {
    let start = tsc::now();
    while tsc::now().wrapping_sub(start) < ticks {
        std::hint::spin_loop();
    }
}
