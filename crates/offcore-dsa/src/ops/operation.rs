//! What can be asked for, and of which memory.

use std::marker::PhantomData;

use arrayvec::ArrayVec;

use crate::descriptor::Opcode;

use super::outcome::OpsError;
use crate::compute::{Crc, Pattern};

/// Memory that an operation reads: a slice, or what [`Source::new`] was told.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    pub(super) ptr: *const u8,
    pub(super) len: usize,
    borrowed: PhantomData<&'a [u8]>,
}

/// Memory that an operation writes: a slice, or what [`Destination::new`] was told.
#[derive(Debug)]
pub struct Destination<'a> {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: it stands for a `&[u8]`, or for memory of which `Source::new` was promised as much.
unsafe impl Send for Source<'_> {}
// SAFETY: it stands for a `&mut [u8]`, or for memory of which `Destination::new` was promised as much.
unsafe impl Send for Destination<'_> {}

impl Source<'_> {
    /// `len` bytes at `ptr`, an address of this process.
    ///
    /// # Safety
    ///
    /// Until the operation that it becomes part of is over, its bytes are valid for reads and nobody writes them, but
    /// for the destination of the same [`Operation::Copy`]. An operation is over when [`Engine::run`] has returned,
    /// when its ticket has come back from [`Engine::poll`], when it was refused, or when the engine is dropped (one
    /// that is leaked never is).
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
    /// `len` bytes at `ptr`, an address of this process.
    ///
    /// # Safety
    ///
    /// Until the operation that it becomes part of is over, as for [`Source::new`], its bytes are valid for reads and
    /// writes, and nobody else reads or writes them, but for the source of the same [`Operation::Copy`].
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

/// One operation. All of its memory has the same length, which need not fit into one descriptor.
#[derive(Debug)]
pub enum Operation<'a> {
    /// Copies; the two may overlap.
    Copy { src: Source<'a>, dst: Destination<'a> },
    /// Fills with a pattern.
    Fill { pattern: Pattern, dst: Destination<'a> },
    /// Finds the first difference.
    Compare { first: Source<'a>, second: Source<'a> },
    /// Copies to two destinations.
    Dualcast { src: Source<'a>, first: Destination<'a>, second: Destination<'a> },
    /// CRC32C, going on from `seed`, which is 0 at the start.
    Crc { src: Source<'a>, crc: Crc, seed: u32 },
    /// Copies and computes the CRC32C.
    CopyCrc { src: Source<'a>, dst: Destination<'a>, crc: Crc, seed: u32 },
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

    fn overlaps(&self, other: &Self) -> bool {
        let (ours, theirs) = (self.ptr as usize, other.ptr as usize);
        ours < theirs.saturating_add(other.len) && theirs < ours.saturating_add(self.len)
    }
}

impl Operation<'_> {
    /// The operation's code.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Copy { .. } => Opcode::MemoryMove,
            Self::Fill { .. } => Opcode::Fill,
            Self::Compare { .. } => Opcode::Compare,
            Self::Dualcast { .. } => Opcode::Dualcast,
            Self::Crc { .. } => Opcode::CrcGeneration,
            Self::CopyCrc { .. } => Opcode::CopyCrc,
        }
    }

    /// The memory that the operation reads and writes.
    pub(super) fn memory(&self) -> ArrayVec<Memory, 3> {
        let (read, written) = (Memory::read, Memory::written);
        match self {
            Self::Copy { src, dst } | Self::CopyCrc { src, dst, .. } => {
                ArrayVec::from_iter([read("source", src), written("destination", dst)])
            }
            Self::Fill { dst, .. } => ArrayVec::from_iter([written("destination", dst)]),
            Self::Compare { first, second } => {
                ArrayVec::from_iter([read("source", first), read("second source", second)])
            }
            Self::Dualcast { src, first, second } => ArrayVec::from([
                read("source", src),
                written("destination", first),
                written("second destination", second),
            ]),
            Self::Crc { src, .. } => ArrayVec::from_iter([read("source", src)]),
        }
    }

    /// The bytes that the operation works through.
    pub(super) fn len(&self) -> usize {
        self.memory()[0].len
    }

    /// Whether bytes that are written are others of the operation, too.
    pub(super) fn overlaps(&self) -> bool {
        let memory = self.memory();
        let shared = |one: &Memory, other: &Memory| (one.written || other.written) && one.overlaps(other);
        memory.iter().enumerate().any(|(at, one)| memory[..at].iter().any(|other| shared(one, other)))
    }

    /// Whether it is a copy to higher addresses of itself, which goes from its end.
    pub(super) fn goes_backwards(&self) -> bool {
        matches!(self, Self::Copy { src, dst } if dst.ptr.cast_const() > src.ptr) && self.overlaps()
    }

    /// Checks that the lengths are the same and that nothing overlaps that may not.
    pub(super) fn check(&self) -> Result<(), OpsError> {
        let (operation, expected) = (self.opcode(), self.len());
        if let Some(Memory { what, len, .. }) = self.memory().iter().find(|memory| memory.len != expected) {
            return Err(OpsError::Length { operation, what, found: *len, expected });
        }
        match self {
            Self::Copy { .. } => Ok(()),
            _ if self.overlaps() => Err(OpsError::Overlap { operation }),
            _ => Ok(()),
        }
    }
}
