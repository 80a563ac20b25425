//! The interface between the control thread and the worker of one half of a queue on a kernel interface.
//!
//! The control thread publishes the queue's ring or file, publishes a new one when the interface was recreated, and
//! `None` while it is missing. The worker reads a generation number, which is one load of a cache line that rarely
//! changes, and takes the lock only when the number has changed. The worker returns the old ring, so that the control
//! thread closes it: that takes the kernel milliseconds.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug)]
struct State<T> {
    /// The ring that the worker takes next.
    next: Option<T>,
    /// Rings that the control thread has to close.
    retired: Vec<T>,
}

/// State shared by the two sides.
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

    /// Control side: replaces the ring by another one, or by none. A ring that was never taken is closed.
    pub(crate) fn publish(&self, ring: Option<T>) {
        let mut state = self.lock();
        let old = std::mem::replace(&mut state.next, ring);
        self.generation.fetch_add(1, Ordering::Release);
        drop(state);
        drop(old);
    }

    /// Control side: returns the number of the last publication; 0 before the first one.
    pub(crate) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Relaxed)
    }

    /// Control side: closes the rings that the worker has returned.
    pub(crate) fn close_retired(&self) {
        // Closing may take a while, so it is done without the lock.
        let retired = std::mem::take(&mut self.lock().retired);
        drop(retired);
    }
}

/// The worker's end of a [`Cell`].
#[derive(Debug)]
pub(crate) struct End<T> {
    cell: std::sync::Arc<Cell<T>>,
    generation: u32,
    /// The present ring. `None` while the interface is missing, and until it is up for the first time.
    pub(crate) ring: Option<T>,
}

impl<T> End<T> {
    pub(crate) fn new(cell: std::sync::Arc<Cell<T>>) -> Self {
        let mut end = Self { cell, generation: 0, ring: None };
        end.follow();
        end
    }

    /// Returns the publication number of [`ring`](Self::ring).
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns whether another ring was published.
    #[inline(always)]
    pub(crate) fn is_stale(&self) -> bool {
        self.cell.generation.load(Ordering::Acquire) != self.generation
    }

    /// Takes the last publication. The old ring must be empty.
    #[cold]
    pub(crate) fn follow(&mut self) {
        let mut state = self.cell.lock();
        self.generation = self.cell.generation.load(Ordering::Relaxed);
        let next = state.next.take();
        state.retired.extend(std::mem::replace(&mut self.ring, next));
    }

    /// Returns the last publication, if it is a ring. For rings that need not be emptied.
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
        // The second ring is never taken, so it is closed at once.
        cell.publish(Some(Arc::clone(&rings[1])));
        cell.publish(Some(Arc::clone(&rings[2])));
        assert_eq!(Arc::strong_count(&rings[1]), 1);
        end.follow();
        assert_eq!((end.ring.as_deref(), Arc::strong_count(&rings[0])), (Some(&2), 2));
        cell.close_retired();
        assert_eq!((Arc::strong_count(&rings[0]), Arc::strong_count(&rings[2])), (1, 2));
    }

    #[test]
    fn worker_runs_without_ring() {
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
