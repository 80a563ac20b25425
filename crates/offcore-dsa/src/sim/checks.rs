//! The checks of a descriptor before its execution (sections 5.4 and 5.5).
//!
//! Nothing may depend on the order of the checks: the specification leaves open which of several errors is reported.

use std::ops::Range;

use super::{delta, dif::DifFlags};
use crate::completion::Status;
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::wq::{OpSet, gen_cap};

/// Statuses that are never written to a completion record, and statuses of inter-domain operations only.
pub(super) const IDPT_HANDLE: Status = Status(0x29);
pub(super) const UPDATE_WINDOW: Status = Status(0x2c);

/// Traffic classes with an enabled virtual channel, one bit each: the classes that Linux uses.
const TRAFFIC_CLASSES: u32 = 0b11;

/// Operations of version 3 that need structures outside the model. They are refused regardless of OPCAP.
const NOT_MODELLED: [Opcode; 7] = [
    Opcode::TypeConversion,
    Opcode::Reduce,
    Opcode::ReduceDualcast,
    Opcode::GatherReduce,
    Opcode::GatherCopy,
    Opcode::ScatterCopy,
    Opcode::ScatterFill,
];

/// The limits of a work queue and its device.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    pub(super) ops: OpSet,
    pub(super) max_transfer: u64,
    pub(super) max_batch: u32,
    pub(super) block_on_fault: bool,
    pub(super) shared: bool,
    /// Address translation service. Without it, write faults go unnoticed.
    pub(super) ats: bool,
    pub(super) gen_cap: u64,
    pub(super) version: u32,
    /// The group's traffic classes A and B.
    pub(super) traffic_classes: [u32; 2],
}

impl Limits {
    fn has(&self, capability: u64) -> bool {
        self.gen_cap & capability != 0
    }

    /// Whether the device has the functions of the second generation: 16-byte patterns, strides of translation fetch,
    /// fault information.
    pub(super) fn second_generation(&self) -> bool {
        self.version >= 0x200
    }

    fn traffic_class_enabled(&self, selector: usize) -> bool {
        TRAFFIC_CLASSES >> self.traffic_classes[selector].min(31) & 1 == 1
    }
}

/// A descriptor that failed a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) status: Status,
    /// The invalid flags, if the error concerns flags.
    pub(super) flags: Flags,
    /// Whether the completion record cannot be written either.
    pub(super) no_record: bool,
}

impl Refused {
    fn with(status: Status) -> Self {
        Self { status, flags: Flags::empty(), no_record: false }
    }

    fn silent(status: Status) -> Self {
        Self { no_record: true, ..Self::with(status) }
    }
}

/// Bytes 38 to 63.
const REST: &[Range<usize>] = &[Range { start: 38, end: 64 }];
const CACHE_CONTROL: Flags =
    Flags::CACHE_CONTROL_1.union(Flags::CACHE_CONTROL_2).union(Flags::CACHE_CONTROL_3);
/// Flags of operations that write to memory.
const WRITES: Flags = CACHE_CONTROL.union(Flags::STRICT_ORDER).union(Flags::BLOCK_ON_FAULT);
const ADDR_1_2: Flags = Flags::ADDR1_TC.union(Flags::ADDR2_TC);
const SELECTORS: Flags = ADDR_1_2.union(Flags::ADDR3_TC);
/// Flags of operations with a result in the record.
const RECORD: Flags = Flags::CRAV.union(Flags::RCR);
const CRC: Flags = Flags::OP_0.union(Flags::OP_1).union(Flags::OP_2);

/// The flags and reserved fields of an operation (Tables 5-3 and 5-5).
struct Form {
    /// Flags in addition to the ones that every operation may have.
    allowed: Flags,
    required: Flags,
    /// Bytes of the descriptor that must be 0.
    reserved: &'static [Range<usize>],
}

const fn form(allowed: Flags, required: Flags, reserved: &'static [Range<usize>]) -> Form {
    Form { allowed, required, reserved }
}

