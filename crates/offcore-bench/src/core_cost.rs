//! Core cost: the TSC ticks that the measured core spends on a packet, and nothing else.
//!
//! The guests and the engine's steps run on the other core (with `hot`, on the same one), in their own turns, untimed.
//! What is timed is the production worker's round: poll, dequeue, address rewriting, enqueue, publishing. With an
//! engine a window of packets is dequeued (submitted), copied, forwarded (reaped and submitted again), copied, and
//! published: three timed parts, the waits between them untimed.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, bail};
use offcore_dma::{Mode, Mover};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::worker::{MOVER_COUNTERS, Stream, Worker};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping, Pool};
use offcore_port::vhost::{OneCopy, rx_over, tx_over};
use offcore_port::{RxCounters, TxCounters};
use offcore_ring::Layout;
use offcore_stats::page::Block;
use offcore_stats::stage::Group;
use offcore_stats::{Stage, StageClock, tsc};
use offcore_vhost::features::{NET_HEADER, NET_MRG_RXBUF, RING_INDIRECT_DESC, VERSION_1};
use offcore_vhost::{Binding, VringCell, VringConfig};
use offcore_wire::ethernet::FCS_LEN;

use crate::background::Background;
use crate::copier::Engine;
use crate::guest::{Guests, PEER_MAC, PORT_MAC, Seen, buffers_len};
use crate::lockstep::OtherCore;
use crate::temperature::Temperature;
use crate::workload::{Ring, Route, Workload};

/// Packets in a burst.
pub const BURST: usize = 32;
/// Size of both virtqueues.
pub const RING: u16 = 1024;
/// How often the engine is run for one window, at most.
const MOST_WAITS: usize = 64;
/// Where a device sees the guest's memory.
const GUEST_ADDRESS: u64 = 0x1_0000_0000;
/// Bytes kept for the two virtqueues of a guest.
const RINGS: usize = 2 << 20;

/// A guest's memory: buffers, and behind them its virtqueues.
#[derive(Debug)]
struct GuestSide {
    /// The guest's own view.
    memory: Arc<GuestMemory>,
    /// The device's: a mapping of its own, as another process would have.
    device: Arc<GuestMemory>,
    /// Bytes of buffers.
    buffers: usize,
}

impl GuestSide {
    /// Memory for so many bytes of buffers, on the pages that `hugepages` says.
    fn new(buffers: usize, hugepages: Hugepages) -> Result<Self> {
        let (mapping, fd) = Mapping::memfd("bench-guest", buffers + RINGS, hugepages)?;
        let device = one_region(Mapping::shared(fd.as_fd(), 0, mapping.len())?)?;
        Ok(Self { memory: one_region(mapping)?, device, buffers })
    }

    /// A virtqueue behind the buffers, as seen through `view`; the first receives, the second transmits.
    fn ring(&self, view: &Arc<GuestMemory>, queue: u16, ring: Ring) -> Result<Layout> {
        let start = GUEST_ADDRESS + (self.buffers + usize::from(queue) * (RINGS / 2)) as u64;
        let parts = (start, start + 0x2_0000, start + 0x4_0000);
        Ok(Layout::in_memory(view, parts, RING.into(), ring == Ring::Packed)?)
    }
}

fn one_region(mapping: Mapping) -> Result<Arc<GuestMemory>> {
    let len = mapping.len() as u64;
    let region = GuestRegion::new(GUEST_ADDRESS, GUEST_ADDRESS, len, mapping, 0)?;
    Ok(Arc::new(GuestMemory::new(vec![region])?))
}

/// A virtqueue as the device has it.
fn vring(side: &GuestSide, queue: u16, ring: Ring) -> Result<VringConfig> {
    Ok(VringConfig {
        memory: Arc::clone(&side.device),
        layout: side.ring(&side.device, queue, ring)?,
        start: VringConfig::next_start(),
        base: ring.base(),
        features: VERSION_1 | NET_MRG_RXBUF | RING_INDIRECT_DESC | ring.features(),
        call: None,
        kick: None,
        enabled: true,
    })
}

/// A virtqueue's place in a guest's memory: the receiving one, and the transmitting one.
const RX: u16 = 0;
const TX: u16 = 1;

/// One thing to be measured: one or two guests, and the worker that forwards for them.
#[derive(Debug)]
pub struct Lane {
    guests: Arc<Mutex<Guests>>,
    worker: Worker,
    /// The virtqueue that receives, and the one that transmits.
    cells: [Arc<VringCell>; 2],
    engine: Option<Arc<Mutex<Engine>>>,
    background: Option<Background>,
    temperature: Temperature,
    frame_len: usize,
}

