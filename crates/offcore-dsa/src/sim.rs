//! The simulator: a model of the device according to the specification.
//!
//! It models the device, not the driver: it only sees 64-byte descriptors and memory. Every report labels its results
//! `dsa-sim`.

mod arbiter;
mod checks;
mod engine;
mod execute;
mod faults;
mod memory;
mod options;
mod portal;
mod shared;
mod stats;
mod timing;

pub use engine::SimEngine;
pub use faults::Faults;
pub use options::{Generation, Profile, SimOptions};
pub use portal::SimPortal;
pub use stats::SimStats;
pub use timing::Timing;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;

use offcore_ring::spsc;
use offcore_stats::{lcore, tsc};

use crate::config::ConfigError;
use crate::wq::{WqInfo, WqMode};
use shared::{Client, PortalCell, Shared, lock};

/// Minimum number of slots of a portal's ring.
const SMALLEST_RING: usize = 32;

/// Why there is no simulated device, or no work queue of it.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum SimError {
    /// '{found}' for a simulated DSA: expected {expected}
    Option { found: String, expected: &'static str },
    /// simulated DSA '{0}': expected a name that ends in a number, such as dsa-sim0
    Name(String),
    /// simulated DSA: {0}
    Config(ConfigError),
    /// simulated DSA '{device}': its thread cannot run: {reason}
    Thread { device: String, reason: String },
    /// {device} has no work queue '{wq}': it has {there}
    NoWorkQueue { device: String, wq: String, there: String },
    /// {device}: {wq} is dedicated and already open: close it, or use a shared work queue
    Busy { device: String, wq: String },
    /// {0} has halted: reset it
    Halted(String),
}

/// The state of a device (GENSTS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceState {
    /// The device works.
    Enabled,
    /// The device has stopped because of an error. Only a reset enables it again.
    Halted,
}

/// The control side of a simulated device. Clones are handles of the same device.
#[derive(Clone, Debug)]
pub struct SimDevice {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    seed: u64,
    /// Never read. It stops the thread when the last handle and portal are gone.
    _helper: Option<Helper>,
}

/// The helper thread. Dropping this value stops and joins it.
#[derive(Debug)]
struct Helper {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The panic of the loop has already been printed, so the result needs no handling.
            let _ = thread.join();
        }
    }
}

impl SimDevice {
    /// Creates a device on a virtual clock that only runs when [`SimEngine::step`] is called. The same seed and the
    /// same submissions produce the same events. `name` ends in the device's number, such as `dsa-sim0`.
    ///
    /// # Errors
    /// [`SimError::Name`], or [`SimError::Config`] if the layout does not exist or violates a rule.
    pub fn stepped(name: &str, options: SimOptions) -> Result<(Self, SimEngine), SimError> {
        memory::install();
        let config = options::layout(&options, name)?;
        let shared = Arc::new(Shared::new(name, &config, &options));
        let engine = SimEngine::new(Arc::clone(&shared), &options);
        Ok((Self { inner: Arc::new(Inner { shared, seed: options.seed, _helper: None }) }, engine))
    }

