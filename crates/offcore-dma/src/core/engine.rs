//! The engine's side: the loop body, and how channels come to it and leave it.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_utils::CachePadded;
use offcore_ring::spsc::Consumer;

use super::MAX_CHANNELS;
use crate::channel::{CopyOp, EngineError};
use crate::cpu::Copier;

/// Operations of one channel in one step.
const BUDGET: usize = 64;
/// Operations after which completions are shown to the submitter.
const RELEASED: usize = 32;

/// What the device, its channels and its engine share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) name: String,
    open: AtomicUsize,
    /// Counts arrivals and withdrawals of channels.
    generation: CachePadded<AtomicU64>,
    /// The generation that the engine has taken note of.
    acknowledged: CachePadded<AtomicU64>,
    /// Whether the engine is inside a step.
    stepping: CachePadded<AtomicBool>,
    /// Cleared when the stepper is dropped.
    alive: AtomicBool,
    /// Channels on their way to the engine.
    arriving: Mutex<Vec<Served>>,
}

impl Shared {
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

    /// Hands a channel to the engine, which finds it at its next step.
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

    /// Takes a channel away from the engine: when this returns, none of its operations is being made or will be.
    ///
    /// The engine says that it is in a step before it looks at the generation, the channel raises the generation before
    /// it looks whether the engine is in a step, all in one order (SeqCst): so one of the two sees the other. A step
    /// that begins later sees the withdrawal; one that is under way ends, or acknowledges it.
    pub(super) fn withdraw(&self, withdrawn: &AtomicBool) {
        withdrawn.store(true, Ordering::SeqCst);
        let generation = self.generation.fetch_add(1, Ordering::SeqCst) + 1;
        while self.stepping.load(Ordering::SeqCst) && self.acknowledged.load(Ordering::Acquire) < generation {
            std::hint::spin_loop();
        }
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether somebody can still make a step.
    pub(super) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }
}

/// A channel as the engine sees it.
#[derive(Debug)]
pub(super) struct Served {
    ring: Consumer<CopyOp>,
    withdrawn: Arc<AtomicBool>,
    copier: Copier,
}

impl Served {
    /// Makes operations of the ring, at most `most`; returns how many.
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
            // SAFETY: the submitter promises that the memory of what it publishes may be touched until it is completed,
            // which is shown by the release below, or the channel is withdrawn, which waits for this step.
            unsafe { copier.copy_burst(run) };
            ring.release(n);
            made += n;
        }
        made
    }
}

/// The engine: one loop body over all channels of its device, for the one thread that owns it.
#[derive(Debug)]
pub struct Stepper {
    shared: Arc<Shared>,
    generation: u64,
    channels: Vec<Served>,
    through_caches: bool,
}

impl Stepper {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, generation: 0, channels: Vec::new(), through_caches: false }
    }

    /// Makes copies through the caches only ([`Copier::through_caches`]), of channels that have made none yet.
    pub fn keep_to_caches(&mut self) {
        self.through_caches = true;
    }

    /// Makes submitted operations, at most 64 of each channel; returns how many were made.
    #[inline]
    pub fn step(&mut self) -> usize {
        self.step_at_most(BUDGET)
    }

    /// As [`Stepper::step`], at most `most` of each channel.
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

    /// What makes the copies of each channel.
    #[cfg(test)]
    pub(super) fn copiers(&self) -> impl Iterator<Item = &Copier> {
        self.channels.iter().map(|served| &served.copier)
    }

    /// Takes in the channels that have arrived and lets go of those that were withdrawn.
    #[cold]
    fn take_note(&mut self, generation: u64) {
        let known = self.channels.len();
        self.channels.append(&mut self.shared.arriving.lock().unwrap_or_else(PoisonError::into_inner));
        for served in self.channels[known..].iter_mut().filter(|_| self.through_caches) {
            served.copier = Copier::through_caches();
        }
        self.channels.retain(|served| !served.withdrawn.load(Ordering::SeqCst));
        self.generation = generation;
        self.shared.acknowledged.store(generation, Ordering::Release);
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        // A step that panicked has ended, too.
        self.shared.stepping.store(false, Ordering::Release);
        self.shared.alive.store(false, Ordering::Release);
    }
}
