//! Shared state between the control thread and the worker of one virtqueue.
//!
//! The control thread publishes the wanted configuration. The worker picks it up between bursts, drains the packets in
//! flight under the old configuration, applies the new one, and acknowledges it. In the common case, the worker only
//! loads a cache line that is rarely written. Deadlock is not possible: a worker never waits for the control thread,
//! and the control thread holds no lock while it waits, so it may also wait inside a callback.

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

/// The configuration of a virtqueue as set up by the front end. It is immutable: each change makes a new one.
#[derive(Clone, Debug)]
pub struct VringConfig {
    /// The memory table that addresses are checked against.
    pub memory: Arc<GuestMemory>,
    /// The parts of the ring, inside `memory`.
    pub layout: Layout,
    /// Unique number of this start of the ring, from [`VringConfig::next_start`]. A new configuration with the same
    /// number changes only eventfds, `enabled`, and the mapping of the memory. The ring then continues at its current
    /// position.
    pub start: u64,
    /// The position at which the ring begins, in the format of vhost-user's vring state: see
    /// `offcore_ring::device::DeviceQueue::base`.
    pub base: u32,
    pub features: u64,
    /// Eventfd that notifies the driver; `None` if the driver polls.
    pub call: Option<Arc<OwnedFd>>,
    /// Eventfd that the driver signals to kick the device; `None` if the driver sends no kicks.
    pub kick: Option<Arc<OwnedFd>>,
    /// Dirty log for writes to guest memory; `None` if they are not logged.
    pub log: Option<RingLog>,
    /// Shared record of descriptors in flight, which survives this process; `None` if none is used.
    pub inflight: Option<Inflight>,
    /// Whether the front end has enabled the queue. If a guest's TX queue is started but disabled, its packets are
    /// discarded.
    pub enabled: bool,
}

impl VringConfig {
    /// Returns a new, unique start number.
    pub fn next_start() -> u64 {
        static STARTS: AtomicU64 = AtomicU64::new(0);
        STARTS.fetch_add(1, Ordering::Relaxed)
    }
}

/// The configuration that the control thread requests.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The ring; `None` while the virtqueue is stopped.
    pub vring: Option<Arc<VringConfig>>,
    pub binding: Binding,
}

/// The state that the worker reports.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// The position of the ring, which is the answer to GET_VRING_BASE. It is kept when the ring is stopped.
    pub base: u32,
    pub broken: Option<RingError>,
    /// The reason why the core copies instead of the requested binding.
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
pub struct WorkerTimeout {
    pub queue: u16,
    pub waited: Duration,
    pub in_flight: u64,
}

/// State of one virtqueue, shared by the control thread and the worker.
#[derive(Debug)]
pub struct VringCell {
    queue: u16,
    generation: AtomicU32,
    state: Mutex<State>,
    changed: Condvar,
    in_flight: Counter,
}

impl VringCell {
    /// Creates a stopped virtqueue without a worker. The core makes its copies.
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

    /// Index of the virtqueue. The guest receives from even ones and transmits to odd ones.
    pub fn queue(&self) -> u16 {
        self.queue
    }

    /// Packets whose copies are in flight, as last reported by the worker.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.value()
    }

    /// The last report of the worker.
    pub fn report(&self) -> Report {
        self.lock().report.clone()
    }

    /// The configuration requested last.
    pub fn wanted(&self) -> Wanted {
        self.lock().wanted.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // ---- control side ----

    /// Publishes a change. Every publication makes the worker drain the queue first, so publishing an empty change
    /// clears it.
    pub fn publish(&self, change: impl FnOnce(&mut Wanted)) {
        let mut state = self.lock();
        change(&mut state.wanted);
        let generation = self.generation.load(Ordering::Relaxed).wrapping_add(1);
        if !state.attached {
            // No worker uses the ring, so the change takes effect at once.
            state.acknowledged = generation;
            if let Some(vring) = &state.wanted.vring {
                state.report = Report { base: vring.base, ..Report::default() };
            }
        }
        self.generation.store(generation, Ordering::Release);
    }

    /// Waits until the worker has applied all publications. The report is then up to date.
    ///
    /// # Errors
    /// [`WorkerTimeout`] after `timeout`. The change stays published, and the old memory stays mapped until the worker
    /// releases it.
    pub fn wait(&self, timeout: Duration) -> Result<Report, WorkerTimeout> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if state.acknowledged == self.generation.load(Ordering::Acquire) {
                return Ok(state.report.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(WorkerTimeout {
                    queue: self.queue,
                    waited: timeout,
                    in_flight: self.in_flight(),
                });
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    // ---- worker side ----

    /// Attaches a worker; returns `None` if another worker is attached.
    pub(crate) fn attach(&self) -> Option<(u32, Wanted)> {
        let mut state = self.lock();
        if std::mem::replace(&mut state.attached, true) {
            return None;
        }
        Some((self.generation.load(Ordering::Relaxed), state.wanted.clone()))
    }

    /// Detaches the worker after it has drained the virtqueue. `used` is the ring that `report` is about.
    pub(crate) fn detach(&self, used: Option<&Arc<VringConfig>>, report: Report) {
        let mut state = self.lock();
        let wanted = state.wanted.vring.as_mut();
        state.report = match wanted {
            // The next worker continues at this position, possibly with other eventfds.
            Some(vring) if used.is_some_and(|used| used.start == vring.start) => {
                Arc::make_mut(vring).base = report.base;
                report
            }
            // The worker has not seen this ring.
            Some(vring) => Report { base: vring.base, ..Report::default() },
            None => report,
        };
        state.attached = false;
        state.acknowledged = self.generation.load(Ordering::Relaxed);
        self.in_flight.set(0);
        self.changed.notify_all();
    }

    /// The number of the last publication. This is a single load.
    #[inline(always)]
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the last publication and its number.
    pub(crate) fn latest_publication(&self) -> (u32, Wanted) {
        let state = self.lock();
        (self.generation.load(Ordering::Relaxed), state.wanted.clone())
    }

    /// Records that publication `generation` has taken effect.
    pub(crate) fn acknowledge(&self, generation: u32, report: Report) {
        let mut state = self.lock();
        state.acknowledged = generation;
        state.report = report;
        self.changed.notify_all();
    }

    /// Reports a broken queue between publications.
    pub(crate) fn report_broken(&self, report: Report) {
        self.lock().report = report;
    }

    /// Publishes the number of packets in flight.
    #[inline(always)]
    pub(crate) fn set_in_flight(&self, packets: u64) {
        self.in_flight.set(packets);
    }
}
