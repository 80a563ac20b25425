//! Each descriptor against the specification's tables (section 8.3), written out by hand.

use offcore_dsa::ops::encode::{self, DomainAddress, Seed, Window};
use offcore_dsa::ops::software::dif::{DestinationFlags, DifFlags, SourceFlags, Tags, Update};
use offcore_dsa::ops::software::{Crc, Pattern};
use offcore_dsa::{Descriptor, Flags, Opcode};

const SRC: u64 = 0x1817_1615_1413_1211;
const DST: u64 = 0x2827_2625_2423_2221;
const SIZE: u32 = 0x3433_3231;
const TAGS: Tags = Tags { reference: 0x0403_0201, mask: 0x0605, application: 0x0807 };
const OTHER: Tags = Tags { reference: 0x1413_1211, mask: 0x1615, application: 0x1817 };

/// The 64 bytes: flags and operation, the addresses and the size above where they are wanted, and some bytes
/// more.
fn is(descriptor: Descriptor, code: u8, flags: [u8; 3], fields: [bool; 3], more: &[(usize, &[u8])]) {
    let mut bytes = [0; 64];
    bytes[4..7].copy_from_slice(&flags);
    bytes[7] = code;
    let values = [(16, &[0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18][..])];
    let values = values.into_iter().chain([(24, &[0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28][..])]);
    let values = values.chain([(32, &[0x31, 0x32, 0x33, 0x34][..])]);
    for ((at, value), _) in values.zip(fields).filter(|(_, wanted)| *wanted) {
        bytes[at..at + value.len()].copy_from_slice(value);
    }
    for (at, value) in more {
        bytes[*at..at + value.len()].copy_from_slice(value);
    }
    assert_eq!(descriptor.bytes(), &bytes, "operation 0x{code:02x}");
}

const NONE: [u8; 3] = [0; 3];
const ALL: [bool; 3] = [true; 3];
const SRC_ONLY: [bool; 3] = [true, false, true];
const DST_ONLY: [bool; 3] = [false, true, true];

#[test]
fn a_completion_record_is_requested_with_two_flags_and_its_address() {
    let descriptor = encode::with_record(encode::noop(), 0x0102_0304_0506_0720);
    is(descriptor, 0, [0x0c, 0, 0], [false; 3], &[(8, &[0x20, 7, 6, 5, 4, 3, 2, 1])]);
    let fill = encode::with_record(encode::fill(Pattern::of_16(1, 2), DST, SIZE), 0);
    assert_eq!(fill.flags(), Flags::CRAV | Flags::RCR | Flags::OP_2, "what was set stays");
}

#[test]
fn control_operations() {
    is(encode::noop(), 0x00, NONE, [false; 3], &[]);
    is(encode::drain(), 0x02, NONE, [false; 3], &[]);
    is(encode::batch(SRC, SIZE), 0x01, NONE, SRC_ONLY, &[]);
    is(encode::cache_flush(DST, SIZE), 0x20, NONE, DST_ONLY, &[]);
}

#[test]
fn moves_and_fills() {
    is(encode::copy(SRC, DST, SIZE), 0x03, NONE, ALL, &[]);
    is(encode::fill(Pattern::of_8(SRC), DST, SIZE), 0x04, NONE, ALL, &[]);
    let upper = [8, 7, 6, 5, 4, 3, 2, 1];
    let wide = Pattern::of_16(SRC, 0x0102_0304_0506_0708);
    is(encode::fill(wide, DST, SIZE), 0x04, [0, 0, 4], ALL, &[(40, &upper)]);
    is(encode::dualcast(SRC, DST, 0x0102_0304_0506_0708, SIZE), 0x09, NONE, ALL, &[(40, &upper)]);
}

#[test]
fn comparisons() {
    is(encode::compare(SRC, DST, SIZE, None), 0x05, NONE, ALL, &[]);
    is(encode::compare(SRC, DST, SIZE, Some(true)), 0x05, [0x80, 0, 0], ALL, &[(40, &[1])]);
    is(encode::compare(SRC, DST, SIZE, Some(false)), 0x05, [0x80, 0, 0], ALL, &[]);
    is(encode::compare_pattern(SRC, DST, SIZE, None), 0x06, NONE, ALL, &[]);
    is(encode::compare_pattern(SRC, DST, SIZE, Some(true)), 0x06, [0x80, 0, 0], ALL, &[(40, &[1])]);
}

#[test]
fn delta_records() {
    let record = [8, 7, 6, 5, 4, 3, 2, 1];
    let create =
        |expected| encode::create_delta(SRC, DST, SIZE, (0x0102_0304_0506_0708, 0x0a0b_0c0d), expected);
    let size = [0x0d, 0x0c, 0x0b, 0x0a];
    is(create(None), 0x07, NONE, ALL, &[(40, &record), (48, &size)]);
    is(create(Some(5)), 0x07, [0x80, 0, 0], ALL, &[(40, &record), (48, &size), (56, &[5])]);
    is(encode::apply_delta(SRC, 0x0a0b_0c0d, DST, SIZE), 0x08, NONE, ALL, &[(40, &size)]);
}

