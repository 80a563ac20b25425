//! The driver side of a virtqueue of either format: makes chains available and collects used ones. Each chain carries a
//! token of its owner.

pub use crate::chain::Used;
use crate::chain::VIRTQ_DESC_F_INDIRECT;
use crate::device::Direction;
use crate::{Layout, RingError, packed, split};

/// The driver side of a queue of either format. `T` is the token that identifies a chain to its owner.
#[derive(Debug)]
pub enum RingDriver<T> {
    /// The driver side of a split queue.
    Split(split::driver::SplitDriver<T>),
    /// The driver side of a packed queue.
    Packed(packed::driver::PackedDriver<T>),
}

/// Calls the same method for either format.
macro_rules! either {
    ($queue:expr, $side:ident => $call:expr) => {
        match $queue {
            RingDriver::Split($side) => $call,
            RingDriver::Packed($side) => $call,
        }
    };
}

impl<T> RingDriver<T> {
    /// Creates the driver side of a new queue. Initializes the memory of the queue.
    pub fn new(layout: impl Into<Layout>, event_idx: bool) -> Self {
        match layout.into() {
            Layout::Split(layout) => Self::Split(split::driver::SplitDriver::new(layout, event_idx)),
            Layout::Packed(layout) => Self::Packed(packed::driver::PackedDriver::new(layout, event_idx)),
        }
    }

    /// Queue size.
    pub fn size(&self) -> u16 {
        either!(self, side => side.size())
    }

    /// Free descriptors.
    #[inline(always)]
    pub fn free(&self) -> u16 {
        either!(self, side => side.free())
    }

    /// Chains in flight: added, but not returned by [`RingDriver::pop`] yet.
    pub fn in_flight(&self) -> u16 {
        either!(self, side => side.in_flight())
    }

    /// Makes one buffer available. It becomes visible to the device with [`RingDriver::publish`].
    ///
    /// # Errors
    /// Returns the token if no descriptor is free.
    #[inline(always)]
    pub fn add(&mut self, addr: u64, len: u32, direction: Direction, token: T) -> Result<(), T> {
        self.add_chain(&[(addr, len)], direction, token)
    }

    /// Makes a chain of buffers available. Each buffer has a guest address and a length.
    ///
    /// # Errors
    /// Returns the token if not enough descriptors are free, or if `buffers` is empty.
    #[inline(always)]
    pub fn add_chain(&mut self, buffers: &[(u64, u32)], direction: Direction, token: T) -> Result<(), T> {
        either!(self, side => side.add_with(buffers, direction.flag(), token))
    }

    /// Makes the chain in the indirect table of `len` bytes at guest address `table` available. It takes one
    /// descriptor. INDIRECT_DESC must have been negotiated.
    ///
    /// # Errors
    /// Returns the token if the queue is full.
    #[inline(always)]
    pub fn add_indirect(&mut self, table: u64, len: u32, token: T) -> Result<(), T> {
        either!(self, side => side.add_with(&[(table, len)], VIRTQ_DESC_F_INDIRECT, token))
    }

    /// Makes all chains added so far visible to the device.
    #[inline(always)]
    pub fn publish(&mut self) {
        either!(self, side => side.publish());
    }

    /// Returns whether the device requests a kick for the chains published since the last call.
    #[inline(always)]
    pub fn needs_kick(&mut self) -> bool {
        either!(self, side => side.needs_kick())
    }

    /// Enables or disables notifications of used chains by the device.
    pub fn set_notification(&mut self, wanted: bool) {
        either!(self, side => side.set_notification(wanted));
    }

    /// Returns the number of returned chains that are known and were not taken by [`RingDriver::pop`] yet. If none are
    /// known, reads the ring.
    ///
    /// # Errors
    /// Fails if the device violates the virtio specification.
    #[inline(always)]
    pub fn used(&mut self) -> Result<u16, RingError> {
        either!(self, side => side.used())
    }

    /// Returns the next used chain; `None` if no more are known since the last call of [`RingDriver::used`].
    ///
    /// # Errors
    /// Fails if the device violates the virtio specification.
    #[inline(always)]
    pub fn pop(&mut self) -> Result<Option<Used<T>>, RingError> {
        either!(self, side => side.pop())
    }

    /// Takes back every chain in flight, for use after the device has terminated and will not return them.
    pub fn take_in_flight(&mut self) -> impl Iterator<Item = T> + '_ {
        let (split, packed) = match self {
            Self::Split(side) => (Some(side.take_in_flight()), None),
            Self::Packed(side) => (None, Some(side.take_in_flight())),
        };
        split.into_iter().flatten().chain(packed.into_iter().flatten())
    }
}
