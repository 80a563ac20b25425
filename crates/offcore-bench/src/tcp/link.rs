//! Two hosts of this process and a wire between them: one is measured, the other runs on the other core.
//!
//! Timed are the production worker's rounds on the measured host: protocol, copies or their hand-over, headers. Untimed
//! are the far host, what applications do with their FIFOs, the wire, and the engine, each in turns of its own. With
//! [`Side::Send`] data goes from the measured host, with [`Side::Receive`] to it.

use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use offcore_dma::{Binding, Mover};
use offcore_flow::host::{App, Host};
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_stats::named;
use offcore_tcp::path::Path;
use offcore_tcp::proto::{Config, IfaceConfig, Out, Prefix, Stack};
use offcore_wire::MacAddr;

use super::streams::{Ends, Shared, Streams};
use super::wire::{WireEnd, wire};
use crate::method::alternate::{Cost, Subject};
use crate::method::copier::Setup;
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::method::timed_worker::{self, TimedWorker};

/// Bytes of a window, at least: as many chunks as that takes.
const WINDOW: usize = 256 << 10;
/// Without progress for so long something is wrong.
pub(super) const STALLED: Duration = Duration::from_secs(10);
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
}

/// How data goes over a link.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) temperature: Temperature,
    /// Bytes that applications write at a time.
    pub(super) chunk: usize,
}

/// Bytes that the FIFOs of so many connections hold.
pub(super) fn fifo_of(connections: usize) -> u32 {
    if connections <= FEW { LARGE_FIFO } else { SMALL_FIFO }
}

/// The far host.
#[derive(Debug)]
struct Far {
    worker: Worker,
    shared: Shared,
    wire: WireEnd,
}