#[test]
fn crcs() {
    let seed = [4, 3, 2, 1];
    let value = Seed::Value(0x0102_0304);
    is(encode::crc(SRC, SIZE, Crc::default(), value), 0x10, NONE, SRC_ONLY, &[(40, &seed)]);
    let bypassed = Crc { bypass_inversion: true, bypass_reflection: true };
    is(encode::copy_crc(SRC, DST, SIZE, bypassed, value), 0x11, [0, 0, 6], ALL, &[(40, &seed)]);
    let at = Seed::At(0x0102_0304);
    is(encode::crc(SRC, SIZE, Crc::default(), at), 0x10, [0, 0, 1], SRC_ONLY, &[(48, &seed)]);
}

#[test]
fn data_integrity_fields() {
    let dif = DifFlags::INVERT_RESULT.with_block(4104).unwrap();
    let (from, to) = (SourceFlags::from_bits_retain(0xa1), DestinationFlags::from_bits_retain(0xb8));
    let tags = [1, 2, 3, 4, 5, 6, 7, 8];
    let other = [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
    let check = encode::dif_check(SRC, SIZE, dif, from, TAGS);
    is(check, 0x12, NONE, SRC_ONLY, &[(40, &[0xa1, 0, 0x0b]), (48, &tags)]);
    let insert = encode::dif_insert(SRC, DST, SIZE, dif, to, TAGS);
    is(insert, 0x13, NONE, ALL, &[(40, &[0, 0xb8, 0x0b]), (56, &tags)]);
    let strip = encode::dif_strip(SRC, DST, SIZE, dif, from, TAGS);
    is(strip, 0x14, NONE, ALL, &[(40, &[0xa1, 0, 0x0b]), (48, &tags)]);
    let update = Update { dif, source: from, destination: to };
    let update = encode::dif_update(SRC, DST, SIZE, update, TAGS, OTHER);
    is(update, 0x15, NONE, ALL, &[(40, &[0xa1, 0xb8, 0x0b]), (48, &tags), (56, &other)]);
    let generate = encode::dix_generate(SRC, DST, SIZE, dif, to, TAGS);
    is(generate, 0x17, NONE, ALL, &[(40, &[0, 0xb8, 0x0b]), (56, &tags)]);
}

#[test]
fn inter_domain_operations() {
    let here = |address| DomainAddress { address, handle: None };
    let there = |address, handle| DomainAddress { address, handle: Some(handle) };
    let copy = encode::inter_domain_copy(there(SRC, 0x0201), here(DST), SIZE);
    is(copy, 0x23, [0, 0, 1], ALL, &[(60, &[1, 2])]);
    let copy = encode::inter_domain_copy(there(SRC, 0x0201), there(DST, 0x0403), SIZE);
    is(copy, 0x23, [0, 0, 3], ALL, &[(60, &[1, 2, 3, 4])]);
    let fill = encode::inter_domain_fill(Pattern::of_8(SRC), DST, 0x0403, SIZE);
    is(fill, 0x24, [0, 0, 2], ALL, &[(62, &[3, 4])]);
    let wide = encode::inter_domain_fill(Pattern::of_16(SRC, 1), DST, 0x0403, SIZE);
    is(wide, 0x24, [0, 0, 6], ALL, &[(40, &[1]), (62, &[3, 4])]);
    let compare = encode::inter_domain_compare(here(SRC), there(DST, 0x0403), SIZE, Some(true));
    is(compare, 0x25, [0x80, 0, 2], ALL, &[(40, &[1]), (62, &[3, 4])]);
    let pattern = encode::inter_domain_compare_pattern(SRC, 0x0201, DST, SIZE, None);
    is(pattern, 0x26, [0, 0, 1], ALL, &[(60, &[1, 2])]);
    let window = Window { range: Some((SRC, DST)), offset_mode: true, write: false, read: true };
    let update = encode::update_window(0x0403, window, false);
    is(update, 0x21, NONE, [true, true, false], &[(61, &[0x0d, 3, 4])]);
    let closed = Window { range: None, offset_mode: false, write: true, read: true };
    is(encode::update_window(0x0403, closed, true), 0x21, [0, 0, 1], [false; 3], &[(61, &[3, 3, 4])]);
}

#[test]
fn flags_are_asked_for_only_where_they_are_allowed() {
    let both = |opcode| encode::common_flags(opcode, true, true);
    assert_eq!(both(Opcode::MemoryMove), Flags::BLOCK_ON_FAULT | Flags::CACHE_CONTROL_1);
    for opcode in [Opcode::Compare, Opcode::CrcGeneration, Opcode::DifCheck, Opcode::CacheFlush] {
        assert_eq!(both(opcode), Flags::BLOCK_ON_FAULT, "{opcode:?} writes no memory");
    }
    for opcode in [Opcode::Noop, Opcode::Drain, Opcode::Batch, Opcode::UpdateWindow] {
        assert_eq!(both(opcode), Flags::empty(), "{opcode:?}");
    }
    assert_eq!(encode::common_flags(Opcode::Fill, false, false), Flags::empty());
}
