//! Explanations of completion records and descriptors, field by field.

use crate::completion::{Completed, DifMismatch, Status};
use crate::descriptor::{Descriptor, Flags, Opcode};

use super::Explanation;
use super::codes::{flag_name, flag_reason};
use super::statuses::status;

/// Explains a descriptor.
pub fn descriptor(descriptor: &Descriptor) -> Explanation {
    let mut explanation =
        Explanation { title: format!("descriptor: {}", name(descriptor)), ..Default::default() };
    explanation.facts =
        operands(descriptor).into_iter().map(|(what, value)| format!("{what} {value}")).collect();
    let flags = descriptor.flags();
    explanation.facts.push(match names(flags) {
        names if names.is_empty() => "no flags".into(),
        names => format!("flags: {}", names.join(", ")),
    });
    if flags.contains(Flags::CRAV) {
        explanation.facts.push(format!("completion record at {:#x}", descriptor.completion));
    }
    explanation
}

/// Explains a completion record. With its descriptor, operands, sizes and ranges are named, too.
pub fn record(descriptor: Option<&Descriptor>, record: &Completed) -> Explanation {
    let mut explanation = status(record.status);
    let facts = &mut explanation.facts;
    if let Some(descriptor) = descriptor {
        let operands = operands(descriptor);
        let operands: Vec<_> = operands.iter().map(|(what, value)| format!("{what} {value}")).collect();
        facts.push(format!("operation: {}: {}", name(descriptor), operands.join(", ")));
    }
    let fault = matches!(record.status.0, 0x03 | 0x04 | 0x06 | 0x1a | 0x1f);
    if fault {
        facts.push(fault_of(descriptor, record));
    }
    if let Some(done) = done(descriptor, record) {
        facts.push(done);
    }
    match record.status {
        Status::INVALID_FLAGS => {
            let invalid = Flags::from_bits_retain(record.specific[0] as u32 & 0xff_ffff);
            for bit in (0..24).filter(|bit| invalid.bits() >> bit & 1 == 1) {
                let flag = Flags::from_bits_retain(1 << bit);
                let set = descriptor.map(|descriptor| descriptor.flags().contains(flag));
                let is = set.map_or("", |set| if set { " (set)" } else { " (not set)" });
                facts.push(format!("invalid flag: {}{is}: {}", flag_name(bit), flag_reason(flag)));
            }
        }
        Status::DIF_ERROR => facts.push(format!("wrong: {}", mismatches(record.result).join(", "))),
        Status::SUCCESS | Status::FALSE_PREDICATE => facts.extend(result(descriptor, record)),
        _ => {}
    }
    if let Some(descriptor) = descriptor {
        facts.extend(reason(descriptor, record.status));
    }
    explanation
}

fn name(descriptor: &Descriptor) -> String {
    descriptor
        .opcode()
        .map_or_else(|| format!("unknown operation 0x{:02x}", descriptor.code()), |op| op.to_string())
}

fn names(flags: Flags) -> Vec<&'static str> {
    (0..24).filter(|bit| flags.bits() >> bit & 1 == 1).map(flag_name).collect()
}

/// Returns the names and values of a descriptor's operands.
fn operands(descriptor: &Descriptor) -> Vec<(&'static str, String)> {
    use Opcode as O;
    let hex = |value: u64| format!("{value:#x}");
    let src = ("source", hex(descriptor.src));
    let dst = ("destination", hex(descriptor.dst));
    let bytes = ("transfer size", descriptor.size.to_string());
    let [first, second, _] = descriptor.specific;
    match descriptor.opcode() {
        None | Some(O::Noop | O::Drain) => Vec::new(),
        Some(O::Batch) => {
            vec![("descriptor list", hex(descriptor.src)), ("descriptor count", descriptor.size.to_string())]
        }
        Some(O::Fill | O::InterDomainFill) => vec![("pattern", hex(descriptor.src)), dst, bytes],
        Some(O::Compare | O::InterDomainCompare) => {
            vec![("source 1", hex(descriptor.src)), ("source 2", hex(descriptor.dst)), bytes]
        }
        Some(O::ComparePattern | O::InterDomainComparePattern) => {
            vec![src, ("pattern", hex(descriptor.dst)), bytes]
        }
        Some(O::CreateDelta) => vec![
            ("source 1", hex(descriptor.src)),
            ("source 2", hex(descriptor.dst)),
            bytes,
            ("delta record", hex(first)),
            ("maximum record size", (second as u32).to_string()),
        ],
        Some(O::ApplyDelta) => vec![
            ("delta record", hex(descriptor.src)),
            ("record size", (first as u32).to_string()),
            dst,
            bytes,
        ],
        Some(O::Dualcast) => {
            vec![src, ("destination 1", hex(descriptor.dst)), ("destination 2", hex(first)), bytes]
        }
        Some(O::CrcGeneration | O::DifCheck) => vec![src, bytes],
        Some(O::CacheFlush) => vec![dst, bytes],
        Some(O::UpdateWindow) => {
            vec![("window base", hex(descriptor.src)), ("window size", hex(descriptor.dst))]
        }
        Some(_) => vec![src, dst, bytes],
    }
}

