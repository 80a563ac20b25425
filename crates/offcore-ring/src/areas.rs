//! Addresses of a virtqueue of either format.

/// The front-end addresses of the parts of a virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Areas {
    /// The descriptor area: the descriptor table or ring.
    pub descriptors: u64,
    /// The driver area: the available ring, or the driver event suppression structure.
    pub driver: u64,
    /// The device area: the used ring, or the device event suppression structure.
    pub device: u64,
}
