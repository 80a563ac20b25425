//! Packed virtqueues: virtio 1.2, section 2.8.
pub mod device;
use crate::RingError;
use offcore_mem::GuestMemory;
use std::sync::Arc;
/// The parts of a packed queue.
#[derive(Clone, Debug)]
pub struct Layout {
    size: u16,
}
impl Layout {
    /// A queue of `size`.
    ///
    /// # Errors
    /// Not yet.
    pub fn in_memory(
        _memory: &Arc<GuestMemory>,
        _parts: (u64, u64, u64),
        size: u32,
    ) -> Result<Self, RingError> {
        Err(RingError::Size(size))
    }
    /// Queue size.
    pub fn size(&self) -> u16 {
        self.size
    }
}
