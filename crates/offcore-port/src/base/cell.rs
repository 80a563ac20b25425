//! The seam between the control thread and the worker of one half of a queue on an interface of the kernel.
//!
//! The control thread publishes what the queue works with, a ring or a file, and another one when the interface was
//! made anew, or none while it is gone. The worker looks at a number, which is one load of a line that hardly ever
//! changes, and only when that has changed takes the lock. The old one goes back, so that the control thread closes it:
//! that takes the kernel milliseconds.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
struct State<T> {
    /// The ring for the worker to take.
    next: Option<T>,
    /// Rings for the control thread to close.
    retired: Vec<T>,
}

/// What the two sides share.
#[derive(Debug)]
pub(crate) struct Cell<T> {
    generation: AtomicU32,
    state: Mutex<State<T>>,
}

impl<T> Cell<T> {
    pub(crate) fn new() -> Self {
        let state = State { next: None, retired: Vec::new() };
        Self { generation: AtomicU32::new(0), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Control side: exchanges the ring for another one, or for none. One that nobody has taken is closed.
    pub(crate) fn publish(&self, ring: Option<T>) {
        let mut state = self.lock();
        let old = std::mem::replace(&mut state.next, ring);
        self.generation.fetch_add(1, Ordering::Release);
        drop(state);
        drop(old);
    }

    /// Control side: the number of the last publication; 0 before the first.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Control side: closes what the worker has given back.
    pub(crate) fn close_retired(&self) {
        // Not under the lock, since it may take a while.
        let retired = std::mem::take(&mut self.lock().retired);
        drop(retired);
    }
}

/// The worker's end of a [`Cell`].
#[derive(Debug)]
pub(crate) struct End<T> {
    cell: std::sync::Arc<Cell<T>>,
    generation: u32,
    /// The present ring; there is none while the interface is gone, and until it is up for the first time.
    pub(crate) ring: Option<T>,
}

impl<T> End<T> {
    pub(crate) fn new(cell: std::sync::Arc<Cell<T>>) -> Self {
        let mut end = Self { cell, generation: 0, ring: None };
        end.follow();
        end
    }

    /// The number of the publication that [`ring`](Self::ring) is of.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether another ring was published.
    #[inline(always)]
    pub(crate) fn is_stale(&self) -> bool {
        self.cell.generation.load(Ordering::Acquire) != self.generation
    }

    /// Takes what was published last; the old ring must have been emptied.
    #[cold]
    pub(crate) fn follow(&mut self) {
        let mut state = self.cell.lock();
        self.generation = self.cell.generation.load(Ordering::Relaxed);
        let next = state.next.take();
        state.retired.extend(std::mem::replace(&mut self.ring, next));
    }

    /// What was published last, if it was anything; for rings that need not be emptied.
    #[inline(always)]
    pub(crate) fn latest(&mut self) -> Option<&mut T> {
        if self.is_stale() {
            self.follow();
        }
        self.ring.as_mut()
    }
}

impl<T> Drop for End<T> {
    fn drop(&mut self) {
        self.cell.lock().retired.extend(self.ring.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn ring_is_taken_once() {
        let cell = Arc::new(Cell::new());
        let mut end = End::new(Arc::clone(&cell));
        assert_eq!((end.ring.is_none(), end.is_stale()), (true, false));
        let rings: Vec<_> = (0..3).map(Arc::new).collect();
        cell.publish(Some(Arc::clone(&rings[0])));
        assert!(end.is_stale());
        end.follow();
        assert_eq!((end.ring.as_deref(), end.is_stale()), (Some(&0), false));
        // The second is never seen, so it is closed at once.
        cell.publish(Some(Arc::clone(&rings[1])));
        cell.publish(Some(Arc::clone(&rings[2])));
        assert_eq!(Arc::strong_count(&rings[1]), 1);
        end.follow();
        assert_eq!((end.ring.as_deref(), Arc::strong_count(&rings[0])), (Some(&2), 2));
        cell.close_retired();
        assert_eq!((Arc::strong_count(&rings[0]), Arc::strong_count(&rings[2])), (1, 2));
    }

    #[test]
    fn worker_goes_on_without_ring() {
        let cell = Arc::new(Cell::new());
        let ring = Arc::new(());
        cell.publish(Some(Arc::clone(&ring)));
        let mut end = End::new(Arc::clone(&cell));
        assert!(end.latest().is_some());
        cell.publish(None);
        assert!(end.latest().is_none());
        cell.publish(Some(Arc::clone(&ring)));
        assert!(end.latest().is_some());
        cell.close_retired();
        assert_eq!(Arc::strong_count(&ring), 2);
        drop(end);
        assert_eq!(Arc::strong_count(&ring), 2, "the control side closes it");
        cell.close_retired();
        assert_eq!(Arc::strong_count(&ring), 1);
    }
}