fn form_of(op: Opcode) -> Form {
    let bof = Flags::BLOCK_ON_FAULT;
    let none = Flags::empty();
    match op {
        Opcode::Noop => form(none, none, &[16..36, 38..64]),
        Opcode::Batch => form(Flags::ADDR1_TC | Flags::OP_0, none, &[24..32, 38..64]),
        Opcode::Drain => {
            let readback = Flags::OP_0 | Flags::OP_1 | Flags::OP_2 | Flags::OP_3;
            form(ADDR_1_2 | readback, none, &[32..36, 38..64])
        }
        Opcode::MemoryMove => form(WRITES | ADDR_1_2, none, REST),
        Opcode::Fill => form(WRITES | Flags::ADDR2_TC | Flags::OP_2, none, &[38..40, 48..64]),
        Opcode::Compare => form(bof | Flags::CHECK_RESULT | ADDR_1_2, RECORD, &[38..40, 41..64]),
        Opcode::ComparePattern => {
            form(bof | Flags::CHECK_RESULT | Flags::ADDR1_TC, RECORD, &[38..40, 41..64])
        }
        Opcode::CreateDelta => {
            form(WRITES | Flags::CHECK_RESULT | SELECTORS, RECORD, &[38..40, 52..56, 57..64])
        }
        Opcode::ApplyDelta => form(WRITES | ADDR_1_2, none, &[38..40, 44..64]),
        Opcode::Dualcast => form(WRITES | SELECTORS, none, &[38..40, 48..64]),
        Opcode::TranslationFetch => form(bof | Flags::OP_0, none, &[24..32, 38..48, 52..64]),
        Opcode::CrcGeneration => {
            let selectors = Flags::ADDR1_TC | Flags::ADDR3_TC;
            form(bof | selectors | CRC, RECORD, &[24..32, 38..40, 44..48, 56..64])
        }
        Opcode::CopyCrc => form(WRITES | SELECTORS | CRC, RECORD, &[38..40, 44..48, 56..64]),
        Opcode::DifCheck => form(bof | Flags::ADDR1_TC, RECORD, &[24..32, 38..40, 41..42, 43..48, 56..64]),
        Opcode::DifInsert | Opcode::DixGenerate => form(WRITES | ADDR_1_2, none, &[38..41, 43..56]),
        Opcode::DifStrip => form(WRITES | ADDR_1_2, none, &[38..40, 41..42, 43..48, 56..64]),
        Opcode::DifUpdate => form(WRITES | ADDR_1_2, none, &[38..40, 43..48]),
        Opcode::CacheFlush => {
            let flush = Flags::CACHE_CONTROL_1 | Flags::STRICT_ORDER | Flags::ADDR2_TC;
            form(bof | flush, none, &[16..24, 38..64])
        }
        Opcode::UpdateWindow => form(Flags::OP_0 | Flags::OP_1, none, &[32..36, 38..61]),
        Opcode::InterDomainCopy => {
            form(WRITES | ADDR_1_2 | Flags::OP_0 | Flags::OP_1, none, &[38..40, 40..60])
        }
        Opcode::InterDomainFill => {
            form(WRITES | Flags::ADDR2_TC | Flags::OP_1 | Flags::OP_2, Flags::OP_1, &[38..40, 48..62])
        }
        Opcode::InterDomainCompare => {
            let alternate = Flags::OP_0 | Flags::OP_1;
            form(bof | Flags::CHECK_RESULT | ADDR_1_2 | alternate, none, &[38..40, 41..60])
        }
        Opcode::InterDomainComparePattern => {
            let allowed = bof | Flags::CHECK_RESULT | Flags::ADDR1_TC | Flags::OP_0;
            form(allowed, Flags::OP_0, &[38..40, 41..60, 62..64])
        }
        _ => form(none, none, &[]),
    }
}

