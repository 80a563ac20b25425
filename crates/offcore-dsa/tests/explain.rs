//! The explanations of a code, a record, and a record with its descriptor.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use offcore_dsa::completion::Completed;
use offcore_dsa::explain::{self, ExplainError, from_text};
use offcore_dsa::{Descriptor, Flags, Opcode, Status};

fn explained(arguments: &[&str]) -> Result<String, ExplainError> {
    from_text(&arguments.iter().map(|&argument| argument.to_owned()).collect::<Vec<_>>())
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in:\n{text}");
    }
}

/// Returns a descriptor without flags: its addresses, its size, and the operation-specific fields.
fn descriptor(op: Opcode, [src, dst]: [u64; 2], size: u32, specific: [u64; 3]) -> Descriptor {
    Descriptor { src, dst, size, specific, ..Descriptor::new(op, Flags::empty()) }
}

fn copy(src: u64, dst: u64, size: u32) -> Descriptor {
    descriptor(Opcode::MemoryMove, [src, dst], size, [0; 3])
}

fn batch(list: u64, count: u32) -> Descriptor {
    descriptor(Opcode::Batch, [list, 0], count, [0; 3])
}

fn with_record(descriptor: Descriptor, completion: u64) -> Descriptor {
    Descriptor { completion, ..descriptor }.with_flags(Flags::CRAV | Flags::RCR)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn status_codes_accept_any_notation() {
    for code in ["0x03", "3", "0x3", "03"] {
        says(
            &explained(&[code]).unwrap(),
            &["0x03: page fault", "What to do: Touch the memory", "block on fault"],
        );
    }
    says(&explained(&["0x83"]).unwrap(), &["0x83: bit 7: on a write", "0x03: page fault"]);
    says(&explained(&["0x11"]).unwrap(), &["invalid flags", "only valid in a batch"]);
    says(&explained(&["0x13"]).unwrap(), &["max_transfer_size", "split"]);
    says(&explained(&["0x53"]).unwrap(), &["SWERROR", "dedicated", "dropped"]);
    says(&explained(&["0x1f"]).unwrap(), &["readback"]);
}

#[test]
fn bare_number_is_decimal_and_hex() {
    let text = explained(&["16"]).unwrap();
    says(
        &text,
        &["16 as a decimal number is 0x10: unsupported operation", "as a hexadecimal number is 0x16: over"],
    );
    says(&explained(&["83"]).unwrap(), &["0x53 (SWERROR)", "bit 7: on a write"]);
    assert!(!explained(&["3"]).unwrap().contains("decimal"), "it is the same either way");
}

#[test]
fn the_kernels_command_status_is_explained() {
    says(&explained(&["0x80050000"]).unwrap(), &["WQ_NO_SVM", "intel_iommu=on,sm_on"]);
    says(&explained(&["0x80200000"]).unwrap(), &["WQ_NO_DRV_NAME", "driver_name: user"]);
    says(&explained(&["0x80000010"]).unwrap(), &["DEV_ENABLED"]);
    says(&explained(&["cmd", "0x16"]).unwrap(), &["enable device", "two groups"]);
    says(&explained(&["cmd_status=0x25"]).unwrap(), &["enable work queue", "block on fault"]);
    assert_eq!(explained(&["cmd", "0x2f"]), Err(ExplainError::NoCode { code: 0x2f }));
}

#[test]
fn every_status_has_words() {
    let used = (0x00..=0x09).chain(0x10..=0x22).chain(0x26..=0x2e);
    for code in 0..=0x3f_u8 {
        let explanation = explain::status(Status(code));
        assert!(explanation.title.starts_with(&format!("0x{code:02x}: ")));
        assert_eq!(
            explanation.title.contains("unused"),
            !used.clone().any(|known| known == code),
            "{code:#x}"
        );
        assert!(!explanation.facts.is_empty());
        let failure = used.clone().any(|known| known == code) && !matches!(code, 1 | 2);
        assert_eq!(!explanation.advice.is_empty(), failure, "{code:#x}");
    }
}

#[test]
fn page_fault_names_operand_and_progress() {
    let descriptor = with_record(copy(0x7000_0000_1000, 0x7000_0001_0000, 16384), 0x1000);
    let record = Completed {
        status: Status::PAGE_FAULT,
        fault_was_write: true,
        fault_info: 3 << 1,
        completed: 8192,
        fault_address: 0x7000_0001_2010,
        ..Completed::of(Status::PAGE_FAULT)
    };
    let text = explain::record(Some(&descriptor), &record).to_string();
    says(
        &text,
        &[
            "operation: memory move: source 0x700000001000, destination 0x700000010000, transfer size 16384",
            "fault: a write to the destination at 0x700000012010",
            "done: 8192 of 16384 bytes",
            "What to do: Touch",
        ],
    );
    let masked =
        Completed { fault_address: 0x7000_0001_2000, fault_was_write: false, fault_info: 1 << 1, ..record };
    says(
        &explain::record(Some(&descriptor), &masked).to_string(),
        &["a read of the source at 0x700000012000 (or further in that page)"],
    );
    let hidden = Completed { fault_info: 1, ..record };
    says(
        &explain::record(None, &hidden).to_string(),
        &[
            "an operand that the record does not name at an address that the record does not tell",
            "done: 8192 bytes",
        ],
    );
    let backwards = Completed { result: 1, ..record };
    says(&explain::record(Some(&descriptor), &backwards).to_string(), &["from the end backwards"]);
}

#[test]
fn operands_have_the_operations_names() {
    let fault = |descriptor: Descriptor, operand: u8| {
        let record = Completed { fault_info: operand << 1, ..Completed::of(Status::PAGE_FAULT) };
        explain::record(Some(&descriptor), &record).to_string()
    };
    says(&fault(descriptor(Opcode::Compare, [1, 2], 3, [0; 3]), 1), &["read of source 1"]);
    says(
        &fault(descriptor(Opcode::CreateDelta, [8, 16], 8, [64, 80, 0]), 3),
        &["of the delta record", "maximum record size 80"],
    );
    says(&fault(descriptor(Opcode::ApplyDelta, [64, 8], 8, [10, 0, 0]), 1), &["of the delta record"]);
    says(&fault(descriptor(Opcode::Dualcast, [1, 2], 4, [3, 0, 0]), 4), &["destination 2"]);
    says(&fault(descriptor(Opcode::CrcGeneration, [1, 0], 2, [0, 4, 0]), 2), &["the CRC seed"]);
    says(&fault(batch(64, 2), 1), &["the descriptor list"]);
}

#[test]
fn invalid_flags_are_named_with_a_reason() {
    let descriptor = copy(1, 2, 3).with_flags(Flags::FENCE | Flags::BLOCK_ON_FAULT);
    let invalid = Flags::FENCE | Flags::BLOCK_ON_FAULT | Flags::RCR | Flags::OP_7;
    let record = Completed {
        specific: [u64::from(invalid.bits()) | 0xff00_0000, 0],
        ..Completed::of(Status::INVALID_FLAGS)
    };
    let text = explain::record(Some(&descriptor), &record).to_string();
    says(
        &text,
        &[
            "invalid flag: fence (set): only descriptors in a batch",
            "invalid flag: block on fault (set): the work queue has block_on_fault 0",
            "invalid flag: request completion record (not set)",
            "invalid flag: operation-specific bit 23 (not set)",
        ],
    );
    assert_eq!(text.matches("invalid flag:").count(), 4);
}

#[test]
fn wrong_descriptor_field_is_named() {
    let of = |descriptor: Descriptor, status| {
        explain::record(Some(&descriptor), &Completed::of(status)).to_string()
    };
    says(&of(copy(1, 2, 0), Status::BAD_TRANSFER_SIZE), &["the transfer size is 0"]);
    says(&of(copy(1, 2, 99), Status::BAD_TRANSFER_SIZE), &["max_transfer_size must be less than 99"]);
    says(&of(batch(64, 1), Status::BAD_DESCRIPTOR_COUNT), &["at least 2"]);
    says(
        &of(descriptor(Opcode::Dualcast, [0, 0x1010], 8, [0x2020, 0, 0]), Status::DUALCAST_ADDRESS),
        &["0x10 and 0x20"],
    );
    says(&of(batch(65, 2), Status::LIST_MISALIGNED), &["modulo 64 is 1"]);
    let unknown = Descriptor { flags_opcode: 0x0b00_0000, ..Descriptor::default() };
    says(&of(unknown, Status::BAD_OPCODE), &["unknown operation 0x0b", "op_cap"]);
}

#[test]
fn results_and_mismatches_are_explained() {
    let compared = Completed { result: 1, completed: 77, ..Completed::of(Status::SUCCESS) };
    let compare = descriptor(Opcode::Compare, [1, 2], 100, [0; 3]);
    says(&explain::record(Some(&compare), &compared).to_string(), &["different, first at byte 77"]);
    let dif = descriptor(Opcode::DifCheck, [0; 2], 1040, [0; 3]);
    let record = Completed { result: 5, completed: 520, ..Completed::of(Status::DIF_ERROR) };
    says(
        &explain::record(Some(&dif), &record).to_string(),
        &["done: 520 of 1040 bytes", "wrong: guard (the CRC of the block), reference tag"],
    );
    let failed = Completed { completed: 7, ..Completed::of(Status::BATCH_FAILED) };
    says(&explain::record(Some(&batch(64, 32)), &failed).to_string(), &["done: 7 of 32 descriptors"]);
    let crc = Completed { specific: [0xe306_9283, 0], ..Completed::of(Status::SUCCESS) };
    let generation = descriptor(Opcode::CrcGeneration, [1, 0], 9, [0; 3]);
    says(&explain::record(Some(&generation), &crc).to_string(), &["CRC 0xe3069283"]);
}

#[test]
fn hex_is_read_in_any_form() {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&[0x83, 0, 7, 0, 0, 0x20, 0, 0]);
    bytes[8..16].copy_from_slice(&0x7f00_dead_b010_u64.to_le_bytes());
    let parts = [
        "page fault",
        "a write to the destination at an address that the record does not tell",
        "8192 bytes",
    ];
    let plain = hex(&bytes);
    says(&explained(&[&plain]).unwrap(), &parts);
    says(&explained(&[&format!("0x{plain}")]).unwrap(), &parts);
    let spaced: Vec<String> = bytes.iter().map(|byte| format!("{byte:02X}")).collect();
    says(&explained(&[&spaced.join(" ")]).unwrap(), &parts);
    says(&explained(&spaced.iter().map(String::as_str).collect::<Vec<_>>()).unwrap(), &parts);
    says(&explained(&[&spaced.join(":")]).unwrap(), &parts);
    let words: Vec<String> = bytes
        .chunks(8)
        .map(|word| format!("{:#018x}", u64::from_le_bytes(word.try_into().unwrap())))
        .collect();
    says(&explained(&[&words.join(" ")]).unwrap(), &parts);

    let descriptor = with_record(copy(0x1000, 0x2000, 16384), 0x40);
    let both = explained(&[&plain, &hex(descriptor.bytes())]).unwrap();
    says(&both, &["memory move: source 0x1000, destination 0x2000", "8192 of 16384 bytes"]);
    let alone = explained(&[&hex(descriptor.bytes())]).unwrap();
    says(
        &alone,
        &[
            "descriptor: memory move",
            "request completion record",
            "completion record at 0x40",
            "transfer size 16384",
        ],
    );
}

