//! The device side of a virtqueue, whatever its format: takes available chains, returns used ones.
//!
//! Work is per burst. [`DeviceQueue::look`] reads what the driver has made available into private memory, once;
//! [`DeviceQueue::singles`] and [`DeviceQueue::walk`] take chains apart into host addresses without consuming them;
//! [`DeviceQueue::consume`] moves on; [`DeviceQueue::push_used`] writes what nobody sees until
//! [`DeviceQueue::publish`]. Whoever works with a queue is generic over the format, so that it is chosen once a burst.

use offcore_mem::GuestMemory;

use crate::RingError;
use crate::chain::{Buffer, Chain, Direction};
use crate::double::Double;
use crate::vector::{Single, Wanted};

/// Entries that [`DeviceQueue::look`] reads at once, at most.
pub const LOOK: usize = 64;

/// The device side of one queue. `ahead` counts entries of the ring after the next one that is not consumed, and goes on
/// by [`Chain::entries`] from chain to chain.
pub trait DeviceQueue {
    /// Queue size.
    fn size(&self) -> u16;

    /// Where a later start goes on, in the form of vhost-user's vring state: of a split queue the next available entry; of
    /// a packed one the next available entry with its wrap counter (bit 15), and above it the same of the next used one.
    fn base(&self) -> u32;

    /// How many entries are available, of `wanted` (at most [`LOOK`]). They are read once and what they name is fetched
    /// ahead.
    ///
    /// # Errors
    /// What is wrong with the ring: the driver claims more than it holds, the entries not yet returned included, so no
    /// more are ever out than the queue has.
    fn look(&mut self, wanted: usize) -> Result<usize, RingError>;

    /// Whether there is an entry `ahead`, however far [`DeviceQueue::look`] has looked.
    ///
    /// # Errors
    /// As for [`DeviceQueue::look`].
    fn has(&mut self, ahead: u16) -> Result<bool, RingError>;

    /// The chains from the entry `ahead` on, at most `most`, as long as they are one buffer in one region, as `wanted`, and
    /// have been found by [`DeviceQueue::look`]. What comes next may be anything: see [`DeviceQueue::doubles`].
    fn singles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &mut [Single];

    /// The same, as long as they are an indirect table of one or two buffers, each in one region, whose lengths together
    /// are as `wanted`: to be asked for where [`DeviceQueue::singles`] has stopped. What comes next may be anything: see
    /// [`DeviceQueue::walk`].
    fn doubles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &[Double];

    /// Calls `visit` with each buffer of the chain that begins at the available entry `ahead`, in order; a buffer across
    /// regions comes in pieces. Buffers of length 0 are left out, but count: at most `max` descriptors are read, whatever
    /// the driver wrote, and they are taken off `max`.
    ///
    /// # Errors
    /// What is wrong with the chain; more than `max` descriptors or pieces are [`RingError::TooManyBuffers`].
    fn walk(
        &mut self,
        ahead: u16,
        memory: &GuestMemory,
        direction: Direction,
        max: &mut usize,
        visit: impl FnMut(Buffer),
    ) -> Result<Chain, RingError>;

    /// Moves on over `entries`.
    fn consume(&mut self, entries: u16);

    /// Notes the return of `chain`, of which `written` bytes were written. Not visible before [`DeviceQueue::publish`].
    /// Chains go back in the order in which they were taken; one that is complete at once may be pushed before
    /// [`DeviceQueue::consume`] moves on over it.
    fn push_used(&mut self, chain: Chain, written: u32);

    /// Notes the return of `count` chains that [`DeviceQueue::singles`] or, as readable ones, [`DeviceQueue::doubles`] has
    /// found, from the entry `ahead` on, before they are consumed. Of readable ones nothing was written; of a writable one,
    /// whose length is not 0, [as many bytes](Single::set_written) as it now says.
    ///
    /// # Panics
    /// When there cannot be so many.
    fn push_used_singles(&mut self, ahead: u16, count: u16, direction: Direction);

    /// Makes the chains returned so far visible to the driver.
    fn publish(&mut self);

    /// Whether the driver wants to be notified of what was published since this last said so.
    fn needs_notification(&mut self) -> bool;

    /// Asks the driver for notifications of new available chains, or (when `wanted` is false) for none.
    fn set_notification(&mut self, wanted: bool);

    /// Fetches ahead, for writing, the lines in which the next `chains` are going to be returned.
    fn prefetch_used(&self, chains: usize);
}
