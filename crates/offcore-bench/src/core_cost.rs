//! Core cost: the TSC ticks that the measured core spends on a packet, and nothing else.
//!
//! The guest and the engine's steps run on the other core (with `hot`, on the same one), in their own turns, untimed.
//! What is timed is the production worker's round: poll, dequeue, address rewriting, enqueue, publishing. With an
//! engine a window of packets is dequeued (submitted), copied, forwarded (reaped and submitted again), copied, and
//! published: three timed parts, the waits between them untimed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use offcore_dma::{Mode, Mover};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::worker::{MOVER_COUNTERS, Stream, Worker};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping, Pool};
use offcore_port::vhost::{rx_over, tx_over};
use offcore_port::{RxCounters, TxCounters};
use offcore_ring::split::Layout;
use offcore_stats::page::Block;
use offcore_stats::stage::Group;
use offcore_stats::{Stage, StageClock, tsc};
use offcore_vhost::features::{NET_MRG_RXBUF, RING_INDIRECT_DESC, VERSION_1};
use offcore_vhost::{Binding, VringCell, VringConfig};

use crate::copier::Engine;
use crate::guest::{Guest, PEER_MAC, PORT_MAC, Seen, memory_len};
use crate::lockstep::OtherCore;
use crate::temperature::Temperature;

/// Packets in a burst.
pub const BURST: usize = 32;
/// Size of both virtqueues.
pub const RING: u16 = 1024;
/// How often the engine is run for one window, at most.
const MOST_WAITS: usize = 64;
/// Where the device sees the guest's memory.
const GUEST_ADDRESS: u64 = 0x1_0000_0000;
/// Bytes kept for the two virtqueues.
const RINGS: usize = 2 << 20;

/// Guest memory: buffers, and behind them the two virtqueues.
#[derive(Debug)]
pub struct GuestSide {
    /// The guest's own view.
    pub memory: Arc<GuestMemory>,
    /// The memfd behind it, for the device to map.
    pub fd: OwnedFd,
    len: usize,
    temperature: Temperature,
}

impl GuestSide {
    /// Memory for a guest of this temperature, on the pages that `hugepages` says.
    ///
    /// # Errors
    /// When there is no such memory.
    pub fn new(temperature: Temperature, hugepages: Hugepages) -> Result<Self> {
        let (mapping, fd) = Mapping::memfd("bench-guest", memory_len(temperature) + RINGS, hugepages)?;
        let len = mapping.len();
        Ok(Self { memory: one_region(mapping)?, fd, len, temperature })
    }

    /// The device's view: a mapping of its own, as another process would have.
    fn device_view(&self) -> Result<Arc<GuestMemory>> {
        one_region(Mapping::shared(self.fd.as_fd(), 0, self.len)?)
    }

    /// The virtqueues at the end of the memory, as seen through `view`: RX, then TX.
    fn rings(&self, view: &Arc<GuestMemory>) -> Result<(Layout, Layout)> {
        let ring = |index: usize| {
            let start = GUEST_ADDRESS + (memory_len(self.temperature) + index * (RINGS / 2)) as u64;
            Layout::in_memory(view, (start, start + 0x2_0000, start + 0x4_0000), RING.into())
        };
        Ok((ring(0)?, ring(1)?))
    }
}

fn one_region(mapping: Mapping) -> Result<Arc<GuestMemory>> {
    let len = mapping.len() as u64;
    let region = GuestRegion::new(GUEST_ADDRESS, GUEST_ADDRESS, len, mapping, 0)?;
    Ok(Arc::new(GuestMemory::new(vec![region])?))
}

/// One thing to be measured: a guest and the worker that forwards for it.
#[derive(Debug)]
pub struct Lane {
    guest: Arc<Mutex<Guest>>,
    worker: Worker,
    cells: [Arc<VringCell>; 2],
    engine: Option<Arc<Mutex<Engine>>>,
    temperature: Temperature,
}

impl Lane {
    /// A lane for frames of `frame` bytes, FCS included, whose virtqueues are bound to `engine`'s channel in `mode`.
    ///
    /// # Errors
    /// When memory cannot be had, or the engine's channel is taken already.
    pub fn new(
        temperature: Temperature,
        frame: usize,
        (mode, mut engine): (Mode, Option<Engine>),
        pool: &'static Pool,
        hugepages: Hugepages,
    ) -> Result<Self> {
        let side = GuestSide::new(temperature, hugepages)?;
        let guest = Guest::new(Arc::clone(&side.memory), side.rings(&side.memory)?, temperature, frame)?;
        let device = side.device_view()?;
        let (rx_ring, tx_ring) = side.rings(&device)?;
        let cells = [Arc::new(VringCell::new(0)), Arc::new(VringCell::new(1))];
        let mut mover = Mover::new();
        if let Some(engine) = &mut engine {
            let channel = engine.take_channel().context("the engine's channel belongs to another lane")?;
            mover.add_channel(channel);
        }
        let channels: Vec<_> = mover.channels().map(|(id, _)| id).collect();
        for (cell, layout) in cells.iter().zip([rx_ring, tx_ring]) {
            let vring = VringConfig {
                memory: Arc::clone(&device),
                layout: layout.into(),
                start: VringConfig::next_start(),
                base: 0,
                features: VERSION_1 | NET_MRG_RXBUF | RING_INDIRECT_DESC,
                call: None,
                kick: None,
                enabled: true,
            };
            cell.publish(|wanted| {
                wanted.vring = Some(Arc::new(vring));
                wanted.binding = Binding::new(mode, channels.clone());
            });
        }
        let stream = Stream {
            rx: rx_over(&cells[1], &mut mover, RxCounters::private())?,
            tx: tx_over(&cells[0], &mut mover, TxCounters::private())?,
            addresses: Addresses { source: PORT_MAC, destination: PEER_MAC },
            source: None,
        };
        let worker = Worker {
            streams: vec![stream],
            forward: Forward::Mac,
            burst: BURST,
            work: 0,
            mover,
            cache: pool.cache(),
            clock: StageClock::private(),
            mover_stats: Block::private(&MOVER_COUNTERS),
            channel_stats: Vec::new(),
        };
        let engine = engine.map(|engine| Arc::new(Mutex::new(engine)));
        Ok(Self { guest: Arc::new(Mutex::new(guest)), worker, cells, engine, temperature })
    }