    /// Creates a device that a helper thread runs on lcore `lcore`, by the TSC, until the last handle and portal are
    /// dropped.
    ///
    /// # Errors
    /// As [`SimDevice::stepped`], and [`SimError::Thread`] if the thread cannot be started or pinned.
    pub fn start(name: &str, options: SimOptions, lcore: usize) -> Result<Self, SimError> {
        let seed = options.seed;
        let (device, mut engine) = Self::stepped(name, options)?;
        let refused = |reason: String| SimError::Thread { device: name.into(), reason };
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let (report, pinned) = mpsc::sync_channel(1);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let outcome = lcore::pin(lcore).map_err(|e| e.to_string());
                let failed = outcome.is_err();
                let ticks_per_ns = tsc::hz() as f64 / 1e9;
                // Sending cannot fail, because the receiver waits for this message.
                let _ = report.send(outcome);
                let start = tsc::now();
                while !failed && !stopped.load(Ordering::Relaxed) {
                    let now = (tsc::now() - start) as f64 / ticks_per_ns;
                    if engine.run_until(now as u64) == 0 {
                        std::hint::spin_loop();
                    }
                }
            })
            .map_err(|e| refused(e.to_string()))?;
        let helper = Helper { stop, thread: Some(thread) };
        match pinned.recv() {
            Ok(Ok(())) => {
                let shared = Arc::clone(&device.inner.shared);
                Ok(Self { inner: Arc::new(Inner { shared, seed, _helper: Some(helper) }) })
            }
            Ok(Err(reason)) => Err(refused(reason)),
            Err(mpsc::RecvError) => Err(refused("its thread ended before it was pinned".into())),
        }
    }

    fn shared(&self) -> &Shared {
        &self.inner.shared
    }

    /// Returns the device's name.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// Returns the enabled work queues.
    pub fn work_queues(&self) -> Vec<WqInfo> {
        self.shared().layout.queues.iter().map(|queue| queue.info.clone()).collect()
    }

    /// Opens a work queue, like opening its character device.
    ///
    /// # Errors
    /// [`SimError::NoWorkQueue`], [`SimError::Busy`] for a dedicated queue that is already open, [`SimError::Halted`].
    pub fn open(&self, wq: &str) -> Result<SimPortal, SimError> {
        let shared = self.shared();
        let queues = &shared.layout.queues;
        let Some(queue) = queues.iter().position(|queue| queue.info.name == wq) else {
            let there: Vec<&str> = queues.iter().map(|queue| &*queue.info.name).collect();
            return Err(SimError::NoWorkQueue {
                device: self.name().into(),
                wq: wq.into(),
                there: there.join(", "),
            });
        };
        let mut opened = lock(&shared.opened);
        if shared.state() == DeviceState::Halted {
            return Err(SimError::Halted(self.name().into()));
        }
        let info = &queues[queue].info;
        if info.mode == WqMode::Dedicated && opened.portals[queue] > 0 {
            return Err(SimError::Busy { device: self.name().into(), wq: wq.into() });
        }
        let size = (info.size as usize).next_power_of_two().max(SMALLEST_RING);
        let Ok((producer, consumer)) = spsc::ring(size) else {
            unreachable!("a power of two is a ring's size");
        };
        let is_shared = info.mode == WqMode::Shared;
        let special = is_shared || lock(&shared.faults).weak_ordering;
        let cell = Arc::new(PortalCell {
            special: AtomicBool::new(special),
            shared: is_shared,
            withdrawn: AtomicBool::new(false),
            entries: AtomicU32::new(0),
            late_stores: Mutex::default(),
        });
        let occupancy = Arc::clone(&opened.occupancy[queue]);
        opened.portals[queue] += 1;
        opened.cells.push(Arc::clone(&cell));
        let client =
            Client { ring: consumer, cell: Arc::clone(&cell), wq: queue, occupancy: Arc::clone(&occupancy) };
        lock(&shared.pending_requests).arriving.push(client);
        shared.notify();
        Ok(SimPortal::new(self.clone(), producer, cell, occupancy, queue, opened.epoch))
    }

    /// Returns the state of the device.
    pub fn state(&self) -> DeviceState {
        self.shared().state()
    }

    /// Halts the device, as a fatal error does: descriptors in flight never complete. When this returns, none of them
    /// accesses memory any more.
    pub fn halt(&self) {
        let shared = self.shared();
        if shared.state() == DeviceState::Enabled {
            shared.counters.halts.fetch_add(1, Ordering::Relaxed);
            shared.set_state(DeviceState::Halted);
        }
        shared.notify_and_wait();
    }

    /// Function-level reset: descriptors in flight are aborted, open portals no longer work, and the device is enabled
    /// again with its work queues closed. When this returns, no earlier descriptor accesses memory any more.
    pub fn reset(&self) {
        let shared = self.shared();
        {
            let mut opened = lock(&shared.opened);
            opened.epoch += 1;
            shared.epoch.store(opened.epoch, Ordering::Release);
            opened.portals.fill(0);
            opened.cells.clear();
            opened.occupancy.iter_mut().for_each(|occupancy| *occupancy = Arc::default());
            let mut pending_requests = lock(&shared.pending_requests);
            pending_requests.arriving.clear();
            pending_requests.reset = true;
        }
        shared.counters.resets.fetch_add(1, Ordering::Relaxed);
        // The device is enabled last: if a halted device were enabled before the engine has aborted everything, it
        // would continue with it.
        shared.notify_and_wait();
        shared.set_state(DeviceState::Enabled);
    }

    /// Returns the statistics of the device.
    pub fn stats(&self) -> SimStats {
        self.shared().counters.snapshot()
    }

    /// Replaces the faults to inject from now on.
    pub fn set_faults(&self, faults: Faults) {
        let shared = self.shared();
        *lock(&shared.faults) = faults;
        lock(&shared.pending_requests).faults = Some(faults);
        for cell in &lock(&shared.opened).cells {
            cell.special.store(cell.shared || faults.weak_ordering, Ordering::Relaxed);
        }
        shared.notify_and_wait();
    }
}
