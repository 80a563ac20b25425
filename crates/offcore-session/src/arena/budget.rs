//! Memory budgets that several arenas share.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::layout::LARGE;

/// Memory that all arenas of one user may use, in large blocks. A block counts from its first use on, because the
/// kernel then allocates its pages, and they stay allocated until the arena's segments are unmapped.
#[derive(Debug)]
pub struct Budget {
    left: AtomicUsize,
}

impl Budget {
    /// Creates a budget of `bytes`, in whole large blocks.
    pub fn new(bytes: usize) -> Self {
        Self { left: AtomicUsize::new(bytes / LARGE) }
    }
}

/// The part of a [`Budget`] that one arena has used. It is returned when this is dropped. The arena, and everything
/// that keeps segments mapped, holds a reference.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    taken: AtomicUsize,
}

impl Charge {
    /// Creates a charge of 0 blocks.
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, taken: AtomicUsize::new(0) }
    }

    /// Returns the number of large blocks that may still be used for the first time.
    #[inline]
    pub(super) fn left(&self) -> usize {
        self.budget.left.load(Ordering::Relaxed)
    }

    /// Takes `blocks` large blocks, all or none. Returns `false` if the budget does not have as many.
    pub fn take(&self, blocks: usize) -> bool {
        let less = |left: usize| left.checked_sub(blocks);
        let taken = self.budget.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        if taken {
            self.taken.fetch_add(blocks, Ordering::Relaxed);
        }
        taken
    }
}

/// Without a limit, for the stack's own memory.
impl Default for Charge {
    fn default() -> Self {
        Self::new(Arc::new(Budget::new(usize::MAX)))
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.left.fetch_add(*self.taken.get_mut(), Ordering::Relaxed);
    }
}