/// Returns the meaning of an operand identifier in the fault info for this operation (Table 8-13).
fn operand(descriptor: Option<&Descriptor>, id: u8) -> &'static str {
    use Opcode as O;
    match (id, descriptor.and_then(Descriptor::opcode)) {
        (1, Some(O::Batch)) => "the descriptor list",
        (1, Some(O::Drain)) => "readback address 1",
        (1, Some(O::ApplyDelta)) => "the delta record",
        (1, Some(O::Compare | O::CreateDelta | O::InterDomainCompare)) => "source 1",
        (1, _) => "the source",
        (2, Some(O::CrcGeneration | O::CopyCrc)) => "the CRC seed",
        (2, Some(O::Drain)) => "readback address 2",
        (2, _) => "source 2",
        (3, Some(O::CreateDelta)) => "the delta record",
        (3, Some(O::Dualcast)) => "destination 1",
        (3, _) => "the destination",
        (4, _) => "destination 2",
        (5, _) => "the completion record",
        (6, _) => "the scatter-gather list",
        _ => "an operand that the record does not name",
    }
}

fn fault_of(descriptor: Option<&Descriptor>, record: &Completed) -> String {
    let access = if record.fault_was_write { "write to" } else { "read of" };
    let operand = operand(descriptor, record.fault_info >> 1 & 7);
    let address = record.fault_address;
    let place = match record.fault_info & 1 {
        1 => "at an address that the record does not tell".to_owned(),
        _ if address.trailing_zeros() >= 12 => format!("at {address:#x} (or further in that page)"),
        _ => format!("at {address:#x}"),
    };
    format!("fault: a {access} {operand} {place}")
}

/// Describes the progress of the operation, if the record's count has that meaning.
fn done(descriptor: Option<&Descriptor>, record: &Completed) -> Option<String> {
    let opcode = descriptor.and_then(Descriptor::opcode);
    let counted = matches!(record.status.0, 0x03..=0x09) || record.completed > 0;
    if !counted || matches!(record.status, Status::NONE) || record.status.0 >= 0x10 {
        return None;
    }
    let done = record.completed;
    let of = descriptor.map_or(String::new(), |descriptor| format!(" of {}", descriptor.size));
    if opcode == Some(Opcode::Batch) || matches!(record.status.0, 0x05 | 0x06) {
        return Some(format!("done: {done}{of} descriptors"));
    }
    if opcode == Some(Opcode::ApplyDelta) {
        return Some(format!("done: {done} bytes of the delta record"));
    }
    let from = match (opcode, record.result) {
        (Some(Opcode::MemoryMove), 1) if record.status.is_page_fault() => ", from the end backwards",
        _ => "",
    };
    Some(format!("done: {done}{of} bytes{from}"))
}

fn mismatches(result: u8) -> Vec<&'static str> {
    let mismatch = DifMismatch::from_bits_retain(result);
    let names = [
        (DifMismatch::GUARD, "guard (the CRC of the block)"),
        (DifMismatch::APPLICATION, "application tag"),
        (DifMismatch::REFERENCE, "reference tag"),
        (DifMismatch::ALL_F, "all bits of the field are 1"),
    ];
    names.into_iter().filter(|(bit, _)| mismatch.contains(*bit)).map(|(_, name)| name).collect()
}

/// Describes the result of a successful operation.
fn result(descriptor: Option<&Descriptor>, record: &Completed) -> Option<String> {
    use Opcode as O;
    match descriptor?.opcode()? {
        O::Compare | O::ComparePattern | O::InterDomainCompare | O::InterDomainComparePattern => {
            Some(match record.result {
                0 => "result: equal".to_owned(),
                _ => format!("result: different, first at byte {}", record.completed),
            })
        }
        O::CreateDelta => {
            let size = record.specific[0] as u32;
            Some(match record.result {
                0 => "result: no difference".to_owned(),
                1 => format!("result: a delta record of {size} bytes"),
                _ => format!("result: the delta record is full, with {size} bytes"),
            })
        }
        O::CrcGeneration | O::CopyCrc => Some(format!("result: CRC {:#010x}", record.specific[0] as u32)),
        _ => None,
    }
}

/// Returns the probable reason in the descriptor.
fn reason(descriptor: &Descriptor, status: Status) -> Option<String> {
    let size = descriptor.size;
    match status {
        Status::BAD_TRANSFER_SIZE if size == 0 => Some("the transfer size is 0".into()),
        Status::BAD_TRANSFER_SIZE => {
            Some(format!("the work queue's max_transfer_size must be less than {size}"))
        }
        Status::BAD_DESCRIPTOR_COUNT if size < 2 => {
            Some(format!("a batch of {size}: it needs at least 2 descriptors"))
        }
        Status::BAD_DESCRIPTOR_COUNT => {
            Some(format!("the work queue's max_batch_size must be less than {size}"))
        }
        Status::DUALCAST_ADDRESS => {
            let (first, second) = (descriptor.dst & 0xfff, descriptor.specific[0] & 0xfff);
            Some(format!("bits 11:0 of the destinations are {first:#x} and {second:#x}"))
        }
        Status::LIST_MISALIGNED => {
            Some(format!("{:#x} modulo 64 is {}", descriptor.src, descriptor.src % 64))
        }
        Status::CR_MISALIGNED => {
            Some(format!("{:#x} modulo 32 is {}", descriptor.completion, descriptor.completion % 32))
        }
        Status::NONZERO_RESERVED if descriptor.reserved != 0 => {
            Some(format!("bytes 38 and 39 are {:#x}", descriptor.reserved))
        }
        _ => None,
    }
}
