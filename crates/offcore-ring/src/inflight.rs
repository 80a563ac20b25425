//! What a back end leaves in the front end's memory for the one that comes after it, however it ends (vhost-user, "Inflight I/O
//! tracking").
//!
//! Chains go back in the order in which they were taken. So those in flight are all that were made available and not returned, and a
//! split ring itself says which: its used index is where the next back end goes on. In a packed ring what is used is written over
//! what was available, the first descriptor of a burst last. The region keeps what is needed to undo the others,
//!
//! ```text
//! features u64 | version u16 | desc_num u16 | …            of a virtqueue, the fields that are used
//! 16: used_idx u16 | old_used_idx u16 | used_wrap_counter u8 | old_used_wrap_counter u8
//! 32: desc_num × { … 16: id u16 | flags u16 | len u32 | … }
//! ```
//! by stores of eight bytes: where the burst ends that is about to be published, and where it begins, of which one is where to go on;
//! and each descriptor as it was available. Whoever shares the memory can write it: what is found is checked, and harms only its ring.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering, fence};

use offcore_mem::sigbus::Guarded;

use crate::RingError;
use crate::chain::WRAP;

/// VIRTIO_F_RING_PACKED and VIRTIO_F_IN_ORDER. A back end that returns chains in another order leaves other things, and no such bit.
const PACKED: u64 = 1 << 34;
const IN_ORDER: u64 = 1 << 35;
/// Of a region that is in use.
const VERSION: u16 = 1;

const FEATURES_AT: usize = 0;
const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
const USED_AT: usize = 16;
/// Bytes of a header, and of what there is for a descriptor.
const HEADER: usize = 32;
const ENTRY: usize = 32;
const WORD_AT: usize = 16;
/// What the part of a virtqueue is aligned to.
const ALIGN: usize = 64;

/// The part of one virtqueue.
#[derive(Clone, Debug)]
pub struct Inflight {
    base: NonNull<u8>,
    /// Descriptors for which there is room.
    room: u16,
    mapping: Arc<Guarded>,
}

// SAFETY: the region is accessed by atomics only, and is mapped as long as the part lives.
unsafe impl Send for Inflight {}
// SAFETY: as above.
unsafe impl Sync for Inflight {}

impl Inflight {
    /// Bytes of the part of a virtqueue of at most `size` descriptors, of either format.
    pub const fn len(size: u16) -> usize {
        (HEADER + ENTRY * size as usize).next_multiple_of(ALIGN)
    }

    /// The part that is `offset` bytes into `mapping`, for a virtqueue of at most `size` descriptors.
    ///
    /// # Panics
    /// When it is not in the mapping as a whole, or not aligned to 8.
    pub fn new(mapping: &Arc<Guarded>, offset: usize, size: u16) -> Self {
        let end = offset.checked_add(Self::len(size));
        assert!(offset.is_multiple_of(8) && end.is_some_and(|end| end <= mapping.len()));
        // SAFETY: the offset is inside the mapping.
        let base = unsafe { mapping.base().add(offset) };
        Self { base, room: size, mapping: Arc::clone(mapping) }
    }

    /// Bytes that are mapped for the whole region.
    pub fn mapped(&self) -> u64 {
        self.mapping.len() as u64
    }

    /// Whether its file was truncated.
    pub fn has_vanished(&self) -> bool {
        self.mapping.has_vanished()
    }

    /// Whether a ring of `size` was in use, of this format, and its back end has not stopped.
    ///
    /// # Errors
    /// [`RingError::Inflight`] when something else was in use here, or there is no room for the ring.
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

    /// A ring of `size` is in use from now on, and of a packed one the descriptor `at` is the next.
    pub(crate) fn begin(&self, size: u16, is_packed: bool, at: u16) {
        self.u64_at(FEATURES_AT).store(features_of(is_packed), Ordering::Relaxed);
        self.u16_at(SIZE_AT).store(size, Ordering::Relaxed);
        self.publish(at, at);
        self.u16_at(VERSION_AT).store(VERSION, Ordering::Release);
    }

    /// Where the burst that was about to be published last begins, and where it ends, in the 16-bit form.
    pub(crate) fn last_burst(&self) -> (u16, u16) {
        let used = self.u64_at(USED_AT).load(Ordering::Acquire);
        let half = |index: u64, wrap: u64| index as u16 & !WRAP | ((wrap as u16 & 1) << 15);
        (half(used >> 16, used >> 40), half(used, used >> 32))
    }

    /// Length, id and flags of the descriptor `index` when it was available.
    pub(crate) fn kept_word(&self, index: u32) -> u64 {
        self.word_at(index).load(Ordering::Relaxed).rotate_left(32)
    }

    /// The virtqueue was stopped: the next start is where the front end says.
    pub fn end(&self) {
        self.u16_at(VERSION_AT).store(0, Ordering::Release);
    }

    /// Notes length, id and flags of the available descriptor `index`, before anything is written over it.
    #[inline(always)]
    pub(crate) fn keep(&self, index: u32, word: u64) {
        self.word_at(index).store(word.rotate_left(32), Ordering::Relaxed);
    }

    /// What was kept is there before anything is written that comes after this.
    #[inline(always)]
    pub(crate) fn kept(&self) {
        fence(Ordering::Release);
    }

    /// Notes that the used descriptors from `old` on, up to `new`, are about to be published.
    #[inline(always)]
    pub(crate) fn publish(&self, old: u16, new: u16) {
        let (index, wrap) = (|at: u16| u64::from(at & !WRAP), |at: u16| u64::from(at >> 15));
        let used = index(new) | index(old) << 16 | wrap(new) << 32 | wrap(old) << 40;
        // After what was published before, and before what is published next, by a store that releases it.
        self.u64_at(USED_AT).store(used, Ordering::Release);
    }

    #[inline(always)]
    fn word_at(&self, index: u32) -> &AtomicU64 {
        debug_assert!(index < self.room.into());
        self.u64_at(HEADER + ENTRY * (index as usize % usize::from(self.room).max(1)) + WORD_AT)
    }

    #[inline(always)]
    fn u64_at(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: callers pass offsets of fields of a part, which is in the mapping as a whole; the part and the offsets are aligned.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    #[inline(always)]
    fn u16_at(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as in `u64_at`.
        unsafe { AtomicU16::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

fn features_of(is_packed: bool) -> u64 {
    if is_packed { IN_ORDER | PACKED } else { IN_ORDER }
}

#[cfg(test)]
mod tests;
