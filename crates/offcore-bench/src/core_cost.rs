//! Core cost: the TSC ticks that the measured core spends on a packet, and nothing else.
//!
//! The guest and the engine's steps run on the other core (with `hot`, on the same one), in their own turns, untimed.
//! What is timed is the production worker's round: poll, dequeue, address rewriting, enqueue, publishing. With an
//! engine a window of packets is dequeued (submitted), copied, forwarded (reaped and submitted again), copied, and
//! published: three timed parts, the waits between them untimed.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Result, bail};
use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Device, Mode, Mover};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::worker::{MOVER_COUNTERS, Stream, Worker};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping, Pool};
use offcore_port::vhost::{rx_over, tx_over};
use offcore_port::{RxCounters, TxCounters};
use offcore_ring::split::Layout;
use offcore_stats::page::Block;
use offcore_stats::{StageClock, tsc};
use offcore_vhost::features::{NET_MRG_RXBUF, RING_INDIRECT_DESC, VERSION_1};
use offcore_vhost::{Binding, VringCell, VringConfig};

use crate::guest::{Guest, PEER_MAC, PORT_MAC, Seen, memory_len};
use crate::lockstep::OtherCore;
use crate::sample::Spread;
use crate::temperature::Temperature;

/// Packets in a burst.
pub const BURST: usize = 32;
/// Size of both virtqueues.
pub const RING: u16 = 1024;
/// Operations that a channel holds.
const CHANNEL: usize = 1024;
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

/// Who makes the copies of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Copier {
    /// The core.
    Core,
    /// A helper core, its loop body stepped by the other core between the timed parts.
    Helper,
}

impl Copier {
    /// The mode's name in JSON.
    pub const fn mode(self) -> &'static str {
        match self {
            Self::Core => "cpu",
            Self::Helper => "offload",
        }
    }

    /// The engine's name in JSON.
    pub const fn engine(self) -> &'static str {
        match self {
            Self::Core => "cpu",
            Self::Helper => "core:1",
        }
    }
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

#[derive(Debug)]
struct Engine {
    stepper: Stepper,
    /// TSC ticks a copy, of each run: the median does not notice when the engine's core was taken away for a while.
    samples: Vec<f64>,
}

impl Engine {
    /// Runs the engine until it has nothing to do.
    fn run(&mut self) {
        let (mut copies, mut ticks) = (0, 0);
        loop {
            let start = tsc::now();
            let done = self.stepper.step();
            if done == 0 {
                break;
            }
            ticks += tsc::now() - start;
            copies += done;
        }
        if copies > 0 {
            self.samples.push(ticks as f64 / copies as f64);
        }
    }
}

impl Lane {
    /// A lane for frames of `frame` bytes, FCS included.
    ///
    /// # Errors
    /// When memory or the engine cannot be had.
    pub fn new(
        temperature: Temperature,
        frame: usize,
        copier: Copier,
        pool: &'static Pool,
        hugepages: Hugepages,
    ) -> Result<Self> {
        let side = GuestSide::new(temperature, hugepages)?;
        let guest = Guest::new(Arc::clone(&side.memory), side.rings(&side.memory)?, temperature, frame)?;
        let device = side.device_view()?;
        let (rx_ring, tx_ring) = side.rings(&device)?;
        let cells = [Arc::new(VringCell::new(0)), Arc::new(VringCell::new(1))];
        let mut mover = Mover::new();
        let (mode, engine) = match copier {
            Copier::Core => (Mode::Cpu, None),
            Copier::Helper => {
                let (device, stepper) = CoreDevice::stepped();
                mover.add_channel(device.open_channel(CHANNEL)?);
                (Mode::Offload, Some(Arc::new(Mutex::new(Engine { stepper, samples: Vec::new() }))))
            }
        };
        let channels: Vec<_> = mover.channels().map(|(id, _)| id).collect();
        for (cell, layout) in cells.iter().zip([rx_ring, tx_ring]) {
            let vring = VringConfig {
                memory: Arc::clone(&device),
                layout,
                base: 0,
                features: VERSION_1 | NET_MRG_RXBUF | RING_INDIRECT_DESC,
                call: None,
                enabled: true,
            };
            cell.publish(|wanted| {
                wanted.vring = Some(Arc::new(vring));
                wanted.binding = Binding { mode, channels: channels.clone() };
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
        Ok(Self { guest: Arc::new(Mutex::new(guest)), worker, cells, engine, temperature })
    }

    /// What the guest has seen.
    pub fn seen(&self) -> Seen {
        lock(&self.guest).seen()
    }

    /// Nanoseconds that the engine took for a copy; `None` without one.
    pub fn engine_ns_per_copy(&self) -> Option<f64> {
        let engine = lock(self.engine.as_ref()?);
        Some(Spread::of(&engine.samples).median * 1e9 / tsc::hz() as f64)
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
        let mut ticks = self.rounds(window / BURST);
        if self.engine.is_some() {
            self.run_engine(other)?;
            ticks += self.rounds(window / BURST);
            self.run_engine(other)?;
            let start = tsc::now();
            let mut rounds = 0;
            while self.cells[0].in_flight() > 0 {
                self.worker.round();
                rounds += 1;
                if rounds > window {
                    bail!("{} packets were not published after {rounds} rounds", self.cells[0].in_flight());
                }
            }
            ticks += tsc::now() - start;
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
