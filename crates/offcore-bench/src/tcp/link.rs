//! Two hosts of this process and a wire between them: one is measured, the other runs on the other core.
//!
//! Timed are the production worker's rounds on the measured host: protocol, copies or their hand-over, headers. What the
//! far host takes, and applications with their FIFOs, is timed in turns of its own and told apart, so that it is seen who
//! pays for a copy. Untimed are the wire and the engine. With [`Side::Send`] data goes from the measured host, with
//! [`Side::Receive`] to it.
//!
//! The far host and a helper core copy through their caches: where data is `remote`, it is in those. So does the measured
//! core, unless [`Traffic::past_caches`] lets it choose.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::AddAssign;
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use offcore_dma::{Binding, Mover};
use offcore_flow::host::{App, Host};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_stats::{named, tsc};
use offcore_tcp::path::Path;
use offcore_tcp::proto::{Config, IfaceConfig, Out, Prefix, Stack};
use offcore_wire::MacAddr;

use super::share::CopyShare;
use super::streams::{Ends, Shared, Streams};
use super::wire::{WireEnd, wire};
use crate::method::alternate::{Cost, Subject};
use crate::method::copier::Setup;
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::method::timed_worker::{self, TimedWorker};

/// Bytes of a window, at least: as many chunks as that takes.
const WINDOW: usize = 256 << 10;
/// How often a window is made in which segments are sent again or dropped, before something is wrong.
const TRIES: usize = 3;
/// Without progress for so long something is wrong.
pub(super) const STALLED: Duration = Duration::from_secs(10);
/// Bytes of a request: what wrk sends, about.
const REQUEST: usize = 64;
/// Bytes of FIFOs in each host.
const MEMORY: usize = 512 << 20;
/// IP and TCP headers, with timestamps.
const HEADERS: u16 = 52;
/// Connections with large FIFOs, at most, and bytes of a FIFO.
const FEW: usize = 100;
const LARGE_FIFO: u32 = 4 << 20;
pub(super) const SMALL_FIFO: u32 = 256 << 10;

named! {
    /// Which host is measured.
    pub enum Side {
        /// The one that sends.
        Send = "send",
        /// The one that receives.
        Receive = "receive",
    }
}

/// What goes over a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    pub(super) side: Side,
    /// Bytes of payload in a segment, at most.
    pub(super) segment: usize,
    /// Connections that take turns.
    pub(super) connections: usize,
    /// Connections beside these, on which nothing happens.
    pub(super) idle: usize,
    /// Bytes that a FIFO holds.
    pub(super) fifo: u32,
    /// Whether the port completes and verifies checksums.
    pub(super) checksums: bool,
    /// Whether the measured core may store past the caches, at its reader's expense.
    pub(super) past_caches: bool,
    /// Whether each chunk is sent when it is asked for: what is counted is requests, one of a connection at a time.
    pub(super) asks: bool,
}

/// How data goes over a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) temperature: Temperature,
    /// Bytes that applications write at a time.
    pub(super) chunk: usize,
}

/// What has gone over a link, every byte checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) segments: u64,
    /// Bytes of payload.
    pub(super) bytes: u64,
    /// Windows that were thrown away and made anew because segments were sent again in them, or dropped.
    pub(super) again: u64,
}

impl AddAssign for Moved {
    fn add_assign(&mut self, other: Self) {
        self.segments += other.segments;
        self.bytes += other.bytes;
        self.again += other.again;
    }
}

/// What the other side of a window did: bytes that were read, and TSC ticks that it took.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    bytes: usize,
    ticks: u64,
}

/// Bytes that the FIFOs of so many connections hold.
pub(super) fn fifo_of(connections: usize) -> u32 {
    if connections <= FEW { LARGE_FIFO } else { SMALL_FIFO }
}

/// Chunks of a window: of those that are asked for, one of a connection.
pub(super) fn at_a_time(chunk: usize, (asks, connections): (bool, usize)) -> usize {
    (WINDOW / chunk).clamp(1, if asks { connections } else { usize::MAX })
}

/// The far host.
#[derive(Debug)]
struct Far {
    worker: Worker,
    shared: Shared,
    wire: WireEnd,
    /// Packets that its stack has dropped so far.
    dropped: u64,
}

impl Far {
    /// Rounds until nothing comes and nothing goes; the ticks that took, without the wire's.
    fn run(&mut self) -> Result<u64> {
        let (start, wires) = (tsc::now(), self.wire.taken());
        loop {
            let before = self.wire.segments();
            self.worker.round();
            if self.wire.waiting() == 0 && self.wire.segments() == before {
                break;
            }
        }
        let all = tsc::now() - start;
        self.dropped = dropped(&mut self.worker)?;
        Ok(all.saturating_sub(self.wire.taken() - wires))
    }
}

