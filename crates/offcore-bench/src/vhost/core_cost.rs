//! Core cost: the TSC ticks that the measured core alone spends on a packet.
//!
//! The guests run in their own turns on the other core (with `hot`, on the measured core), and the engine always runs
//! on the other core. The timed part is the production worker's round: poll, dequeue, address rewriting, enqueue and
//! publishing. With an engine, a window of packets is first dequeued, which submits the copies (timed). Then the engine
//! makes some copies (untimed), and the worker runs a round (timed) in which it reaps completions, forwards and
//! publishes. This repeats until all packets have been published.

use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow, ensure};
use offcore_dma::{Binding, Mode};
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
use crate::guests::guest::{Guests, PEER_MAC, PORT_MAC, Seen};
use crate::guests::memory::{GuestSide, Testbed};
use crate::guests::workload::{Route, Workload};
use crate::method::alternate::{Cost, Subject};
use crate::method::copier::Engine;
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::method::timed_worker::{self, TimedWorker};
use crate::peer::about::feature_names;

/// Maximum number of additional rounds for a window.
const MOST_LATE_ROUNDS: usize = 64;

/// Returns the device's configuration of a virtqueue.
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
        log: None,
        inflight: None,
        enabled: true,
    })
}

/// Indices of a guest's receive and transmit virtqueues.
const RX: u16 = 0;
const TX: u16 = 1;

/// A measured variant: one or two guests, and the worker that forwards for them.
#[derive(Debug)]
pub struct OwnVariant {
    guests: Arc<Mutex<Guests>>,
    timed: TimedWorker,
    /// Whether packets are copied directly from guest to guest.
    is_pair: bool,
    /// The receive virtqueue and the transmit virtqueue.
    cells: [Arc<VringCell>; 2],
    frame_len: usize,
}

impl OwnVariant {
    /// Creates a variant in `bed`, which it shares with the other variants of its cell. Its virtqueues are bound to
    /// `engine`'s channel in `mode`.
    ///
    /// # Errors
    /// If the testbed is full, or the engine's channel is already in use.
    pub fn new(bed: &Testbed, mode: Mode, mut engine: Option<Engine>) -> Result<Self> {
        let Testbed { workload, pool, from, to, traffic, .. } = bed;
        let &Workload { route, ring, temperature, frame, one_copy, .. } = workload;
        let slot = bed.take_slot()?;
        let rx = to.ring(&to.memory, slot, RX, ring)?;
        let tx = from.ring(&from.memory, slot, TX, ring)?;
        let guests = Guests::new(traffic, rx, tx, from.tables(slot));
        let [rx, tx] = [vring(bed, to, slot, RX)?, vring(bed, from, slot, TX)?];
        let cells = [Arc::new(VringCell::new(RX)), Arc::new(VringCell::new(TX))];
        let (mut mover, channels) = timed_worker::mover_with(engine.as_mut())?;
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
            timed: TimedWorker::new(worker, engine, temperature),
            is_pair,
            cells,
            frame_len: frame - FCS_LEN,
        })
    }

    /// Adds a background copier on the other core, which makes as many copies as this variant's core during the timed
    /// parts.
    #[must_use]
    pub fn with_background(mut self) -> Self {
        self.timed.set_background(NET_HEADER + self.frame_len);
        self
    }

    /// Returns the background copier's copies per packet, or `None` without a background copier.
    pub fn background_copies(&self) -> Option<f64> {
        Some(self.timed.background_copies()? as f64 / self.seen().received.max(1) as f64)
    }

    /// Returns the bytes that core and engines have copied per packet so far, including virtio-net headers: 2 × 1526
    /// for a frame of 1518 bytes that was copied twice.
    pub fn copied_bytes(&self) -> f64 {
        self.timed.copied_bytes() as f64 / self.seen().received.max(1) as f64
    }

    /// Returns the number of copies per payload, derived from [`OwnVariant::copied_bytes`].
    pub fn copies(&self) -> f64 {
        (self.copied_bytes() / (self.frame_len + NET_HEADER) as f64).round().max(1.0)
    }

    /// Changes the temperature of the data, which must not need more buffers than the testbed's workload.
    pub(crate) fn set_temperature(&mut self, temperature: Temperature, other: &OtherCore) -> Result<()> {
        lock(&self.guests).set_temperature(temperature);
        // Hot data has few buffers, and each of them is posted several times. They are therefore used up in short
        // windows, in which each buffer receives one packet.
        self.timed.temperature = Temperature::Hot;
        let posted = Temperature::Cold.window() / Temperature::Hot.window();
        for _ in 0..if temperature == Temperature::Hot { 0 } else { posted } {
            self.window(other)?;
        }
        self.timed.temperature = temperature;
        Ok(())
    }

    /// Returns the packet counters of the guests.
    pub fn seen(&self) -> Seen {
        lock(&self.guests).seen()
    }

    /// Returns the engine's nanoseconds per copy, or `None` without an engine.
    pub fn engine_ns_per_copy(&self) -> Option<f64> {
        self.timed.engine_ns_per_copy()
    }

    /// Sets the application work per packet in nanoseconds.
    ///
    /// # Errors
    /// If the worker does not forward.
    pub fn set_work(&mut self, ns: u64) -> Result<()> {
        self.timed.rules()?.work = (ns as f64 * tsc::hz() as f64 / 1e9) as u64;
        Ok(())
    }

    /// Returns the TSC ticks of a round without work.
    pub fn empty_poll(&mut self) -> f64 {
        self.timed.empty_poll()
    }

    /// Returns the routines with which the core copied in most windows: out of the guest's memory and into it, or from
    /// guest to guest. Returns `None` if the core has made no copy.
    pub fn copy_routine(&self) -> Option<String> {
        self.timed.copy_routine()
    }

    /// Returns the shares of the core's cycles for switching, virtqueues and copies (Figure 3 of the vhost guide),
    /// measured with the stage clock over `windows` windows.
    ///
    /// # Errors
    /// As for [`OwnVariant::window`].
    pub fn breakdown(&mut self, other: &OtherCore, windows: usize) -> Result<[f64; 3]> {
        let before = self.groups();
        for window in 0..windows {
            self.window(other)?;
            // Sampling covers every 64th round. An additional empty round now and then shifts the samples to different
            // rounds of the windows.
            if window % 3 == 0 {
                self.timed.worker.round();
            }
        }
        let mut shares = self.groups();
        for (share, before) in shares.iter_mut().zip(before) {
            *share -= before;
        }
        let all: f64 = shares.iter().sum();
        Ok(shares.map(|ticks| if all > 0.0 { ticks / all } else { 0.0 }))
    }

    /// Returns the ticks charged to each group so far.
    fn groups(&self) -> [f64; 3] {
        Group::ALL.map(|group| {
            let stages = Stage::ALL.into_iter().filter(|stage| stage.group() == Some(group));
            stages.map(|stage| self.timed.worker.clock.ticks(stage) as f64).sum()
        })
    }
}

