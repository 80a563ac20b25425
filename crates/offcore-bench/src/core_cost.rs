//! Core cost: the TSC ticks that the measured core spends on a packet, and nothing else.
//!
//! The guests run on the other core (with `hot`, on the same one) and the engine always does, in their own turns. What is
//! timed is the production worker's round: poll, dequeue, address rewriting, enqueue, publishing. With an engine a window
//! of packets is dequeued (submitted, timed); then the engine makes some copies, untimed, and the worker a round, timed,
//! in which it reaps what is done, forwards it and publishes, until all packets have been published.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use offcore_dma::cpu::Routine;
use offcore_dma::{Binding, Mode, Mover};
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::guest_pair::GuestPair;
use offcore_flow::task::Task;
use offcore_flow::worker::Worker;
use offcore_port::vhost::{OneCopy, rx_over, tx_over};
use offcore_port::{RxCounters, TxCounters};
use offcore_stats::stage::Group;
use offcore_stats::{Stage, tsc};
use offcore_vhost::features::{NET_HEADER, OFFERED, VIRTIO_F_VERSION_1};
use offcore_vhost::{VringCell, VringConfig};
use offcore_wire::ethernet::FCS_LEN;

use crate::BURST;
use crate::alternate::{Cost, Subject};
use crate::background::Background;
use crate::copier::Engine;
use crate::guest::{Guests, PEER_MAC, PORT_MAC, Seen};
use crate::lockstep::OtherCore;
use crate::memory::{GuestSide, Testbed};
use crate::peer::about::feature_names;
use crate::rules::rules;
use crate::temperature::Temperature;
use crate::workload::{Route, Workload};

/// How often in a row the engine is run for nothing, at most.
const MOST_IN_VAIN: usize = 64;
/// A copy that takes longer counts as lost.
pub(crate) const NEVER_LOST: Duration = Duration::from_secs(600);

/// A virtqueue as the device has it.
fn vring(bed: &Testbed, side: &GuestSide, slot: usize, queue: u16) -> Result<VringConfig> {
    let (ring, asked) = (bed.workload.ring, bed.workload.features());
    ensure!(asked & !OFFERED == 0, "our back end does not offer {}", feature_names(asked & !OFFERED));
    Ok(VringConfig {
        memory: Arc::clone(&side.device),
        layout: side.ring(&side.device, slot, queue, ring)?,
        start: VringConfig::next_start(),
        base: ring.base(),
        features: VIRTIO_F_VERSION_1 | asked,
        call: None,
        kick: None,
        enabled: true,
    })
}

/// The virtqueues of a guest: the receiving one, and the transmitting one.
const RX: u16 = 0;
const TX: u16 = 1;

/// One thing to be measured: one or two guests, and the worker that forwards for them.
#[derive(Debug)]
pub struct OwnVariant {
    guests: Arc<Mutex<Guests>>,
    worker: Worker,
    /// Whether packets go from guest to guest in one copy.
    is_pair: bool,
    /// The virtqueue that receives, and the one that transmits.
    cells: [Arc<VringCell>; 2],
    engine: Option<Arc<Mutex<Engine>>>,
    /// Whether the engine has copied anything when it was run last.
    engine_worked: Arc<AtomicBool>,
    background: Option<Background>,
    /// Of the queues that the core may copy for.
    routines: [Routines; 2],
    temperature: Temperature,
    frame_len: usize,
}

