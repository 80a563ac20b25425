//! What shared rings are made of: the standard library's atomics and cells, or loom's when a test explores every
//! interleaving (`RUSTFLAGS='--cfg loom' cargo test -p offcore-ring spsc`).

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;

#[cfg(all(loom, test))]
pub(crate) use loom::sync::{Arc, atomic::AtomicUsize, atomic::Ordering};
#[cfg(not(all(loom, test)))]
pub(crate) use std::sync::{Arc, atomic::AtomicUsize, atomic::Ordering};

/// The slots of a ring: a power of two of them, in one piece, so that bursts are plain slices.
///
/// Loom cannot see plain memory; it is told of every access through a cell that stands for the slot.
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

    /// The slot of cursor `at`: cursors count on for ever.
    #[inline(always)]
    pub(crate) fn slot(&self, at: usize) -> *mut MaybeUninit<T> {
        let index = at & (self.memory.len() - 1);
        // SAFETY: the length is a power of two, so the masked index is below it.
        unsafe { self.memory.get_unchecked(index) }.get()
    }

    /// How many of the `n` slots from cursor `at` on lie before the ring wraps around.
    #[inline(always)]
    pub(crate) fn before_wrap(&self, at: usize, n: usize) -> usize {
        n.min(self.memory.len() - (at & (self.memory.len() - 1)))
    }

    /// Tells loom that the `n` slots from cursor `at` on are read here.
    #[inline(always)]
    pub(crate) fn reading(&self, at: usize, n: usize) {
        #[cfg(all(loom, test))]
        (at..at + n).for_each(|at| self.watched[at & (self.memory.len() - 1)].with(|_| ()));
        let _ = (at, n);
    }

    /// Tells loom that the `n` slots from cursor `at` on are written here.
    #[inline(always)]
    pub(crate) fn writing(&self, at: usize, n: usize) {
        #[cfg(all(loom, test))]
        (at..at + n).for_each(|at| self.watched[at & (self.memory.len() - 1)].with_mut(|_| ()));
        let _ = (at, n);
    }
}
