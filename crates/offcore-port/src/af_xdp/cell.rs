//! The seam between the control thread and the worker of one half of a queue.
//!
//! The control thread publishes a half of a new socket, or none when the interface is gone. The worker looks at a
//! generation number in every call, which is one load of a line that hardly ever changes; only when it has changed does
//! it take the lock. A half that was replaced goes back to the control thread, which closes the socket: that takes the
//! kernel a while, and a worker has none.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
struct State<H> {
    /// The half for the worker to take.
    next: Option<H>,
    /// Halves that nobody uses any more.
    returned: Vec<H>,
}

/// One half of a queue, shared by the control thread and the worker.
#[derive(Debug)]
pub(super) struct Cell<H> {
    generation: AtomicU32,
    state: Mutex<State<H>>,
}

impl<H> Cell<H> {
    pub(super) fn new(half: H) -> Arc<Self> {
        let state = State { next: Some(half), returned: Vec::new() };
        Arc::new(Self { generation: AtomicU32::new(0), state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State<H>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Control side: exchanges the half for another one, or for none.
    pub(super) fn publish(&self, half: Option<H>) {
        let untaken = {
            let mut state = self.lock();
            self.generation.fetch_add(1, Ordering::Release);
            std::mem::replace(&mut state.next, half)
        };
        drop(untaken);
    }

    /// Control side: drops what nobody uses any more.
    pub(super) fn clear(&self) {
        // Not under the lock, since it may take a while.
        let returned = std::mem::take(&mut self.lock().returned);
        drop(returned);
    }
}

/// The worker's side of a [`Cell`].
#[derive(Debug)]
pub(super) struct Held<H> {
    cell: Arc<Cell<H>>,
    /// The publication that `half` is of.
    generation: u32,
    half: Option<H>,
}

impl<H> Held<H> {
    pub(super) fn new(cell: Arc<Cell<H>>) -> Self {
        let mut held = Self { cell, generation: 0, half: None };
        held.follow();
        held
    }

    /// The half, if there is one.
    #[inline(always)]
    pub(super) fn half(&mut self) -> Option<&mut H> {
        if self.is_outdated() {
            self.follow();
        }
        self.half.as_mut()
    }

    /// Whether there is something new to pick up.
    #[inline(always)]
    pub(super) fn is_outdated(&self) -> bool {
        self.cell.generation.load(Ordering::Acquire) != self.generation
    }

    #[cold]
    fn follow(&mut self) {
        let mut state = self.cell.lock();
        self.generation = self.cell.generation.load(Ordering::Relaxed);
        let next = state.next.take();
        state.returned.extend(std::mem::replace(&mut self.half, next));
    }
}

impl<H> Drop for Held<H> {
    fn drop(&mut self) {
        self.cell.lock().returned.extend(self.half.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_gets_the_last_half_published_and_gives_back_the_one_before() {
        let cell = Cell::new(Arc::new(1));
        let mut held = Held::new(Arc::clone(&cell));
        let first = Arc::clone(held.half().unwrap());
        cell.publish(Some(Arc::new(2)));
        cell.publish(Some(Arc::new(3)));
        cell.clear();
        assert_eq!(Arc::strong_count(&first), 2, "the worker has it still");
        assert!(held.is_outdated());
        assert_eq!(held.half().map(|half| **half), Some(3));
        assert_eq!(Arc::strong_count(&first), 2, "the control side drops it");
        cell.clear();
        assert_eq!(Arc::strong_count(&first), 1);
        cell.publish(None);
        assert!(held.half().is_none());
    }

    #[test]
    fn a_worker_that_goes_away_leaves_its_half() {
        let half = Arc::new(());
        let cell = Cell::new(Arc::clone(&half));
        drop(Held::new(Arc::clone(&cell)));
        assert_eq!(Arc::strong_count(&half), 2);
        cell.clear();
        assert_eq!(Arc::strong_count(&half), 1);
    }
}
