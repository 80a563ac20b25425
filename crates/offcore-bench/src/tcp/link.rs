//! A link: two hosts in this process and a wire between them. One host is measured, the other runs on the other core.
//!
//! The timed part is the production worker's rounds on the measured host: protocol, copies or their submission, and
//! headers. The time of the far host, and of applications with their FIFOs, is measured in separate turns and reported
//! separately. This shows which side bears the cost of a copy. The wire and the engine are not timed. With
//! [`Side::Send`] data flows from the measured host, with [`Side::Receive`] to it.
//!
//! The far host and a helper core copy through their caches. If data is `remote`, it is in those caches. The measured
//! core copies through its caches, too, unless [`Traffic::past_caches`] is set.

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
use offcore_stats::time::Time;
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

/// Minimum size of a window in bytes. The number of chunks follows from it.
const WINDOW: usize = 256 << 10;
/// Maximum number of attempts for a window in which segments are retransmitted or dropped.
const TRIES: usize = 3;
/// Maximum time without progress.
pub(super) const STALLED: Duration = Duration::from_secs(10);
/// Size of a request in bytes, about the size of a request of wrk.
const REQUEST: usize = 64;
/// Memory for FIFOs in each host, in bytes.
const MEMORY: usize = 512 << 20;
/// Bytes of IP and TCP headers with timestamps.
const HEADERS: u16 = 52;
/// Maximum number of connections with large FIFOs, and sizes of FIFOs in bytes.
const FEW: usize = 100;
const LARGE_FIFO: u32 = 4 << 20;
pub(super) const SMALL_FIFO: u32 = 256 << 10;

named! {
    /// The measured host.
    pub enum Side {
        /// The sending host.
        Send = "send",
        /// The receiving host.
        Receive = "receive",
    }
}

/// Traffic on a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    pub(super) side: Side,
    /// Maximum payload of a segment in bytes.
    pub(super) segment: usize,
    /// Connections that take turns.
    pub(super) connections: usize,
    /// Number of additional idle connections.
    pub(super) idle: usize,
    /// Size of a FIFO in bytes.
    pub(super) fifo: u32,
    /// Whether the port completes and verifies checksums.
    pub(super) checksums: bool,
    /// Whether the measured core may use stores that bypass the caches, which makes reading more expensive.
    pub(super) past_caches: bool,
    /// Whether a chunk is sent only in response to a request. Then requests are counted, with one at a time per
    /// connection.
    pub(super) asks: bool,
}

/// Temperature and write size of the data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) temperature: Temperature,
    /// Write size of applications in bytes.
    pub(super) chunk: usize,
}

/// Data that has passed the link. Every byte is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) segments: u64,
    /// Bytes of payload.
    pub(super) bytes: u64,
    /// Windows that were discarded and repeated because segments were retransmitted or dropped in them.
    pub(super) again: u64,
}

impl AddAssign for Moved {
    fn add_assign(&mut self, other: Self) {
        self.segments += other.segments;
        self.bytes += other.bytes;
        self.again += other.again;
    }
}

/// Result of the other side in a window: bytes read, and TSC ticks used.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    bytes: usize,
    ticks: u64,
}

/// Returns the FIFO size in bytes for the given number of connections.
pub(super) fn fifo_of(connections: usize) -> u32 {
    if connections <= FEW { LARGE_FIFO } else { SMALL_FIFO }
}

/// Returns the number of chunks per window. With requests, it is limited to one per connection.
pub(super) fn chunks_per_window(chunk: usize, asks: bool, connections: usize) -> usize {
    (WINDOW / chunk).clamp(1, if asks { connections } else { usize::MAX })
}

/// The far host.
#[derive(Debug)]
struct Far {
    worker: Worker,
    shared: Shared,
    wire: WireEnd,
    /// Number of packets that its stack has dropped so far.
    dropped: u64,
}

impl Far {
    /// Runs rounds until no packet arrives or leaves. Returns the ticks used, without those for the wire.
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

/// The measured host, the far host, and their connections.
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
    /// The connection with the next chunk.
    next: usize,
    /// Write size of applications in bytes.
    chunk: usize,
    /// Data that the measured host has sent or received since the last [`Link::set`].
    moved: Moved,
    share: CopyShare,
    windows: usize,
}

/// Returns the address of a host.
pub(super) fn address(last: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, last).into()
}

/// Sizes of a host's stack in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct StackSizes {
    /// Maximum payload of a segment.
    pub(super) segment: usize,
    pub(super) fifo: u32,
}

/// Creates the worker of the host whose address ends with `last`. `binding` selects the copy mode and the channels of
/// `mover`.
pub(super) fn worker(
    last: u8,
    wire: &WireEnd,
    app: Box<dyn App>,
    mut mover: Mover,
    binding: &Binding,
    sizes: StackSizes,
    pool: &'static Pool,
) -> Result<Worker> {
    let StackSizes { segment, fifo } = sizes;
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
    stack.add_iface(Time::from_micros(1), &iface, &mut out);
    let mut path = Path::new(stack, out, &mut mover, pool);
    path.bind(&mut mover, binding, binding)?;
    let host = Host::new(path, vec![wire.port()], app)?;
    Ok(Worker::new(vec![Box::new(host)], mover, pool.cache()))
}

/// Returns the number of packets that a host's stack has dropped.
fn dropped(worker: &mut Worker) -> Result<u64> {
    let task: &mut dyn Any = worker.tasks.first_mut().context("the worker has no task")?.as_mut();
    let host: &mut Host = task.downcast_mut().context("the task is no host")?;
    Ok(host.stack().drops().iter().map(|(_, count)| count).sum())
}