impl Lane {
    /// A lane whose virtqueues are bound to `engine`'s channel in `mode`.
    ///
    /// # Errors
    /// When memory cannot be had, or the engine's channel is taken already.
    pub fn new(
        workload: &Workload,
        (mode, mut engine): (Mode, Option<Engine>),
        pool: &'static Pool,
        hugepages: Hugepages,
    ) -> Result<Self> {
        let &Workload { route, ring, temperature, frame, one_copy } = workload;
        let one_way = buffers_len(temperature);
        let (guests, [rx, tx]) = match route {
            Route::Loop => {
                let side = GuestSide::new(2 * one_way, hugepages)?;
                let rings = (side.ring(&side.memory, RX, ring)?, side.ring(&side.memory, TX, ring)?);
                let guests = Guests::looped(Arc::clone(&side.memory), rings, temperature, frame)?;
                (guests, [vring(&side, RX, ring)?, vring(&side, TX, ring)?])
            }
            Route::GuestToGuest => {
                let [from, to] = [GuestSide::new(one_way, hugepages)?, GuestSide::new(one_way, hugepages)?];
                let sender = (Arc::clone(&from.memory), from.ring(&from.memory, TX, ring)?);
                let receiver = (Arc::clone(&to.memory), to.ring(&to.memory, RX, ring)?);
                let guests = Guests::two(sender, receiver, temperature, frame)?;
                (guests, [vring(&to, RX, ring)?, vring(&from, TX, ring)?])
            }
        };
        let cells = [Arc::new(VringCell::new(RX)), Arc::new(VringCell::new(TX))];
        let mut mover = Mover::new();
        if let Some(engine) = &mut engine {
            let channel = engine.take_channel().context("the engine's channel belongs to another lane")?;
            mover.add_channel(channel);
        }
        let channels: Vec<_> = mover.channels().map(|(id, _)| id).collect();
        for (cell, vring) in cells.iter().zip([rx, tx]) {
            cell.publish(|wanted| {
                wanted.vring = Some(Arc::new(vring));
                wanted.binding = Binding::new(mode, channels.clone());
            });
        }
        let mut rx = rx_over(&cells[1], &mut mover, RxCounters::private())?;
        let mut tx = tx_over(&cells[0], &mut mover, TxCounters::private())?;
        let one_copy = match route {
            Route::GuestToGuest if one_copy => OneCopy::between(&mut *rx, &mut *tx, &mut mover),
            Route::GuestToGuest | Route::Loop => None,
        };
        let stream = Stream {
            rx,
            tx,
            addresses: Addresses { source: PORT_MAC, destination: PEER_MAC },
            source: None,
            one_copy,
        };
        let worker = Worker {
            streams: vec![stream],
            bridges: Vec::new(),
            mirrors: Vec::new(),
            forward: Forward::Mac,
            burst: BURST,
            work: 0,
            mover,
            cache: pool.cache(),
            clock: StageClock::private(),
            mover_stats: Block::private(&MOVER_COUNTERS),
            channel_stats: Vec::new(),
        };
        Ok(Self {
            guests: Arc::new(Mutex::new(guests)),
            worker,
            cells,
            engine: engine.map(|engine| Arc::new(Mutex::new(engine))),
            background: None,
            temperature,
            frame_len: frame - FCS_LEN,
        })
    }

    /// Puts a copier on the other core that makes as many copies as this lane's core, while that is timed.
    #[must_use]
    pub fn with_background(mut self) -> Self {
        self.background = Some(Background::new(NET_HEADER + self.frame_len));
        self
    }

    /// Copies that the copier beside has made for each packet; `None` without one.
    pub fn background_copies(&self) -> Option<f64> {
        let made = self.background.as_ref()?.made();
        Some(made as f64 / self.seen().received.max(1) as f64)
    }

    /// Bytes that core and engines have copied for each packet so far: 1526 and again 1526 for a frame of 1518 bytes
    /// that was copied twice, virtio-net headers included.
    pub fn copied_bytes(&self) -> f64 {
        let by_engines: u64 = self.worker.mover.channels().map(|(_, channel)| channel.stats().bytes).sum();
        let all = self.worker.mover.stats().core_bytes + by_engines;
        all as f64 / self.seen().received.max(1) as f64
    }

    /// How often a packet's payload has been copied, by [`Lane::copied_bytes`].
    pub fn copies(&self) -> f64 {
        (self.copied_bytes() / (self.frame_len + NET_HEADER) as f64).round().max(1.0)
    }

    /// What the guests have seen.
    pub fn seen(&self) -> Seen {
        lock(&self.guests).seen()
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
        self.on_guests(other, move |guests| guests.transmit(window))?;
        let bursts = window / BURST;
        let mut ticks = self.first_rounds(bursts, other)?;
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
        self.on_guests(other, move |guests| {
            guests.collect()?;
            match guests.outstanding() {
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

    /// As [`Lane::rounds`], with the copier beside where there is one.
    fn first_rounds(&mut self, rounds: usize, other: &OtherCore) -> Result<u64> {
        let beside = self.background.as_ref().map(|background| background.begin(other)).transpose()?;
        let before = self.worker.mover.stats().core_copies;
        let ticks = self.rounds(rounds);
        if let Some(beside) = beside {
            beside.end()?;
        }
        let copies = self.worker.mover.stats().core_copies - before;
        if let Some(background) = &mut self.background {
            background.follow(ticks, copies);
        }
        Ok(ticks)
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

    fn on_guests(
        &mut self,
        other: &OtherCore,
        f: impl FnOnce(&mut Guests) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let guests = Arc::clone(&self.guests);
        self.elsewhere(other, move || f(&mut lock(&guests)))
    }

    /// Hot data stays with the measured core; otherwise the other core does it.
    fn elsewhere(&self, other: &OtherCore, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        if self.temperature == Temperature::Hot { job() } else { other.run(job) }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
