//! Where a virtqueue of either format is.

use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::GuestMemory;

use crate::{RingError, packed, split};

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
