//! Single-producer single-consumer rings between two threads of one process.
//!
//! ```text
//!            released          published        written
//!               |   published, not  |   written,    |
//!   free slots  |   yet released    | not published |  free slots
//!               ^ consumer's cursor ^ producer's cursor
//! ```
//! Each side owns its cursor, on separate cache lines, and caches the other side's cursor, which it reloads only when
//! the cached value is not sufficient. A burst therefore costs one cache line transfer in each direction. Each cursor
//! has a single writer, so it is published by a plain store with release ordering. Cursors count items and never wrap.
//!
//! The two sides are separate types, [`Producer`] and [`Consumer`], with the functions for their side. Neither can be
//! cloned.

#[cfg(test)]
mod tests;

use std::fmt;
use std::mem::MaybeUninit;

use crossbeam_utils::CachePadded;

use crate::prefetch;
use crate::sync::{Arc, AtomicUsize, Ordering, Slots};

/// ring of {0} slots: expected a power of two
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub struct CapacityError(
    /// The requested capacity.
    pub usize,
);

/// Creates a ring with room for `capacity` items.
///
/// # Errors
/// [`CapacityError`] if `capacity` is not a power of two.
pub fn ring<T: Send>(capacity: usize) -> Result<(Producer<T>, Consumer<T>), CapacityError> {
    if !capacity.is_power_of_two() {
        return Err(CapacityError(capacity));
    }
    let shared = Arc::new(Shared {
        slots: Slots::new(capacity),
        released: CachePadded::new(AtomicUsize::new(0)),
        published: CachePadded::new(AtomicUsize::new(0)),
    });
    let producer = Producer { shared: Arc::clone(&shared), written: 0, published: 0, released: 0 };
    Ok((producer, Consumer { shared, read: 0, published: 0 }))
}

struct Shared<T> {
    slots: Slots<T>,
    /// Stored only by the consumer.
    released: CachePadded<AtomicUsize>,
    /// Stored only by the producer.
    published: CachePadded<AtomicUsize>,
}

// SAFETY: from its release to its publication, only the producer accesses a slot. From its publication to its release,
// only the consumer does (the producer may still read it). The cursors' release stores and acquire loads order the two.
// Items move between threads, so they must be Send.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: a slot belongs to the producer until its publication, then to the consumer until its release. The cursors'
// release stores and acquire loads order the two.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if !std::mem::needs_drop::<T>() {
            return;
        }
        let (from, to) = (self.released.load(Ordering::Relaxed), self.published.load(Ordering::Relaxed));
        for at in from..to {
            self.slots.writing(at, 1);
            // SAFETY: both handles are dropped. Slots from `released` to `published` hold items that were not taken.
            unsafe { (*self.slots.slot(at)).assume_init_drop() };
        }
    }
}

/// The producer side of a ring.
pub struct Producer<T> {
    shared: Arc<Shared<T>>,
    written: usize,
    published: usize,
    released: usize,
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer")
            .field("capacity", &self.capacity())
            .field("written", &self.written)
            .field("published", &self.published)
            .finish_non_exhaustive()
    }
}

impl<T> Producer<T> {
    /// Number of slots in the ring.
    #[inline(always)]
    pub fn capacity(&self) -> usize {
        self.shared.slots.capacity()
    }

    /// Returns how many more items fit. Reloads the consumer's cursor only if fewer than `wanted` are known to fit.
    #[inline(always)]
    pub fn room(&mut self, wanted: usize) -> usize {
        if self.capacity() - (self.written - self.released) < wanted {
            self.released();
        }
        self.capacity() - (self.written - self.released)
    }

    /// Number of items released by the consumer since the ring was created, as last seen by the producer.
    #[inline(always)]
    pub fn released_seen(&self) -> usize {
        self.released
    }

    /// Returns the number of items released by the consumer since the ring was created. Reloads the consumer's cursor.
    #[inline(always)]
    pub fn released(&mut self) -> usize {
        self.released = self.shared.released.load(Ordering::Acquire);
        self.released
    }

