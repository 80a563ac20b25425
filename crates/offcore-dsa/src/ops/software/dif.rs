//! Data integrity fields: what the DIF operations compute (sections 8.3.14 to 8.3.18, appendix B).
//!
//! A field is 8 bytes behind (or, with DIX, apart from) a block of 512, 520, 4096 or 4104 bytes, in network
//! order: a guard tag of 16 bits (the CRC of the block), an application tag of 16 bits, a reference tag of 32
//! bits. Every function processes as many blocks as its slices have and leaves in the tags those of the next
//! block, so a device that stops between two blocks goes on with the tags it left.

use bitflags::bitflags;

use super::crc::t10;

/// Bytes of a field.
pub const FIELD: usize = 8;

bitflags! {
    /// DIF Flags: byte 42 of the descriptor (section 8.3.17.1). Bits 1:0 are the block size.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct DifFlags: u8 {
        /// Blocks of 520 bytes; with [`Self::BLOCK_4096`], of 4104. With neither, of 512.
        const BLOCK_520 = 1 << 0;
        /// Blocks of 4096 bytes.
        const BLOCK_4096 = 1 << 1;
        /// The guard's CRC starts with 0xffff instead of 0.
        const INVERT_SEED = 1 << 2;
        /// The guard is the CRC with every bit inverted.
        const INVERT_RESULT = 1 << 3;
        const _ = !0;
    }
}

bitflags! {
    /// Source DIF Flags: byte 40 of the descriptor (section 8.3.17.2).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SourceFlags: u8 {
        /// All F Detect Error: a field of ones is an error. Ignored without [`Self::ALL_F_DETECT`].
        const ALL_F_ERROR = 1 << 0;
        /// All F Detect: a field of ones is not checked.
        const ALL_F_DETECT = 1 << 1;
        /// A field whose application tag is all ones is not checked.
        const APPLICATION_F_DETECT = 1 << 2;
        /// A field whose application and reference tags are all ones is not checked.
        const BOTH_F_DETECT = 1 << 3;
        /// The application tag is incremented for every block, instead of fixed.
        const APPLICATION_INCREMENTS = 1 << 4;
        /// The guard is not checked.
        const NO_GUARD_CHECK = 1 << 5;
        /// The reference tag is not checked.
        const NO_REFERENCE_CHECK = 1 << 6;
        /// The reference tag is fixed, instead of incremented for every block.
        const REFERENCE_FIXED = 1 << 7;
    }
}

bitflags! {
    /// Destination DIF Flags: byte 41 of the descriptor (section 8.3.17.3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct DestinationFlags: u8 {
        /// Update only: the source's application tag is kept.
        const PASS_APPLICATION = 1 << 3;
        /// The application tag is incremented for every block, instead of fixed.
        const APPLICATION_INCREMENTS = 1 << 4;
        /// Update only: the source's guard is kept.
        const PASS_GUARD = 1 << 5;
        /// Update only: the source's reference tag is kept.
        const PASS_REFERENCE = 1 << 6;
        /// The reference tag is fixed, instead of incremented for every block.
        const REFERENCE_FIXED = 1 << 7;
        const _ = !0;
    }
}

bitflags! {
    /// What was wrong with a field: DIF Status, byte 1 of the completion record (section 8.3.17.4).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct Mismatch: u8 {
        /// The guard is not the block's CRC.
        const GUARD = 1 << 0;
        /// Another application tag was expected.
        const APPLICATION = 1 << 1;
        /// Another reference tag was expected.
        const REFERENCE = 1 << 2;
        /// All F Detect Error: the field is all ones.
        const ALL_F = 1 << 3;
        const _ = !0;
    }
}

impl DifFlags {
    /// Bytes of a block, without its field.
    pub const fn block(self) -> usize {
        [512, 520, 4096, 4104][(self.bits() & 3) as usize]
    }

    /// The block size's bits; `None` when there is no such block size.
    pub fn with_block(self, bytes: usize) -> Option<Self> {
        let code = [512, 520, 4096, 4104].iter().position(|&size| size == bytes)?;
        Some(Self::from_bits_retain(self.bits() & !3 | code as u8))
    }

    fn guard(self, block: &[u8]) -> u16 {
        let crc = t10(block, if self.contains(Self::INVERT_SEED) { 0xffff } else { 0 });
        if self.contains(Self::INVERT_RESULT) { !crc } else { crc }
    }
}

