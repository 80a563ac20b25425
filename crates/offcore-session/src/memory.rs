//! The memory of one application: segments of shared memory, and what addresses it.
//!
//! Nothing in shared memory is a pointer. A page has a number: its segment times 16,384, plus the page in the segment.
//! Slots and tables have a *place*, counted in units of 512 bytes from the start of the first segment. Page 0 is never
//! given out, so 0 is no page and no place.

use std::num::NonZeroU32;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use offcore_mem::Mapping;
use offcore_mem::mapping::MemoryError;

use crate::layout::{SMALL, TABLE};
use crate::slot::{SLOT, Slot};
use crate::sync::AtomicU32;

/// Bytes of a segment; the last one may be shorter.
pub const SEGMENT: usize = 64 << 20;
/// Pages of a segment.
pub(crate) const PAGES: usize = SEGMENT / SMALL;
const UNITS: usize = SEGMENT / SLOT;

/// A block of an arena, small or large: the number of its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block(NonZeroU32);

impl Block {
    /// The block that begins at `page`; `None` for 0.
    #[inline(always)]
    pub(crate) fn new(page: u32) -> Option<Self> {
        NonZeroU32::new(page).map(Self)
    }

    /// Number of its first page.
    #[inline(always)]
    pub fn page(self) -> u32 {
        self.0.get()
    }
}

/// Where a slot or a table is, in units of 512 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place(NonZeroU32);

impl Place {
    /// The place of that number, as it stands in shared memory; `None` for 0.
    #[inline(always)]
    pub fn new(number: u32) -> Option<Self> {
        NonZeroU32::new(number).map(Self)
    }

    /// Its number.
    #[inline(always)]
    pub fn number(self) -> u32 {
        self.0.get()
    }
}

#[derive(Debug)]
struct Segment {
    mapping: Mapping,
    /// Of the side that made it: to be passed on.
    fd: Option<OwnedFd>,
}

/// The segments that one party has mapped. They stay mapped, at the same addresses, while there is a reference: a copy
/// in flight keeps one, and so do a [`crate::Reader`] and a [`crate::Writer`].
#[derive(Debug)]
pub struct Memory {
    segments: Box<[OnceLock<Segment>]>,
}

impl Memory {
    /// Room for that many segments.
    pub(crate) fn new(segments: usize) -> Self {
        Self { segments: (0..segments).map(|_| OnceLock::new()).collect() }
    }

    /// Maps the segments of somebody's arena, given as in [`Memory::segments`]. Later segments are not seen.
    ///
    /// # Errors
    /// When a memfd is shorter than said, or what the kernel says.
    pub fn attach<'a>(
        segments: impl IntoIterator<Item = (BorrowedFd<'a>, usize)>,
    ) -> Result<Self, MemoryError> {
        let map = |(fd, len)| {
            let mapping = Mapping::shared(fd, 0, len)?;
            Ok(OnceLock::from(Segment { mapping, fd: None }))
        };
        Ok(Self { segments: segments.into_iter().map(map).collect::<Result<_, MemoryError>>()? })
    }

    /// The memfds of this side's segments and their lengths in bytes: what another process needs to map them.
    pub fn segments(&self) -> impl Iterator<Item = (BorrowedFd<'_>, usize)> {
        let made = self.segments.iter().map_while(OnceLock::get);
        made.filter_map(|segment| Some((segment.fd.as_ref()?.as_fd(), segment.mapping.len())))
    }

    /// Adds segment number `at`.
    pub(crate) fn add(&self, at: usize, mapping: Mapping, fd: OwnedFd) {
        let added = self.segments[at].set(Segment { mapping, fd: Some(fd) });
        debug_assert!(added.is_ok(), "segment {at} is there");
    }

    /// Where `len` bytes from byte `offset` of `block` on are mapped; `None` when they are not in a mapped segment.
    #[inline(always)]
    pub fn address(&self, block: Block, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let page = block.page() as usize;
        self.at(page / PAGES, (page % PAGES) * SMALL, offset, len)
    }

    /// The slot at `place`; `None` when it is not in a mapped segment.
    #[inline(always)]
    pub fn slot(&self, place: Place) -> Option<&Slot> {
        let unit = place.number() as usize;
        let address = self.at(unit / UNITS, (unit % UNITS) * SLOT, 0, SLOT)?;
        // SAFETY: 512 mapped bytes, aligned to them, which stay mapped while `self` is borrowed; every byte of a slot
        // is part of an atomic, so others may write to it.
        Some(unsafe { address.cast().as_ref() })
    }

    /// Entry `entry` of the table at `place`: the page of a large block, or 0. `None` when the table is not in a mapped
    /// segment.
    #[inline(always)]
    pub(crate) fn entry(&self, place: Place, entry: usize) -> Option<&AtomicU32> {
        let unit = place.number() as usize;
        let address = self.at(unit / UNITS, (unit % UNITS) * SLOT, (entry % TABLE) * 4, 4)?;
        // SAFETY: 4 mapped bytes, aligned, as the segment's base and the place are; they stay mapped while `self` is
        // borrowed. An atomic may be written by others.
        Some(unsafe { address.cast().as_ref() })
    }

    #[inline(always)]
    fn at(&self, segment: usize, base: usize, offset: usize, len: usize) -> Option<NonNull<u8>> {
        let mapping = &self.segments.get(segment)?.get()?.mapping;
        let start = base.checked_add(offset)?;
        if start.checked_add(len)? > mapping.len() {
            return None;
        }
        // SAFETY: the range is inside the mapping, as just checked.
        Some(unsafe { mapping.base().add(start) })
    }
}