impl Far {
    /// Rounds until nothing comes and nothing goes.
    fn run(&mut self) {
        loop {
            let before = self.wire.segments();
            self.worker.round();
            if self.wire.waiting() == 0 && self.wire.segments() == before {
                return;
            }
        }
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
    /// The connection that has the next chunk.
    next: usize,
    /// Bytes that applications write at a time.
    chunk: usize,
    /// Segments that the measured host has sent or received since that was set, every byte checked.
    segments: u64,
    /// What the stage clock had then, by group.
    groups: [f64; 3],
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

impl Link {
    /// Opens both hosts and their connections. Takes some seconds: addresses are probed for first.
    pub(super) fn open(setup: Setup, traffic: Traffic, pool: &'static Pool) -> Result<Self> {
        let Traffic { side, connections, idle, checksums, .. } = traffic;
        let mut engine = setup.open()?;
        let (mover, channels) = timed_worker::mover_with(engine.as_mut())?;
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
        let far = worker((2, &far_wire, far_app), Mover::new(), &core, sizes, pool)?;
        let mut near = TimedWorker::new(near, engine, Temperature::Remote);
        near.not_its_own = Arc::clone(&wire.taken_ticks);
        let far = Arc::new(Mutex::new(Far { worker: far, shared: far_shared, wire: far_wire }));
        let (next, chunk, segments, groups, windows) = (0, WINDOW, 0, [0.0; 3], 0);
        let mut link = Self {
            setup,
            side,
            near,
            shared,
            wire,
            far,
            connections,
            next,
            chunk,
            segments,
            groups,
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
        Ok(())
    }

    /// From now on data is so warm, and applications write so many bytes at a time.
    pub(super) fn set(&mut self, Load { temperature, chunk }: Load) {
        self.near.temperature = temperature;
        let cold = temperature == Temperature::Cold;
        lock(&self.shared.streams).cold = cold;
        self.wire.set_cold(cold);
        (self.chunk, self.segments, self.groups) = (chunk, 0, self.near.groups());
    }

    /// Segments that were moved, every byte of them checked.
    pub(super) fn segments(&self) -> u64 {
        self.segments
    }

    /// Shares of the measured core's cycles: packets and protocol, virtqueues, copies.
    pub(super) fn shares(&self) -> [f64; 3] {
        self.near.shares_since(self.groups)
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

    /// The far host's application writes what there is room for, the host runs, and what has come is read; returns the
    /// bytes read.
    fn run_far(&self, other: &OtherCore, read: Option<Chunks>) -> Result<usize> {
        let bytes = Arc::new(Mutex::new(0));
        let into = Arc::clone(&bytes);
        other.run_on(self.near.temperature, &self.far, move |far| {
            lock(&far.shared.streams).write();
            far.shared.touched.store(true, Ordering::Relaxed);
            far.run();
            if let Some(chunks) = read {
                *lock(&into) = chunks.read(&mut lock(&far.shared.streams))?;
                far.shared.touched.store(true, Ordering::Relaxed);
                // The window opens again.
                far.run();
            }
            Ok(())
        })?;
        let bytes = *lock(&bytes);
        Ok(bytes)
    }

    /// What the measured host's application does, on the other core unless the data is hot.
    fn application(
        &self,
        other: &OtherCore,
        work: impl FnOnce(&mut Streams) -> Result<usize> + Send + 'static,
    ) -> Result<usize> {
        let bytes = Arc::new(Mutex::new(0));
        let into = Arc::clone(&bytes);
        other.run_on(self.near.temperature, &self.shared.streams, move |streams| {
            *lock(&into) = work(streams)?;
            Ok(())
        })?;
        self.shared.touched.store(true, Ordering::Relaxed);
        let bytes = *lock(&bytes);
        Ok(bytes)
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
        let count = (WINDOW / self.chunk).max(1);
        let chunks = Chunks { first: self.next, count, connections: self.connections, len: self.chunk };
        self.next = (self.next + count) % self.connections;
        let bytes = count * self.chunk;
        let before = self.wire.segments();
        match self.side {
            Side::Send => chunks.owe(&mut lock(&self.shared.streams))?,
            Side::Receive => chunks.owe(&mut lock(&lock(&self.far).shared.streams))?,
        }
        let (mut ticks, mut read, mut since) = (0, 0, Instant::now());
        loop {
            match self.side {
                Side::Send => self.application(other, |streams| {
                    streams.write();
                    Ok(0)
                })?,
                Side::Receive => self.run_far(other, None)?,
            };
            ticks += self.run_near(other)?;
            if read == bytes {
                break;
            }
            let more = match self.side {
                Side::Send => self.run_far(other, Some(chunks))?,
                Side::Receive => self.application(other, move |streams| chunks.read(streams))?,
            };
            if more > 0 {
                (read, since) = (read + more, Instant::now());
            }
            ensure!(since.elapsed() < STALLED, "{read} of {bytes} bytes have arrived");
        }
        // The stack's queues: what is received, what is sent.
        self.near.note_routines(if self.side == Side::Receive { 0..1 } else { 1..2 });
        // The stage clock samples one round in 64: not the same of every window.
        self.windows += 1;
        if self.windows.is_multiple_of(3) {
            self.near.worker.round();
        }
        let after = self.wire.segments();
        let segments = match self.side {
            Side::Send => after[1] - before[1],
            Side::Receive => after[0] - before[0],
        };
        self.segments += segments;
        Ok(Cost { packets: segments, core: ticks, guest: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_mem::Hugepages;

    #[test]
    fn every_byte_arrives_whoever_copies() {
        let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
        let other = OtherCore::start(None).unwrap();
        for (side, setup, checksums) in [
            (Side::Send, Setup::HELPER, true),
            (Side::Receive, Setup::HELPER, false),
            (Side::Send, Setup::CPU, false),
        ] {
            let traffic =
                Traffic { side, segment: 1448, connections: 3, idle: 2, fifo: fifo_of(5), checksums };
            let mut link = Link::open(setup, traffic, pool).unwrap();
            for (temperature, chunk) in
                [(Temperature::Hot, 4096), (Temperature::Remote, 2 << 20), (Temperature::Cold, 777)]
            {
                link.set(Load { temperature, chunk });
                let cost = link.window(&other).unwrap();
                assert_eq!(link.segments(), cost.packets);
                let bytes = (WINDOW / chunk).max(1) * chunk;
                assert!(cost.packets as usize >= bytes.div_ceil(1448) && cost.core > 0, "{side}: {cost:?}");
            }
        }
    }

    #[test]
    fn a_wrong_byte_is_noticed() {
        let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
        let other = OtherCore::start(None).unwrap();
        let (connections, idle, fifo) = (1, 0, fifo_of(1));
        let traffic = Traffic { side: Side::Send, segment: 512, connections, idle, fifo, checksums: true };
        let mut link = Link::open(Setup::CPU, traffic, pool).unwrap();
        link.window(&other).unwrap();
        lock(&link.shared.streams).skip(0);
        let error = link.window(&other).unwrap_err();
        assert!(format!("{error:#}").contains("wrong bytes"), "{error:#}");
    }
}