impl Subject for OwnVariant {
    /// Fails if a packet is lost, reordered or changed.
    fn window(&mut self, other: &OtherCore) -> Result<Cost> {
        let window = self.timed.temperature.window();
        let before = lock(&self.guests).ticks();
        other.run_on(self.timed.temperature, &self.guests, move |guests| guests.transmit(window))?;
        let cells = &self.cells;
        let mut core = self.timed.rounds_until(window / BURST, other, || in_flight(cells) > 0)?;
        // A round in which two guests switch to packet buffers or back leaves its packets to later rounds.
        let mut outstanding = self.collect(other)?;
        for _ in 0..MOST_LATE_ROUNDS {
            if outstanding == 0 {
                break;
            }
            core += self.timed.rounds_until(1, other, || in_flight(cells) > 0)?;
            outstanding = self.collect(other)?;
        }
        let left = in_flight(cells);
        ensure!(left == 0, "{left} packets are not published, and the engine has nothing to do");
        ensure!(outstanding == 0, "{outstanding} of {window} packets did not arrive");
        // From guest to guest, only the queue of the direct copy makes copies. It was opened last.
        self.timed.note_routines(if self.is_pair { 2..3 } else { 0..2 });
        let guest = lock(&self.guests).ticks() - before;
        Ok(Cost { packets: window as u64, core, guest })
    }
}

impl OwnVariant {
    /// Checks the packets that have arrived at the guests. Returns the number of outstanding packets.
    fn collect(&self, other: &OtherCore) -> Result<usize> {
        other.run_on(self.timed.temperature, &self.guests, Guests::collect)?;
        Ok(lock(&self.guests).outstanding())
    }
}

/// Returns the number of packets in both directions whose copies are pending.
fn in_flight(cells: &[Arc<VringCell>]) -> u64 {
    cells.iter().map(|cell| cell.in_flight()).sum()
}
