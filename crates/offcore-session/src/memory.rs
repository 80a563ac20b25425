//! The segments of one application's memory, as the stack has them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use offcore_mem::Mapping;
use offcore_mem::mapping::MemoryError;

use crate::place::Segments;

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
}

// SAFETY: a segment that was added stays mapped until the memory is dropped.
unsafe impl Segments for Memory {
    #[inline(always)]
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
        let mapping = &self.segments.get(number)?.get()?.mapping;
        Some((mapping.base(), mapping.len()))
    }
}

// SAFETY: the memory lives as long as there is a reference to it.
unsafe impl Segments for Arc<Memory> {
    #[inline(always)]
    fn segment(&self, number: usize) -> Option<(NonNull<u8>, usize)> {
        (**self).segment(number)
    }
}
