//! Descriptor chains: code shared by both formats and both sides.

use std::ptr::NonNull;

use offcore_mem::{GuestMemory, RegionCache};

use crate::RingError;

/// The wrap counter in the 16-bit form of a position, as used in events and in vhost-user's bases.
pub(crate) const WRAP: u16 = 1 << 15;

/// Largest queue size that the specification allows.
pub const MAX_SIZE: u16 = 32768;

/// The buffer continues in the descriptor at index `next`.
pub const VIRTQ_DESC_F_NEXT: u16 = 1;
/// The device writes the buffer (otherwise it reads it).
pub const VIRTQ_DESC_F_WRITE: u16 = 2;
/// The buffer holds a table of descriptors.
pub const VIRTQ_DESC_F_INDIRECT: u16 = 4;

/// A private copy of a descriptor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Descriptor {
    /// Guest physical address of the buffer.
    pub addr: u64,
    pub len: u32,
    /// `VIRTQ_DESC_F_*`.
    pub flags: u16,
    /// Index of the next descriptor of the chain, if `flags` contains NEXT.
    pub next: u16,
}

/// Makes a private copy of a descriptor in shared memory.
///
/// # Safety
/// `at` must point to 16 mapped bytes, aligned to 8.
#[inline(always)]
pub(crate) unsafe fn read_descriptor(at: *const Descriptor) -> Descriptor {
    let words: *const u64 = at.cast();
    // SAFETY: `at` points to 16 mapped bytes, as the caller guarantees. Volatile, so that the value is read exactly
    // once, even if the other side changes it.
    let addr = unsafe { words.read_volatile() };
    // SAFETY: this is the second half of the 16 mapped bytes. Volatile, so that it is read exactly once.
    let rest = unsafe { words.add(1).read_volatile() };
    Descriptor { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
}

/// Makes a private copy of a descriptor in an indirect table, which may have any alignment.
///
/// # Safety
/// `at` must point to 16 mapped bytes.
pub(crate) unsafe fn read_unaligned(at: NonNull<u8>) -> Descriptor {
    if (at.as_ptr() as usize).is_multiple_of(8) {
        // SAFETY: `at` points to 16 mapped bytes, as the caller guarantees, and is aligned to 8.
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

/// The direction of the buffers of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The device reads them (the guest transmits).
    Readable,
    /// The device writes them (the guest receives).
    Writable,
}

impl Direction {
    /// The value of the WRITE flag in descriptors of this direction.
    #[inline(always)]
    pub(crate) fn flag(self) -> u16 {
        match self {
            Self::Readable => 0,
            Self::Writable => VIRTQ_DESC_F_WRITE,
        }
    }

    /// Whether a descriptor with `flags` has this direction.
    #[inline(always)]
    pub(crate) fn fits(self, flags: u16) -> bool {
        (flags & VIRTQ_DESC_F_WRITE != 0) == (self == Self::Writable)
    }
}

/// A buffer of a chain at its host address. The whole range is guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Address of the first byte.
    pub addr: NonNull<u8>,
    pub len: u32,
}

/// The information needed to return a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Chain {
    /// The first descriptor of a chain in a split queue, or the buffer ID in a packed queue.
    pub id: u16,
    /// Number of ring entries of the chain: 1 entry of the available ring for a split queue, and the number of
    /// descriptors for a packed queue.
    pub entries: u16,
}

impl Chain {
    /// A chain with one entry.
    #[inline(always)]
    pub const fn one(id: u16) -> Self {
        Self { id, entries: 1 }
    }
}

/// A chain that the device has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used<T> {
    /// The token that was passed to [`RingDriver::add`](crate::driver::RingDriver::add).
    pub token: T,
    /// Number of bytes that the device claims to have written. This value is not trusted.
    pub len: u32,
}

/// Walks one chain: code shared by both formats and their indirect tables.
pub(crate) struct Walker<'a> {
    /// First descriptor of the chain, for error messages.
    pub(crate) head: u16,
    pub(crate) memory: &'a GuestMemory,
    pub(crate) direction: Direction,
    /// Maximum number of buffers.
    pub(crate) max: usize,
    pub(crate) region: &'a mut RegionCache,
    pub(crate) visited: usize,
    /// Number of descriptors read, including empty ones.
    pub(crate) read: usize,
}

impl Walker<'_> {
    /// Checks the direction of a descriptor with `flags`, and visits its buffer of `len` bytes at `addr`.
    pub(crate) fn descriptor(
        &mut self,
        addr: u64,
        len: u32,
        flags: u16,
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
