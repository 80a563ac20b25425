//! The driver side of a virtqueue of either format: makes chains available, collects used ones. A chain keeps a token of
//! its owner's.

pub use crate::chain::Used;
use crate::chain::VIRTQ_DESC_F_INDIRECT;
use crate::device::Direction;
use crate::{Layout, RingError, packed, split};

/// The driver side of a queue of either format. `T` names a chain to its owner.
#[derive(Debug)]
pub enum Queue<T> {
    /// Of a split one.
    Split(split::driver::Queue<T>),
    /// Of a packed one.
    Packed(packed::driver::Queue<T>),
}

/// Calls the same method of either side.
macro_rules! either {
    ($queue:expr, $side:ident => $call:expr) => {
        match $queue {
            Queue::Split($side) => $call,
            Queue::Packed($side) => $call,
        }
    };
}

impl<T> Queue<T> {
    /// The driver side of a fresh queue, whose memory is set to what a queue begins with.
    pub fn new(layout: impl Into<Layout>, event_idx: bool) -> Self {
        match layout.into() {
            Layout::Split(layout) => Self::Split(split::driver::Queue::new(layout, event_idx)),
            Layout::Packed(layout) => Self::Packed(packed::driver::Queue::new(layout, event_idx)),
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

    /// Chains in flight: added and not taken by [`Queue::pop`].
    pub fn in_flight(&self) -> u16 {
        either!(self, side => side.in_flight())
    }

    /// Makes one buffer available, not visible before [`Queue::publish`].
    ///
    /// # Errors
    /// The token, when no descriptor is free.
    #[inline(always)]
    pub fn add(&mut self, addr: u64, len: u32, direction: Direction, token: T) -> Result<(), T> {
        self.add_chain(&[(addr, len)], direction, token)
    }

    /// Makes a chain of buffers, guest addresses and lengths, available.
    ///
    /// # Errors
    /// The token, when fewer descriptors are free, or `buffers` is empty.
    #[inline(always)]
    pub fn add_chain(&mut self, buffers: &[(u64, u32)], direction: Direction, token: T) -> Result<(), T> {
        either!(self, side => side.add_with(buffers, direction.flag(), token))
    }

    /// Makes the chain in the table of `len` bytes at guest address `table` available, which takes one descriptor. It is
    /// for whoever has negotiated INDIRECT_DESC.
    ///
    /// # Errors
    /// The token, when the queue is full.
    #[inline(always)]
    pub fn add_indirect(&mut self, table: u64, len: u32, token: T) -> Result<(), T> {
        either!(self, side => side.add_with(&[(table, len)], VIRTQ_DESC_F_INDIRECT, token))
    }

    /// Makes the chains added so far visible to the device.
    #[inline(always)]
    pub fn publish(&mut self) {
        either!(self, side => side.publish());
    }

    /// Whether the device wants to be kicked for what was published since this was last asked.
    #[inline(always)]
    pub fn needs_kick(&mut self) -> bool {
        either!(self, side => side.needs_kick())
    }

    /// Asks the device for notifications of used chains, or for none.
    pub fn set_notification(&mut self, wanted: bool) {
        either!(self, side => side.set_notification(wanted));
    }

    /// How many chains, as far as they were looked at, the device has returned that [`Queue::pop`] has not taken;
    /// looks when it knows of none.
    ///
    /// # Errors
    /// What the device did wrong.
    #[inline(always)]
    pub fn used(&mut self) -> Result<u16, RingError> {
        either!(self, side => side.used())
    }

    /// The next returned chain; `None` when [`Queue::used`] last said there is no more.
    ///
    /// # Errors
    /// What the device did wrong.
    #[inline(always)]
    pub fn pop(&mut self) -> Result<Option<Used<T>>, RingError> {
        either!(self, side => side.pop())
    }

    /// Takes back every chain in flight: the device is gone and will not return them.
    pub fn take_in_flight(&mut self) -> impl Iterator<Item = T> + '_ {
        let (split, packed) = match self {
            Self::Split(side) => (Some(side.take_in_flight()), None),
            Self::Packed(side) => (None, Some(side.take_in_flight())),
        };
        split.into_iter().flatten().chain(packed.into_iter().flatten())
    }
}
