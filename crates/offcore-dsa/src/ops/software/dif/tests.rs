use super::*;
use proptest::prelude::*;

const BLOCK: usize = 512;

fn blocks(count: usize) -> Vec<u8> {
    (0..count * BLOCK).map(|at| (at * 7 + at / 251) as u8).collect()
}

fn inserted(count: usize, flags: DestinationFlags, mut tags: Tags) -> Vec<u8> {
    let mut dst = vec![0; count * (BLOCK + FIELD)];
    insert(DifFlags::empty(), flags, &mut tags, &blocks(count), &mut dst);
    dst
}

/// What checking `src` says of its first block that is wrong.
fn verdict(flags: SourceFlags, mut tags: Tags, src: &[u8]) -> Option<Mismatch> {
    check(DifFlags::empty(), flags, &mut tags, src).err().map(|error| error.mismatch)
}

#[test]
fn block_sizes_have_their_codes() {
    for (bits, size) in [(0, 512), (1, 520), (2, 4096), (3, 4104)] {
        assert_eq!(DifFlags::from_bits_retain(bits).block(), size);
        let flags = DifFlags::INVERT_SEED.with_block(size).unwrap();
        assert_eq!(flags.bits(), bits | 4);
    }
    assert_eq!(DifFlags::default().with_block(1024), None);
}

#[test]
fn a_field_is_in_network_order() {
    let tags = Tags { reference: 0x0102_0304, mask: 0x00f0, application: 0xabcd };
    let dst = inserted(2, DestinationFlags::empty(), tags);
    let guard = t10(&blocks(2)[..BLOCK], 0).to_be_bytes();
    assert_eq!(dst[BLOCK..BLOCK + FIELD], [guard[0], guard[1], 0xab, 0x0d, 1, 2, 3, 4]);
    assert_eq!(dst[BLOCK * 2 + FIELD + 2..], [0xab, 0x0d, 1, 2, 3, 5]);
    let mut fields = [0; 16];
    let mut left = tags;
    let flags = DestinationFlags::APPLICATION_INCREMENTS | DestinationFlags::REFERENCE_FIXED;
    generate(DifFlags::empty(), flags, &mut left, &blocks(2), &mut fields);
    assert_eq!(fields[..2], guard);
    assert_eq!(fields[10..], [0xab, 0x0e, 1, 2, 3, 4]);
    assert_eq!(left, Tags { application: 0xabcf, ..tags });
}

#[test]
fn a_guard_of_zeros_and_its_inversions_are_known() {
    let guard = |flags: DifFlags| flags.guard(&[0; BLOCK]);
    assert_eq!(guard(DifFlags::empty()), 0);
    assert_eq!(guard(DifFlags::INVERT_RESULT), 0xffff);
    let mut first = [0; BLOCK];
    first[..2].fill(0xff);
    assert_eq!(guard(DifFlags::INVERT_SEED), t10(&first, 0), "the seed is in the first 16 bits");
    assert_eq!(guard(DifFlags::INVERT_SEED | DifFlags::INVERT_RESULT), !t10(&first, 0));
}

#[test]
fn tags_stand_in_descriptors_little_endian() {
    let tags = Tags::from_word(u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]));
    assert_eq!(tags, Tags { reference: 0x0403_0201, mask: 0x0605, application: 0x0807 });
    assert_eq!(Tags::from_word(tags.word()), tags);
}

#[test]
fn every_tag_is_checked_and_may_be_left_out() {
    let tags = Tags { reference: 9, mask: 0, application: 5 };
    let good = inserted(1, DestinationFlags::empty(), tags);
    let none = SourceFlags::empty();
    assert_eq!(verdict(none, tags, &good), None);
    let mut bad = good.clone();
    bad[100] ^= 1;
    assert_eq!(verdict(none, tags, &bad), Some(Mismatch::GUARD));
    assert_eq!(verdict(SourceFlags::NO_GUARD_CHECK, tags, &bad), None);
    let other = Tags { reference: 10, ..tags };
    assert_eq!(verdict(none, other, &good), Some(Mismatch::REFERENCE));
    assert_eq!(verdict(SourceFlags::NO_REFERENCE_CHECK, other, &good), None);
    let other = Tags { application: 7, ..tags };
    assert_eq!(verdict(none, other, &good), Some(Mismatch::APPLICATION));
    assert_eq!(verdict(none, Tags { mask: 2, ..other }, &good), None);
    let other = Tags { application: 0, reference: 0, ..tags };
    assert_eq!(verdict(none, other, &bad), Some(Mismatch::all() & Mismatch::from_bits_retain(7)));
    assert_eq!(
        verdict(
            SourceFlags::NO_GUARD_CHECK | SourceFlags::NO_REFERENCE_CHECK,
            Tags { mask: 0xffff, ..other },
            &bad
        ),
        None
    );
}

#[test]
fn fields_of_ones_are_detected() {
    let tags = Tags::default();
    let mut src = inserted(1, DestinationFlags::empty(), tags);
    let wrong = Mismatch::GUARD | Mismatch::APPLICATION | Mismatch::REFERENCE;
    src[BLOCK..].fill(0xff);
    assert_eq!(verdict(SourceFlags::empty(), tags, &src), Some(wrong));
    assert_eq!(verdict(SourceFlags::ALL_F_ERROR, tags, &src), Some(wrong), "ignored without detection");
    assert_eq!(verdict(SourceFlags::ALL_F_DETECT, tags, &src), None);
    let both = SourceFlags::ALL_F_DETECT | SourceFlags::ALL_F_ERROR | SourceFlags::APPLICATION_F_DETECT;
    assert_eq!(verdict(both, tags, &src), Some(Mismatch::ALL_F));
    src[BLOCK] = 0;
    assert_eq!(verdict(SourceFlags::ALL_F_DETECT, tags, &src), Some(wrong), "the guard is not all ones");
    assert_eq!(verdict(SourceFlags::BOTH_F_DETECT, tags, &src), None);
    src[BLOCK + 7] = 0;
    assert_eq!(verdict(SourceFlags::BOTH_F_DETECT, tags, &src), Some(wrong));
    assert_eq!(verdict(SourceFlags::APPLICATION_F_DETECT, tags, &src), None);
}

