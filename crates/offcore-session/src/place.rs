//! Addresses in an application's memory: page numbers, and places of slots and tables.
//!
//! Shared memory contains no pointers. A page has a number: its segment times 16,384, plus the page in the segment.
//! Slots and tables have a *place*, counted in units of 512 bytes from the start of the first segment. Page 0 is never
//! given out, so 0 means no page and no place.

use core::num::NonZeroU32;
use core::ptr::NonNull;

use crate::layout::{SMALL, TABLE};
use crate::slot::{SLOT, Slot};
use crate::sync::AtomicU32;

/// Length of a segment in bytes. The last one may be shorter.
pub const SEGMENT: usize = 64 << 20;
/// Number of pages in a segment.
pub(crate) const PAGES: usize = SEGMENT / SMALL;
const UNITS: usize = SEGMENT / SLOT;

/// A block of an arena, small or large, identified by the number of its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block(NonZeroU32);

impl Block {
    /// Returns the block that begins at `page`, or `None` for 0.
    #[inline(always)]
    pub(crate) fn new(page: u32) -> Option<Self> {
        NonZeroU32::new(page).map(Self)
    }

    /// Returns the number of its first page.
    #[inline(always)]
    pub fn page(self) -> u32 {
        self.0.get()
    }
}

/// The location of a slot or a table, in units of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place(NonZeroU32);

impl Place {
    /// Returns the place with this number, as stored in shared memory, or `None` for 0.
    #[inline(always)]
    pub fn new(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }

    /// Returns its number.
    #[inline(always)]
    pub fn number(self) -> u32 {
        self.0.get()
    }
}

/// Segments that one party has mapped.
///
/// # Safety
/// A returned segment must be mapped for reading and writing, at a page-aligned address, for as long as `self` is
/// borrowed.
pub unsafe trait Segments {
    /// Returns the first byte and length of segment `number`, or `None` if it is not mapped.
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)>;

    /// Returns the address of `len` bytes from byte `offset` of `block` on, or `None` if they are not in a mapped
    /// segment.
    #[inline(always)]
    fn address(&self, block: Block, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let page = block.page() as usize;
        self.at(page / PAGES, (page % PAGES) * SMALL, offset, len)
    }

    /// Returns the slot at `place`, or `None` if it is not in a mapped segment.
    #[inline(always)]
    fn slot(&self, place: Place) -> Option<&Slot> {
        let unit = place.number() as usize;
        let address = self.at(unit / UNITS, (unit % UNITS) * SLOT, 0, SLOT)?;
        // SAFETY: the slot has 512 mapped bytes, aligned to 512, which stay mapped while `self` is borrowed. Every byte
        // of a slot is part of an atomic, so other parties may write to it.
        Some(unsafe { address.cast().as_ref() })
    }

    /// Returns entry `entry` of the table at `place`: the page of a large block, or 0. Returns `None` if the table is
    /// not in a mapped segment.
    #[inline(always)]
    fn entry(&self, place: Place, entry: usize) -> Option<&AtomicU32> {
        let unit = place.number() as usize;
        let address = self.at(unit / UNITS, (unit % UNITS) * SLOT, (entry % TABLE) * 4, 4)?;
        // SAFETY: the entry has 4 mapped bytes, aligned because the segment's base and the place are. They stay mapped
        // while `self` is borrowed. It is an atomic, so other parties may write to it.
        Some(unsafe { address.cast().as_ref() })
    }

    /// Returns the address of `len` bytes from `base + offset` of a segment on, if they are mapped.
    #[inline(always)]
    #[doc(hidden)]
    fn at(&self, segment: usize, base: usize, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let (first, mapped) = self.segment(segment)?;
        let start = base.checked_add(offset)?;
        if start.checked_add(len)? > mapped {
            return None;
        }
        // SAFETY: the range is inside the segment, as just checked.
        Some(unsafe { first.add(start) })
    }
}

// SAFETY: the referenced `T` fulfils the requirements of `Segments`.
unsafe impl<T: Segments + ?Sized> Segments for &T {
    #[inline(always)]
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
        (**self).segment(number)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// This memory has a segment of one page and a segment of two pages.
    struct Two([u64; 1024]);

    // SAFETY: both segments are this struct's bytes. The tests only use addresses.
    unsafe impl Segments for Two {
        fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
            let len = *[SMALL, 2 * SMALL].get(number)?;
            Some((NonNull::from(&self.0).cast(), len))
        }
    }

    /// Each page, offset and length has an address only if all bytes are in one segment.
    #[test]
    #[cfg_attr(miri, ignore = "takes minutes")]
    fn block_addresses_stay_in_segment() {
        let two = Two([0; 1024]);
        let base = two.0.as_ptr() as usize;
        let ends = (1..=2 * PAGES + 2).chain([u32::MAX as usize - 1, u32::MAX as usize]);
        for block in ends.filter_map(|page| Block::new(page as u32)) {
            let (segment, page) = (block.page() as usize / PAGES, block.page() as usize % PAGES);
            for offset in [0, 1, SMALL - 1, SMALL, usize::MAX - SMALL, usize::MAX] {
                for len in [0, 1, SMALL, 2 * SMALL, usize::MAX] {
                    let start = (page * SMALL) as u128 + offset as u128;
                    let mapped = [SMALL, 2 * SMALL].get(segment).copied().unwrap_or(0) as u128;
                    let fits = segment < 2 && start + len as u128 <= mapped;
                    let found =
                        two.address(block, offset, len).map(|address| address.as_ptr() as usize - base);
                    assert_eq!(found, fits.then_some(start as usize), "{block:?} {offset:#x} {len:#x}");
                }
            }
        }
    }
}
