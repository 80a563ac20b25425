//! What can be asked for, and of which memory.

use crate::descriptor::Opcode;

use super::encode::{DomainAddress, Window};
use super::outcome::OpsError;
use super::software::delta::{BLOCK, DELTA, MAX_TRANSFER};
use super::software::dif::{DestinationFlags, DifFlags, FIELD, SourceFlags, Tags, Update};
use super::software::{Crc, Pattern};

/// Memory that an operation reads: `len` bytes at an address of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    pub(super) ptr: *const u8,
    pub(super) len: usize,
}

/// Memory that an operation writes: `len` bytes at an address of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    pub(super) ptr: *mut u8,
    pub(super) len: usize,
}

// SAFETY: the pair is only an address; who submits it promises what stands there (`Engine::submit`).
unsafe impl Send for Source {}
// SAFETY: as above.
unsafe impl Send for Destination {}

impl Source {
    /// `len` bytes at `ptr`.
    pub const fn new(ptr: *const u8, len: usize) -> Self {
        Self { ptr, len }
    }

    pub(super) fn address(self, offset: usize) -> u64 {
        self.ptr.wrapping_add(offset) as u64
    }
}

impl Destination {
    /// `len` bytes at `ptr`.
    pub const fn new(ptr: *mut u8, len: usize) -> Self {
        Self { ptr, len }
    }

    pub(super) fn address(self, offset: usize) -> u64 {
        self.ptr.wrapping_add(offset) as u64
    }

    /// The same memory, to read.
    pub const fn as_source(self) -> Source {
        Source { ptr: self.ptr, len: self.len }
    }
}

impl From<&[u8]> for Source {
    fn from(bytes: &[u8]) -> Self {
        Self::new(bytes.as_ptr(), bytes.len())
    }
}

impl From<&mut [u8]> for Destination {
    fn from(bytes: &mut [u8]) -> Self {
        Self::new(bytes.as_mut_ptr(), bytes.len())
    }
}

/// One operation. The lengths are those of the memory; they need not fit into one descriptor.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // The fields' names and types say what they are.
pub enum Operation {
    /// Nothing, but through the device.
    Noop,
    /// Waits for what was submitted before.
    Drain,
    /// Copies; the two may overlap.
    Copy { src: Source, dst: Destination },
    /// Fills with a pattern.
    Fill { pattern: Pattern, dst: Destination },
    /// Finds the first difference.
    Compare { first: Source, second: Source },
    /// Finds the first byte that is not the pattern's, which has 8 bytes.
    ComparePattern { src: Source, pattern: u64 },
    /// Writes a delta record that turns `original` into `changed`.
    CreateDelta { original: Source, changed: Source, record: Destination },
    /// Applies a delta record.
    ApplyDelta { record: Source, dst: Destination },
    /// Copies to two destinations.
    Dualcast { src: Source, first: Destination, second: Destination },
    /// CRC32C, going on from `seed`.
    Crc { src: Source, crc: Crc, seed: u32 },
    /// Copies and computes the CRC.
    CopyCrc { src: Source, dst: Destination, crc: Crc, seed: u32 },
    /// Checks data integrity fields.
    DifCheck { src: Source, dif: DifFlags, flags: SourceFlags, tags: Tags },
    /// Copies and inserts data integrity fields.
    DifInsert { src: Source, dst: Destination, dif: DifFlags, flags: DestinationFlags, tags: Tags },
    /// Copies, checks and removes data integrity fields.
    DifStrip { src: Source, dst: Destination, dif: DifFlags, flags: SourceFlags, tags: Tags },
    /// Copies, checks and replaces data integrity fields.
    DifUpdate { src: Source, dst: Destination, update: Update, source: Tags, destination: Tags },
    /// Writes only the fields.
    DixGenerate { src: Source, dst: Destination, dif: DifFlags, flags: DestinationFlags, tags: Tags },
    /// Writes cache lines back to memory and removes them from the caches.
    CacheFlush { dst: Destination },
    /// Copies between domains.
    InterDomainCopy { src: DomainAddress, dst: DomainAddress, len: usize },
    /// Fills another domain's memory.
    InterDomainFill { pattern: Pattern, dst: u64, handle: u16, len: usize },
    /// Compares across domains.
    InterDomainCompare { first: DomainAddress, second: DomainAddress, len: usize },
    /// Compares another domain's memory with a pattern.
    InterDomainComparePattern { src: u64, handle: u16, pattern: u64, len: usize },
    /// Changes the window of an Inter-Domain Permissions Table entry.
    UpdateWindow { handle: u16, window: Window, suppress_drain: bool },
}