/// A measured host, the far one, and their connections.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) setup: Setup,
    side: Side,
    near: TimedWorker,
    shared: Shared,
    wire: WireEnd,
    far: Arc<Mutex<Far>>,
    connections: usize,
    asks: bool,
    /// The connection that has the next chunk.
    next: usize,
    /// Bytes that applications write at a time.
    chunk: usize,
    /// What the measured host has sent or received since that was set.
    moved: Moved,
    share: CopyShare,
    windows: usize,
}

/// The address of a host.
pub(super) fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

/// A host's worker: `setup` says who makes its copies, with the channels of `mover`.
pub(super) fn worker(
    (last, wire, app): (u8, &WireEnd, Box<dyn App>),
    mut mover: Mover,
    binding: &Binding,
    (segment, fifo): (usize, u32),
    pool: &'static Pool,
) -> Result<Worker> {
    let config = Config {
        secret: [last; 16],
        memory: MEMORY,
        receive_window: fifo,
        send_buffer: fifo,
        largest_buffer: fifo,
        largest_segment: segment as u16,
        ..Config::default()
    };
    let mut stack = Stack::new(config).context("FIFOs")?;
    let mut out = Out::default();
    let iface = IfaceConfig {
        mac: MacAddr([2, 0, 0, 0, 0, last]),
        mtu: 1500.max(segment as u16 + HEADERS),
        addresses: vec![Prefix { address: address(last), len: 24 }],
        routes: Vec::new(),
    };
    stack.add_iface(1, &iface, &mut out);
    let mut path = Path::new(stack, out, &mut mover, pool);
    path.bind(&mut mover, binding, binding)?;
    let host = Host::new(path, vec![wire.port()], app)?;
    Ok(Worker::new(vec![Box::new(host)], mover, pool.cache()))
}

/// Packets that a host's stack has dropped.
fn dropped(worker: &mut Worker) -> Result<u64> {
    let task: &mut dyn Any = worker.tasks.first_mut().context("the worker has no task")?.as_mut();
    let host: &mut Host = task.downcast_mut().context("the task is no host")?;
    Ok(host.stack().drops().iter().map(|(_, count)| count).sum())
}

impl Link {
    /// Opens both hosts and their connections. Takes some seconds: addresses are probed for first.
    pub(super) fn open(setup: Setup, traffic: Traffic, pool: &'static Pool) -> Result<Self> {
        let Traffic { side, connections, idle, checksums, asks, .. } = traffic;
        let mut engine = setup.open_to_caches()?;
        let (mut mover, channels) = timed_worker::mover_with(engine.as_mut())?;
        if !traffic.past_caches {
            mover.keep_to_caches();
        }
        let binding = Binding::new(setup.mode, channels);
        let [wire, far_wire] = wire(pool, checksums);
        let (shared, far_shared) = (Shared::default(), Shared::default());
        // The sender is the client.
        let all = connections + idle;
        let client = |shared: &Shared, to| Box::new(Ends::client(shared.clone(), address(to), all));
        let server = |shared: &Shared| Box::new(Ends::server(shared.clone()));
        let (near_app, far_app) = match side {
            Side::Send => (client(&shared, 2), server(&far_shared)),
            Side::Receive => (server(&shared), client(&far_shared, 1)),
        };
        let sizes = (traffic.segment, traffic.fifo);
        let near = worker((1, &wire, near_app), mover, &binding, sizes, pool)?;
        let core = Binding::core();
        let mut far_mover = Mover::new();
        far_mover.keep_to_caches();
        let far = worker((2, &far_wire, far_app), far_mover, &core, sizes, pool)?;
        let mut near = TimedWorker::new(near, engine, Temperature::Remote);
        near.not_its_own = Arc::clone(&wire.taken_ticks);
        let far = Far { worker: far, shared: far_shared, wire: far_wire, dropped: 0 };
        let far = Arc::new(Mutex::new(far));
        let (share, moved) = (CopyShare::begin(&near.worker.clock), Moved::default());
        let (next, chunk, windows) = (0, WINDOW, 0);
        let mut link = Self {
            setup,
            side,
            near,
            shared,
            wire,
            far,
            connections,
            asks,
            next,
            chunk,
            moved,
            share,
            windows,
        };
        link.connect(all)?;
        Ok(link)
    }

