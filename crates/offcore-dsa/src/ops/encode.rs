//! Descriptors of every operation, as sections 8.3.1 to 8.3.31 have them.
//!
//! Each function returns a descriptor that is complete but for the completion record ([`with_record`]) and
//! the flags that depend on queue and taste ([`common_flags`]). Addresses are those of the process that
//! submits. Nothing is checked here; what an [`Engine`](super::Engine) submits, it has checked.

use crate::descriptor::{Descriptor, Flags, Opcode};

use super::software::dif::{DestinationFlags, DifFlags, SourceFlags, Tags, Update};
use super::software::{Crc, Pattern};

/// The descriptor with a completion record, requested on success, too.
#[must_use]
pub const fn with_record(mut descriptor: Descriptor, address: u64) -> Descriptor {
    descriptor.completion = address;
    let record = Flags::CRAV.union(Flags::RCR);
    descriptor.with_flags(descriptor.flags().union(record))
}

/// Of block-on-fault and cache control (write to the cache), those flags that an operation allows (Table
/// 5-3).
pub const fn common_flags(opcode: Opcode, block_on_fault: bool, to_cache: bool) -> Flags {
    let mut flags = Flags::empty();
    let faults = !matches!(opcode, Opcode::Noop | Opcode::Batch | Opcode::Drain | Opcode::UpdateWindow);
    if block_on_fault && faults {
        flags = flags.union(Flags::BLOCK_ON_FAULT);
    }
    if to_cache && writes(opcode) {
        flags = flags.union(Flags::CACHE_CONTROL_1);
    }
    flags
}

/// Whether the operation writes to memory that its cache control flags are about.
pub const fn writes(opcode: Opcode) -> bool {
    use Opcode as O;
    !matches!(
        opcode,
        O::Noop
            | O::Batch
            | O::Drain
            | O::Compare
            | O::ComparePattern
            | O::TranslationFetch
            | O::CrcGeneration
            | O::DifCheck
            | O::CacheFlush
            | O::UpdateWindow
            | O::InterDomainCompare
            | O::InterDomainComparePattern
    )
}

const fn plain(opcode: Opcode, src: u64, dst: u64, size: u32) -> Descriptor {
    Descriptor { src, dst, size, ..Descriptor::new(opcode, Flags::empty()) }
}

/// No-op (8.3.1).
pub const fn noop() -> Descriptor {
    plain(Opcode::Noop, 0, 0, 0)
}

/// Batch of the `count` descriptors at `list`, which is 64-byte aligned (8.3.2).
pub const fn batch(list: u64, count: u32) -> Descriptor {
    plain(Opcode::Batch, list, 0, count)
}

/// Drain, without readback addresses (8.3.3).
pub const fn drain() -> Descriptor {
    plain(Opcode::Drain, 0, 0, 0)
}

/// Memory Move (8.3.4).
pub const fn copy(src: u64, dst: u64, size: u32) -> Descriptor {
    plain(Opcode::MemoryMove, src, dst, size)
}

/// Fill; a pattern of 16 bytes needs a device that has them (8.3.5).
pub const fn fill(pattern: Pattern, dst: u64, size: u32) -> Descriptor {
    filling(Opcode::Fill, pattern, dst, size)
}

const fn filling(opcode: Opcode, pattern: Pattern, dst: u64, size: u32) -> Descriptor {
    let (lower, upper) = pattern.words();
    let mut descriptor = plain(opcode, lower, dst, size);
    if pattern.size() == 16 {
        descriptor.specific[0] = upper;
        descriptor = descriptor.with_flags(Flags::OP_2);
    }
    descriptor
}

/// Compare (8.3.6). With `expected`, the status is success only if the two are different (`true`) or equal
/// (`false`).
pub const fn compare(first: u64, second: u64, size: u32, expected: Option<bool>) -> Descriptor {
    expecting(plain(Opcode::Compare, first, second, size), expected)
}

/// Compare Pattern, of 8 bytes (8.3.7). `expected` as in [`compare`].
pub const fn compare_pattern(src: u64, pattern: u64, size: u32, expected: Option<bool>) -> Descriptor {
    expecting(plain(Opcode::ComparePattern, src, pattern, size), expected)
}

const fn expecting(mut descriptor: Descriptor, expected: Option<bool>) -> Descriptor {
    if let Some(different) = expected {
        descriptor.specific[0] = different as u64;
        descriptor = descriptor.with_flags(descriptor.flags().union(Flags::CHECK_RESULT));
    }
    descriptor
}

