//! The effects of every operation, with raw descriptors (section 8.3).

use crate::rig::*;
use offcore_dsa::{Flags, Opcode, Status};

#[test]
fn a_noop_completes() {
    assert_eq!(Rig::plain().run(noop()).status, Status::SUCCESS);
}

#[test]
fn fill_repeats_pattern() {
    let mut dst = vec![0; 37];
    let fill = operation(Opcode::Fill, u64::from_le_bytes(*b"abcdefgh"), dst.as_mut_ptr() as u64, 37);
    let mut rig = Rig::new(second_generation(layout(&[dedicated()], 1)));
    assert_eq!(rig.run(fill).status, Status::SUCCESS);
    assert_eq!(dst, b"abcdefghabcdefghabcdefghabcdefghabcde");
    // The simulator does not support patterns of 16 bytes.
    assert_eq!(rig.run(fill.with_flags(Flags::OP_2)).status, Status::INVALID_FLAGS);
}

#[test]
fn compare_returns_first_difference() {
    let mut rig = Rig::plain();
    let a = pattern(100_000, 1);
    let mut b = a.clone();
    let descriptor = |b: &[u8]| operation(Opcode::Compare, a.as_ptr() as u64, b.as_ptr() as u64, b.len());
    let record = rig.run(descriptor(&b));
    assert_eq!((record.status, record.result, record.completed), (Status::SUCCESS, 0, 0));
    b[70_001] ^= 4;
    let record = rig.run(descriptor(&b));
    assert_eq!((record.status, record.result, record.completed), (Status::SUCCESS, 1, 70_001));
    for (expected, status) in [(0, Status::FALSE_PREDICATE), (1, Status::SUCCESS)] {
        let mut checked = descriptor(&b).with_flags(Flags::CHECK_RESULT);
        checked.specific[0] = expected;
        assert_eq!(rig.run(checked).status, status);
    }
}

#[test]
fn difference_comes_before_a_fault() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(2, 1..2);
    let mut other = vec![0_u8; 8192];
    let descriptor = operation(Opcode::Compare, other.as_ptr() as u64, pages.at(0), 8192);
    let record = rig.run(descriptor);
    assert_eq!((record.status, record.result, record.completed), (Status::PAGE_FAULT, 0, 4096));
    other[4000] = 1;
    let record = rig.run(descriptor);
    assert_eq!((record.status, record.result, record.completed), (Status::SUCCESS, 1, 4000));
}

#[test]
fn crc_is_crc32c_with_seed() {
    let mut rig = Rig::plain();
    let data = b"123456789";
    let crc = |at: usize, len: usize, seed: u32| {
        let mut crc = operation(Opcode::CrcGeneration, data[at..].as_ptr() as u64, 0, len);
        crc.specific[0] = u64::from(seed);
        crc
    };
    // The check value of CRC-32C (iSCSI).
    assert_eq!(rig.run(crc(0, 9, 0)).specific[0], 0xe306_9283);
    let part = rig.run(crc(0, 4, 0)).specific[0] as u32;
    assert_eq!(rig.run(crc(4, 5, part)).specific[0], 0xe306_9283);
    // The simulator does not support a seed in memory, or a CRC without inversion or reflection.
    for flag in [Flags::OP_0, Flags::OP_1, Flags::OP_2] {
        assert_eq!(rig.run(crc(0, 9, 0).with_flags(flag)).status, Status::INVALID_FLAGS);
    }
}

#[test]
fn crc_resumes_from_partial_value() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(2, 1..2);
    pages.put(0, &pattern(4096, 1));
    let whole = operation(Opcode::CrcGeneration, pages.at(0), 0, 8192);
    let record = rig.run(whole);
    assert_eq!((record.status, record.completed), (Status::PAGE_FAULT, 4096));
    pages.protect(1..2, libc::PROT_READ | libc::PROT_WRITE);
    let mut rest = operation(Opcode::CrcGeneration, pages.at(4096), 0, 4096);
    rest.specific[0] = record.specific[0];
    assert_eq!(rig.run(rest).specific[0], rig.run(whole).specific[0]);
}