/// Checks a descriptor that was submitted directly or, if `member` is set, in a batch.
pub(super) fn check(descriptor: &Descriptor, limits: &Limits, member: bool) -> Result<(), Refused> {
    record_address(descriptor)?;
    if limits.shared && !member && descriptor.pasid >> 31 == 1 {
        return Err(Refused::silent(Status::PRIVILEGE));
    }
    let op = operation(descriptor, limits, member)?;
    let form = form_of(op);
    flags(descriptor, op, &form, limits, member)?;
    if descriptor.flags().contains(Flags::RCI) {
        // The kernel grants handles by a command that is not available to user programs, so every handle is invalid.
        return Err(Refused::with(Status::INTERRUPT_HANDLE));
    }
    reserved_fields(descriptor, op, &form)?;
    traffic_classes(descriptor, &form, limits)?;
    sizes(descriptor, op, limits)?;
    addresses(descriptor, op, limits)
}

fn record_address(descriptor: &Descriptor) -> Result<(), Refused> {
    if descriptor.flags().contains(Flags::CRAV) {
        if !descriptor.completion.is_multiple_of(32) {
            return Err(Refused::silent(Status::CR_MISALIGNED));
        }
    } else if descriptor.completion != 0 {
        return Err(Refused::silent(Status::NONZERO_RESERVED));
    }
    Ok(())
}

fn operation(descriptor: &Descriptor, limits: &Limits, member: bool) -> Result<Opcode, Refused> {
    let known = descriptor.opcode().filter(|&op| limits.ops.contains(op) && !NOT_MODELLED.contains(&op));
    known
        .filter(|op| !member || !matches!(op, Opcode::Batch | Opcode::Drain | Opcode::UpdateWindow))
        .filter(|&op| limits.ats || op != Opcode::TranslationFetch)
        .ok_or(Refused::with(Status::BAD_OPCODE))
}

fn flags(
    descriptor: &Descriptor,
    op: Opcode,
    form: &Form,
    limits: &Limits,
    member: bool,
) -> Result<(), Refused> {
    let flags = descriptor.flags();
    let mut allowed = form.allowed | RECORD | Flags::CR_TC | Flags::RCI;
    allowed.set(Flags::FENCE, member);
    if !limits.block_on_fault {
        allowed.remove(Flags::BLOCK_ON_FAULT);
    }
    let cached =
        if op == Opcode::CacheFlush { gen_cap::CACHE_CONTROL_FLUSH } else { gen_cap::CACHE_CONTROL_MEMORY };
    if !limits.has(cached) {
        allowed.remove(Flags::CACHE_CONTROL_1);
    }
    if !limits.has(gen_cap::DESTINATION_READBACK) {
        allowed.remove(Flags::CACHE_CONTROL_2);
    }
    // Durable writes without readback are not supported by any modelled generation.
    allowed.remove(Flags::CACHE_CONTROL_3);
    if !flags.contains(Flags::CRAV) {
        allowed.remove(Flags::RCR | Flags::CR_TC);
    }
    let second = limits.second_generation();
    match op {
        Opcode::Batch if !limits.has(gen_cap::BATCH_CONTINUATION) => allowed.remove(Flags::OP_0),
        Opcode::Drain => {
            if !limits.has(gen_cap::DRAIN_READBACK) {
                allowed.remove(Flags::OP_0 | Flags::OP_1);
            }
            for (valid, selector) in [(Flags::OP_0, Flags::ADDR1_TC), (Flags::OP_1, Flags::ADDR2_TC)] {
                if !flags.contains(valid) {
                    allowed.remove(selector);
                }
            }
        }
        Opcode::Fill if !second => allowed.remove(Flags::OP_2),
        Opcode::TranslationFetch if !second => allowed.remove(Flags::OP_0),
        Opcode::CrcGeneration | Opcode::CopyCrc if !flags.contains(Flags::OP_0) => {
            allowed.remove(Flags::ADDR3_TC);
        }
        _ => {}
    }
    let alternate = Flags::OP_0 | Flags::OP_1;
    let wants_alternate = matches!(op, Opcode::InterDomainCopy | Opcode::InterDomainCompare);
    let mut wrong = (flags - allowed) | (form.required - flags);
    if op == Opcode::Drain && !flags.intersects(Flags::RCR | Flags::RCI) {
        wrong |= Flags::RCR;
    }
    if wants_alternate && !flags.intersects(alternate) {
        wrong |= alternate;
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(Refused { flags: wrong, ..Refused::with(Status::INVALID_FLAGS) })
    }
}