/// Create Delta Record of at most `max_record` bytes at `record` (8.3.8). With `expected`, a mask, the status
/// is success only if the bit of the result is set: bit 0 no difference, bit 1 differences, bit 2 record
/// full.
pub const fn create_delta(
    original: u64,
    changed: u64,
    size: u32,
    (record, max_record): (u64, u32),
    expected: Option<u8>,
) -> Descriptor {
    let mut descriptor = plain(Opcode::CreateDelta, original, changed, size);
    descriptor.specific = [record, max_record as u64, 0];
    if let Some(mask) = expected {
        descriptor.specific[2] = mask as u64;
        descriptor = descriptor.with_flags(Flags::CHECK_RESULT);
    }
    descriptor
}

/// Apply Delta Record of `record_size` bytes to the `size` bytes at `dst` (8.3.9).
pub const fn apply_delta(record: u64, record_size: u32, dst: u64, size: u32) -> Descriptor {
    let mut descriptor = plain(Opcode::ApplyDelta, record, dst, size);
    descriptor.specific[0] = record_size as u64;
    descriptor
}

/// Memory Copy with Dualcast; bits 11:0 of the destinations are the same (8.3.10).
pub const fn dualcast(src: u64, first: u64, second: u64, size: u32) -> Descriptor {
    let mut descriptor = plain(Opcode::Dualcast, src, first, size);
    descriptor.specific[0] = second;
    descriptor
}

/// Where the seed of a CRC is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// In the descriptor.
    Value(u32),
    /// In memory, at this 4-byte aligned address: for example in the completion record of a partial CRC.
    At(u64),
}

/// CRC Generation (8.3.12).
pub fn crc(src: u64, size: u32, crc: Crc, seed: Seed) -> Descriptor {
    seeded(plain(Opcode::CrcGeneration, src, 0, size), crc, seed)
}

/// Copy with CRC Generation (8.3.13).
pub fn copy_crc(src: u64, dst: u64, size: u32, crc: Crc, seed: Seed) -> Descriptor {
    seeded(plain(Opcode::CopyCrc, src, dst, size), crc, seed)
}

fn seeded(mut descriptor: Descriptor, crc: Crc, seed: Seed) -> Descriptor {
    let mut flags = crc.flags();
    match seed {
        Seed::Value(value) => descriptor.specific[0] = value.into(),
        Seed::At(address) => {
            descriptor.specific[1] = address;
            flags |= Flags::OP_0;
        }
    }
    descriptor.with_flags(flags)
}

const fn dif_flags(source: u8, destination: u8, dif: DifFlags) -> u64 {
    source as u64 | (destination as u64) << 8 | (dif.bits() as u64) << 16
}

/// DIF Check (8.3.14). `size` counts the fields.
pub const fn dif_check(src: u64, size: u32, dif: DifFlags, flags: SourceFlags, tags: Tags) -> Descriptor {
    let mut descriptor = plain(Opcode::DifCheck, src, 0, size);
    descriptor.specific = [dif_flags(flags.bits(), 0, dif), tags.word(), 0];
    descriptor
}

/// DIF Insert (8.3.15). `size` counts the source, without fields.
pub const fn dif_insert(
    src: u64,
    dst: u64,
    size: u32,
    dif: DifFlags,
    flags: DestinationFlags,
    tags: Tags,
) -> Descriptor {
    let mut descriptor = plain(Opcode::DifInsert, src, dst, size);
    descriptor.specific = [dif_flags(0, flags.bits(), dif), 0, tags.word()];
    descriptor
}

/// DIF Strip (8.3.16). `size` counts the source, with its fields.
pub const fn dif_strip(
    src: u64,
    dst: u64,
    size: u32,
    dif: DifFlags,
    flags: SourceFlags,
    tags: Tags,
) -> Descriptor {
    let mut descriptor = plain(Opcode::DifStrip, src, dst, size);
    descriptor.specific = [dif_flags(flags.bits(), 0, dif), tags.word(), 0];
    descriptor
}