impl Link {
    /// Opens both hosts and their connections. This takes some seconds because of duplicate address detection.
    pub(super) fn open(setup: Setup, traffic: Traffic, pool: &'static Pool) -> Result<Self> {
        let Traffic { side, connections, idle, checksums, asks, .. } = traffic;
        let mut engine = setup.open_to_caches()?;
        let (mut mover, channels) = timed_worker::mover_with(engine.as_mut())?;
        if !traffic.past_caches {
            mover.disable_streaming_stores();
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
        let sizes = StackSizes { segment: traffic.segment, fifo: traffic.fifo };
        let near = worker(1, &wire, near_app, mover, &binding, sizes, pool)?;
        let core = Binding::core();
        let mut far_mover = Mover::new();
        far_mover.disable_streaming_stores();
        let far = worker(2, &far_wire, far_app, far_mover, &core, sizes, pool)?;
        let mut near = TimedWorker::new(near, engine, Temperature::Remote);
        near.foreign_ticks = Arc::clone(&wire.taken_ticks);
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

    /// Sets the temperature of the data and the write size of applications.
    pub(super) fn set(&mut self, Load { temperature, chunk }: Load) {
        self.near.temperature = temperature;
        let cold = temperature == Temperature::Cold;
        lock(&self.shared.streams).cold = cold;
        self.wire.set_cold(cold);
        (self.chunk, self.moved) = (chunk, Moved::default());
        self.share = CopyShare::begin(&self.near.worker.clock);
        self.near.forget();
    }

    /// Returns the data moved since the last [`Link::set`].
    pub(super) fn moved(&self) -> Moved {
        self.moved
    }

    /// Returns the share of copies in the measured core's cycles, or `None` if the stage clock has no samples.
    pub(super) fn copy_share(&self) -> Option<f64> {
        self.share.median()
    }

    /// Returns the routine with which the core copied in most windows.
    pub(super) fn copy_routine(&self) -> Option<String> {
        self.near.copy_routine()
    }

    /// Returns the engine's nanoseconds per copy, or `None` without an engine.
    pub(super) fn engine_ns_per_copy(&self) -> Option<f64> {
        self.near.engine_ns_per_copy()
    }

    /// Runs the measured host until no work is pending. Returns the ticks used.
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

    /// Lets the far host's application write as much as the FIFOs take, runs the host, and reads the received data.
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
                // The receive window opens again.
                ticks += far.run()?;
            }
            *lock(&into) = Done { bytes, ticks: ticks + app(far) - before };
            Ok(())
        })?;
        let done = *lock(&done);
        Ok(done)
    }

    /// Runs the measured host's application, on the other core unless the data is hot.
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

    /// Sends requests for chunks from the far application until the measured host's application has read them. Returns
    /// the ticks of the measured core and of the other side.
    fn ask(&mut self, other: &OtherCore, chunks: Chunks) -> Result<[u64; 2]> {
        let requests = Chunks { len: REQUEST, ..chunks };
        requests.queue_bytes(&mut lock(&lock(&self.far).shared.streams))?;
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

    /// Transfers one chunk for each of `chunks`. Returns the ticks of the measured core and of the other side.
    fn transfer(&mut self, other: &OtherCore, chunks: Chunks) -> Result<[u64; 2]> {
        let bytes = chunks.count * chunks.len;
        match self.side {
            Side::Send => chunks.queue_bytes(&mut lock(&self.shared.streams))?,
            Side::Receive => chunks.queue_bytes(&mut lock(&lock(&self.far).shared.streams))?,
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

    /// Returns the number of packets with payload and of payload bytes that have passed the wire, and the number of
    /// packets dropped by the stacks.
    fn seen(&mut self) -> Result<[u64; 3]> {
        let lane = usize::from(self.side == Side::Send);
        let drops = dropped(&mut self.near.worker)? + lock(&self.far).dropped;
        Ok([self.wire.segments()[lane], self.wire.payload()[lane], drops])
    }

    /// Runs a window. Returns `None` if segments were retransmitted or packets dropped in it. This happens if a thread
    /// is preempted for a long time, which is not part of the measurement.
    fn try_window(&mut self, other: &OtherCore) -> Result<Option<Cost>> {
        let count = chunks_per_window(self.chunk, self.asks, self.connections);
        let chunks = Chunks { first: self.next, count, connections: self.connections, len: self.chunk };
        self.next = (self.next + count) % self.connections;
        let before = self.seen()?;
        let asked = if self.asks { self.ask(other, chunks)? } else { [0; 2] };
        let sent = self.transfer(other, chunks)?;
        let [core, guest] = [0, 1].map(|i| asked[i] + sent[i]);
        // Indices of the stack's queues: receive, then send.
        self.near.note_routines(if self.side == Side::Receive { 0..1 } else { 1..2 });
        // The stage clock samples every 64th round. An additional round shifts the samples to different rounds of the
        // windows.
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

/// Data written in a window: one chunk for each of several consecutive connections.
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

    fn queue_bytes(self, streams: &mut Streams) -> Result<()> {
        self.indices().try_for_each(|index| streams.queue_bytes(index, self.len))
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
        bail!(
            "segments were retransmitted or dropped in {TRIES} windows in a row; if other programs use these cores, stop \
             them and try again"
        )
    }
}

#[cfg(test)]
mod tests;