/// The tags of the next block, as they stand in descriptors (seeds) and completion records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tags {
    /// Reference tag.
    pub reference: u32,
    /// Application tag mask: bits that are 0 in the tag and are not checked; 0xffff checks none.
    pub mask: u16,
    /// Application tag.
    pub application: u16,
}

impl Tags {
    /// From 8 bytes of a descriptor or record, little endian.
    pub const fn from_word(word: u64) -> Self {
        Self { reference: word as u32, mask: (word >> 32) as u16, application: (word >> 48) as u16 }
    }

    /// The 8 bytes of a descriptor or record, little endian.
    pub const fn word(self) -> u64 {
        self.reference as u64 | (self.mask as u64) << 32 | (self.application as u64) << 48
    }

    /// The tag is incremented as a whole and masked when it is used.
    fn advance(&mut self, application_increments: bool, reference_fixed: bool) {
        self.application = self.application.wrapping_add(application_increments.into());
        self.reference = self.reference.wrapping_add((!reference_fixed).into());
    }
}

/// A block whose field is not what it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("data integrity field of the block at byte {completed}: wrong {mismatch:?}")]
pub struct DifError {
    /// What is wrong.
    pub mismatch: Mismatch,
    /// Source bytes that were processed before that block.
    pub completed: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Field {
    guard: u16,
    application: u16,
    reference: u32,
}

impl Field {
    fn read(bytes: &[u8]) -> Self {
        let number =
            |range: std::ops::Range<usize>| bytes[range].iter().fold(0, |n, b| n << 8 | u32::from(*b));
        Self { guard: number(0..2) as u16, application: number(2..4) as u16, reference: number(4..8) }
    }

    fn bytes(self) -> [u8; FIELD] {
        let word =
            u64::from(self.guard) << 48 | u64::from(self.application) << 32 | u64::from(self.reference);
        word.to_be_bytes()
    }

    /// A mask bit of 1 takes the bit out of the comparison, as a mask of 0xffff takes out the whole tag.
    fn check(self, dif: DifFlags, flags: SourceFlags, tags: Tags, block: &[u8]) -> Mismatch {
        let application_f = self.application == 0xffff;
        let both_f = application_f && self.reference == u32::MAX;
        let all_f = both_f && self.guard == 0xffff;
        if all_f && flags.contains(SourceFlags::ALL_F_DETECT) {
            let error = flags.contains(SourceFlags::ALL_F_ERROR);
            return if error { Mismatch::ALL_F } else { Mismatch::empty() };
        }
        if application_f && flags.contains(SourceFlags::APPLICATION_F_DETECT)
            || both_f && flags.contains(SourceFlags::BOTH_F_DETECT)
        {
            return Mismatch::empty();
        }
        let mut mismatch = Mismatch::empty();
        let no_guard = flags.contains(SourceFlags::NO_GUARD_CHECK);
        mismatch.set(Mismatch::GUARD, !no_guard && self.guard != dif.guard(block));
        mismatch.set(Mismatch::APPLICATION, (self.application ^ tags.application) & !tags.mask != 0);
        let no_reference = flags.contains(SourceFlags::NO_REFERENCE_CHECK);
        mismatch.set(Mismatch::REFERENCE, !no_reference && self.reference != tags.reference);
        mismatch
    }

