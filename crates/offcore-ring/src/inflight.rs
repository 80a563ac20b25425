//! Descriptors in flight, recorded in memory of the front end. The next back end can continue even if this one crashes
//! (vhost-user specification, "Inflight I/O tracking").
//!
//! Chains are returned in the order in which they were taken. So the chains in flight are all chains that were made
//! available and not returned. For a split ring, the ring itself contains this information: the next back end continues
//! at the used index. In a packed ring, used descriptors overwrite available ones, and the first descriptor of a burst
//! is written last. The region contains the data to undo the other writes,
//! ```text
//! features u64 | version u16 | desc_num u16 | …            of a virtqueue, the fields that are used
//! 16: used_idx u16 | old_used_idx u16 | used_wrap_counter u8 | old_used_wrap_counter u8
//! 32: desc_num × { … 16: id u16 | flags u16 | len u32 | … }
//! ```
//! by stores of eight bytes: the start and the end of the burst that is about to be published (the next back end
//! continues at either of them), and a copy of each available descriptor. Any process that shares the memory can write
//! to it. The content is therefore checked, and wrong content harms only its own ring.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use offcore_mem::sigbus::Guarded;

use crate::RingError;
use crate::chain::WRAP;

/// VIRTIO_F_RING_PACKED and VIRTIO_F_IN_ORDER. A back end that returns chains in another order records other data, and
/// does not set the latter bit.
const PACKED: u64 = 1 << 34;
const IN_ORDER: u64 = 1 << 35;
/// Version of a region that is in use.
const VERSION: u16 = 1;

const FEATURES_AT: usize = 0;
const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const USED_AT: usize = 16;
/// Length in bytes of the header, and of the entry for a descriptor.
const HEADER: usize = 32;
const ENTRY: usize = 32;
const WORD_AT: usize = 16;
/// Alignment of the part of a virtqueue.
const ALIGN: usize = 64;

/// The part of a region that belongs to one virtqueue.
#[derive(Clone, Debug)]
pub struct Inflight {
    base: NonNull<u8>,
    /// Number of descriptors that fit into the part.
    room: u16,
    mapping: Arc<Guarded>,
}

// SAFETY: the part is accessed only by atomics, and stays mapped as long as this value exists.
unsafe impl Send for Inflight {}
// SAFETY: all threads access the part by atomics only, and it stays mapped as long as this value exists.
unsafe impl Sync for Inflight {}

impl Inflight {
    /// Length in bytes of the part for a virtqueue of up to `size` descriptors, of either format.
    pub const fn len(size: u16) -> usize {
        (HEADER + ENTRY * size as usize).next_multiple_of(ALIGN)
    }

    /// Uses the part at `offset` bytes in `mapping`, for a virtqueue of up to `size` descriptors.
    ///
    /// # Panics
    /// Panics if the part is not completely in the mapping, or not aligned to 8.
    pub fn new(mapping: &Arc<Guarded>, offset: usize, size: u16) -> Self {
        let end = offset.checked_add(Self::len(size));
        assert!(offset.is_multiple_of(8) && end.is_some_and(|end| end <= mapping.len()));
        // SAFETY: the offset is inside the mapping, as checked above.
        let base = unsafe { mapping.base().add(offset) };
        Self { base, room: size, mapping: Arc::clone(mapping) }
    }

    /// Number of bytes mapped for the whole region.
    pub fn mapped(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Whether the file of the region was truncated.
    pub fn has_vanished(&self) -> bool {
        self.mapping.has_vanished()
    }

    /// Returns whether a ring of `size` and this format was in use and was not stopped by its back end.
    ///
    /// # Errors
    /// [`RingError::Inflight`] if another ring was in use here, or if the ring does not fit.
    pub(crate) fn is_in_use(&self, size: u16, is_packed: bool) -> Result<bool, RingError> {
        let version = self.u16_at(VERSION_AT).load(Ordering::Acquire);
        let features = self.u64_at(FEATURES_AT).load(Ordering::Relaxed);
        let found = self.u16_at(SIZE_AT).load(Ordering::Relaxed);
        let same = version == VERSION && features == features_of(is_packed) && found == size;
        if size > self.room || version != 0 && !same {
            return Err(RingError::Inflight { version, features, found, room: self.room, size });
        }
        Ok(version != 0)
    }

    /// Marks the part as used by a ring of `size`. For a packed ring, `at` is the next descriptor.
    pub(crate) fn begin(&self, size: u16, is_packed: bool, at: u16) {
        self.u64_at(FEATURES_AT).store(features_of(is_packed), Ordering::Relaxed);
        self.u16_at(SIZE_AT).store(size, Ordering::Relaxed);
        self.publish(at, at);
        self.u16_at(VERSION_AT).store(VERSION, Ordering::Release);
    }

    /// Returns the start and the end of the burst that was last about to be published, in the 16-bit form.
    pub(crate) fn last_burst(&self) -> (u16, u16) {
        let used = self.u64_at(USED_AT).load(Ordering::Acquire);
        let half = |index: u64, wrap: u64| index as u16 & !WRAP | ((wrap as u16 & 1) << 15);
        (half(used >> 16, used >> 40), half(used, used >> 32))
    }

    /// Returns length, ID and flags of the descriptor `index` when it was available.
    pub(crate) fn kept_word(&self, index: u32) -> u64 {
        self.word_at(index).load(Ordering::Relaxed).rotate_left(32)
    }

    /// Records that the virtqueue was stopped. The next start uses the position given by the front end.
    pub fn end(&self) {
        self.u16_at(VERSION_AT).store(0, Ordering::Release);
    }

    /// Saves length, ID and flags of the available descriptor `index` before it is overwritten.
    #[inline(always)]
    pub(crate) fn keep(&self, index: u32, word: u64) {
        self.word_at(index).store(word.rotate_left(32), Ordering::Relaxed);
    }

    /// Orders the saved descriptors before all later writes.
    #[inline(always)]
    pub(crate) fn kept(&self) {
        fence(Ordering::Release);
    }

    /// Records that the used descriptors from `old` up to `new` are about to be published.
    #[inline(always)]
    pub(crate) fn publish(&self, old: u16, new: u16) {
        let (index, wrap) = (|at: u16| u64::from(at & !WRAP), |at: u16| u64::from(at >> 15));
        let used = index(new) | index(old) << 16 | wrap(new) << 32 | wrap(old) << 40;
        // Ordered after the previous publication, and before the next one, which is a store with release ordering.
        self.u64_at(USED_AT).store(used, Ordering::Release);
    }

    #[inline(always)]
    fn word_at(&self, index: u32) -> &AtomicU64 {
        debug_assert!(index < self.room.into());
        self.u64_at(HEADER + ENTRY * (index as usize % usize::from(self.room).max(1)) + WORD_AT)
    }

    #[inline(always)]
    fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: callers pass offsets of fields of a part, which is completely in the mapping. The part and the
        // offsets are aligned.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    #[inline(always)]
    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers pass offsets of two-byte fields of the part, which is completely in the mapping. The part and
        // the offsets are aligned.
        unsafe { AtomicU16::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

fn features_of(is_packed: bool) -> u64 {
    if is_packed { IN_ORDER | PACKED } else { IN_ORDER }
}

#[cfg(test)]
mod tests;
