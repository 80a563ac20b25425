use super::*;
use proptest::prelude::*;

const BLOCK: usize = 512;
const NONE: SourceFlags = SourceFlags::empty();

fn blocks(count: usize) -> Vec<u8> {
    (0..count * BLOCK).map(|at| (at * 7 + at / 251) as u8).collect()
}

/// Processes `src` in blocks of `from` bytes that produce `to` bytes each. Returns the output and the mismatch, if any.
fn run(dif: &mut Dif, (from, to): (usize, usize), src: &[u8]) -> (Vec<u8>, Option<DifMismatch>) {
    let mut dst = Vec::new();
    for input in src.chunks_exact(from) {
        let mut output = vec![0; to];
        if let Err(mismatch) = dif.process(input, &mut output) {
            return (dst, Some(mismatch));
        }
        dst.extend(output);
    }
    (dst, None)
}

fn inserted(count: usize, tags: Tags) -> Vec<u8> {
    let mut dif = Dif { destination_tags: tags, ..Dif::default() };
    run(&mut dif, (BLOCK, BLOCK + FIELD), &blocks(count)).0
}

/// Checks `src` and returns the mismatch of its first bad block.
fn verdict(source: SourceFlags, tags: Tags, src: &[u8]) -> Option<DifMismatch> {
    run(&mut Dif { source, source_tags: tags, ..Dif::default() }, (BLOCK + FIELD, 0), src).1
}

#[test]
fn t10_known_answers() {
    assert_eq!(t10(b"123456789", 0), 0xd0db);
    assert_eq!(t10(&[0; 32], 0), 0);
    assert_eq!(t10(&[1], 0), 0x8bb7);
}

#[test]
fn block_sizes_have_their_codes() {
    for (bits, size) in [(0, 512), (5, 520), (2, 4096), (7, 4104)] {
        assert_eq!(DifFlags::from_bits_retain(bits).block(), size);
    }
}

#[test]
fn a_field_is_in_network_order() {
    let tags = Tags { reference: 0x0102_0304, mask: 0x00f0, application: 0xabcd };
    let dst = inserted(2, tags);
    let guard = t10(&blocks(2)[..BLOCK], 0).to_be_bytes();
    assert_eq!(dst[BLOCK..BLOCK + FIELD], [guard[0], guard[1], 0xab, 0x0d, 1, 2, 3, 4]);
    assert_eq!(dst[BLOCK * 2 + FIELD + 2..], [0xab, 0x0d, 1, 2, 3, 5]);
    let destination = DestinationFlags::APPLICATION_INCREMENTS | DestinationFlags::REFERENCE_FIXED;
    let mut dif = Dif { destination, destination_tags: tags, ..Dif::default() };
    let (fields, _) = run(&mut dif, (BLOCK, FIELD), &blocks(2));
    assert_eq!(fields[..2], guard);
    assert_eq!(fields[10..], [0xab, 0x0e, 1, 2, 3, 4]);
    assert_eq!(dif.destination_tags, Tags { application: 0xabcf, ..tags });
}

#[test]
fn guards_of_zeros_are_known() {
    let guard = |flags: DifFlags| flags.guard(&[0; BLOCK]);
    assert_eq!(guard(DifFlags::empty()), 0);
    assert_eq!(guard(DifFlags::INVERT_RESULT), 0xffff);
    let mut first = [0; BLOCK];
    first[..2].fill(0xff);
    assert_eq!(guard(DifFlags::INVERT_SEED), t10(&first, 0), "the seed is in the first 16 bits");
    assert_eq!(guard(DifFlags::INVERT_SEED | DifFlags::INVERT_RESULT), !t10(&first, 0));
}

#[test]
fn descriptor_tags_are_little_endian() {
    let tags = Tags::from_word(u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]));
    assert_eq!(tags, Tags { reference: 0x0403_0201, mask: 0x0605, application: 0x0807 });
    assert_eq!(Tags::from_word(tags.word()), tags);
}

#[test]
fn tag_checks_can_be_disabled() {
    let tags = Tags { reference: 9, mask: 0, application: 5 };
    let good = inserted(1, tags);
    assert_eq!(verdict(NONE, tags, &good), None);
    let mut bad = good.clone();
    bad[100] ^= 1;
    assert_eq!(verdict(NONE, tags, &bad), Some(DifMismatch::GUARD));
    assert_eq!(verdict(SourceFlags::NO_GUARD_CHECK, tags, &bad), None);
    let other = Tags { reference: 10, ..tags };
    assert_eq!(verdict(NONE, other, &good), Some(DifMismatch::REFERENCE));
    assert_eq!(verdict(SourceFlags::NO_REFERENCE_CHECK, other, &good), None);
    let other = Tags { application: 7, ..tags };
    assert_eq!(verdict(NONE, other, &good), Some(DifMismatch::APPLICATION));
    assert_eq!(verdict(NONE, Tags { mask: 2, ..other }, &good), None);
    let other = Tags { application: 0, reference: 0, ..tags };
    assert_eq!(verdict(NONE, other, &bad), Some(DifMismatch::from_bits_retain(7)));
    let unchecked = SourceFlags::NO_GUARD_CHECK | SourceFlags::NO_REFERENCE_CHECK;
    assert_eq!(verdict(unchecked, Tags { mask: 0xffff, ..other }, &bad), None);
}

