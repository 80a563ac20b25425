//! Communication between the control thread and running senders and receivers. Workers check one cell for new settings
//! between bursts; latencies are handed over through another cell. A lock is only taken when something has changed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use offcore_stats::Histogram;

use super::rate::Rate;
use super::sizes::Sizes;

/// Settings of senders.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    pub running: bool,
    pub rate: Rate,
    pub sizes: Sizes,
    /// Number of flows, 1 to 65536. Packets cycle through them.
    pub flows: u32,
    /// Number of packets that are due together.
    pub burst: u32,
    /// Number of packets to send from each start. `None` means no limit.
    pub count: Option<u64>,
    /// Number of the start. A higher number restarts [`count`](Self::count).
    pub start: u64,
}

/// The settings and their version.
#[derive(Debug)]
pub(super) struct Control {
    version: AtomicU64,
    settings: Mutex<Settings>,
}

impl Control {
    pub(super) fn new(settings: Settings) -> Self {
        Self { version: AtomicU64::new(1), settings: Mutex::new(settings) }
    }

    /// Returns the current settings.
    pub(super) fn settings(&self) -> Settings {
        self.lock().clone()
    }

    /// Changes the settings; returns their version.
    pub(super) fn change(&self, change: impl FnOnce(&mut Settings)) -> u64 {
        let mut settings = self.lock();
        change(&mut settings);
        self.version.fetch_add(1, Ordering::Release) + 1
    }

    /// Returns the settings and their version if it differs from `seen`. Workers call this between two bursts.
    #[inline(always)]
    pub(super) fn changed(&self, seen: u64) -> Option<(u64, Settings)> {
        if self.version.load(Ordering::Acquire) == seen {
            return None;
        }
        let settings = self.lock();
        Some((self.version.load(Ordering::Acquire), settings.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Settings> {
        self.settings.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Latencies on their way from a receiver to the control thread.
#[derive(Debug)]
pub(super) struct Handover {
    asked: AtomicU64,
    answered: AtomicU64,
    latencies: Mutex<Histogram>,
}

impl Handover {
    pub(super) fn new() -> Self {
        Self {
            asked: AtomicU64::new(0),
            answered: AtomicU64::new(0),
            latencies: Mutex::new(Histogram::new()),
        }
    }

    /// Asks the receiver for its latencies.
    pub(super) fn ask(&self) {
        self.asked.fetch_add(1, Ordering::Release);
    }

    /// Whether the receiver has answered the last request.
    pub(super) fn is_answered(&self) -> bool {
        self.answered.load(Ordering::Acquire) == self.asked.load(Ordering::Relaxed)
    }

    /// Moves the latencies from the receiver to `all`.
    pub(super) fn take(&self, all: &mut Histogram) {
        let mut latencies = self.lock();
        all.merge(&latencies);
        latencies.clear();
    }

    /// Hands over the latencies if they were requested. The receiver calls this between two bursts.
    #[inline(always)]
    pub(super) fn answer(&self, latencies: &mut Histogram) {
        let asked = self.asked.load(Ordering::Acquire);
        if asked != self.answered.load(Ordering::Relaxed) {
            self.hand_over(asked, latencies);
        }
    }

    #[cold]
    fn hand_over(&self, asked: u64, latencies: &mut Histogram) {
        self.lock().merge(latencies);
        latencies.clear();
        self.answered.store(asked, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, Histogram> {
        self.latencies.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_change_is_seen_once() {
        let settings = Settings {
            running: false,
            rate: Rate::Unlimited,
            sizes: Sizes::fixed(64).unwrap(),
            flows: 1,
            burst: 1,
            count: None,
            start: 0,
        };
        let control = Control::new(settings.clone());
        let (seen, first) = control.changed(0).unwrap();
        assert_eq!(first, settings);
        assert_eq!(control.changed(seen), None);
        let version = control.change(|settings| settings.flows = 8);
        let (now, changed) = control.changed(seen).unwrap();
        assert_eq!((now, changed.flows, control.settings().flows), (version, 8, 8));
        assert_eq!(control.changed(now), None);
    }

    #[test]
    fn latencies_are_handed_over_once() {
        let (handover, mut own, mut all) = (Handover::new(), Histogram::new(), Histogram::new());
        own.record(5);
        handover.answer(&mut own);
        assert_eq!(own.values(), 1, "no request was made");
        handover.ask();
        assert!(!handover.is_answered());
        handover.answer(&mut own);
        assert!(handover.is_answered());
        assert_eq!(own.values(), 0);
        handover.take(&mut all);
        handover.take(&mut all);
        assert_eq!((all.values(), all.max()), (1, 5));
    }
}