    /// Number of items written since the ring was created, published or not.
    #[inline(always)]
    pub fn written(&self) -> usize {
        self.written
    }

    /// Number of items published since the ring was created.
    #[inline(always)]
    pub fn published(&self) -> usize {
        self.published
    }

    /// Writes one item into the ring and publishes it.
    ///
    /// # Errors
    /// Returns the item if the ring is full.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        if self.room(1) == 0 {
            return Err(item);
        }
        self.write(item);
        self.publish();
        Ok(())
    }

    /// Moves items from `items` into the ring until it is full, and publishes them together. Returns their number. The
    /// other items stay in the iterator.
    #[inline]
    pub fn push_iter(&mut self, items: &mut impl Iterator<Item = T>) -> usize {
        let before = self.written;
        while self.room(1) > 0 {
            let Some(item) = items.next() else { break };
            self.write(item);
        }
        self.publish();
        self.written - before
    }

    #[inline(always)]
    fn write(&mut self, item: T) {
        self.shared.slots.writing(self.written, 1);
        // SAFETY: the caller has checked for room, so the slot belongs to the producer. `&mut self` makes this the only
        // writer.
        unsafe { (*self.shared.slots.slot(self.written)).write(item) };
        self.written += 1;
    }

    /// Publishes everything written so far to the consumer.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.published != self.written {
            self.published = self.written;
            self.shared.published.store(self.written, Ordering::Release);
        }
    }

    /// Prefetches the next `n` slots for writing. Call it after a burst, so that the stores of the next burst do not
    /// wait for the consumer's cache.
    #[inline(always)]
    pub fn prefetch(&self, n: usize) {
        let n = n.min(self.capacity());
        let first = self.shared.slots.before_wrap(self.written, n);
        prefetch_slots(self.shared.slots.slot(self.written), first);
        prefetch_slots(self.shared.slots.slot(0), n - first);
    }

    /// Returns whether the consumer's handle was dropped.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

impl<T: Copy> Producer<T> {
    /// Returns up to `max` free slots, in order, for writing in place. The first slice ends at the end of the ring, the
    /// second begins at its start. [`Producer::advance`] tells the ring the number of slots written.
    #[inline(always)]
    pub fn spare(&mut self, max: usize) -> (&mut [MaybeUninit<T>], &mut [MaybeUninit<T>]) {
        let n = self.room(max).min(max);
        let slots = &self.shared.slots;
        let first = slots.before_wrap(self.written, n);
        slots.writing(self.written, n);
        // SAFETY: the `n` slots after `written` are free and belong to the producer, and `self` stays borrowed while
        // the slices exist. The first `first` of them are before the end of the ring, the rest begin at slot 0.
        unsafe {
            (
                std::slice::from_raw_parts_mut(slots.slot(self.written), first),
                std::slice::from_raw_parts_mut(slots.slot(0), n - first),
            )
        }
    }

    /// Counts `n` more slots as written. They are published together later.
    ///
    /// # Safety
    /// The first `n` slots of [`Producer::spare`], called immediately before, must have been written.
    #[inline(always)]
    pub unsafe fn advance(&mut self, n: usize) {
        debug_assert!(self.written + n - self.released <= self.capacity());
        self.written += n;
    }

    /// Returns the item with number `at`, counted from 0; `None` once its slot holds a later item.
    ///
    /// # Safety
    /// Every slot of [`Producer::spare`] that was written must have been counted by [`Producer::advance`]. A slot that
    /// was written and not counted no longer holds the earlier item.
    pub unsafe fn get(&self, at: usize) -> Option<T> {
        if at >= self.written || self.written - at > self.capacity() {
            return None;
        }
        self.shared.slots.reading(at, 1);
        // SAFETY: item `at` was written, and no later item has overwritten its slot. The caller guarantees that no
        // uncounted item has either. Only the producer writes slots, and it is borrowed here. The consumer may read the
        // same slot, and items are Copy.
        Some(unsafe { (*self.shared.slots.slot(at)).assume_init() })
    }
}

