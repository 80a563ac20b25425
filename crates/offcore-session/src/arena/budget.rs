//! Memory that several arenas may use together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::layout::LARGE;

/// Memory that the arenas of one user may use together, in large blocks. A block counts from its first use on, because the
/// kernel allocates its pages then, and they stay allocated until the arena's segments are unmapped.
#[derive(Debug)]
pub struct Budget {
    left: AtomicUsize,
}

impl Budget {
    /// A budget of `bytes`, in whole large blocks.
    pub fn new(bytes: usize) -> Self {
        Self { left: AtomicUsize::new(bytes / LARGE) }
    }
}

/// What one arena has taken from a [`Budget`]. It is given back when this is dropped: by the arena, and by everybody who keeps
/// a reference for as long as segments are mapped.
#[derive(Debug)]
pub struct Charge {
    budget: Arc<Budget>,
    taken: AtomicUsize,
}

impl Charge {
    /// A charge of nothing.
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, taken: AtomicUsize::new(0) }
    }

    /// Large blocks that may still be used for the first time.
    #[inline]
    pub(super) fn left(&self) -> usize {
        self.budget.left.load(Ordering::Relaxed)
    }

    /// Takes one large block. `false`: the budget is used up.
    pub(super) fn take(&self) -> bool {
        let less = |left: usize| left.checked_sub(1);
        let taken = self.budget.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok();
        if taken {
            self.taken.fetch_add(1, Ordering::Relaxed);
        }
        taken
    }
}

/// Without a limit: the stack's own memory.
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
