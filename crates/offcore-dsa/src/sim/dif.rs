//! Data integrity fields: the DIF operations (sections 8.3.14 to 8.3.18, appendix B).
//!
//! A field has 8 bytes and follows (or, with DIX, is separate from) a block of 512, 520, 4096 or 4104 bytes. It
//! contains, in network byte order, a 16-bit guard tag (the CRC of the block), a 16-bit application tag and a 32-bit
//! reference tag. A device that stops between two blocks continues with the tags of the next block.

use bitflags::bitflags;

use crate::completion::DifMismatch;
use crate::descriptor::Descriptor;

/// Size of a field in bytes.
pub(super) const FIELD: usize = 8;

bitflags! {
    /// DIF Flags: byte 42 of the descriptor (section 8.3.17.1). Bits 1:0 are the block size.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub(super) struct DifFlags: u8 {
        /// Blocks of 520 bytes; 4104 bytes with [`Self::BLOCK_4096`]. Without both flags, 512 bytes.
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
    pub(super) struct SourceFlags: u8 {
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
    pub(super) struct DestinationFlags: u8 {
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

impl DifFlags {
    /// Returns the flags of a descriptor.
    pub(super) fn of(descriptor: &Descriptor) -> Self {
        Self::from_bits_retain(descriptor.specific_byte(42))
    }

    /// Returns the size of a block in bytes, without its field.
    pub(super) const fn block(self) -> usize {
        [512, 520, 4096, 4104][(self.bits() & 3) as usize]
    }

    fn guard(self, block: &[u8]) -> u16 {
        let crc = t10(block, if self.contains(Self::INVERT_SEED) { 0xffff } else { 0 });
        if self.contains(Self::INVERT_RESULT) { !crc } else { crc }
    }
}

/// The tags of the next block, in the format of descriptors (seeds) and completion records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tags {
    pub(super) reference: u32,
    /// Application tag mask: masked bits are 0 in the tag and are not checked; 0xffff disables the check.
    pub(super) mask: u16,
    pub(super) application: u16,
}

impl Tags {
    /// Decodes the tags from 8 bytes of a descriptor or record, little endian.
    pub(super) const fn from_word(word: u64) -> Self {
        Self { reference: word as u32, mask: (word >> 32) as u16, application: (word >> 48) as u16 }
    }

    /// Encodes the tags as 8 bytes of a descriptor or record, little endian.
    pub(super) const fn word(self) -> u64 {
        self.reference as u64 | (self.mask as u64) << 32 | (self.application as u64) << 48
    }

    /// Advances the tags to the next block. The tag is incremented unmasked, and masked when it is used.
    fn advance(&mut self, application_increments: bool, reference_fixed: bool) {
        self.application = self.application.wrapping_add(application_increments.into());
        self.reference = self.reference.wrapping_add((!reference_fixed).into());
    }
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

    /// Compares the field with the expected tags and the block. Bits that are 1 in the mask are not compared.
    fn check(self, dif: DifFlags, flags: SourceFlags, tags: Tags, block: &[u8]) -> DifMismatch {
        let application_f = self.application == 0xffff;
        let both_f = application_f && self.reference == u32::MAX;
        let all_f = both_f && self.guard == 0xffff;
        if all_f && flags.contains(SourceFlags::ALL_F_DETECT) {
            let error = flags.contains(SourceFlags::ALL_F_ERROR);
            return if error { DifMismatch::ALL_F } else { DifMismatch::empty() };
        }
        if application_f && flags.contains(SourceFlags::APPLICATION_F_DETECT)
            || both_f && flags.contains(SourceFlags::BOTH_F_DETECT)
        {
            return DifMismatch::empty();
        }
        let mut mismatch = DifMismatch::empty();
        let no_guard = flags.contains(SourceFlags::NO_GUARD_CHECK);
        mismatch.set(DifMismatch::GUARD, !no_guard && self.guard != dif.guard(block));
        mismatch.set(DifMismatch::APPLICATION, (self.application ^ tags.application) & !tags.mask != 0);
        let no_reference = flags.contains(SourceFlags::NO_REFERENCE_CHECK);
        mismatch.set(DifMismatch::REFERENCE, !no_reference && self.reference != tags.reference);
        mismatch
    }
}

/// The parameters of a DIF operation, and the tags of the next block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Dif {
    pub(super) flags: DifFlags,
    source: SourceFlags,
    destination: DestinationFlags,
    pub(super) source_tags: Tags,
    pub(super) destination_tags: Tags,
}

impl Dif {
    /// Returns the parameters in a descriptor.
    pub(super) fn of(descriptor: &Descriptor) -> Self {
        Self {
            flags: DifFlags::of(descriptor),
            source: SourceFlags::from_bits_retain(descriptor.specific_byte(40)),
            destination: DestinationFlags::from_bits_retain(descriptor.specific_byte(41)),
            source_tags: Tags::from_word(descriptor.specific[1]),
            destination_tags: Tags::from_word(descriptor.specific[2]),
        }
    }

    /// Reads a block and checks its field, if it has one. Then writes the block, the new field or both, depending on
    /// the size of `output`.
    ///
    /// # Errors
    ///
    /// The field does not match. Nothing is written, and the tags remain at this block.
    pub(super) fn process(&mut self, input: &[u8], output: &mut [u8]) -> Result<(), DifMismatch> {
        let (block, field) = input.split_at(self.flags.block());
        let old = (!field.is_empty()).then(|| Field::read(field));
        if let Some(old) = old {
            let mismatch = old.check(self.flags, self.source, self.source_tags, block);
            if !mismatch.is_empty() {
                return Err(mismatch);
            }
            self.source_tags.advance(
                self.source.contains(SourceFlags::APPLICATION_INCREMENTS),
                self.source.contains(SourceFlags::REFERENCE_FIXED),
            );
        }
        let copied = if output.len() < block.len() { 0 } else { block.len() };
        let (data, field) = output.split_at_mut(copied);
        data.copy_from_slice(&block[..copied]);
        if !field.is_empty() {
            field.copy_from_slice(&self.next_field(old, block).bytes());
        }
        Ok(())
    }

    /// Returns the field to write for a block, including the preserved tags of the old field.
    fn next_field(&mut self, old: Option<Field>, block: &[u8]) -> Field {
        let tags = self.destination_tags;
        let mut new = Field {
            guard: self.flags.guard(block),
            application: tags.application & !tags.mask,
            reference: tags.reference,
        };
        self.destination_tags.advance(
            self.destination.contains(DestinationFlags::APPLICATION_INCREMENTS),
            self.destination.contains(DestinationFlags::REFERENCE_FIXED),
        );
        if let Some(old) = old {
            let pass = |flag| self.destination.contains(flag);
            new.guard = if pass(DestinationFlags::PASS_GUARD) { old.guard } else { new.guard };
            new.application =
                if pass(DestinationFlags::PASS_APPLICATION) { old.application } else { new.application };
            new.reference =
                if pass(DestinationFlags::PASS_REFERENCE) { old.reference } else { new.reference };
        }
        new
    }
}

/// Returns the 16-bit CRC of a guard tag (appendix B), continued from `seed`, without inversion.
fn t10(data: &[u8], seed: u16) -> u16 {
    let shift = |crc: u16, _| crc << 1 ^ if crc & 0x8000 == 0 { 0 } else { 0x8bb7 };
    data.iter().fold(seed, |crc, byte| (0..8).fold(crc ^ u16::from(*byte) << 8, shift))
}

#[cfg(test)]
mod tests;
