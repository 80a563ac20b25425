//! The engine's side of a copying core: the loop body, and the arrival and withdrawal of channels.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_utils::CachePadded;
use offcore_ring::spsc::Consumer;

use super::MAX_CHANNELS;
use crate::channel::{CopyOp, EngineError};
use crate::cpu::Copier;

/// Maximum number of operations of a channel per step.
const BUDGET: usize = 64;
/// Number of operations after which completions are made visible to the submitter.
const RELEASED: usize = 32;

/// State shared by the device, its channels and its engine.
#[derive(Debug)]
pub(super) struct HelperShared {
    pub(super) name: String,
    open: AtomicUsize,
    /// Counts arrivals and withdrawals of channels.
    generation: CachePadded<AtomicU64>,
    /// The generation up to which the engine has applied changes.
    acknowledged: CachePadded<AtomicU64>,
    /// Whether the engine is in a step.
    stepping: CachePadded<AtomicBool>,
    /// Cleared when the stepper is dropped.
    alive: AtomicBool,
    /// Channels to be added to the engine.
    arriving: Mutex<Vec<Served>>,
}

impl HelperShared {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            open: AtomicUsize::new(0),
            generation: CachePadded::default(),
            acknowledged: CachePadded::default(),
            stepping: CachePadded::default(),
            alive: AtomicBool::new(true),
            arriving: Mutex::default(),
        }
    }

    /// Passes a channel to the engine, which adds it in its next step.
    pub(super) fn hand_over(
        &self,
        ring: Consumer<CopyOp>,
        withdrawn: Arc<AtomicBool>,
    ) -> Result<(), EngineError> {
        if self.open.fetch_add(1, Ordering::Relaxed) >= MAX_CHANNELS {
            self.open.fetch_sub(1, Ordering::Relaxed);
            return Err(EngineError::NoChannel { device: self.name.clone(), max: MAX_CHANNELS });
        }
        let served = Served { ring, withdrawn, copier: Copier::default() };
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner).push(served);
        self.generation.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Withdraws a channel from the engine. When this returns, none of its operations is being made or will be made.
    ///
    /// The engine sets `stepping` before it reads the generation, and this function raises the generation before it
    /// reads `stepping`. All four accesses are sequentially consistent, so at least one side sees the other's store. A
    /// later step sees the withdrawal. A present step ends, or acknowledges the withdrawal.
    pub(super) fn withdraw(&self, withdrawn: &AtomicBool) {
        withdrawn.store(true, Ordering::SeqCst);
        let generation = self.generation.fetch_add(1, Ordering::SeqCst) + 1;
        while self.stepping.load(Ordering::SeqCst) && self.acknowledged.load(Ordering::Acquire) < generation {
            std::hint::spin_loop();
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether steps are still possible.
    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }
}

/// The engine's state of a channel.
#[derive(Debug)]
pub(super) struct Served {
    ring: Consumer<CopyOp>,
    withdrawn: Arc<AtomicBool>,
    copier: Copier,
}

impl Served {
    /// Makes at most `most` operations of the ring. Returns their number.
    #[inline]
    fn step(&mut self, most: usize) -> usize {
        let Self { ring, copier, .. } = self;
        let mut made = 0;
        while made < most {
            let (run, _) = ring.peek(RELEASED.min(most - made));
            if run.is_empty() {
                break;
            }
            let n = run.len();
            // SAFETY: the submitter guarantees that the memory of published operations is valid until they are
            // completed, which the release below reports, or until the channel is withdrawn, which waits for this step.
            unsafe { copier.copy_burst(run) };
            ring.release(n);
            made += n;
        }
        made
    }
}

/// The engine: a loop body over all channels of its device, for the thread that owns it.
#[derive(Debug)]
pub struct Stepper {
    shared: Arc<HelperShared>,
    generation: u64,
    channels: Vec<Served>,
    cached_stores_only: bool,
}

impl Stepper {
    pub(super) fn new(shared: Arc<HelperShared>) -> Self {
        Self { shared, generation: 0, channels: Vec::new(), cached_stores_only: false }
    }

    /// Makes copies with stores through the caches only ([`Copier::cached_stores_only`]), for channels that have not
    /// made any copies yet.
    pub fn disable_streaming_stores(&mut self) {
        self.cached_stores_only = true;
    }

    /// Makes at most 64 submitted operations of each channel. Returns the number of operations made.
    #[inline]
    pub fn step(&mut self) -> usize {
        self.step_at_most(BUDGET)
    }

    /// As [`Stepper::step`], with at most `most` operations of each channel.
    #[inline]
    pub fn step_at_most(&mut self, most: usize) -> usize {
        self.shared.stepping.swap(true, Ordering::SeqCst);
        let generation = self.shared.generation.load(Ordering::SeqCst);
        if generation != self.generation {
            self.take_note(generation);
        }
        let made = self.channels.iter_mut().map(|channel| channel.step(most)).sum();
        self.shared.stepping.store(false, Ordering::Release);
        made
    }

    /// Returns the copiers of all channels.
    #[cfg(test)]
    pub(super) fn copiers(&self) -> impl Iterator<Item = &Copier> {
        self.channels.iter().map(|served| &served.copier)
    }

    /// Adds channels that have arrived, and removes channels that were withdrawn.
    #[cold]
    fn take_note(&mut self, generation: u64) {
        let known = self.channels.len();
        self.channels.append(&mut self.shared.arriving.lock().unwrap_or_else(PoisonError::into_inner));
        for served in self.channels[known..].iter_mut().filter(|_| self.cached_stores_only) {
            served.copier = Copier::cached_stores_only();
        }
        self.channels.retain(|served| !served.withdrawn.load(Ordering::SeqCst));
        self.generation = generation;
        self.shared.acknowledged.store(generation, Ordering::Release);
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        // The flag is also cleared after a panic in a step.
        self.shared.stepping.store(false, Ordering::Release);
        self.shared.alive.store(false, Ordering::Release);
    }
}