    fn connect(&mut self, all: usize) -> Result<()> {
        let mut far = lock(&self.far);
        let (mut open, mut since) = (0, Instant::now());
        loop {
            self.near.worker.round();
            far.worker.round();
            let both = [&self.shared, &far.shared].map(|shared| lock(&shared.streams).len());
            if both == [all; 2] {
                break;
            }
            if both[0] + both[1] > open {
                (open, since) = (both[0] + both[1], Instant::now());
            }
            ensure!(since.elapsed() < STALLED, "{both:?} of {all} connections are open");
        }
        lock(&self.shared.streams).sort();
        lock(&far.shared.streams).sort();
        far.dropped = dropped(&mut far.worker)?;
        Ok(())
    }

    /// From now on data is so warm, and applications write so many bytes at a time.
    pub(super) fn set(&mut self, Load { temperature, chunk }: Load) {
        self.near.temperature = temperature;
        let cold = temperature == Temperature::Cold;
        lock(&self.shared.streams).cold = cold;
        self.wire.set_cold(cold);
        (self.chunk, self.moved) = (chunk, Moved::default());
        self.share = CopyShare::begin(&self.near.worker.clock);
        self.near.forget();
    }

    /// What was moved since that was set.
    pub(super) fn moved(&self) -> Moved {
        self.moved
    }

    /// The share of copies in the measured core's cycles; `None` when the stage clock has sampled none.
    pub(super) fn copy_share(&self) -> Option<f64> {
        self.share.median()
    }

    /// The routine by which the core copied, as most windows had it.
    pub(super) fn copy_routine(&self) -> Option<String> {
        self.near.copy_routine()
    }

    /// Nanoseconds that the engine took for a copy; `None` without one.
    pub(super) fn engine_ns_per_copy(&self) -> Option<f64> {
        self.near.engine_ns_per_copy()
    }

    /// Runs the measured host until it has nothing to do; the ticks that took.
    fn run_near(&mut self, other: &OtherCore) -> Result<u64> {
        let Self { near, shared, wire, .. } = self;
        let before = Cell::new(wire.segments());
        let left = || {
            let now = wire.segments();
            let moved = before.replace(now) != now;
            moved || wire.waiting() > 0 || shared.in_flight.load(Ordering::Relaxed) > 0
        };
        near.rounds_until(1, other, left)
    }

    /// The far host's application writes what there is room for, the host runs, and what has come is read.
    fn run_far(&self, other: &OtherCore, read: Option<Chunks>) -> Result<Done> {
        let done = Arc::new(Mutex::new(Done::default()));
        let into = Arc::clone(&done);
        other.run_on(self.near.temperature, &self.far, move |far| {
            let app = |far: &Far| lock(&far.shared.streams).ticks;
            let before = app(far);
            lock(&far.shared.streams).write();
            far.shared.touched.store(true, Ordering::Relaxed);
            let (mut bytes, mut ticks) = (0, far.run()?);
            if let Some(chunks) = read {
                bytes = chunks.read(&mut lock(&far.shared.streams))?;
                far.shared.touched.store(true, Ordering::Relaxed);
                // The window opens again.
                ticks += far.run()?;
            }
            *lock(&into) = Done { bytes, ticks: ticks + app(far) - before };
            Ok(())
        })?;
        let done = *lock(&done);
        Ok(done)
    }

    /// What the measured host's application does, on the other core unless the data is hot.
    fn application(
        &self,
        other: &OtherCore,
        work: impl FnOnce(&mut Streams) -> Result<usize> + Send + 'static,
    ) -> Result<Done> {
        let done = Arc::new(Mutex::new(Done::default()));
        let into = Arc::clone(&done);
        other.run_on(self.near.temperature, &self.shared.streams, move |streams| {
            let before = streams.ticks;
            let bytes = work(streams)?;
            *lock(&into) = Done { bytes, ticks: streams.ticks - before };
            Ok(())
        })?;
        self.shared.touched.store(true, Ordering::Relaxed);
        let done = *lock(&done);
        Ok(done)
    }

    /// The far application asks for chunks, and the measured host's has read that; the ticks that took the measured core, and
    /// the other side.
    fn ask(&mut self, other: &OtherCore, chunks: Chunks) -> Result<[u64; 2]> {
        let requests = Chunks { len: REQUEST, ..chunks };
        requests.owe(&mut lock(&lock(&self.far).shared.streams))?;
        let (mut ticks, mut others, mut read, since) = (0, 0, 0, Instant::now());
        while read < requests.count * requests.len {
            others += self.run_far(other, None)?.ticks;
            ticks += self.run_near(other)?;
            let more = self.application(other, move |streams| requests.read(streams))?;
            (read, others) = (read + more.bytes, others + more.ticks);
            ensure!(since.elapsed() < STALLED, "{read} bytes of requests have arrived");
        }
        Ok([ticks, others])
    }