impl OwnVariant {
    /// A variant whose virtqueues are bound to `engine`'s channel in `mode`, in `bed` beside the other variants of its cell.
    ///
    /// # Errors
    /// When the testbed is full, or the engine's channel is taken already.
    pub fn new(bed: &Testbed, (mode, mut engine): (Mode, Option<Engine>)) -> Result<Self> {
        let Testbed { workload, pool, from, to, traffic, .. } = bed;
        let &Workload { route, ring, temperature, frame, one_copy, .. } = workload;
        let slot = bed.take_slot()?;
        let rings = (to.ring(&to.memory, slot, RX, ring)?, from.ring(&from.memory, slot, TX, ring)?);
        let guests = Guests::new(traffic, rings, from.tables(slot));
        let [rx, tx] = [vring(bed, to, slot, RX)?, vring(bed, from, slot, TX)?];
        let cells = [Arc::new(VringCell::new(RX)), Arc::new(VringCell::new(TX))];
        let mut mover = Mover::new();
        // Whoever steps the engine may be taken off its core for long; no copy is lost by that.
        mover.set_lost_after(tsc::ticks(NEVER_LOST));
        if let Some(engine) = &mut engine {
            let channel = engine.take_channel().context("the engine's channel belongs to another variant")?;
            mover.add_channel(channel);
        }
        let channels: Vec<_> = mover.channels().map(|(id, _)| id).collect();
        for (cell, vring) in cells.iter().zip([rx, tx]) {
            cell.publish(|wanted| {
                wanted.vring = Some(Arc::new(vring));
                wanted.binding = Binding::new(mode, channels.clone());
            });
        }
        let rx = rx_over(&cells[1], &mut mover, RxCounters::private())?;
        let tx = tx_over(&cells[0], &mut mover, TxCounters::private())?;
        let addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };
        let rules = Rules::new(Forward::Mac, addresses, 0);
        let is_pair = one_copy && route == Route::GuestToGuest;
        let task: Box<dyn Task> = match is_pair {
            true => {
                let guests = OneCopy::between(rx, tx, &mut mover)
                    .map_err(|_| anyhow!("these are no queues of guests"))?;
                Box::new(GuestPair::new(guests, rules))
            }
            false => Box::new(Forwarding::new(rx, tx, rules)),
        };
        let worker = Worker::new(vec![task], mover, pool.cache());
        Ok(Self {
            guests: Arc::new(Mutex::new(guests)),
            worker,
            is_pair,
            cells,
            engine: engine.map(|engine| Arc::new(Mutex::new(engine))),
            engine_worked: Arc::default(),
            background: None,
            routines: Default::default(),
            temperature,
            frame_len: frame - FCS_LEN,
        })
    }

    /// Puts a copier on the other core that makes as many copies as this variant's core, while that is timed.
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

    /// How often a packet's payload has been copied, by [`OwnVariant::copied_bytes`].
    pub fn copies(&self) -> f64 {
        (self.copied_bytes() / (self.frame_len + NET_HEADER) as f64).round().max(1.0)
    }

    /// From now on data of this temperature: at most that of the testbed's workload.
    ///
    /// # Errors
    /// As for [`Subject::window`].
    pub(crate) fn become_as(&mut self, temperature: Temperature, other: &OtherCore) -> Result<()> {
        lock(&self.guests).become_as(temperature);
        // Of hot data's few buffers each has been posted several times, so they are used up in short windows, in which
        // each is received in once.
        self.temperature = Temperature::Hot;
        let posted = Temperature::Cold.window() / Temperature::Hot.window();
        for _ in 0..if temperature == Temperature::Hot { 0 } else { posted } {
            self.window(other)?;
        }
        self.temperature = temperature;
        Ok(())
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
    ///
    /// # Errors
    /// When the worker does not forward.
    pub fn set_work(&mut self, ns: u64) -> Result<()> {
        rules(&mut self.worker)?.work = (ns as f64 * tsc::hz() as f64 / 1e9) as u64;
        Ok(())
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

    /// The routines by which the core copies, as most windows had it: out of the guest's memory and into it, or from guest
    /// to guest. `None` where the core has made no copy.
    pub fn copy_routine(&self) -> Option<String> {
        let made = self.worker.mover.stats().core_copies > 0;
        let names: Vec<_> = self.routines.iter().filter_map(Routines::most).map(Routine::name).collect();
        made.then(|| names.join("+"))
    }

    fn note_routines(&mut self) {
        let mover = &self.worker.mover;
        // From guest to guest, the queue of the one copy was opened last, and no other copies.
        let only = if self.is_pair { 2 } else { 0 };
        for (queue, routines) in mover.queues().skip(only).zip(&mut self.routines) {
            if let Some(routine) = mover.routine(queue) {
                routines.note(routine);
            }
        }
    }

    /// The shares of the core's cycles that switching, virtqueues and copies take (Figure 3 of the vhost guide), by the
    /// stage clock over so many windows.
    ///
    /// # Errors
    /// As for [`OwnVariant::window`].
    pub fn breakdown(&mut self, other: &OtherCore, windows: usize) -> Result<[f64; 3]> {
        let before = self.groups();
        for window in 0..windows {
            self.window(other)?;
            // One round in 64 is sampled. An empty one now and then, and it is not the same of every window.
            if window % 3 == 0 {
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

    /// As [`OwnVariant::rounds`], with the copier beside where there is one.
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

    /// Some copies by the engine, always on the other core: on this one it would leave the packets in its caches. Returns
    /// whether it has made any.
    fn run_engine(&mut self, other: &OtherCore) -> Result<bool> {
        let Some(engine) = self.engine.as_ref().map(Arc::clone) else { return Ok(false) };
        let made = Arc::clone(&self.engine_worked);
        other.run(move || {
            made.store(lock(&engine).run_portion().copies > 0, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(self.engine_worked.load(Ordering::Relaxed))
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

impl Subject for OwnVariant {
    /// Fails when a packet is lost, reordered or changed.
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        let window = self.temperature.window();
        let before = lock(&self.guests).ticks();
        self.on_guests(other, move |guests| guests.transmit(window))?;
        let mut core = self.first_rounds(window / BURST, other)?;
        // In mode `auto` the core may have made all copies: then there is nothing to wait for.
        let mut in_vain = 0;
        while self.in_flight() > 0 {
            in_vain = if self.run_engine(other)? { 0 } else { in_vain + 1 };
            core += self.rounds(1);
            if in_vain > MOST_IN_VAIN {
                bail!("{} packets are not published, and the engine has nothing to do", self.in_flight());
            }
        }
        self.note_routines();
        self.on_guests(other, move |guests| {
            guests.collect()?;
            match guests.outstanding() {
                0 => Ok(()),
                n => bail!("{n} of {window} packets did not arrive"),
            }
        })?;
        let guest = lock(&self.guests).ticks() - before;
        Ok(Cost { packets: window as u64, core, guest })
    }
}

/// How often each routine was the present one of a queue.
#[derive(Clone, Debug, Default)]
struct Routines(Vec<(Routine, u64)>);

impl Routines {
    fn note(&mut self, routine: Routine) {
        match self.0.iter_mut().find(|(known, _)| *known == routine) {
            Some((_, times)) => *times += 1,
            None => self.0.push((routine, 1)),
        }
    }

    fn most(&self) -> Option<Routine> {
        self.0.iter().max_by_key(|(_, times)| *times).map(|(routine, _)| *routine)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
