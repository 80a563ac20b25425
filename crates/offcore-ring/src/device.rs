//! The device side of a virtqueue, whatever its format: takes available chains, returns used ones.
//!
//! Work is per burst. [`DeviceQueue::look`] reads what the driver has made available into private memory, once;
//! [`DeviceQueue::singles`] and [`DeviceQueue::walk`] take chains apart into host addresses without consuming them;
//! [`DeviceQueue::consume`] moves on; [`DeviceQueue::push_used`] writes what nobody sees until
//! [`DeviceQueue::publish`]. Whoever works with a queue is generic over the format, so that it is chosen once a burst.

use std::ptr::NonNull;

use offcore_mem::{GuestMemory, RegionCache};

pub use crate::double::Double;
use crate::split::VIRTQ_DESC_F_WRITE;
pub use crate::vector::{Single, Wanted};
use crate::{Layout, RingError, packed, split};

/// Entries that [`DeviceQueue::look`] reads at once, at most.
pub const LOOK: usize = 64;

/// Which way the buffers of a chain go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The device reads them (the guest transmits).
    Readable,
    /// The device writes them (the guest receives).
    Writable,
}

impl Direction {
    /// WRITE, or not, as descriptors that go this way have it.
    #[inline(always)]
    pub(crate) fn flag(self) -> u16 {
        match self {
            Self::Readable => 0,
            Self::Writable => VIRTQ_DESC_F_WRITE,
        }
    }

    /// Whether a descriptor with `flags` goes this way.
    #[inline(always)]
    pub(crate) fn fits(self, flags: u16) -> bool {
        (flags & VIRTQ_DESC_F_WRITE != 0) == (self == Self::Writable)
    }
}

/// A buffer of a chain at its host address. The whole range is in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// First byte.
    pub addr: NonNull<u8>,
    /// Length in bytes.
    pub len: u32,
}

/// What it takes to return a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// Its name: the first descriptor of a split queue, the buffer id of a packed one.
    pub id: u16,
    /// Entries of the ring that it takes: 1 of a split queue's available ring, as many as it has descriptors in a
    /// packed ring.
    pub entries: u16,
}

impl Chain {
    /// A chain that takes one entry.
    #[inline(always)]
    pub const fn one(id: u16) -> Self {
        Self { id, entries: 1 }
    }
}

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

    /// The chain that begins at the available entry `ahead`, if it is one buffer in one region of memory.
    ///
    /// # Errors
    /// A buffer of the wrong direction.
    fn single(
        &mut self,
        ahead: u16,
        memory: &GuestMemory,
        direction: Direction,
    ) -> Result<Option<(Buffer, Chain)>, RingError>;

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

/// The device side of a queue of either format.
#[derive(Debug)]
pub enum Queue {
    /// A split queue.
    Split(split::device::Queue),
    /// A packed queue.
    Packed(packed::device::Queue),
}

impl Queue {
    /// The device side of the queue in `layout`, beginning at `base`: see [`DeviceQueue::base`].
    ///
    /// # Errors
    /// A base that the queue cannot have.
    pub fn new(layout: Layout, base: u32, event_idx: bool, indirect: bool) -> Result<Self, RingError> {
        Ok(match layout {
            // The control side has checked that it fits 16 bits; the others do not count.
            Layout::Split(layout) => {
                Self::Split(split::device::Queue::new(layout, base as u16, event_idx, indirect))
            }
            Layout::Packed(layout) => {
                Self::Packed(packed::device::Queue::new(layout, base, event_idx, indirect)?)
            }
        })
    }
}

/// Does the same with a queue of either format: `with_queue!(queue, q => work)`.
#[macro_export]
macro_rules! with_queue {
    ($queue:expr, $name:ident => $work:expr) => {
        match $queue {
            $crate::device::Queue::Split($name) => $work,
            $crate::device::Queue::Packed($name) => $work,
        }
    };
}

impl Queue {
    /// See [`DeviceQueue::size`].
    pub fn size(&self) -> u16 {
        with_queue!(self, queue => queue.size())
    }

    /// See [`DeviceQueue::base`].
    pub fn base(&self) -> u32 {
        with_queue!(self, queue => queue.base())
    }

    /// See [`DeviceQueue::publish`].
    #[inline(always)]
    pub fn publish(&mut self) {
        with_queue!(self, queue => queue.publish());
    }

    /// See [`DeviceQueue::needs_notification`].
    #[inline(always)]
    pub fn needs_notification(&mut self) -> bool {
        with_queue!(self, queue => queue.needs_notification())
    }

    /// See [`DeviceQueue::set_notification`].
    pub fn set_notification(&mut self, wanted: bool) {
        with_queue!(self, queue => queue.set_notification(wanted));
    }
}

/// Takes one chain apart: what both formats and their indirect tables share.
pub(crate) struct Walker<'a> {
    /// First descriptor of the chain, for messages.
    pub(crate) head: u16,
    pub(crate) memory: &'a GuestMemory,
    pub(crate) direction: Direction,
    /// Buffers that are taken, at most.
    pub(crate) max: usize,
    pub(crate) region: &'a mut RegionCache,
    /// Buffers visited.
    pub(crate) visited: usize,
    /// Descriptors read, empty ones included.
    pub(crate) read: usize,
}

impl Walker<'_> {
    /// Checks the direction of a descriptor with `flags` and visits its buffer of `len` bytes at `addr`.
    pub(crate) fn descriptor(
        &mut self,
        (addr, len, flags): (u64, u32, u16),
        visit: &mut impl FnMut(Buffer),
    ) -> Result<(), RingError> {
        self.read += 1;
        if !self.direction.fits(flags) {
            return Err(RingError::Direction { head: self.head });
        }
        self.buffer(addr, len, visit)
    }

    pub(crate) fn too_many(&self) -> RingError {
        RingError::TooManyBuffers { head: self.head, max: self.max }
    }

    fn buffer(&mut self, addr: u64, len: u32, visit: &mut impl FnMut(Buffer)) -> Result<(), RingError> {
        let outside = RingError::Address { addr, len };
        let (mut addr, mut left) = (addr, len);
        while left > 0 {
            let (host, room) = self.memory.translate_some(addr, self.region).ok_or(outside)?;
            let len = left.min(u32::try_from(room).unwrap_or(u32::MAX));
            if self.visited == self.max {
                return Err(self.too_many());
            }
            self.visited += 1;
            visit(Buffer { addr: host, len });
            left -= len;
            addr = addr.checked_add(len.into()).ok_or(outside)?;
        }
        Ok(())
    }
}
