//! The effects of every operation, with raw descriptors (section 8.3).

use crate::rig::*;
use offcore_dsa::completion::Completed;
use offcore_dsa::{Descriptor, Flags, Opcode, Status};

#[test]
fn a_noop_completes() {
    assert_eq!(Rig::plain().run(noop()).status, Status::SUCCESS);
}

#[test]
fn fill_patterns_have_8_or_16_bytes() {
    let mut dst = vec![0; 37];
    let fill = Descriptor {
        src: u64::from_le_bytes(*b"abcdefgh"),
        dst: dst.as_mut_ptr() as u64,
        size: 37,
        ..Descriptor::new(Opcode::Fill, Flags::empty())
    };
    let mut rig = Rig::plain();
    assert_eq!(rig.run(fill).status, Status::SUCCESS);
    assert_eq!(dst, b"abcdefghabcdefghabcdefghabcdefghabcde");
    let mut wide = fill.with_flags(Flags::OP_2);
    wide.specific[0] = u64::from_le_bytes(*b"ABCDEFGH");
    assert_eq!(rig.run(wide).status, Status::INVALID_FLAGS);
    let mut rig = Rig::new(second_generation(layout(&[dedicated()], 1)));
    assert_eq!(rig.run(wide).status, Status::SUCCESS);
    assert_eq!(dst, b"abcdefghABCDEFGHabcdefghABCDEFGHabcde");
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
fn compare_pattern_returns_an_offset() {
    let mut rig = Rig::plain();
    let mut data = b"abcdefgh".repeat(100);
    let descriptor =
        operation(Opcode::ComparePattern, data.as_ptr() as u64, u64::from_le_bytes(*b"abcdefgh"), 799);
    assert_eq!(rig.run(descriptor).result, 0);
    data[500] = 0;
    let record = rig.run(descriptor);
    assert!(record.result == 1 && record.completed <= 500, "{record:?}");
}

fn delta_pair(rig: &mut Rig, original: &[u8], changed: &[u8], delta: &mut [u8]) -> Completed {
    let mut create =
        operation(Opcode::CreateDelta, original.as_ptr() as u64, changed.as_ptr() as u64, original.len());
    create.specific = [delta.as_mut_ptr() as u64, delta.len() as u64, 0];
    rig.run(create)
}

fn apply(delta: &[u8], dst: &mut [u64]) -> Descriptor {
    let mut apply =
        operation(Opcode::ApplyDelta, delta.as_ptr() as u64, dst.as_mut_ptr() as u64, dst.len() * 8);
    apply.specific[0] = delta.len() as u64;
    apply
}

#[test]
fn delta_record_remakes_the_change() {
    let mut rig = Rig::plain();
    let original: Vec<u64> = (0..4096).collect();
    let mut changed = original.clone();
    (100..130).for_each(|at| changed[at] = 7);
    changed[4095] = 9;
    let bytes = |words: &[u64]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let (a, b) = (bytes(&original), bytes(&changed));
    let mut delta = vec![0; 1000];
    let record = delta_pair(&mut rig, &a, &b, &mut delta);
    assert_eq!((record.status, record.result, record.specific[0]), (Status::SUCCESS, 1, 310));
    let mut copy = original.clone();
    assert_eq!(rig.run(apply(&delta[..310], &mut copy)).status, Status::SUCCESS);
    assert_eq!(copy, changed);
    // Equal sources have an empty record. A record that does not fit is truncated.
    assert_eq!(delta_pair(&mut rig, &a, &a, &mut delta).result, 0);
    let record = delta_pair(&mut rig, &a, &b, &mut delta[..100]);
    assert_eq!((record.result, record.specific[0], record.completed), (2, 100, 110 * 8));
}

#[test]
fn bad_delta_offsets_are_an_error() {
    let mut rig = Rig::plain();
    let delta = |offset: u16| [offset.to_le_bytes().as_slice(), &[7; 8]].concat();
    let mut dst = vec![0; 4];
    let record = [delta(1), delta(1)].concat();
    let outcome = rig.run(apply(&record, &mut dst));
    assert_eq!((outcome.status, outcome.completed), (Status::DELTA_OFFSET, 10));
    let record = [delta(0), delta(4)].concat();
    let outcome = rig.run(apply(&record, &mut dst));
    assert_eq!((outcome.status, outcome.completed), (Status::DELTA_OFFSET_ORDER, 10));
}

#[test]
fn dualcast_writes_both_destinations() {
    let mut rig = Rig::plain();
    let src = pattern(4000, 3);
    let pages = Pages::with_holes(4, 3..4);
    let mut dualcast = operation(Opcode::Dualcast, src.as_ptr() as u64, pages.at(96), 4000);
    dualcast.specific[0] = pages.at(4096 + 96);
    assert_eq!(rig.run(dualcast).status, Status::SUCCESS);
    assert!(pages.bytes(96, 4000) == src && pages.bytes(4096 + 96, 4000) == src);
    dualcast.specific[0] += 64;
    assert_eq!(rig.run(dualcast).status, Status::DUALCAST_ADDRESS);
    dualcast.specific[0] = pages.at(3 * 4096 + 96);
    let record = rig.run(dualcast);
    assert_eq!((record.status, record.completed), (Status::PAGE_FAULT, 0));
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
    // The same with a seed that is read from memory, for example from the partial record.
    let mut seeded = crc(4, 5, 0).with_flags(Flags::OP_0);
    seeded.specific[1] = &raw const part as u64;
    assert_eq!(rig.run(seeded).specific[0], 0xe306_9283);
    seeded.specific[1] += 2;
    assert_eq!(rig.run(seeded).status, Status::MISALIGNED);
}

#[test]
fn copy_crc_returns_the_crc() {
    let mut rig = Rig::plain();
    let src = pattern(200_000, 3);
    let mut dst = vec![0; 200_000];
    let descriptor = operation(Opcode::CopyCrc, src.as_ptr() as u64, dst.as_mut_ptr() as u64, 200_000);
    let record = rig.run(descriptor);
    assert_eq!((record.status, dst == src), (Status::SUCCESS, true));
    let alone = rig.run(operation(Opcode::CrcGeneration, src.as_ptr() as u64, 0, 200_000));
    assert_eq!(record.specific[0], alone.specific[0]);
    // Bypassing inversion or reflection gives other values.
    for flag in [Flags::OP_1, Flags::OP_2] {
        assert_ne!(rig.run(descriptor.with_flags(flag)).specific[0], alone.specific[0]);
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

/// Returns a DIF operation with the flags of source, destination and both, and the tags of source and destination.
fn dif(op: Opcode, (src, dst): (u64, u64), size: usize, flags: [u8; 3], tags: [u64; 2]) -> Descriptor {
    let mut descriptor = operation(op, src, dst, size);
    let [source, destination, both] = flags.map(u64::from);
    descriptor.specific = [source | destination << 8 | both << 16, tags[0], tags[1]];
    descriptor
}

#[test]
fn dif_insert_update_and_strip() {
    let mut rig = Rig::plain();
    let data = pattern(4 * 512, 8);
    let [mut with_fields, mut updated] = [(); 2].map(|()| vec![0_u8; 4 * 520]);
    let mut back = vec![0; 4 * 512];
    let [plain, fields, newer, stripped] = [
        data.as_ptr() as u64,
        with_fields.as_mut_ptr() as u64,
        updated.as_mut_ptr() as u64,
        back.as_mut_ptr() as u64,
    ];
    // Reference tag 100, application tag 0x1234.
    let tags = 100 | 0x1234 << 48;
    let other = 900 | 0x4321 << 48;
    let record = rig.run(dif(Opcode::DifInsert, (plain, fields), 2048, [0; 3], [0, tags]));
    assert_eq!((record.status, record.specific[1]), (Status::SUCCESS, tags + 4));
    assert_eq!(with_fields[..512], data[..512]);
    assert_eq!(with_fields[514..520], [0x12, 0x34, 0, 0, 0, 100]);
    let check = dif(Opcode::DifCheck, (fields, 0), 2080, [0; 3], [tags, 0]);
    assert_eq!(rig.run(check).status, Status::SUCCESS);
    let update = dif(Opcode::DifUpdate, (fields, newer), 2080, [0; 3], [tags, other]);
    let record = rig.run(update);
    assert_eq!((record.status, record.specific), (Status::SUCCESS, [tags + 4, other + 4]));
    let strip = dif(Opcode::DifStrip, (newer, stripped), 2080, [0; 3], [other, 0]);
    assert_eq!(rig.run(strip).status, Status::SUCCESS);
    assert_eq!(back, data);
    // A flipped bit in the third block: guard mismatch after two blocks.
    with_fields[2 * 520 + 5] ^= 1;
    let record = rig.run(check);
    assert_eq!((record.status, record.result, record.completed), (Status::DIF_ERROR, 1, 1040));
}

#[test]
fn dix_needs_second_generation() {
    let data = pattern(1024, 8);
    let mut fields = [0_u64; 2];
    let generate =
        dif(Opcode::DixGenerate, (data.as_ptr() as u64, fields.as_mut_ptr() as u64), 1024, [0; 3], [0, 5]);
    assert_eq!(Rig::plain().run(generate).status, Status::BAD_OPCODE);
    let mut rig = Rig::new(second_generation(layout(&[dedicated()], 1)));
    let record = rig.run(generate);
    assert_eq!((record.status, record.specific[1]), (Status::SUCCESS, 7));
    let tags = fields.map(|field| u64::from_be(field) as u32);
    assert_eq!(tags, [5, 6]);
}

#[test]
fn cache_flush_only_needs_its_pages() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(2, 1..2);
    let flush = operation(Opcode::CacheFlush, 0, pages.at(0), 4096);
    assert_eq!(rig.run(flush).status, Status::SUCCESS);
    let record = rig.run(Descriptor { size: 8192, ..flush });
    assert_eq!((record.status, record.completed), (Status::PAGE_FAULT, 4096));
}

#[test]
fn translation_fetch_needs_generation_2() {
    let pages = Pages::with_holes(4, 3..4);
    let mut fetch = operation(Opcode::TranslationFetch, pages.at(0), 0, 3 * 4096);
    assert_eq!(Rig::plain().run(fetch).status, Status::BAD_OPCODE);
    let mut rig = Rig::new(second_generation(layout(&[dedicated()], 1)));
    assert_eq!(rig.run(fetch).status, Status::SUCCESS);
    assert_eq!(rig.run(Descriptor { size: 4 * 4096, ..fetch }).status, Status::PAGE_FAULT);
    fetch = fetch.with_flags(Flags::OP_0);
    fetch.specific[1] = 100;
    assert_eq!(rig.run(fetch).status, Status::MISALIGNED);
    fetch.specific[1] = 8192;
    assert_eq!(rig.run(fetch).status, Status::SUCCESS);
    let off = offcore_dsa::config::WqConfig { ats_disable: true, ..dedicated() };
    let mut rig = Rig::new(second_generation(layout(&[off], 1)));
    assert_eq!(rig.run(fetch).status, Status::BAD_OPCODE);
}

#[test]
fn drain_readback_needs_second_generation() {
    let pages = Pages::with_holes(2, 1..2);
    let mut drain = Descriptor::new(Opcode::Drain, Flags::OP_0);
    drain.src = pages.at(8);
    assert_eq!(Rig::plain().run(drain).status, Status::INVALID_FLAGS);
    let mut rig = Rig::new(second_generation(layout(&[dedicated()], 1)));
    assert_eq!(rig.run(drain).status, Status::SUCCESS);
    drain.src = pages.at(4096);
    assert_eq!(rig.run(drain).status, Status::DRAIN_READBACK);
}