fn reserved_fields(descriptor: &Descriptor, op: Opcode, form: &Form) -> Result<(), Refused> {
    let flags = descriptor.flags();
    let bytes = descriptor.bytes();
    let zero = |range: Range<usize>| bytes[range].iter().all(|&byte| byte == 0);
    let mut clear = form.reserved.iter().all(|range| zero(range.clone())) && descriptor.interrupt == 0;
    clear &= match op {
        Opcode::Drain => {
            (flags.contains(Flags::OP_0) || zero(16..24)) && (flags.contains(Flags::OP_1) || zero(24..32))
        }
        Opcode::Fill => flags.contains(Flags::OP_2) || zero(40..48),
        Opcode::TranslationFetch => flags.contains(Flags::OP_0) || zero(48..52),
        Opcode::CrcGeneration | Opcode::CopyCrc => {
            if flags.contains(Flags::OP_0) {
                zero(40..44)
            } else {
                zero(48..56)
            }
        }
        Opcode::DifCheck | Opcode::DifStrip => bytes[42] & 0xf0 == 0,
        Opcode::DifInsert | Opcode::DifUpdate | Opcode::DixGenerate => {
            bytes[42] & 0xf0 == 0 && bytes[41] & 0x07 == 0
        }
        _ => true,
    };
    if clear { Ok(()) } else { Err(Refused::with(Status::NONZERO_RESERVED)) }
}

fn traffic_classes(descriptor: &Descriptor, form: &Form, limits: &Limits) -> Result<(), Refused> {
    let flags = descriptor.flags();
    let record = usize::from(flags.contains(Flags::CR_TC));
    if flags.contains(Flags::CRAV) && !limits.traffic_class_enabled(record) {
        return Err(Refused::silent(Status::TRAFFIC_CLASS));
    }
    for selector in (form.allowed & SELECTORS).iter() {
        if !limits.traffic_class_enabled(usize::from(flags.contains(selector))) {
            return Err(Refused::with(Status::TRAFFIC_CLASS));
        }
    }
    Ok(())
}

fn sizes(descriptor: &Descriptor, op: Opcode, limits: &Limits) -> Result<(), Refused> {
    let size = u64::from(descriptor.size);
    let wrong = match op {
        Opcode::Noop | Opcode::Drain | Opcode::UpdateWindow => return Ok(()),
        Opcode::Batch => {
            let fits = (2..=limits.max_batch).contains(&descriptor.size);
            return if fits { Ok(()) } else { Err(Refused::with(Status::BAD_DESCRIPTOR_COUNT)) };
        }
        Opcode::TranslationFetch => size == 0 || descriptor.src.checked_add(size - 1).is_none(),
        Opcode::CreateDelta | Opcode::ApplyDelta => {
            size == 0 || size > limits.max_transfer || size > delta::MAX_TRANSFER as u64
        }
        _ => size == 0 || size > limits.max_transfer,
    };
    if wrong {
        return Err(Refused::with(Status::BAD_TRANSFER_SIZE));
    }
    let record = match op {
        Opcode::CreateDelta => (descriptor.specific[1] as u32, delta::MIN_RECORD as u64),
        Opcode::ApplyDelta => (descriptor.specific[0] as u32, delta::DELTA as u64),
        _ => return Ok(()),
    };
    let fits = (record.1..=limits.max_transfer).contains(&u64::from(record.0));
    if fits { Ok(()) } else { Err(Refused::with(Status::FIELD_VALUE)) }
}

