//! Building blocks of shared rings: the standard library's atomics and cells, or loom's if a test explores all
//! interleavings (`RUSTFLAGS='--cfg loom' cargo test -p offcore-ring spsc`).

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

#[cfg(all(loom, test))]
pub(crate) use loom::sync::{Arc, atomic::AtomicUsize, atomic::Ordering};
#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::{Arc, atomic::AtomicUsize, atomic::Ordering};

/// The slots of a ring. Their number is a power of two, and they are contiguous, so that bursts are plain slices.
///
/// Loom cannot observe plain memory. Each slot has a loom cell, which is notified of every access.
pub(crate) struct Slots<T> {
    memory: Box<[UnsafeCell<MaybeUninit<T>>]>,
    #[cfg(all(loom, test))]
    watched: Box<[loom::cell::UnsafeCell<()>]>,
}

impl<T> Slots<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(capacity.is_power_of_two());
        Self {
            memory: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
            #[cfg(all(loom, test))]
            watched: (0..capacity).map(|_| loom::cell::UnsafeCell::new(())).collect(),
        }
    }

    #[inline(always)]
    pub(crate) fn capacity(&self) -> usize {
        self.memory.len()
    }

    /// Returns the slot of cursor `at`. Cursors increase forever and do not wrap at the capacity.
    #[inline(always)]
    pub(crate) fn slot(&self, at: usize) -> *mut MaybeUninit<T> {
        let index = at & (self.memory.len() - 1);
        // SAFETY: the length is a power of two, so the masked index is below it.
        unsafe { self.memory.get_unchecked(index) }.get()
    }

    /// Returns how many of the `n` slots from cursor `at` on are before the end of the ring.
    #[inline(always)]
    pub(crate) fn before_wrap(&self, at: usize, n: usize) -> usize {
        n.min(self.memory.len() - (at & (self.memory.len() - 1)))
    }

    /// Notifies loom that the `n` slots from cursor `at` on are read here.
    #[inline(always)]
    pub(crate) fn reading(&self, at: usize, n: usize) {
        #[cfg(all(loom, test))]
        (at..at + n).for_each(|at| self.watched[at & (self.memory.len() - 1)].with(|_| ()));
        let _ = (at, n);
    }

    /// Notifies loom that the `n` slots from cursor `at` on are written here.
    #[inline(always)]
    pub(crate) fn writing(&self, at: usize, n: usize) {
        #[cfg(all(loom, test))]
        (at..at + n).for_each(|at| self.watched[at & (self.memory.len() - 1)].with_mut(|_| ()));
        let _ = (at, n);
    }
}
