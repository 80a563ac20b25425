//! Operations and the memory that they use.

use std::marker::PhantomData;

use arrayvec::ArrayVec;

use crate::descriptor::Opcode;

use super::outcome::OpsError;

/// Memory that an operation reads: a slice, or memory described to [`Source::new`].
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub(super) ptr: *const u8,
    pub(super) len: usize,
    borrowed: PhantomData<&'a [u8]>,
}

/// Memory that an operation writes: a slice, or memory described to [`Destination::new`].
#[derive(Debug)]
pub struct Destination<'a> {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: this type represents a `&[u8]`, or memory with the same guarantees from the caller of `Source::new`.
unsafe impl Send for Source<'_> {}
// SAFETY: this type represents a `&mut [u8]`, or memory with the same guarantees from the caller of `Destination::new`.
unsafe impl Send for Destination<'_> {}

impl Source<'_> {
    /// Returns a source of `len` bytes at `ptr`, an address of this process.
    ///
    /// # Safety
    ///
    /// Until the operation that uses this source has ended, the bytes are valid for reads, and nothing writes them
    /// except the destination of the same [`Operation::Copy`]. An operation has ended when [`Engine::run`] has
    /// returned, when [`Engine::poll`] has returned its ticket, when it was refused, or when the engine is dropped.
    /// Operations of a leaked engine never end.
    ///
    /// [`Engine::run`]: super::Engine::run
    /// [`Engine::poll`]: super::Engine::poll
    pub const unsafe fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len, borrowed: PhantomData }
    }

    pub(super) fn address(&self, offset: usize) -> u64 {
        self.ptr.wrapping_add(offset) as u64
    }
}

impl Destination<'_> {
    /// Returns a destination of `len` bytes at `ptr`, an address of this process.
    ///
    /// # Safety
    ///
    /// Until the operation that uses this destination has ended (see [`Source::new`]), the bytes are valid for reads
    /// and writes, and nothing else reads or writes them except the source of the same [`Operation::Copy`].
    pub const unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len, borrowed: PhantomData }
    }

    pub(super) fn address(&self, offset: usize) -> u64 {
        self.ptr.wrapping_add(offset) as u64
    }
}

impl<'a> From<&'a [u8]> for Source<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        Self { ptr: bytes.as_ptr(), len: bytes.len(), borrowed: PhantomData }
    }
}

impl<'a> From<&'a mut [u8]> for Destination<'a> {
    fn from(bytes: &'a mut [u8]) -> Self {
        Self { ptr: bytes.as_mut_ptr(), len: bytes.len(), borrowed: PhantomData }
    }
}

/// An operation. All of its memory has the same length, which may exceed the maximum size of a descriptor.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Copies. If source and destination overlap, the core makes the copy.
    Copy { src: Source<'a>, dst: Destination<'a> },
    /// Fills with a pattern of 8 bytes, the least significant byte first.
    Fill { pattern: u64, dst: Destination<'a> },
    /// Finds the first difference.
    Compare { first: Source<'a>, second: Source<'a> },
    /// Computes the CRC32C, continued from `seed`, which is 0 at the start.
    Crc { src: Source<'a>, seed: u32 },
}

/// A part of an operation's memory.
pub(super) struct Memory {
    what: &'static str,
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    pub(super) written: bool,
}

impl Memory {
    fn read(what: &'static str, src: &Source<'_>) -> Self {
        Self { what, ptr: src.ptr.cast_mut(), len: src.len, written: false }
    }

    fn written(what: &'static str, dst: &Destination<'_>) -> Self {
        Self { what, ptr: dst.ptr, len: dst.len, written: true }
    }
}

impl Operation<'_> {
    /// Returns the operation code.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Copy { .. } => Opcode::MemoryMove,
            Self::Fill { .. } => Opcode::Fill,
            Self::Compare { .. } => Opcode::Compare,
            Self::Crc { .. } => Opcode::CrcGeneration,
        }
    }

    /// Returns the memory that the operation reads and writes.
    pub(super) fn memory(&self) -> ArrayVec<Memory, 2> {
        let (read, written) = (Memory::read, Memory::written);
        match self {
            Self::Copy { src, dst } => ArrayVec::from([read("source", src), written("destination", dst)]),
            Self::Fill { dst, .. } => ArrayVec::from_iter([written("destination", dst)]),
            Self::Compare { first, second } => {
                ArrayVec::from([read("source", first), read("second source", second)])
            }
            Self::Crc { src, .. } => ArrayVec::from_iter([read("source", src)]),
        }
    }

    /// Returns the length of the operation in bytes.
    pub(super) fn len(&self) -> usize {
        self.memory()[0].len
    }

    /// Returns whether this is a copy whose source and destination overlap.
    pub(super) fn overlaps(&self) -> bool {
        let Self::Copy { src, dst } = self else { return false };
        let (from, to) = (src.ptr as usize, dst.ptr as usize);
        from < to.saturating_add(dst.len) && to < from.saturating_add(src.len)
    }

    /// Checks that all lengths are equal.
    pub(super) fn check(&self) -> Result<(), OpsError> {
        let (operation, expected) = (self.opcode(), self.len());
        match self.memory().iter().find(|memory| memory.len != expected) {
            Some(&Memory { what, len: found, .. }) => {
                Err(OpsError::Length { operation, what, found, expected })
            }
            None => Ok(()),
        }
    }
}