/// The consumer side of a ring.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    /// Number of items taken. Published to the producer by a release.
    read: usize,
    published: usize,
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer")
            .field("capacity", &self.capacity())
            .field("read", &self.read)
            .finish_non_exhaustive()
    }
}

impl<T> Consumer<T> {
    /// Number of slots in the ring.
    #[inline(always)]
    pub fn capacity(&self) -> usize {
        self.shared.slots.capacity()
    }

    /// Returns the number of items in the ring. Reloads the producer's cursor only if fewer than `wanted` are known.
    #[inline(always)]
    pub fn available(&mut self, wanted: usize) -> usize {
        if self.published - self.read < wanted {
            self.published = self.shared.published.load(Ordering::Acquire);
        }
        self.published - self.read
    }

    /// Takes one item.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        self.pop_burst(1).next()
    }

    /// Takes up to `max` items one by one. When the burst is dropped, all of its slots are released together, and items
    /// that were not taken are dropped.
    #[inline(always)]
    pub fn pop_burst(&mut self, max: usize) -> PopBurst<'_, T> {
        let left = self.available(max).min(max);
        PopBurst { consumer: self, left }
    }

    /// Returns up to `max` of the oldest items without taking them. The first slice ends at the end of the ring, the
    /// second begins at its start.
    #[inline(always)]
    pub fn peek(&mut self, max: usize) -> (&[T], &[T]) {
        let n = self.available(max).min(max);
        let slots = &self.shared.slots;
        let first = slots.before_wrap(self.read, n);
        slots.reading(self.read, n);
        // SAFETY: the `n` slots from `read` on are published, so they are initialized. They stay so until they are
        // released, which needs `&mut self`. The first `first` of them are before the end of the ring, the rest begin
        // at slot 0.
        unsafe {
            (
                std::slice::from_raw_parts(slots.slot(self.read).cast(), first),
                std::slice::from_raw_parts(slots.slot(0).cast(), n - first),
            )
        }
    }

    /// Releases the slots of the `n` oldest items to the producer and drops the items.
    ///
    /// # Panics
    /// Panics if fewer items have been peeked at.
    #[inline(always)]
    pub fn release(&mut self, n: usize) {
        assert!(n <= self.published - self.read, "{n} items to release, {} seen", self.published - self.read);
        if std::mem::needs_drop::<T>() {
            drop(PopBurst { consumer: self, left: n });
            return;
        }
        self.shared.slots.reading(self.read, n);
        self.read += n;
        self.shared.released.store(self.read, Ordering::Release);
    }

    /// Returns whether the producer's handle was dropped. No more items will follow those in the ring.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        // Items of a leaked burst were taken, but their slots were not released. The ring drops the rest.
        self.shared.released.store(self.read, Ordering::Release);
    }
}

/// Items being taken from a ring: see [`Consumer::pop_burst`].
#[derive(Debug)]
pub struct PopBurst<'a, T> {
    consumer: &'a mut Consumer<T>,
    left: usize,
}

impl<T> Iterator for PopBurst<'_, T> {
    type Item = T;

    #[inline(always)]
    fn next(&mut self) -> Option<T> {
        self.left = self.left.checked_sub(1)?;
        let at = self.consumer.read;
        // The cursor moves first, so that the item is taken only once even if the burst is leaked.
        self.consumer.read += 1;
        self.consumer.shared.slots.reading(at, 1);
        // SAFETY: `left` counted a published item. The cursor has just passed it, so it is not read again, and its slot
        // is released for writing only later.
        Some(unsafe { (*self.consumer.shared.slots.slot(at)).assume_init_read() })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl<T> ExactSizeIterator for PopBurst<'_, T> {}

impl<T> Drop for PopBurst<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            self.for_each(drop);
        } else {
            self.consumer.read += self.left;
        }
        self.consumer.shared.released.store(self.consumer.read, Ordering::Release);
    }
}

#[inline(always)]
fn prefetch_slots<T>(from: *mut MaybeUninit<T>, n: usize) {
    let bytes = n * size_of::<T>();
    let mut at = 0;
    while at < bytes {
        prefetch::write(from.wrapping_byte_add(at));
        at += prefetch::LINE;
    }
}