#[test]
fn fields_of_ones_are_detected() {
    let tags = Tags::default();
    let mut src = inserted(1, tags);
    let wrong = DifMismatch::GUARD | DifMismatch::APPLICATION | DifMismatch::REFERENCE;
    src[BLOCK..].fill(0xff);
    assert_eq!(verdict(NONE, tags, &src), Some(wrong));
    assert_eq!(verdict(SourceFlags::ALL_F_ERROR, tags, &src), Some(wrong), "ignored without detection");
    assert_eq!(verdict(SourceFlags::ALL_F_DETECT, tags, &src), None);
    let both = SourceFlags::ALL_F_DETECT | SourceFlags::ALL_F_ERROR | SourceFlags::APPLICATION_F_DETECT;
    assert_eq!(verdict(both, tags, &src), Some(DifMismatch::ALL_F));
    src[BLOCK] = 0;
    assert_eq!(verdict(SourceFlags::ALL_F_DETECT, tags, &src), Some(wrong), "the guard is not all ones");
    assert_eq!(verdict(SourceFlags::BOTH_F_DETECT, tags, &src), None);
    src[BLOCK + 7] = 0;
    assert_eq!(verdict(SourceFlags::BOTH_F_DETECT, tags, &src), Some(wrong));
    assert_eq!(verdict(SourceFlags::APPLICATION_F_DETECT, tags, &src), None);
}

#[test]
fn wrong_block_is_not_written() {
    let mut src = inserted(3, Tags::default());
    src[(BLOCK + FIELD) + 3] ^= 0x10;
    let mut dif = Dif::default();
    let stripped = run(&mut dif, (BLOCK + FIELD, BLOCK), &src);
    assert_eq!(stripped, (blocks(1), Some(DifMismatch::GUARD)));
    assert_eq!(dif.source_tags.reference, 1);
}

#[test]
fn dif_update_replaces_unpassed_fields() {
    let source_tags = Tags { reference: 0x11, mask: 0, application: 0x22 };
    let destination_tags = Tags { reference: 0x33, mask: 0, application: 0x44 };
    let mut src = inserted(2, source_tags);
    let update = |source, destination, src: &[u8]| {
        let mut dif = Dif { source, destination, source_tags, destination_tags, ..Dif::default() };
        let (dst, wrong) = run(&mut dif, (BLOCK + FIELD, BLOCK + FIELD), src);
        assert_eq!((wrong, dif.source_tags.reference), (None, 0x13));
        assert_eq!(dst[..BLOCK], src[..BLOCK]);
        Field::read(&dst[BLOCK + FIELD + BLOCK..])
    };
    let old = Field::read(&src[BLOCK + FIELD + BLOCK..]);
    let new = Field { guard: old.guard, application: 0x44, reference: 0x34 };
    assert_eq!(update(NONE, DestinationFlags::empty(), &src), new);
    let two = DestinationFlags::PASS_APPLICATION | DestinationFlags::PASS_GUARD;
    assert_eq!(update(NONE, two, &src), Field { reference: 0x34, ..old });
    assert_eq!(update(NONE, DestinationFlags::PASS_REFERENCE, &src).reference, 0x12);
    src[BLOCK + FIELD] ^= 1;
    let unchecked = SourceFlags::NO_GUARD_CHECK;
    assert_eq!(update(unchecked, DestinationFlags::PASS_GUARD, &src).guard, old.guard);
    assert_ne!(update(unchecked, DestinationFlags::empty(), &src).guard, old.guard);
}

proptest! {
    #[test]
    fn inserted_fields_check_and_strip(
        data in prop::collection::vec(any::<u8>(), 4104 * 3), flags in 0..16_u8,
        reference: u32, mask: u16, application: u16, tag_types in 0..4_u8,
    ) {
        let flags = DifFlags::from_bits_retain(flags);
        let block = flags.block();
        let src = &data[..block * 3];
        let seeds = Tags { reference, mask, application };
        let types = (tag_types & 1) << 7 | (tag_types & 2) << 3;
        let fresh = Dif {
            flags,
            source: SourceFlags::from_bits_retain(types),
            destination: DestinationFlags::from_bits_retain(types),
            source_tags: seeds,
            destination_tags: seeds,
        };
        let mut dif = fresh;
        let mut protected = run(&mut dif, (block, block + FIELD), src).0;
        let mut back = fresh;
        prop_assert_eq!(run(&mut back, (block + FIELD, block), &protected), (src.to_vec(), None));
        prop_assert_eq!(back.source_tags, dif.destination_tags);
        let fields = run(&mut fresh.clone(), (block, FIELD), src).0;
        for (field, with_field) in fields.chunks(FIELD).zip(protected.chunks(block + FIELD)) {
            prop_assert_eq!(field, &with_field[block..]);
        }
        protected[block / 2] ^= 1;
        let wrong = run(&mut fresh.clone(), (block + FIELD, 0), &protected).1;
        prop_assert_eq!(wrong, Some(DifMismatch::GUARD));
    }
}