#[test]
fn invalid_input_names_expected_form() {
    assert_eq!(explained(&[]), Err(ExplainError::Empty));
    assert_eq!(explained(&["0xzz"]), Err(ExplainError::NotHex { text: "0xzz".into() }));
    assert_eq!(explained(&["é"]), Err(ExplainError::NotHex { text: "é".into() }));
    assert_eq!(explained(&["0x99999"]), Err(ExplainError::NoCode { code: 0x99999 }));
    assert_eq!(explained(&["0x55"]), Err(ExplainError::NoCode { code: 0x55 }));
    let short = explained(&["8300070000200000", "00"]).unwrap_err();
    assert_eq!(short, ExplainError::Length { bytes: 9 });
    says(&short.to_string(), &["9 bytes", "32", "64", "96"]);
    assert_eq!(explained(&["830", "0000000000000"]), Err(ExplainError::NotHex { text: "830".into() }));
    says(&ExplainError::Empty.to_string(), &["0x83", "completion record"]);
}

#[test]
fn every_operation_and_flag_has_a_name() {
    let names: std::collections::BTreeSet<_> = Opcode::ALL.into_iter().map(|op| op.to_string()).collect();
    assert_eq!(names.len(), Opcode::ALL.len());
    let flags: std::collections::BTreeSet<_> = (0..24).map(explain::flag_name).collect();
    assert_eq!(flags.len(), 24);
    assert_eq!(explain::flag_name(0), "fence");
}
