//! Chains of descriptors: what both formats and both sides have in common.

use std::ptr::NonNull;

use offcore_mem::{GuestMemory, RegionCache};

use crate::RingError;

/// The wrap counter in the 16-bit form of a position, as events and vhost-user's bases have it.
pub(crate) const WRAP: u16 = 1 << 15;

/// Largest queue size the specification allows.
pub const MAX_SIZE: u16 = 32768;

/// The buffer continues in the descriptor named by `next`.
pub const VIRTQ_DESC_F_NEXT: u16 = 1;
/// The device writes the buffer (otherwise it reads it).
pub const VIRTQ_DESC_F_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const VIRTQ_DESC_F_INDIRECT: u16 = 4;

/// A descriptor, as a private copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Descriptor {
    /// Guest physical address of the buffer.
    pub addr: u64,
    pub len: u32,
    /// `VIRTQ_DESC_F_*`.
    pub flags: u16,
    /// The next descriptor of the chain, when `flags` says that there is one.
    pub next: u16,
}

/// A private copy of a descriptor in shared memory.
///
/// # Safety
/// `at` must point to 16 mapped bytes, aligned to 8.
#[inline(always)]
pub(crate) unsafe fn read_descriptor(at: *const Descriptor) -> Descriptor {
    let words: *const u64 = at.cast();
    // SAFETY: 16 mapped bytes, as the caller promises. Volatile: read once, whatever the other side does.
    let addr = unsafe { words.read_volatile() };
    // SAFETY: as above.
    let rest = unsafe { words.add(1).read_volatile() };
    Descriptor { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
}

/// A private copy of a descriptor in an indirect table, which may stand at any address.
///
/// # Safety
/// `at` must point to 16 mapped bytes.
pub(crate) unsafe fn read_unaligned(at: NonNull<u8>) -> Descriptor {
    if (at.as_ptr() as usize).is_multiple_of(8) {
        // SAFETY: 16 mapped bytes, as the caller promises, and aligned.
        return unsafe { read_descriptor(at.as_ptr().cast()) };
    }
    // SAFETY: 16 mapped bytes; an array of bytes needs no alignment.
    let bytes = unsafe { at.cast::<[u8; 16]>().read_volatile() };
    let raw = u128::from_le_bytes(bytes);
    Descriptor {
        addr: raw as u64,
        len: (raw >> 64) as u32,
        flags: (raw >> 96) as u16,
        next: (raw >> 112) as u16,
    }
}

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

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used<T> {
    /// What was given to [`Queue::add`](crate::driver::Queue::add).
    pub token: T,
    /// Bytes that the device says it has written: another party's claim.
    pub len: u32,
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
