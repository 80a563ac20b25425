//! Where a virtqueue of either format is.

use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::GuestMemory;

use crate::{Inflight, RingError, packed, split};

/// The parts of a virtqueue in host memory, by format.
#[derive(Clone, Debug)]
pub enum Layout {
    /// Descriptor table, available ring, used ring.
    Split(split::Layout),
    /// Descriptor ring, driver and device event suppression structures.
    Packed(packed::Layout),
}

impl Layout {
    /// A queue of `size` whose parts are at these front-end addresses of `memory`, which the layout keeps: descriptor
    /// area, driver area, device area.
    ///
    /// # Errors
    /// A size that the format does not have; a part that is not aligned, or not in the memory as a whole.
    pub fn in_memory(
        memory: &Arc<GuestMemory>,
        parts: (u64, u64, u64),
        size: u32,
        packed: bool,
    ) -> Result<Self, RingError> {
        if packed {
            packed::Layout::in_memory(memory, parts, size).map(Self::Packed)
        } else {
            split::Layout::in_memory(memory, parts, size).map(Self::Split)
        }
    }

    /// What the device writes: first byte and length of the device area, and of the descriptor ring of a packed queue.
    pub fn written(&self) -> [(NonNull<u8>, usize); 2] {
        match self {
            Self::Split(layout) => layout.written(),
            Self::Packed(layout) => layout.written(),
        }
    }

    /// Where the ring goes on, in the form of [`DeviceQueue::base`](crate::device::DeviceQueue::base), when a device has used it with
    /// this part of a region and did not stop; its descriptors are then what they were. Otherwise it is in use from now on, and
    /// begins at `base`: `None`.
    ///
    /// # Errors
    /// [`RingError::Inflight`] when something else was in use there, [`RingError::Base`] when it names no descriptor.
    pub fn take_up(&self, inflight: &Inflight, base: u32) -> Result<Option<u32>, RingError> {
        let (size, is_packed) = (self.size(), matches!(self, Self::Packed(_)));
        let in_use = inflight.is_in_use(size, is_packed)?;
        match self {
            Self::Split(split) if in_use => Ok(Some(split.used_index().into())),
            // Where it begins at an entry of the driver's choice, the next device could not know it.
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

impl From<split::Layout> for Layout {
    fn from(layout: split::Layout) -> Self {
        Self::Split(layout)
    }
}

impl From<packed::Layout> for Layout {
    fn from(layout: packed::Layout) -> Self {
        Self::Packed(layout)
    }
}
