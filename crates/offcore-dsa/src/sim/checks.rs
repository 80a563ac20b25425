//! The checks of a descriptor before its execution (sections 5.4 and 5.5).
//!
//! Nothing may depend on the order of the checks: the specification leaves open which of several errors is reported.

use std::ops::Range;

use crate::completion::Status;
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::wq::{OpSet, gen_cap};

/// Traffic classes with an enabled virtual channel, one bit each: the classes that Linux uses.
const TRAFFIC_CLASSES: u32 = 0b11;

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

    /// Returns whether the device reports fault information, as devices of the second generation do.
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
/// Flags of operations with a result in the record.
const RECORD: Flags = Flags::CRAV.union(Flags::RCR);

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

/// Returns the form of an operation. Returns `None`, regardless of OPCAP, for operations that the simulator refuses.
fn form_of(op: Opcode) -> Option<Form> {
    let bof = Flags::BLOCK_ON_FAULT;
    let none = Flags::empty();
    Some(match op {
        Opcode::Noop => form(none, none, &[16..36, 38..64]),
        Opcode::Batch => form(Flags::ADDR1_TC | Flags::OP_0, none, &[24..32, 38..64]),
        Opcode::Drain => form(none, none, &[16..36, 38..64]),
        Opcode::MemoryMove => form(WRITES | ADDR_1_2, none, REST),
        Opcode::Fill => form(WRITES | Flags::ADDR2_TC, none, REST),
        Opcode::Compare => form(bof | Flags::CHECK_RESULT | ADDR_1_2, RECORD, &[38..40, 41..64]),
        Opcode::CrcGeneration => form(bof | Flags::ADDR1_TC, RECORD, &[24..32, 38..40, 44..64]),
        _ => return None,
    })
}

/// Checks a descriptor that was submitted directly or, if `member` is set, in a batch.
pub(super) fn check(descriptor: &Descriptor, limits: &Limits, member: bool) -> Result<(), Refused> {
    record_address(descriptor)?;
    if limits.shared && !member && descriptor.pasid >> 31 == 1 {
        return Err(Refused::silent(Status::PRIVILEGE));
    }
    let (op, form) = operation(descriptor, limits, member)?;
    flags(descriptor, op, &form, limits, member)?;
    if descriptor.flags().contains(Flags::RCI) {
        // The kernel grants handles by a command that is not available to user programs, so every handle is invalid.
        return Err(Refused::with(Status::INTERRUPT_HANDLE));
    }
    reserved_fields(descriptor, &form)?;
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

fn operation(descriptor: &Descriptor, limits: &Limits, member: bool) -> Result<(Opcode, Form), Refused> {
    let op = descriptor.opcode().filter(|&op| limits.ops.contains(op));
    op.filter(|op| !member || !matches!(op, Opcode::Batch | Opcode::Drain))
        .and_then(|op| Some((op, form_of(op)?)))
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
    if !limits.has(gen_cap::CACHE_CONTROL_MEMORY) {
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
    if op == Opcode::Batch && !limits.has(gen_cap::BATCH_CONTINUATION) {
        allowed.remove(Flags::OP_0);
    }
    let mut wrong = (flags - allowed) | (form.required - flags);
    if op == Opcode::Drain && !flags.intersects(Flags::RCR | Flags::RCI) {
        wrong |= Flags::RCR;
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        Err(Refused { flags: wrong, ..Refused::with(Status::INVALID_FLAGS) })
    }
}

fn reserved_fields(descriptor: &Descriptor, form: &Form) -> Result<(), Refused> {
    let bytes = descriptor.bytes();
    let zero = |range: Range<usize>| bytes[range].iter().all(|&byte| byte == 0);
    let clear = form.reserved.iter().all(|range| zero(range.clone())) && descriptor.interrupt == 0;
    if clear { Ok(()) } else { Err(Refused::with(Status::NONZERO_RESERVED)) }
}

fn traffic_classes(descriptor: &Descriptor, form: &Form, limits: &Limits) -> Result<(), Refused> {
    let flags = descriptor.flags();
    let record = usize::from(flags.contains(Flags::CR_TC));
    if flags.contains(Flags::CRAV) && !limits.traffic_class_enabled(record) {
        return Err(Refused::silent(Status::TRAFFIC_CLASS));
    }
    for selector in (form.allowed & ADDR_1_2).iter() {
        if !limits.traffic_class_enabled(usize::from(flags.contains(selector))) {
            return Err(Refused::with(Status::TRAFFIC_CLASS));
        }
    }
    Ok(())
}

fn sizes(descriptor: &Descriptor, op: Opcode, limits: &Limits) -> Result<(), Refused> {
    let size = u64::from(descriptor.size);
    let (fits, status) = match op {
        Opcode::Noop | Opcode::Drain => return Ok(()),
        Opcode::Batch => ((2..=u64::from(limits.max_batch)).contains(&size), Status::BAD_DESCRIPTOR_COUNT),
        _ => ((1..=limits.max_transfer).contains(&size), Status::BAD_TRANSFER_SIZE),
    };
    if fits { Ok(()) } else { Err(Refused::with(status)) }
}

fn addresses(descriptor: &Descriptor, op: Opcode, limits: &Limits) -> Result<(), Refused> {
    let Descriptor { src, dst, .. } = *descriptor;
    let size = u64::from(descriptor.size);
    let onto_itself = || !limits.has(gen_cap::OVERLAP) && overlap((src, size), (dst, size));
    match op {
        Opcode::Batch if !src.is_multiple_of(64) => Err(Refused::with(Status::LIST_MISALIGNED)),
        Opcode::MemoryMove if onto_itself() => Err(Refused::with(Status::OVERLAP)),
        _ => Ok(()),
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
        for (op, Form { reserved, .. }) in Opcode::ALL.into_iter().filter_map(|op| Some((op, form_of(op)?))) {
            assert!(reserved.iter().all(|range| range.start < range.end && range.end <= 64), "{op:?}");
            assert!(reserved.windows(2).all(|pair| pair[0].end <= pair[1].start), "{op:?}");
        }
    }
}
