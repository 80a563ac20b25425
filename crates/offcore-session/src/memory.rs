//! The mapped segments of one application's memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use offcore_mem::Mapping;
use offcore_mem::mapping::MemoryError;
use rustix::fs::{FallocateFlags, fallocate};

use crate::place::Segments;

#[derive(Debug)]
struct Segment {
    mapping: Mapping,
    /// The memfd on the side that created it, to be passed to the other side.
    fd: Option<OwnedFd>,
}

/// The segments that one party has mapped. They stay mapped, at the same addresses, while a reference exists. A copy in
/// flight holds one, and so do a [`crate::Reader`] and a [`crate::Writer`].
#[derive(Debug)]
pub struct Memory {
    segments: Box<[OnceLock<Segment>]>,
}

impl Memory {
    /// Creates an empty list with room for this number of segments.
    pub(crate) fn new(segments: usize) -> Self {
        Self { segments: (0..segments).map(|_| OnceLock::new()).collect() }
    }

    /// Maps the segments of another party's arena, given as in [`Memory::segments`]. Segments that are added later are
    /// not included.
    ///
    /// # Errors
    /// If a memfd is shorter than specified, and system errors.
    pub fn attach<'a>(
        segments: impl IntoIterator<Item = (BorrowedFd<'a>, usize)>,
    ) -> Result<Self, MemoryError> {
        let map = |(fd, len)| {
            let mapping = Mapping::shared(fd, 0, len)?;
            Ok(OnceLock::from(Segment { mapping, fd: None }))
        };
        Ok(Self { segments: segments.into_iter().map(map).collect::<Result<_, MemoryError>>()? })
    }

    /// Returns the memfds of this side's segments and their lengths in bytes, which another process needs to map them.
    pub fn segments(&self) -> impl Iterator<Item = (BorrowedFd<'_>, usize)> {
        let made = self.segments.iter().map_while(OnceLock::get);
        made.filter_map(|segment| Some((segment.fd.as_ref()?.as_fd(), segment.mapping.len())))
    }

    /// Frees all pages of this side's segments, although other processes may have mapped them. A process that
    /// touches such a page then allocates a new one, which is charged to it.
    pub fn free_pages(&self) {
        for (segment, len) in self.segments() {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // An error leaves the pages to the last process that has them mapped.
            let _ = fallocate(segment, flags, 0, len as u64);
        }
    }

    /// Adds segment number `at`.
    pub(crate) fn add(&self, at: usize, mapping: Mapping, fd: OwnedFd) {
        let added = self.segments[at].set(Segment { mapping, fd: Some(fd) });
        debug_assert!(added.is_ok(), "segment {at} is there");
    }
}

// SAFETY: a segment that was added stays mapped until the memory is dropped.
unsafe impl Segments for Memory {
    #[inline(always)]
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
        let mapping = &self.segments.get(number)?.get()?.mapping;
        Some((mapping.base(), mapping.len()))
    }
}

// SAFETY: `Memory` returns valid segments, and it lives as long as a reference to it.
unsafe impl Segments for Arc<Memory> {
    #[inline(always)]
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
        (**self).segment(number)
    }
}