    fn of(dif: DifFlags, tags: Tags, block: &[u8]) -> Self {
        Self {
            guard: dif.guard(block),
            application: tags.application & !tags.mask,
            reference: tags.reference,
        }
    }
}

/// Checks the fields of `src`: blocks, each with its field behind it. A part of a block at the end is
/// ignored, here and below.
///
/// # Errors
///
/// The first block that has another field than expected; `tags` are those of that block.
pub fn check(dif: DifFlags, flags: SourceFlags, tags: &mut Tags, src: &[u8]) -> Result<(), DifError> {
    for (with_field, at) in src.chunks_exact(dif.block() + FIELD).zip(0..) {
        check_block(dif, flags, tags, with_field)
            .map_err(|mismatch| DifError { mismatch, completed: at * with_field.len() })?;
    }
    Ok(())
}

fn check_block(
    dif: DifFlags,
    flags: SourceFlags,
    tags: &mut Tags,
    with_field: &[u8],
) -> Result<(), Mismatch> {
    let (block, field) = with_field.split_at(dif.block());
    let mismatch = Field::read(field).check(dif, flags, *tags, block);
    if !mismatch.is_empty() {
        return Err(mismatch);
    }
    tags.advance(
        flags.contains(SourceFlags::APPLICATION_INCREMENTS),
        flags.contains(SourceFlags::REFERENCE_FIXED),
    );
    Ok(())
}

fn next_field(dif: DifFlags, flags: DestinationFlags, tags: &mut Tags, block: &[u8]) -> Field {
    let field = Field::of(dif, *tags, block);
    tags.advance(
        flags.contains(DestinationFlags::APPLICATION_INCREMENTS),
        flags.contains(DestinationFlags::REFERENCE_FIXED),
    );
    field
}

/// Copies the blocks of `src` to `dst`, each with its field behind it.
///
/// # Panics
///
/// When `dst` is shorter than the blocks and their fields.
pub fn insert(dif: DifFlags, flags: DestinationFlags, tags: &mut Tags, src: &[u8], dst: &mut [u8]) {
    let size = dif.block();
    assert!(dst.len() >= src.len() / size * (size + FIELD));
    for (block, with_field) in src.chunks_exact(size).zip(dst.chunks_exact_mut(size + FIELD)) {
        with_field[..size].copy_from_slice(block);
        with_field[size..].copy_from_slice(&next_field(dif, flags, tags, block).bytes());
    }
}

/// Writes only the fields of the blocks of `src` to `dst`.
///
/// # Panics
///
/// When `dst` is shorter than the fields.
pub fn generate(dif: DifFlags, flags: DestinationFlags, tags: &mut Tags, src: &[u8], dst: &mut [u8]) {
    assert!(dst.len() >= src.len() / dif.block() * FIELD);
    for (block, field) in src.chunks_exact(dif.block()).zip(dst.chunks_exact_mut(FIELD)) {
        field.copy_from_slice(&next_field(dif, flags, tags, block).bytes());
    }
}

/// Checks the fields of `src` and copies the blocks without them to `dst`.
///
/// # Errors
///
/// As [`check`]; the blocks before are copied.
///
/// # Panics
///
/// When `dst` is shorter than the blocks.
pub fn strip(
    dif: DifFlags,
    flags: SourceFlags,
    tags: &mut Tags,
    src: &[u8],
    dst: &mut [u8],
) -> Result<(), DifError> {
    let size = dif.block();
    assert!(dst.len() >= src.len() / (size + FIELD) * size);
    let blocks = src.chunks_exact(size + FIELD).zip(dst.chunks_exact_mut(size));
    for ((with_field, block), at) in blocks.zip(0..) {
        check_block(dif, flags, tags, with_field)
            .map_err(|mismatch| DifError { mismatch, completed: at * with_field.len() })?;
        block.copy_from_slice(&with_field[..size]);
    }
    Ok(())
}

/// What an update checks and what it writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Block size and guard, of both.
    pub dif: DifFlags,
    /// What is checked in the source.
    pub source: SourceFlags,
    /// What is written to the destination.
    pub destination: DestinationFlags,
}

impl Update {
    /// Checks the fields of `src` and copies the blocks with new fields to `dst`. `tags` are the source's and
    /// the destination's.
    ///
    /// # Errors
    ///
    /// As [`check`]; the blocks before are copied.
    ///
    /// # Panics
    ///
    /// When `dst` is shorter than the blocks and their fields.
    pub fn run(
        &self,
        source_tags: &mut Tags,
        destination_tags: &mut Tags,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<(), DifError> {
        let size = self.dif.block();
        assert!(dst.len() >= src.len() / (size + FIELD) * (size + FIELD));
        let blocks = src.chunks_exact(size + FIELD).zip(dst.chunks_exact_mut(size + FIELD));
        for ((from, to), at) in blocks.zip(0..) {
            check_block(self.dif, self.source, source_tags, from)
                .map_err(|mismatch| DifError { mismatch, completed: at * from.len() })?;
            let old = Field::read(&from[size..]);
            let new = next_field(self.dif, self.destination, destination_tags, &from[..size]);
            let pass = |flag| self.destination.contains(flag);
            let field = Field {
                guard: if pass(DestinationFlags::PASS_GUARD) { old.guard } else { new.guard },
                application: if pass(DestinationFlags::PASS_APPLICATION) {
                    old.application
                } else {
                    new.application
                },
                reference: if pass(DestinationFlags::PASS_REFERENCE) { old.reference } else { new.reference },
            };
            to[..size].copy_from_slice(&from[..size]);
            to[size..].copy_from_slice(&field.bytes());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
