//! Counters with one writer and any number of readers.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A counter that one thread writes and any thread reads: a load and a store, no lock prefix.
///
/// Two threads adding at once would lose counts, not corrupt anything.
#[derive(Debug, Default)]
#[repr(transparent)]
pub struct Counter(AtomicU64);

impl Counter {
    /// A counter at zero.
    pub const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds `n`. For the owning thread only.
    #[inline(always)]
    pub fn add(&self, n: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(n), Relaxed);
    }

    /// Stores `n`: for gauges.
    #[inline(always)]
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    /// The present value, from any thread.
    #[inline(always)]
    pub fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}