/// DIF Update (8.3.17). `size` counts the source, with its fields.
pub const fn dif_update(
    src: u64,
    dst: u64,
    size: u32,
    update: Update,
    source: Tags,
    destination: Tags,
) -> Descriptor {
    let mut descriptor = plain(Opcode::DifUpdate, src, dst, size);
    let flags = dif_flags(update.source.bits(), update.destination.bits(), update.dif);
    descriptor.specific = [flags, source.word(), destination.word()];
    descriptor
}

/// DIX Generate; `dst` is 8-byte aligned (8.3.18).
pub const fn dix_generate(
    src: u64,
    dst: u64,
    size: u32,
    dif: DifFlags,
    flags: DestinationFlags,
    tags: Tags,
) -> Descriptor {
    let mut descriptor = plain(Opcode::DixGenerate, src, dst, size);
    descriptor.specific = [dif_flags(0, flags.bits(), dif), 0, tags.word()];
    descriptor
}

/// Cache Flush (8.3.26).
pub const fn cache_flush(dst: u64, size: u32) -> Descriptor {
    plain(Opcode::CacheFlush, 0, dst, size)
}

/// An address of an inter-domain operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DomainAddress {
    /// The address in its domain, or the offset in its window.
    pub address: u64,
    /// The handle of the Inter-Domain Permissions Table entry; `None` for the submitter's own memory.
    pub handle: Option<u16>,
}

/// Source handle in bits 47:32 of the last word, destination handle in bits 63:48, and the flags that go with
/// them.
fn handles(mut descriptor: Descriptor, source: Option<u16>, destination: Option<u16>) -> Descriptor {
    let mut flags = descriptor.flags();
    flags.set(Flags::OP_0, source.is_some());
    flags.set(Flags::OP_1, destination.is_some());
    descriptor.specific[2] |=
        u64::from(source.unwrap_or(0)) << 32 | u64::from(destination.unwrap_or(0)) << 48;
    descriptor.with_flags(flags)
}

/// Inter-Domain Copy; one of the two has a handle (8.3.28).
pub fn inter_domain_copy(src: DomainAddress, dst: DomainAddress, size: u32) -> Descriptor {
    handles(plain(Opcode::InterDomainCopy, src.address, dst.address, size), src.handle, dst.handle)
}

/// Inter-Domain Fill of the domain behind `handle` (8.3.29).
pub fn inter_domain_fill(pattern: Pattern, dst: u64, handle: u16, size: u32) -> Descriptor {
    handles(filling(Opcode::InterDomainFill, pattern, dst, size), None, Some(handle))
}

/// Inter-Domain Compare; one of the two has a handle (8.3.30). `expected` as in [`compare`].
pub fn inter_domain_compare(
    first: DomainAddress,
    second: DomainAddress,
    size: u32,
    expected: Option<bool>,
) -> Descriptor {
    let descriptor = plain(Opcode::InterDomainCompare, first.address, second.address, size);
    handles(expecting(descriptor, expected), first.handle, second.handle)
}

/// Inter-Domain Compare Pattern in the domain behind `handle` (8.3.31). `expected` as in [`compare`].
pub fn inter_domain_compare_pattern(
    src: u64,
    handle: u16,
    pattern: u64,
    size: u32,
    expected: Option<bool>,
) -> Descriptor {
    let descriptor = plain(Opcode::InterDomainComparePattern, src, pattern, size);
    handles(expecting(descriptor, expected), Some(handle), None)
}

/// What Update Window sets (Table 8-26).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First address and bytes of the window; `None`: addresses are not checked.
    pub range: Option<(u64, u64)>,
    /// Addresses of operations count from the window's base.
    pub offset_mode: bool,
    /// Operations may write through this entry.
    pub write: bool,
    /// Operations may read through this entry.
    pub read: bool,
}

/// Update Window of the entry behind `handle` (8.3.27).
pub const fn update_window(handle: u16, window: Window, suppress_drain: bool) -> Descriptor {
    let (base, size) = match window.range {
        Some(range) => range,
        None => (0, 0),
    };
    let mut descriptor = plain(Opcode::UpdateWindow, base, size, 0);
    let flags = window.read as u64
        | (window.write as u64) << 1
        | (window.range.is_some() as u64) << 2
        | (window.offset_mode as u64) << 3;
    // Window Flags are byte 61, as byte 60 and those before it are reserved (Table 5-3).
    descriptor.specific[2] = flags << 40 | (handle as u64) << 48;
    if suppress_drain {
        descriptor = descriptor.with_flags(Flags::OP_0);
    }
    descriptor
}
