//! The device side of a virtqueue, independent of its format: takes available chains and returns used ones.
//!
//! Work is done in bursts. [`DeviceQueue::look`] reads the available entries into private memory, once.
//! [`DeviceQueue::singles`] and [`DeviceQueue::walk`] translate chains into host addresses without consuming them.
//! [`DeviceQueue::consume`] moves the position. [`DeviceQueue::push_used`] writes used entries, which become visible
//! with [`DeviceQueue::publish`]. Code that uses a queue is generic over the format, so that the format is selected
//! once per burst.

use offcore_mem::GuestMemory;

use crate::RingError;
use crate::chain::{Buffer, Chain, Direction};
use crate::double::Double;
use crate::vector::{Single, Wanted};

/// Maximum number of entries that [`DeviceQueue::look`] reads at once.
pub const LOOK: usize = 64;

/// The device side of one queue. `ahead` is the number of ring entries after the next entry that is not consumed. It
/// increases by [`Chain::entries`] from one chain to the next.
pub trait DeviceQueue {
    /// Queue size.
    fn size(&self) -> u16;

    /// Returns the position at which a later start continues, in the format of vhost-user's vring state. For a split
    /// queue, this is the next available entry. For a packed queue, the lower half is the next available entry with its
    /// wrap counter in bit 15, and the upper half is the same for the next used entry.
    fn base(&self) -> u32;

    /// Returns how many of `wanted` entries (at most [`LOOK`]) are available. They are read once, and the descriptors
    /// they refer to are prefetched.
    ///
    /// Fails if the ring is invalid: the driver makes more entries available than the ring holds, including entries not
    /// returned yet. So the number of chains in flight never exceeds the queue size.
    fn look(&mut self, wanted: usize) -> Result<usize, RingError>;

    /// Returns whether the entry `ahead` is available, even if [`DeviceQueue::look`] has not read it.
    ///
    /// # Errors
    /// The same as for [`DeviceQueue::look`].
    fn has(&mut self, ahead: u16) -> Result<bool, RingError>;

    /// Returns up to `most` chains from the entry `ahead` on, as long as each is one buffer in one region, matches
    /// `wanted`, and was found by [`DeviceQueue::look`]. The next chain may be of any kind: see
    /// [`DeviceQueue::doubles`].
    fn singles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &mut [Single];

    /// Returns up to `most` chains from the entry `ahead` on, as long as each is an indirect table of one or two
    /// buffers, each buffer is in one region, and their total length matches `wanted`. Call this at the entry where
    /// [`DeviceQueue::singles`] has stopped. The next chain may be of any kind: see [`DeviceQueue::walk`].
    fn doubles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &[Double];

    /// Calls `visit` for each buffer of the chain that begins at the available entry `ahead`, in order. A buffer that
    /// crosses regions is passed in pieces. Buffers of length 0 are skipped, but count as descriptors. Regardless of
    /// the content of the ring, at most `max` descriptors are read. The number of descriptors read is subtracted from
    /// `max`.
    ///
    /// # Errors
    /// Fails if the chain is invalid. For more than `max` descriptors or pieces, the error is
    /// [`RingError::TooManyBuffers`].
    fn walk(
        &mut self,
        ahead: u16,
        memory: &GuestMemory,
        direction: Direction,
        max: &mut usize,
        visit: impl FnMut(Buffer),
    ) -> Result<Chain, RingError>;

    /// Advances the position by `entries`.
    fn consume(&mut self, entries: u16);

    /// Returns `chain`, with `written` bytes written to it. Becomes visible with [`DeviceQueue::publish`]. Chains are
    /// returned in the order in which they were taken. A chain that is complete at once may be pushed before
    /// [`DeviceQueue::consume`] advances over it.
    fn push_used(&mut self, chain: Chain, written: u32);

    /// Returns `count` chains from the entry `ahead` on, before they are consumed. They were found by
    /// [`DeviceQueue::singles`] or, if readable, by [`DeviceQueue::doubles`]. For readable chains, the written length
    /// is 0. For writable chains, it is the current length of the single, which [`Single::set_written`] sets and which
    /// must not be 0.
    ///
    /// # Panics
    /// Panics if `count` exceeds the number of entries.
    fn push_used_singles(&mut self, ahead: u16, count: u16, direction: Direction);

    /// Makes all returned chains visible to the driver.
    fn publish(&mut self);

    /// Returns whether the driver requests a notification for the chains published since the last call.
    fn needs_notification(&mut self) -> bool;

    /// Enables or (if `wanted` is false) disables notifications of new available chains by the driver.
    fn set_notification(&mut self, wanted: bool);

    /// Prefetches, for writing, the cache lines in which the next `chains` chains will be returned.
    fn prefetch_used(&self, chains: usize);
}
