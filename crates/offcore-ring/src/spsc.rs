//! Single-producer single-consumer rings between two threads of one process.
//!
//! ```text
//!            released          published        written
//!               |   published, not  |   written,    |
//!   free slots  |   yet released    | not published |  free slots
//!               ^ consumer's cursor ^ producer's cursor
//! ```
//! Each side owns its cursor, on cache lines of its own, and keeps a copy of the other's, which it loads again only
//! when the copy does not suffice: a burst costs one transfer of a line each way. A cursor has one writer, so it is
//! published by a plain store with release ordering. Cursors count items and never wrap.
//!
//! The two sides are two types, [`Producer`] and [`Consumer`]; each has what its side may do, and neither can be
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
    /// What was asked for.
    pub usize,
);

/// A ring with room for `capacity` items.
///
/// # Errors
/// [`CapacityError`] when `capacity` is no power of two.
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
    /// Stored by the consumer only.
    released: CachePadded<AtomicUsize>,
    /// Stored by the producer only.
    published: CachePadded<AtomicUsize>,
}

// SAFETY: a slot is touched by the producer alone from its release to its publication, and by the consumer alone (the
// producer may still read it) from its publication to its release; the cursors' release stores and acquire loads order
// the two. Items travel between threads, so they must be Send.
unsafe impl<T: Send> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        if !std::mem::needs_drop::<T>() {
            return;
        }
        let (from, to) = (self.released.load(Ordering::Relaxed), self.published.load(Ordering::Relaxed));
        for at in from..to {
            self.slots.writing(at, 1);
            // SAFETY: both handles are gone; slots from `released` to `published` hold items nobody has taken.
            unsafe { (*self.slots.slot(at)).assume_init_drop() };
        }
    }
}

/// The producer's side of a ring.
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
    /// Slots in the ring.
    #[inline(always)]
    pub fn capacity(&self) -> usize {
        self.shared.slots.capacity()
    }

    /// How many more items fit. The consumer's cursor is only loaded again when fewer than `wanted` are known to.
    #[inline(always)]
    pub fn room(&mut self, wanted: usize) -> usize {
        if self.capacity() - (self.written - self.released) < wanted {
            self.released();
        }
        self.capacity() - (self.written - self.released)
    }

    /// Items the consumer has released since the ring was made, as far as the producer has seen.
    #[inline(always)]
    pub fn released_seen(&self) -> usize {
        self.released
    }

    /// Items the consumer has released since the ring was made, as of now.
    #[inline(always)]
    pub fn released(&mut self) -> usize {
        self.released = self.shared.released.load(Ordering::Acquire);
        self.released
    }

    /// Items written since the ring was made, published or not.
    #[inline(always)]
    pub fn written(&self) -> usize {
        self.written
    }

    /// Items published since the ring was made.
    #[inline(always)]
    pub fn published(&self) -> usize {
        self.published
    }

    /// Puts one item into the ring and publishes it; gives it back when the ring is full.
    ///
    /// # Errors
    /// The item, when there is no room.
    #[inline]
    pub fn push(&mut self, item: T) -> Result<(), T> {
        if self.room(1) == 0 {
            return Err(item);
        }
        self.write(item);
        self.publish();
        Ok(())
    }

    /// Moves items from `items` into the ring, as many as fit, and publishes them together; returns how many. The
    /// others stay in the iterator.
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
        // SAFETY: the caller saw room, so the slot is the producer's; `&mut self` makes this the only writer.
        unsafe { (*self.shared.slots.slot(self.written)).write(item) };
        self.written += 1;
    }

    /// Shows the consumer everything written so far.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.published != self.written {
            self.published = self.written;
            self.shared.published.store(self.written, Ordering::Release);
        }
    }

    /// Asks for the lines of the next `n` slots for writing: after a burst, for the one to come, so that its stores
    /// do not wait for the consumer's cache.
    #[inline(always)]
    pub fn prefetch(&self, n: usize) {
        let n = n.min(self.capacity());
        let first = self.shared.slots.before_wrap(self.written, n);
        prefetch_slots(self.shared.slots.slot(self.written), first);
        prefetch_slots(self.shared.slots.slot(0), n - first);
    }

    /// Whether the consumer's handle has been dropped.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

