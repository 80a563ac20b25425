//! Location of a virtqueue of either format.

use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::GuestMemory;

use crate::areas::Areas;
use crate::{Inflight, RingError, packed, split};

/// The parts of a virtqueue in host memory, by format.
#[derive(Clone, Debug)]
pub enum Layout {
    /// Descriptor table, available ring, used ring.
    Split(split::SplitLayout),
    /// Descriptor ring, driver and device event suppression structures.
    Packed(packed::PackedLayout),
}

impl Layout {
    /// Describes a queue of `size` descriptors whose parts are at these addresses of `memory`. The layout keeps
    /// the memory mapped.
    ///
    /// # Errors
    /// Fails if the size is invalid for the format, or if a part is not aligned or not completely in the memory.
    pub fn in_memory(
        memory: &Arc<GuestMemory>,
        areas: Areas,
        size: u32,
        packed: bool,
    ) -> Result<Self, RingError> {
        if packed {
            packed::PackedLayout::in_memory(memory, areas, size).map(Self::Packed)
        } else {
            split::SplitLayout::in_memory(memory, areas, size).map(Self::Split)
        }
    }

    /// Returns the ranges that the device writes, as first byte and length: the device area, and the descriptor ring of
    /// a packed queue.
    pub fn written(&self) -> [(NonNull<u8>, usize); 2] {
        match self {
            Self::Split(layout) => layout.written(),
            Self::Packed(layout) => layout.written(),
        }
    }

    /// Resumes the ring if a device has used it with this part of a region and did not stop it. Restores its
    /// descriptors and returns the position, in the format of [`DeviceQueue::base`](crate::device::DeviceQueue::base).
    /// Otherwise, records that the ring is in use from now on and begins at `base`, and returns `None`.
    ///
    /// # Errors
    /// [`RingError::Inflight`] if the region was used for something else, [`RingError::Base`] if the recorded position
    /// is invalid.
    pub fn take_up(&self, inflight: &Inflight, base: u32) -> Result<Option<u32>, RingError> {
        let (size, is_packed) = (self.size(), matches!(self, Self::Packed(_)));
        let in_use = inflight.is_in_use(size, is_packed)?;
        match self {
            Self::Split(split) if in_use => Ok(Some(split.used_index().into())),
            // If the ring begins at an entry chosen by the driver, the next device could not determine it.
            Self::Split(split) if u32::from(split.used_index()) != base => Ok(None),
            Self::Packed(packed) if in_use => {
                let at = u32::from(packed.recover(inflight)?);
                Ok(Some(at | at << 16))
            }
            _ => {
                inflight.begin(size, is_packed, base as u16);
                Ok(None)
            }
        }
    }

    /// Queue size.
    pub fn size(&self) -> u16 {
        match self {
            Self::Split(layout) => layout.size(),
            Self::Packed(layout) => layout.size(),
        }
    }
}

impl From<split::SplitLayout> for Layout {
    fn from(layout: split::SplitLayout) -> Self {
        Self::Split(layout)
    }
}

impl From<packed::PackedLayout> for Layout {
    fn from(layout: packed::PackedLayout) -> Self {
        Self::Packed(layout)
    }
}