impl Operation {
    /// The operation's code.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Noop => Opcode::Noop,
            Self::Drain => Opcode::Drain,
            Self::Copy { .. } => Opcode::MemoryMove,
            Self::Fill { .. } => Opcode::Fill,
            Self::Compare { .. } => Opcode::Compare,
            Self::ComparePattern { .. } => Opcode::ComparePattern,
            Self::CreateDelta { .. } => Opcode::CreateDelta,
            Self::ApplyDelta { .. } => Opcode::ApplyDelta,
            Self::Dualcast { .. } => Opcode::Dualcast,
            Self::Crc { .. } => Opcode::CrcGeneration,
            Self::CopyCrc { .. } => Opcode::CopyCrc,
            Self::DifCheck { .. } => Opcode::DifCheck,
            Self::DifInsert { .. } => Opcode::DifInsert,
            Self::DifStrip { .. } => Opcode::DifStrip,
            Self::DifUpdate { .. } => Opcode::DifUpdate,
            Self::DixGenerate { .. } => Opcode::DixGenerate,
            Self::CacheFlush { .. } => Opcode::CacheFlush,
            Self::InterDomainCopy { .. } => Opcode::InterDomainCopy,
            Self::InterDomainFill { .. } => Opcode::InterDomainFill,
            Self::InterDomainCompare { .. } => Opcode::InterDomainCompare,
            Self::InterDomainComparePattern { .. } => Opcode::InterDomainComparePattern,
            Self::UpdateWindow { .. } => Opcode::UpdateWindow,
        }
    }

    /// Whether it is about memory that the core cannot reach in the device's stead.
    pub const fn is_inter_domain(&self) -> bool {
        self.opcode() as u8 >= Opcode::UpdateWindow as u8
    }

    /// The bytes that the operation works through: of the source, of the destination where there is no
    /// source, of the record where one is applied.
    pub(super) const fn len(&self) -> usize {
        match *self {
            Self::Noop | Self::Drain | Self::UpdateWindow { .. } => 0,
            Self::Copy { src, .. }
            | Self::ComparePattern { src, .. }
            | Self::Dualcast { src, .. }
            | Self::Crc { src, .. }
            | Self::CopyCrc { src, .. }
            | Self::DifCheck { src, .. }
            | Self::DifInsert { src, .. }
            | Self::DifStrip { src, .. }
            | Self::DifUpdate { src, .. }
            | Self::DixGenerate { src, .. } => src.len,
            Self::Fill { dst, .. } | Self::CacheFlush { dst } => dst.len,
            Self::Compare { first, .. } => first.len,
            Self::CreateDelta { original, .. } => original.len,
            Self::ApplyDelta { record, .. } => record.len,
            Self::InterDomainCopy { len, .. }
            | Self::InterDomainFill { len, .. }
            | Self::InterDomainCompare { len, .. }
            | Self::InterDomainComparePattern { len, .. } => len,
        }
    }

    /// The step that pieces and continuations keep to.
    pub(super) const fn step(&self) -> usize {
        match *self {
            Self::CreateDelta { .. } => BLOCK,
            Self::ApplyDelta { .. } => DELTA,
            Self::DifInsert { dif, .. } | Self::DixGenerate { dif, .. } => dif.block(),
            Self::DifCheck { dif, .. } | Self::DifStrip { dif, .. } => dif.block() + FIELD,
            Self::DifUpdate { update, .. } => update.dif.block() + FIELD,
            _ => 1,
        }
    }

    /// The memory of this process that the operation reads, and that it writes. Unused places are empty.
    pub(super) const fn memory(&self) -> ([Source; 2], [Destination; 2]) {
        const NO_SRC: Source = Source::new(std::ptr::null(), 0);
        const NO_DST: Destination = Destination::new(std::ptr::null_mut(), 0);
        match *self {
            Self::Copy { src, dst }
            | Self::CopyCrc { src, dst, .. }
            | Self::DifInsert { src, dst, .. }
            | Self::DifStrip { src, dst, .. }
            | Self::DifUpdate { src, dst, .. }
            | Self::DixGenerate { src, dst, .. }
            | Self::ApplyDelta { record: src, dst } => ([src, NO_SRC], [dst, NO_DST]),
            Self::Fill { dst, .. } | Self::CacheFlush { dst } => ([NO_SRC; 2], [dst, NO_DST]),
            Self::Compare { first, second } => ([first, second], [NO_DST; 2]),
            Self::ComparePattern { src, .. } | Self::Crc { src, .. } | Self::DifCheck { src, .. } => {
                ([src, NO_SRC], [NO_DST; 2])
            }
            Self::CreateDelta { original, changed, record } => ([original, changed], [record, NO_DST]),
            Self::Dualcast { src, first, second } => ([src, NO_SRC], [first, second]),
            Self::Noop
            | Self::Drain
            | Self::InterDomainCopy { .. }
            | Self::InterDomainFill { .. }
            | Self::InterDomainCompare { .. }
            | Self::InterDomainComparePattern { .. }
            | Self::UpdateWindow { .. } => ([NO_SRC; 2], [NO_DST; 2]),
        }
    }

    /// Checks the lengths and that nothing overlaps that may not.
    pub(super) fn check(&self) -> Result<(), OpsError> {
        let len = self.len();
        if !len.is_multiple_of(self.step()) {
            return Err(self.wrong("length", len, Expected::MultipleOf(self.step())));
        }
        let same = |what, found| match found == len {
            true => Ok(()),
            false => Err(self.wrong(what, found, Expected::Exactly(len))),
        };
        let at_least = |what, found, least| match found >= least {
            true => Ok(()),
            false => Err(self.wrong(what, found, Expected::AtLeast(least))),
        };
        let blocks = len / self.step();
        match *self {
            Self::Copy { dst, .. } => same("destination", dst.len),
            Self::Compare { second, .. } => same("second source", second.len),
            Self::CreateDelta { original, changed, record } => {
                if len > MAX_TRANSFER {
                    return Err(self.wrong("length", len, Expected::AtMost(MAX_TRANSFER)));
                }
                same("second source", changed.len)?;
                self.apart(record, original.into())?;
                self.apart(record, changed.into())
            }
            Self::ApplyDelta { record, dst } => {
                if dst.len > MAX_TRANSFER {
                    return Err(self.wrong("destination", dst.len, Expected::AtMost(MAX_TRANSFER)));
                }
                if !dst.len.is_multiple_of(BLOCK) {
                    return Err(self.wrong("destination", dst.len, Expected::MultipleOf(BLOCK)));
                }
                self.apart(dst, record.into())
            }
            Self::Dualcast { src, first, second } => {
                same("destination", first.len)?;
                same("second destination", second.len)?;
                self.apart(first, src.into())?;
                self.apart(second, src.into())?;
                self.apart(first, second.as_source().into())
            }
            Self::CopyCrc { src, dst, .. } => {
                same("destination", dst.len)?;
                self.apart(dst, src.into())
            }
            Self::DifInsert { src, dst, dif, .. } => {
                at_least("destination", dst.len, blocks * (dif.block() + FIELD))?;
                self.apart(dst, src.into())
            }
            Self::DifStrip { src, dst, dif, .. } => {
                at_least("destination", dst.len, blocks * dif.block())?;
                self.apart(dst, src.into())
            }
            Self::DifUpdate { src, dst, .. } => {
                at_least("destination", dst.len, len)?;
                self.apart(dst, src.into())
            }
            Self::DixGenerate { src, dst, .. } => {
                at_least("destination", dst.len, blocks * FIELD)?;
                self.apart(dst, src.into())
            }
            _ => Ok(()),
        }
    }

    fn wrong(&self, what: &'static str, found: usize, expected: Expected) -> OpsError {
        OpsError::Length { operation: self.opcode(), what, found, expected }
    }

    fn apart(&self, dst: Destination, (start, len): (usize, usize)) -> Result<(), OpsError> {
        match overlaps((dst.ptr as usize, dst.len), (start, len)) {
            true => Err(OpsError::Overlap { operation: self.opcode() }),
            false => Ok(()),
        }
    }
}

impl From<Source> for (usize, usize) {
    fn from(src: Source) -> Self {
        (src.ptr as usize, src.len)
    }
}

/// Whether two ranges, each an address and a length, have a byte in common.
pub(super) fn overlaps(first: (usize, usize), second: (usize, usize)) -> bool {
    first.0 < second.0.saturating_add(second.1) && second.0 < first.0.saturating_add(first.1)
}

/// What a length should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The names say it.
pub enum Expected {
    Exactly(usize),
    AtLeast(usize),
    AtMost(usize),
    MultipleOf(usize),
}

impl std::fmt::Display for Expected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exactly(bytes) => write!(f, "{bytes}"),
            Self::AtLeast(bytes) => write!(f, "at least {bytes}"),
            Self::AtMost(bytes) => write!(f, "at most {bytes}"),
            Self::MultipleOf(bytes) => write!(f, "a multiple of {bytes}"),
        }
    }
}