fn addresses(descriptor: &Descriptor, op: Opcode, limits: &Limits) -> Result<(), Refused> {
    let Descriptor { src, dst, specific, .. } = *descriptor;
    let size = u64::from(descriptor.size);
    let refuse = |wrong: bool, status: Status| if wrong { Err(Refused::with(status)) } else { Ok(()) };
    match op {
        Opcode::Batch => refuse(!src.is_multiple_of(64), Status::LIST_MISALIGNED),
        Opcode::MemoryMove => {
            refuse(!limits.has(gen_cap::OVERLAP) && overlap((src, size), (dst, size)), Status::OVERLAP)
        }
        Opcode::CreateDelta => {
            refuse(!(src | dst | size).is_multiple_of(8), Status::MISALIGNED)?;
            let record = (specific[0], u64::from(specific[1] as u32));
            refuse(overlap(record, (src, size)) || overlap(record, (dst, size)), Status::OVERLAP)
        }
        Opcode::ApplyDelta => {
            refuse(!(dst | size).is_multiple_of(8), Status::MISALIGNED)?;
            let record = (src, u64::from(specific[0] as u32));
            refuse(overlap(record, (dst, size)), Status::OVERLAP)
        }
        Opcode::Dualcast => {
            refuse((dst ^ specific[0]) & 0xfff != 0, Status::DUALCAST_ADDRESS)?;
            let [source, first, second] = [src, dst, specific[0]].map(|start| (start, size));
            let any = overlap(source, first) || overlap(source, second) || overlap(first, second);
            refuse(any, Status::OVERLAP)
        }
        Opcode::TranslationFetch if descriptor.flags().contains(Flags::OP_0) => {
            let stride = specific[1] as u32;
            refuse(stride < 4096 || !stride.is_power_of_two(), Status::MISALIGNED)
        }
        Opcode::CrcGeneration | Opcode::CopyCrc => {
            let seeded = descriptor.flags().contains(Flags::OP_0);
            refuse(seeded && !specific[1].is_multiple_of(4), Status::MISALIGNED)?;
            refuse(op == Opcode::CopyCrc && overlap((src, size), (dst, size)), Status::OVERLAP)
        }
        Opcode::DifInsert | Opcode::DifStrip | Opcode::DifUpdate | Opcode::DixGenerate => {
            refuse(op == Opcode::DixGenerate && !dst.is_multiple_of(8), Status::MISALIGNED)?;
            refuse(overlap((src, size), (dst, written(descriptor, op))), Status::OVERLAP)
        }
        Opcode::UpdateWindow => Err(Refused::with(UPDATE_WINDOW)),
        Opcode::InterDomainCopy
        | Opcode::InterDomainFill
        | Opcode::InterDomainCompare
        | Opcode::InterDomainComparePattern => Err(Refused::with(IDPT_HANDLE)),
        _ => Ok(()),
    }
}

/// Returns the number of bytes that a DIF operation writes.
fn written(descriptor: &Descriptor, op: Opcode) -> u64 {
    let size = u64::from(descriptor.size);
    let block = DifFlags::of(descriptor).block() as u64;
    match op {
        Opcode::DifInsert => size / block * (block + 8),
        Opcode::DifStrip => size / (block + 8) * block,
        Opcode::DixGenerate => size / block * 8,
        _ => size,
    }
}

/// Whether two ranges (address, length) have a byte in common.
fn overlap(a: (u64, u64), b: (u64, u64)) -> bool {
    a.1 != 0 && b.1 != 0 && a.0 < b.0.saturating_add(b.1) && b.0 < a.0.saturating_add(a.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_when_they_share_a_byte() {
        assert!(overlap((0, 10), (9, 1)) && overlap((9, 1), (0, 10)) && overlap((5, 1), (5, 1)));
        assert!(!overlap((0, 10), (10, 10)) && !overlap((10, 10), (0, 10)) && !overlap((5, 0), (0, 10)));
    }

    #[test]
    fn reserved_ranges_are_disjoint() {
        for op in Opcode::ALL {
            let reserved = form_of(op).reserved;
            assert!(reserved.iter().all(|range| range.start < range.end && range.end <= 64), "{op:?}");
            assert!(reserved.windows(2).all(|pair| pair[0].end <= pair[1].start), "{op:?}");
        }
    }
}
