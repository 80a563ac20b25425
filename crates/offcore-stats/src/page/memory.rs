//! The mapping of a page, and the words of its layout.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags};

use super::PageError;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"offstats");
pub(super) const VERSION: u32 = 2;
/// Bytes before the first slot.
pub(super) const HEADER: usize = 64;
/// Bytes of a slot.
pub(super) const SLOT: usize = 128;
/// Bytes of a slot's labels.
pub(super) const LABELS: usize = SLOT - Field::Labels as usize;
/// Values and schemas begin at multiples of this, so workers do not share cache lines.
pub(super) const LINE: usize = 64;

/// The header's second word: the version, and the number of slots in its upper half.
pub(super) const VERSION_AND_SLOTS: usize = 8;

/// Offsets in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) enum Field {
    Sequence = 0,
    /// The [`Kind`], and the slot of a block's family in the upper half.
    KindAndFamily = 8,
    /// The offset of the values or of the schema, and in the upper half the number of values, or the schema's bytes.
    Place = 16,
    Number = 24,
    Labels = 32,
}

/// The content of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    Free = 0,
    Family = 1,
    Block = 2,
}

/// Returns two halves of a word: the lower half first.
pub(super) fn halves(word: u64) -> (u32, u32) {
    (word as u32, (word >> 32) as u32)
}

/// Returns a word of two halves.
pub(super) fn word_of(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Returns the offset of a field of slot `slot`.
pub(super) fn at(slot: u32, field: Field) -> usize {
    HEADER + slot as usize * SLOT + field as usize
}

#[derive(Debug)]
pub(super) struct Memory {
    base: NonNull<u8>,
    pub(super) len: usize,
}

// SAFETY: the mapping is shared memory that is only accessed through atomics.
unsafe impl Send for Memory {}
// SAFETY: as for `Send`.
unsafe impl Sync for Memory {}

impl Memory {
    pub(super) fn map(fd: BorrowedFd<'_>, len: usize, prot: ProtFlags) -> Result<Self, PageError> {
        // SAFETY: a new shared mapping at an address that the kernel chooses does not affect existing memory.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        Ok(Self { base: NonNull::new(base.cast()).ok_or(rustix::io::Errno::NOMEM)?, len })
    }

    /// Returns the address of `len` bytes at a multiple of 8, if they are in the page.
    pub(super) fn range(&self, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: the range was checked, so the address is in the mapping.
        (is_inside && offset.is_multiple_of(8)).then(|| unsafe { self.base.add(offset) })
    }

    /// Returns the word at `offset`, a multiple of 8, if it is in the page.
    pub(super) fn get(&self, offset: usize) -> Option<&AtomicU64> {
        // SAFETY: `range` checks that the word is in the mapping and aligned, and the mapping lives as long as self.
        // Every access to the mapping is atomic.
        self.range(offset, 8).map(|address| unsafe { AtomicU64::from_ptr(address.as_ptr().cast()) })
    }

    /// Returns the word at `offset`, which the writer has computed.
    ///
    /// # Panics
    /// If it is not in the page.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        let len = self.len;
        self.get(offset).unwrap_or_else(|| panic!("word at {offset} of a page of {len} bytes"))
    }

    /// Returns a field of slot `slot`, or an error if the slot is not in the page.
    pub(super) fn field(&self, slot: u32, field: Field) -> Result<&AtomicU64, PageError> {
        let offset = at(slot, field);
        self.get(offset).ok_or(PageError::Damaged(offset))
    }

    /// Stores `text` and zeros behind it, `len` bytes in total.
    pub(super) fn store_text(&self, offset: usize, text: &[u8], len: usize) {
        let mut bytes = text.iter().copied().chain(std::iter::repeat(0));
        for word in (offset..offset + len).step_by(8) {
            let eight = std::array::from_fn(|_| bytes.next().unwrap_or(0));
            self.word(word).store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
    }

    /// Returns `len` bytes at `offset` as text.
    pub(super) fn text(&self, offset: usize, len: usize) -> Result<String, PageError> {
        let damaged = PageError::Damaged(offset);
        if self.range(offset, len.next_multiple_of(8)).is_none() {
            return Err(damaged);
        }
        let words = (offset..offset + len).step_by(8).map_while(|word| self.get(word));
        let mut bytes: Vec<u8> = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes()).collect();
        bytes.truncate(len);
        String::from_utf8(bytes).map_err(|_| damaged)
    }

    /// Changes slot `slot`. Meanwhile, readers skip the slot and discard its former content.
    pub(super) fn change(&self, slot: u32, change: impl FnOnce()) {
        let sequence = self.word(at(slot, Field::Sequence));
        let before = sequence.load(Ordering::Relaxed);
        sequence.store(before.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        change();
        sequence.store(before.wrapping_add(2), Ordering::Release);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this length, and every block holds the Arc that owns it.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
