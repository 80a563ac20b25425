//! The seam between the control thread and the worker of one virtqueue.
//!
//! The control thread publishes what the virtqueue shall be; the worker picks it up between bursts, drains what is in
//! flight under the old state, applies the new one, and acknowledges. The worker pays one load of a line that hardly
//! ever changes. Nobody waits for anybody who waits for him: a worker never waits for control, and control waits
//! holding no lock, so it may be called from a callback as well as from outside one.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offcore_dma::Binding;
use offcore_dma::mover::MoverError;
use offcore_mem::GuestMemory;
use offcore_ring::{Inflight, Layout, RingError};
use offcore_stats::Counter;
use rustix::fd::OwnedFd;

use crate::dirty::RingLog;

/// A virtqueue as the front end has set it up. Immutable: a change makes a new one.
#[derive(Clone, Debug)]
pub struct VringConfig {
    /// The table of memory that addresses are checked against.
    pub memory: Arc<GuestMemory>,
    /// The ring parts, inside `memory`.
    pub layout: Layout,
    /// Which start of the ring this is, from a count that never repeats: [`VringConfig::next_start`]. A configuration of
    /// the start that the worker knows changes only descriptors, `enabled` and where the memory is mapped; the ring goes on
    /// where it is.
    pub start: u64,
    /// Where to begin, as in vhost-user's vring state: see `offcore_ring::device::DeviceQueue::base`.
    pub base: u32,
    pub features: u64,
    /// Eventfd that notifies the driver; `None` when it polls.
    pub call: Option<Arc<OwnedFd>>,
    /// Eventfd by which the driver kicks; `None` when it does not.
    pub kick: Option<Arc<OwnedFd>>,
    /// Where what is written is logged; `None` when it is not.
    pub log: Option<RingLog>,
    /// Where what is in flight outlives this process; `None` when it does not.
    pub inflight: Option<Inflight>,
    /// Whether the front end has enabled the queue. A disabled queue that was started is drained and discarded when it
    /// is a guest's TX queue.
    pub enabled: bool,
}

impl VringConfig {
    /// The number of another start.
    pub fn next_start() -> u64 {
        static STARTS: AtomicU64 = AtomicU64::new(0);
        STARTS.fetch_add(1, Ordering::Relaxed)
    }
}

/// What the control side wants.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The ring; `None` while it is stopped.
    pub vring: Option<Arc<VringConfig>>,
    pub binding: Binding,
}

/// What the worker reports.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Where the ring goes on: what GET_VRING_BASE answers. Kept when the ring is stopped.
    pub base: u32,
    pub broken: Option<RingError>,
    /// Why the binding is not in force, and the core copies.
    pub refused: Option<MoverError>,
}

#[derive(Debug)]
struct State {
    wanted: Wanted,
    report: Report,
    attached: bool,
    acknowledged: u32,
}

/// the worker of virtqueue {queue} did not answer within {waited:?}; {in_flight} packets are in flight
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct Unanswered {
    pub queue: u16,
    pub waited: Duration,
    pub in_flight: u64,
}

/// One virtqueue, shared by the control thread and the worker.
#[derive(Debug)]
pub struct VringCell {
    queue: u16,
    generation: AtomicU32,
    state: Mutex<State>,
    changed: Condvar,
    in_flight: Counter,
}

impl VringCell {
    /// A stopped virtqueue, copied by the core, with no worker.
    pub fn new(queue: u16) -> Self {
        Self {
            queue,
            generation: AtomicU32::new(0),
            state: Mutex::new(State {
                wanted: Wanted { vring: None, binding: Binding::core() },
                report: Report::default(),
                attached: false,
                acknowledged: 0,
            }),
            changed: Condvar::new(),
            in_flight: Counter::new(),
        }
    }

    /// Index of the virtqueue: even ones the guest receives from, odd ones it transmits to.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Packets whose copies are in flight, as the worker last said.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.value()
    }

    /// What the worker last reported.
    pub fn report(&self) -> Report {
        self.lock().report.clone()
    }

    /// What is wanted now.
    pub fn wanted(&self) -> Wanted {
        self.lock().wanted.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- control side ----

    /// Publishes a change. Every publication makes the worker drain first, so one that changes nothing clears the queue.
    pub fn publish(&self, change: impl FnOnce(&mut Wanted)) {
        let mut state = self.lock();
        change(&mut state.wanted);
        let generation = self.generation.load(Ordering::Relaxed).wrapping_add(1);
        if !state.attached {
            // Nobody uses the ring: the change is in force at once.
            state.acknowledged = generation;
            if let Some(vring) = &state.wanted.vring {
                state.report = Report { base: vring.base, ..Report::default() };
            }
        }
        self.generation.store(generation, Ordering::Release);
    }

    /// Waits until the worker has applied everything published so far; the report is then up to date.
    ///
    /// # Errors
    /// [`Unanswered`] after `timeout`. The change stays published and the old memory stays alive until the worker lets
    /// go of it.
    pub fn wait(&self, timeout: Duration) -> Result<Report, Unanswered> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if state.acknowledged == self.generation.load(Ordering::Acquire) {
                return Ok(state.report.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Unanswered { queue: self.queue, waited: timeout, in_flight: self.in_flight() });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    // ---- worker side ----

    /// Takes the worker's side; `None` when another worker has it.
    pub(crate) fn attach(&self) -> Option<(u32, Wanted)> {
        let mut state = self.lock();
        if std::mem::replace(&mut state.attached, true) {
            return None;
        }
        Some((self.generation.load(Ordering::Relaxed), state.wanted.clone()))
    }

    /// Gives the worker's side back; the virtqueue is drained. `used` is the ring that the worker has used, and reports
    /// on.
    pub(crate) fn detach(&self, used: Option<&Arc<VringConfig>>, report: Report) {
        let mut state = self.lock();
        let wanted = state.wanted.vring.as_mut();
        state.report = match wanted {
            // The next worker goes on where this one left, be it with other descriptors.
            Some(vring) if used.is_some_and(|used| used.start == vring.start) => {
                Arc::make_mut(vring).base = report.base;
                report
            }
            // It has not seen this one.
            Some(vring) => Report { base: vring.base, ..Report::default() },
            None => report,
        };
        state.attached = false;
        state.acknowledged = self.generation.load(Ordering::Relaxed);
        self.in_flight.set(0);
        self.changed.notify_all();
    }

    /// The number of the last publication: one load.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// What was published last, and its number.
    pub(crate) fn pick_up(&self) -> (u32, Wanted) {
        let state = self.lock();
        (self.generation.load(Ordering::Relaxed), state.wanted.clone())
    }

    /// Publication `generation` is in force.
    pub(crate) fn acknowledge(&self, generation: u32, report: Report) {
        let mut state = self.lock();
        state.acknowledged = generation;
        state.report = report;
        self.changed.notify_all();
    }

    /// Reports between publications: a queue that broke.
    pub(crate) fn report_broken(&self, report: Report) {
        self.lock().report = report;
    }

    /// Tells readers how many packets are in flight.
    #[inline(always)]
    pub(crate) fn set_in_flight(&self, packets: u64) {
        self.in_flight.set(packets);
    }
}