    /// One chunk for each of `chunks` goes over; the ticks that took the measured core, and the other side.
    fn transfer(&mut self, other: &OtherCore, chunks: Chunks) -> Result<[u64; 2]> {
        let bytes = chunks.count * chunks.len;
        match self.side {
            Side::Send => chunks.owe(&mut lock(&self.shared.streams))?,
            Side::Receive => chunks.owe(&mut lock(&lock(&self.far).shared.streams))?,
        }
        let (mut ticks, mut others, mut read, mut since) = (0, 0, 0, Instant::now());
        loop {
            let written = match self.side {
                Side::Send => self.application(other, |streams| {
                    streams.write();
                    Ok(0)
                })?,
                Side::Receive => self.run_far(other, None)?,
            };
            ticks += self.run_near(other)?;
            others += written.ticks;
            if read == bytes {
                return Ok([ticks, others]);
            }
            let more = match self.side {
                Side::Send => self.run_far(other, Some(chunks))?,
                Side::Receive => self.application(other, move |streams| chunks.read(streams))?,
            };
            others += more.ticks;
            if more.bytes > 0 {
                (read, since) = (read + more.bytes, Instant::now());
            }
            ensure!(since.elapsed() < STALLED, "{read} of {bytes} bytes have arrived");
        }
    }

    /// Packets with payload and bytes of it that have gone over the wire, and packets that stacks have dropped.
    fn seen(&mut self) -> Result<[u64; 3]> {
        let lane = usize::from(self.side == Side::Send);
        let drops = dropped(&mut self.near.worker)? + lock(&self.far).dropped;
        Ok([self.wire.segments()[lane], self.wire.payload()[lane], drops])
    }

    /// A window; `None` when segments were sent again in it or packets dropped, as happens when somebody was taken off his
    /// core for long: that is no part of what is measured.
    fn try_window(&mut self, other: &OtherCore) -> Result<Option<Cost>> {
        let count = at_a_time(self.chunk, (self.asks, self.connections));
        let chunks = Chunks { first: self.next, count, connections: self.connections, len: self.chunk };
        self.next = (self.next + count) % self.connections;
        let before = self.seen()?;
        let asked = if self.asks { self.ask(other, chunks)? } else { [0; 2] };
        let sent = self.transfer(other, chunks)?;
        let [core, guest] = [0, 1].map(|i| asked[i] + sent[i]);
        // The stack's queues: what is received, what is sent.
        self.near.note_routines(if self.side == Side::Receive { 0..1 } else { 1..2 });
        // The stage clock samples one round in 64: not the same of every window.
        self.windows += 1;
        if self.windows.is_multiple_of(3) {
            self.near.worker.round();
        }
        let after = self.seen()?;
        let [packets, payload, drops] = [0, 1, 2].map(|i| after[i] - before[i]);
        let bytes = (count * self.chunk) as u64;
        if payload != bytes || drops > 0 {
            self.moved.again += 1;
            return Ok(None);
        }
        self.moved += Moved { segments: packets, bytes, again: 0 };
        self.share.note(&self.near.worker.clock, packets);
        Ok(Some(Cost { packets: if self.asks { count as u64 } else { packets }, core, guest }))
    }
}

/// What is written in a window: one chunk for each of some connections in a row.
#[derive(Clone, Copy, Debug)]
struct Chunks {
    first: usize,
    count: usize,
    connections: usize,
    len: usize,
}

impl Chunks {
    fn indices(self) -> impl Iterator<Item = usize> {
        (0..self.count).map(move |index| (self.first + index) % self.connections)
    }

    fn owe(self, streams: &mut Streams) -> Result<()> {
        self.indices().try_for_each(|index| streams.owe(index, self.len))
    }

    fn read(self, streams: &mut Streams) -> Result<usize> {
        let indices = self.indices().take(self.connections);
        indices.map(|index| streams.read(index)).sum()
    }
}

impl Subject for Rc<RefCell<Link>> {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        self.borrow_mut().window(other)
    }
}

impl Subject for &mut Link {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        Link::window(self, other)
    }
}

impl Subject for Link {
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        for _ in 0..TRIES {
            if let Some(cost) = self.try_window(other)? {
                return Ok(cost);
            }
        }
        bail!("segments were sent again, or packets dropped, in {TRIES} windows in a row")
    }
}

#[cfg(test)]
mod tests;