    /// What the guest has seen.
    pub fn seen(&self) -> Seen {
        lock(&self.guest).seen()
    }

    /// Nanoseconds that the engine took for a copy; `None` without one.
    pub fn engine_ns_per_copy(&self) -> Option<f64> {
        Some(lock(self.engine.as_ref()?).ns_per_copy())
    }

    /// Application work per packet from now on, in nanoseconds.
    pub fn set_work(&mut self, ns: u64) {
        self.worker.work = (ns as f64 * tsc::hz() as f64 / 1e9) as u64;
    }

    /// TSC ticks of a round that finds nothing.
    pub fn empty_poll(&mut self) -> f64 {
        const ROUNDS: usize = 1000;
        let start = tsc::now();
        for _ in 0..ROUNDS {
            self.worker.round();
        }
        (tsc::now() - start) as f64 / ROUNDS as f64
    }

    /// Moves one window of packets through; returns the ticks that each cost the core.
    ///
    /// # Errors
    /// When a packet is lost, reordered or changed.
    pub fn turn(&mut self, other: &OtherCore) -> Result<f64> {
        let window = self.temperature.window();
        self.on_guest(other, move |guest| guest.transmit(window))?;
        let bursts = window / BURST;
        let mut ticks = self.rounds(bursts);
        // In mode `auto` the core may have made all copies: then there is nothing to wait for.
        if self.in_flight() > 0 {
            self.run_engine(other)?;
            if self.cells[1].in_flight() > 0 {
                ticks += self.rounds(bursts);
                self.run_engine(other)?;
            }
            // An engine whose queue is shorter than the window gets the rest as it makes room: then there is more to
            // wait for.
            for _ in 0..MOST_WAITS {
                ticks += self.publish(bursts + 2);
                if self.in_flight() == 0 {
                    break;
                }
                self.run_engine(other)?;
            }
            if self.in_flight() > 0 {
                bail!("{} packets are not published, and the engine has nothing to do", self.in_flight());
            }
        }
        self.on_guest(other, move |guest| {
            guest.collect()?;
            match guest.outstanding() {
                0 => Ok(()),
                n => bail!("{n} of {window} packets did not arrive"),
            }
        })?;
        Ok(ticks as f64 / window as f64)
    }

    /// The shares of the core's cycles that switching, virtqueues and copies take (Figure 3 of the vhost guide), by the
    /// stage clock over `turns` windows.
    ///
    /// # Errors
    /// As for [`Lane::turn`].
    pub fn breakdown(&mut self, other: &OtherCore, turns: usize) -> Result<[f64; 3]> {
        let before = self.groups();
        for turn in 0..turns {
            self.turn(other)?;
            // One round in 64 is sampled. An empty one now and then, and it is not the same of every turn.
            if turn % 3 == 0 {
                self.worker.round();
            }
        }
        let mut shares = self.groups();
        for (share, before) in shares.iter_mut().zip(before) {
            *share -= before;
        }
        let all: f64 = shares.iter().sum();
        Ok(shares.map(|ticks| if all > 0.0 { ticks / all } else { 0.0 }))
    }

    /// Ticks charged to each group so far.
    fn groups(&self) -> [f64; 3] {
        Group::ALL.map(|group| {
            let stages = Stage::ALL.into_iter().filter(|stage| stage.group() == Some(group));
            stages.map(|stage| self.worker.clock.ticks(stage) as f64).sum()
        })
    }

    /// Packets of either direction that wait for their copies.
    fn in_flight(&self) -> u64 {
        self.cells.iter().map(|cell| cell.in_flight()).sum()
    }

    /// At most so many rounds, until nothing is in flight.
    fn publish(&mut self, rounds: usize) -> u64 {
        let start = tsc::now();
        for _ in 0..rounds {
            if self.in_flight() == 0 {
                break;
            }
            self.worker.round();
        }
        tsc::now() - start
    }

    fn rounds(&mut self, rounds: usize) -> u64 {
        let start = tsc::now();
        for _ in 0..rounds {
            self.worker.round();
        }
        tsc::now() - start
    }

    fn run_engine(&mut self, other: &OtherCore) -> Result<()> {
        let Some(engine) = self.engine.as_ref().map(Arc::clone) else { return Ok(()) };
        self.elsewhere(other, move || {
            lock(&engine).run();
            Ok(())
        })
    }

    fn on_guest(
        &mut self,
        other: &OtherCore,
        f: impl FnOnce(&mut Guest) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let guest = Arc::clone(&self.guest);
        self.elsewhere(other, move || f(&mut lock(&guest)))
    }

    /// Hot data stays with the measured core; otherwise the other core does it.
    fn elsewhere(&self, other: &OtherCore, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        if self.temperature == Temperature::Hot { job() } else { other.run(job) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