impl<T: Copy> Producer<T> {
    /// The next free slots, at most `max`, in order, to be written in place: the first slice up to where the ring
    /// wraps around, the second from its start. [`Producer::advance`] says how many were written.
    #[inline(always)]
    pub fn spare(&mut self, max: usize) -> (&mut [MaybeUninit<T>], &mut [MaybeUninit<T>]) {
        let n = self.room(max).min(max);
        let slots = &self.shared.slots;
        let first = slots.before_wrap(self.written, n);
        slots.writing(self.written, n);
        // SAFETY: the `n` slots after `written` are free, so the producer's alone, and `self` stays borrowed while the
        // slices live; `first` of them lie before the wrap, the rest from slot 0 on.
        unsafe {
            (
                std::slice::from_raw_parts_mut(slots.slot(self.written), first),
                std::slice::from_raw_parts_mut(slots.slot(0), n - first),
            )
        }
    }

    /// Counts `n` more slots as written. They are published later, all at once.
    ///
    /// # Safety
    /// The first `n` slots of [`Producer::spare`], called just before, have been written.
    #[inline(always)]
    pub unsafe fn advance(&mut self, n: usize) {
        debug_assert!(self.written + n - self.released <= self.capacity());
        self.written += n;
    }

    /// The item that was written as number `at`, counted from 0; `None` once its slot holds a later one.
    ///
    /// # Safety
    /// Every slot of [`Producer::spare`] that was written has been counted by [`Producer::advance`]: one that was not no
    /// longer holds the earlier item.
    pub unsafe fn get(&self, at: usize) -> Option<T> {
        if at >= self.written || self.written - at > self.capacity() {
            return None;
        }
        self.shared.slots.reading(at, 1);
        // SAFETY: item `at` was written and no later item has taken its slot, nor (as the caller promises) has anything
        // that is not counted. Only the producer writes slots, and it is borrowed here; the consumer may be reading the same slot,
        // and items are Copy.
        Some(unsafe { (*self.shared.slots.slot(at)).assume_init() })
    }
}

/// The consumer's side of a ring.
pub struct Consumer<T> {
    shared: Arc<Shared<T>>,
    /// Items taken out; published to the producer by a release.
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
    /// Slots in the ring.
    #[inline(always)]
    pub fn capacity(&self) -> usize {
        self.shared.slots.capacity()
    }

    /// How many items are there. The producer's cursor is only loaded again when fewer than `wanted` are known of.
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

    /// Takes items, at most `max`, one after the other. Their slots are released together when the burst is dropped,
    /// and with them the items that were not taken out of it.
    #[inline(always)]
    pub fn pop_burst(&mut self, max: usize) -> PopBurst<'_, T> {
        let left = self.available(max).min(max);
        PopBurst { consumer: self, left }
    }

    /// The oldest items, at most `max`, left where they are: the first slice up to where the ring wraps around, the
    /// second from its start.
    #[inline(always)]
    pub fn peek(&mut self, max: usize) -> (&[T], &[T]) {
        let n = self.available(max).min(max);
        let slots = &self.shared.slots;
        let first = slots.before_wrap(self.read, n);
        slots.reading(self.read, n);
        // SAFETY: the `n` slots from `read` on are published, so written, and stay so until they are released, which
        // needs `&mut self`; `first` of them lie before the wrap, the rest from slot 0 on.
        unsafe {
            (
                std::slice::from_raw_parts(slots.slot(self.read).cast(), first),
                std::slice::from_raw_parts(slots.slot(0).cast(), n - first),
            )
        }
    }

    /// Gives the slots of the `n` oldest items back to the producer and drops what is in them.
    ///
    /// # Panics
    /// When fewer items have been peeked at.
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

    /// Whether the producer's handle has been dropped: nothing will follow what is in the ring.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        // Items of a leaked burst have been taken out, but their slots were not released: the ring drops the rest.
        self.shared.released.store(self.read, Ordering::Release);
    }
}

/// Items on their way out of a ring: see [`Consumer::pop_burst`].
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
        // The cursor moves first: should the burst be leaked, the item is still taken out only once.
        self.consumer.read += 1;
        self.consumer.shared.slots.reading(at, 1);
        // SAFETY: `left` counted a published item; the cursor has just passed it, so nobody reads it again, and its slot
        // is released, to be written again, only later.
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