#[test]
fn an_error_names_the_bytes_before_it_and_nothing_after_is_written() {
    let tags = Tags::default();
    let mut src = inserted(3, DestinationFlags::empty(), tags);
    src[(BLOCK + FIELD) + 3] ^= 0x10;
    let error = DifError { mismatch: Mismatch::GUARD, completed: BLOCK + FIELD };
    let mut dst = vec![0xee; 3 * BLOCK];
    let mut left = tags;
    let stripped = strip(DifFlags::empty(), SourceFlags::empty(), &mut left, &src, &mut dst);
    assert_eq!((stripped, left.reference), (Err(error), 1));
    assert_eq!(dst[..BLOCK], blocks(1)[..]);
    assert!(dst[BLOCK..].iter().all(|&byte| byte == 0xee));
    assert!(error.to_string().contains("byte 520") && error.to_string().contains("GUARD"));
}

#[test]
fn an_update_replaces_what_is_not_passed_through() {
    let tags = Tags { reference: 0x11, mask: 0, application: 0x22 };
    let src = inserted(2, DestinationFlags::empty(), tags);
    let new = Tags { reference: 0x33, mask: 0, application: 0x44 };
    let update = |destination| {
        let (mut source_tags, mut new) = (tags, new);
        let mut dst = vec![0; src.len()];
        let update = Update { destination, ..Update::default() };
        update.run(&mut source_tags, &mut new, &src, &mut dst).unwrap();
        assert_eq!(source_tags.reference, 0x13);
        assert_eq!(dst[..BLOCK], src[..BLOCK]);
        Field::read(&dst[BLOCK + FIELD + BLOCK..])
    };
    let old = Field::read(&src[BLOCK + FIELD + BLOCK..]);
    assert_eq!(
        update(DestinationFlags::empty()),
        Field { guard: old.guard, application: 0x44, reference: 0x34 }
    );
    let all = DestinationFlags::PASS_APPLICATION | DestinationFlags::PASS_GUARD;
    assert_eq!(update(all), Field { reference: 0x34, ..old });
    assert_eq!(update(DestinationFlags::PASS_REFERENCE).reference, 0x12);

    let mut damaged = src.clone();
    damaged[0] ^= 1;
    let pass = Update {
        source: SourceFlags::NO_GUARD_CHECK,
        destination: DestinationFlags::PASS_GUARD,
        ..Update::default()
    };
    let mut dst = vec![0; src.len()];
    pass.run(&mut tags.clone(), &mut new.clone(), &damaged, &mut dst).unwrap();
    assert_eq!(Field::read(&dst[BLOCK..]).guard, Field::read(&src[BLOCK..]).guard);
}

proptest! {
    #[test]
    fn what_is_inserted_checks_and_strips_in_any_chunks(
        data in prop::collection::vec(any::<u8>(), 4104 * 3),
        size in 0..4_u8, invert in 0..4_u8, cut in 0..4_usize,
        reference: u32, mask: u16, application: u16, tag_types in 0..4_u8,
    ) {
        let dif = DifFlags::from_bits_retain(size | invert << 2);
        let block = dif.block();
        let src = &data[..block * 3];
        let seeds = Tags { reference, mask, application };
        let (mut to, mut from) = (DestinationFlags::empty(), SourceFlags::empty());
        to.set(DestinationFlags::REFERENCE_FIXED, tag_types & 1 != 0);
        from.set(SourceFlags::REFERENCE_FIXED, tag_types & 1 != 0);
        to.set(DestinationFlags::APPLICATION_INCREMENTS, tag_types & 2 != 0);
        from.set(SourceFlags::APPLICATION_INCREMENTS, tag_types & 2 != 0);

        let mut protected = vec![0; (block + FIELD) * 3];
        let mut whole = seeds;
        insert(dif, to, &mut whole, src, &mut protected);
        let (mut parts, mut chunked) = (seeds, vec![0; protected.len()]);
        let (head, tail) = chunked.split_at_mut((block + FIELD) * cut.min(3));
        insert(dif, to, &mut parts, &src[..block * cut.min(3)], head);
        insert(dif, to, &mut parts, &src[block * cut.min(3)..], tail);
        prop_assert_eq!((parts, &chunked), (whole, &protected));

        let mut tags = seeds;
        prop_assert_eq!(check(dif, from, &mut tags, &protected), Ok(()));
        prop_assert_eq!(tags, whole);
        let mut stripped = vec![0; src.len()];
        tags = seeds;
        prop_assert_eq!(strip(dif, from, &mut tags, &protected, &mut stripped), Ok(()));
        prop_assert_eq!(&stripped, src);
        let mut fields = [0; FIELD * 3];
        generate(dif, to, &mut seeds.clone(), src, &mut fields);
        for (field, with_field) in fields.chunks(FIELD).zip(protected.chunks(block + FIELD)) {
            prop_assert_eq!(field, &with_field[block..]);
        }
        protected[block / 2] ^= 1;
        prop_assert_eq!(
            check(dif, from, &mut seeds.clone(), &protected),
            Err(DifError { mismatch: Mismatch::GUARD, completed: 0 })
        );
    }
}
