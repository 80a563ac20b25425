//! A device that stops wherever a test wants it to, and operations that end as if it had not.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use proptest::prelude::*;

use super::*;
use crate::descriptor::{Flags, Opcode};
use crate::ops::software::dif::{self, DestinationFlags, DifFlags, SourceFlags, Update};
use crate::ops::software::{Crc, delta};
use crate::wq::OpSet;

fn queue(max_transfer_size: u64) -> WqInfo {
    WqInfo {
        name: "wq0.0".into(),
        mode: Default::default(),
        size: 8,
        threshold: 8,
        max_batch_size: 32,
        max_transfer_size,
        block_on_fault: false,
        ops: OpSet([u64::MAX, 0, 0, 0]),
        gen_cap: gen_cap::OVERLAP | FILL_16,
        version: 0x200,
        engines: 1,
        numa_node: None,
    }
}

/// Does what a descriptor asks for, or stops at a page fault before the byte `stop`.
///
/// # Safety
///
/// The descriptor's memory is valid and nobody else uses it.
unsafe fn device(descriptor: &Descriptor, stop: usize) -> Completed {
    let size = descriptor.size as usize;
    let [first, second, third] = descriptor.specific;
    // SAFETY: as for this function; `at` is an address of the descriptor, `len` its length.
    let bytes = |at: u64, len: usize| unsafe { from_raw_parts(at as *const u8, len) };
    // SAFETY: as above.
    let bytes_mut = |at: u64, len: usize| unsafe { from_raw_parts_mut(at as *mut u8, len) };
    let (src, dst) = (descriptor.src, descriptor.dst);
    let opcode = descriptor.opcode().unwrap();
    let whole = if opcode == Opcode::ApplyDelta { first as usize } else { size };
    let dif = DifFlags::from_bits_retain((first >> 16) as u8);
    let source_flags = SourceFlags::from_bits_retain(first as u8);
    let destination_flags = DestinationFlags::from_bits_retain((first >> 8) as u8);
    let step = match opcode {
        Opcode::CreateDelta => 8,
        Opcode::ApplyDelta => 10,
        Opcode::DifInsert | Opcode::DixGenerate => dif.block(),
        Opcode::DifCheck | Opcode::DifStrip | Opcode::DifUpdate => dif.block() + FIELD,
        _ => 1,
    };
    let done = (stop / step * step).min(whole);
    let mut record = Completed::of(Status::SUCCESS);
    if done < whole {
        record =
            Completed { completed: done as u32, fault_address: src, ..Completed::of(Status::PAGE_FAULT) };
    }
    let (mut tags, mut other) = (Tags::from_word(second), Tags::from_word(third));
    let checked = match opcode {
        Opcode::MemoryMove => {
            let backwards = dst > src && dst < src + size as u64;
            record.result = (backwards && done < whole).into();
            let from = if backwards { size - done } else { 0 };
            // SAFETY: as for this function.
            unsafe { std::ptr::copy((src as *const u8).add(from), (dst as *mut u8).add(from), done) };
            Ok(())
        }
        Opcode::Fill => {
            let wide = descriptor.flags().contains(Flags::OP_2);
            let pattern = if wide { Pattern::of_16(src, first) } else { Pattern::of_8(src) };
            software::fill(bytes_mut(dst, done), pattern, 0);
            Ok(())
        }
        Opcode::Compare | Opcode::ComparePattern => {
            let difference = match opcode {
                Opcode::Compare => software::compare(bytes(src, done), bytes(dst, done)),
                // No greater than the first difference, but not always exact.
                _ => {
                    software::compare_pattern(bytes(src, done), Pattern::of_8(dst), 0).map(|at| at / 32 * 32)
                }
            };
            if let Some(at) = difference {
                record = Completed { result: 1, completed: at as u32, ..Completed::of(Status::SUCCESS) };
            }
            Ok(())
        }
        Opcode::CreateDelta => {
            let memory = bytes_mut(first, second as usize);
            let created = delta::create(bytes(src, done), bytes(dst, done), 0, memory);
            record.result = (created.record > 0).into();
            record.specific[0] = created.record as u64;
            if !created.complete {
                (record.status, record.result) = (Status::SUCCESS, 2);
                record.completed = created.compared as u32;
            }
            Ok(())
        }
        Opcode::ApplyDelta => {
            delta::apply(bytes(src, done), bytes_mut(dst, size)).unwrap();
            Ok(())
        }
        Opcode::Dualcast => {
            software::dualcast(bytes(src, done), bytes_mut(dst, done), bytes_mut(first, done));
            Ok(())
        }
        Opcode::CrcGeneration | Opcode::CopyCrc => {
            let crc = Crc::from_flags(descriptor.flags()).of(bytes(src, done), first as u32);
            record.specific[0] = if done > 0 { crc.into() } else { 0xdead_beef };
            if opcode == Opcode::CopyCrc {
                bytes_mut(dst, done).copy_from_slice(bytes(src, done));
            }
            Ok(())
        }
        Opcode::DifCheck => dif::check(dif, source_flags, &mut tags, bytes(src, done)),
        Opcode::DifStrip => {
            let dst = bytes_mut(dst, done / step * dif.block());
            dif::strip(dif, source_flags, &mut tags, bytes(src, done), dst)
        }
        Opcode::DifUpdate => {
            let update = Update { dif, source: source_flags, destination: destination_flags };
            update.run(&mut tags, &mut other, bytes(src, done), bytes_mut(dst, done))
        }
        Opcode::DifInsert => {
            let dst = bytes_mut(dst, done / step * (step + FIELD));
            dif::insert(dif, destination_flags, &mut other, bytes(src, done), dst);
            Ok(())
        }
        Opcode::DixGenerate => {
            dif::generate(
                dif,
                destination_flags,
                &mut other,
                bytes(src, done),
                bytes_mut(dst, done / step * FIELD),
            );
            Ok(())
        }
        _ => Ok(()),
    };
    if step >= 512 {
        record.specific = [tags.word(), other.word()];
    }
    if let Err(error) = checked {
        record = Completed {
            result: error.mismatch.bits(),
            completed: error.completed as u32,
            ..Completed::of(Status::DIF_ERROR)
        };
    }
    record
}

/// Runs an operation on the device above, which stops after each of these bytes in turn.
fn drive(operation: &Operation, wq: &WqInfo, stops: &[usize]) -> (Result<Value, OpsError>, Option<Why>) {
    operation.check().unwrap();
    let mut progress = Progress::new(operation);
    let mut stops = stops.iter().copied();
    let why = loop {
        let (descriptor, len) = match progress.piece(operation, wq) {
            Ok(piece) => piece,
            Err(why) => break why,
        };
        assert!(u64::from(descriptor.size) <= wq.max_transfer_size, "{descriptor:?}");
        // SAFETY: the tests' operations are about memory of theirs.
        let step = unsafe {
            let record = device(&descriptor, stops.next().unwrap_or(usize::MAX));
            progress.absorb(operation, len, &record)
        };
        match step {
            Step::Done(value) => return (Ok(value), None),
            Step::Failed(error) => return (Err(error), None),
            Step::Next | Step::Faulted(_) => {}
            Step::Core(why) => break why,
        }
    };
    // SAFETY: as above.
    (unsafe { progress.finish(operation) }, Some(why))
}

/// What the core alone says.
fn by_core(operation: &Operation) -> Result<Value, OpsError> {
    // SAFETY: as above.
    unsafe { Progress::new(operation).finish(operation) }
}

/// Memory that begins where a test wants it to, modulo 4096.
#[derive(Clone)]
struct Memory(Vec<u64>, usize);

impl Memory {
    fn new(len: usize, seed: u64) -> Self {
        let mut state = seed | 1;
        let words = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            state >> 7
        });
        let vec: Vec<u64> = words.take((len + 4096) / 8 + 2).collect();
        let offset = vec.as_ptr().align_offset(4096) * 8;
        let offset = if offset > 4096 { 0 } else { offset };
        Self(vec, offset % 4096)
    }

    fn dst(&mut self, len: usize) -> super::super::Destination {
        let bytes = self.0.as_mut_ptr().cast::<u8>().wrapping_add(self.1);
        super::super::Destination::new(bytes, len)
    }

    fn bytes(&self, len: usize) -> &[u8] {
        // SAFETY: the vector is longer than the page it is aligned to and `len`.
        unsafe { from_raw_parts(self.0.as_ptr().cast::<u8>().add(self.1), len) }
    }
}

/// Every operation on memory of its own: `src` and `other` to read, `dst` and `dst2` to write.
fn operations(
    len: usize,
    [src, other, dst, dst2]: [&mut Memory; 4],
    size: u8,
    tag_types: u8,
) -> Vec<Operation> {
    let dif = DifFlags::from_bits_retain(size & 3);
    let (block, with_field) = (dif.block(), dif.block() + FIELD);
    let blocks = len / with_field;
    let tags = Tags { reference: 0xffff_ffff, mask: 0xf0, application: 0xfffe };
    let (mut to, mut from) = (DestinationFlags::empty(), SourceFlags::empty());
    to.set(DestinationFlags::REFERENCE_FIXED, tag_types & 1 != 0);
    from.set(SourceFlags::REFERENCE_FIXED, tag_types & 1 != 0);
    to.set(DestinationFlags::APPLICATION_INCREMENTS, tag_types & 2 != 0);
    from.set(SourceFlags::APPLICATION_INCREMENTS, tag_types & 2 != 0);
    let crc = Crc { bypass_inversion: tag_types & 1 != 0, bypass_reflection: tag_types & 2 != 0 };
    let wide = Pattern::of_16(0x0102_0304_0506_0708, u64::from(tag_types) << 60 | 0x0102_0304_0506_0708);
    let eights = len / 8 * 8;

    // Fields that are right, in `other`.
    let mut seeds = tags;
    let data = src.bytes(blocks * block).to_vec();
    let protected = other.dst(blocks * with_field);
    // SAFETY: `protected` is all of `other`'s memory that is used.
    dif::insert(dif, to, &mut seeds, &data, unsafe { from_raw_parts_mut(protected.ptr, protected.len) });

    let s = src.dst(len).as_source();
    let at = |source: super::super::Source, len| super::super::Source::new(source.ptr, len);
    let d = dst.dst(len);
    vec![
        Operation::Copy { src: s, dst: d },
        Operation::Fill { pattern: Pattern::of_8(0x1122_3344_5566_7788), dst: d },
        Operation::Fill { pattern: wide, dst: d },
        Operation::Compare { first: s, second: other.dst(len).as_source() },
        Operation::Compare { first: s, second: s },
        Operation::ComparePattern { src: s, pattern: 5 },
        Operation::CreateDelta {
            original: at(s, eights),
            changed: at(other.dst(0).as_source(), eights),
            record: dst2.dst(eights / 8 * 10),
        },
        Operation::CreateDelta {
            original: at(s, eights),
            changed: at(other.dst(0).as_source(), eights),
            record: dst2.dst(eights / 8 * 6),
        },
        Operation::Dualcast { src: s, first: d, second: dst2.dst(len) },
        Operation::Crc { src: s, crc, seed: 7 },
        Operation::CopyCrc { src: s, dst: d, crc, seed: 0 },
        Operation::DifCheck { src: protected.as_source(), dif, flags: from, tags },
        Operation::DifCheck { src: protected.as_source(), dif, flags: from, tags: Tags::default() },
        Operation::DifInsert {
            src: at(s, blocks * block),
            dst: dst.dst(blocks * with_field),
            dif,
            flags: to,
            tags,
        },
        Operation::DifStrip {
            src: protected.as_source(),
            dst: dst.dst(blocks * block),
            dif,
            flags: from,
            tags,
        },
        Operation::DifUpdate {
            src: protected.as_source(),
            dst: dst.dst(blocks * with_field),
            update: Update { dif, source: from, destination: to },
            source: tags,
            destination: Tags::default(),
        },
        Operation::DixGenerate {
            src: at(s, blocks * block),
            dst: dst.dst(blocks * FIELD),
            dif,
            flags: to,
            tags,
        },
        Operation::CacheFlush { dst: d },
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_operation_that_stops_anywhere_ends_as_if_it_had_not(
        len in 1..20_000_usize, max_transfer in 5_000..12_000_u64,
        stops in prop::collection::vec(0..9_000_usize, 0..6),
        size: u8, tag_types in 0..4_u8, seed: u64,
    ) {
        let mut memory = [0, 1, 2, 3].map(|n| Memory::new(len * 2 + 8192, seed ^ n));
        let fresh = memory.clone();
        let [src, other, dst, dst2] = &mut memory;
        let list = operations(len, [src, other, dst, dst2], size, tag_types);
        for operation in list {
            if operation.len() == 0 {
                continue;
            }
            let whole = len * 2;
            let as_new = |dst: &mut Memory, dst2: &mut Memory| {
                dst.0.copy_from_slice(&fresh[2].0);
                dst2.0.copy_from_slice(&fresh[3].0);
            };
            as_new(dst, dst2);
            let expected = by_core(&operation);
            let written = [dst.bytes(whole).to_vec(), dst2.bytes(whole).to_vec()];
            as_new(dst, dst2);
            let (result, why) = drive(&operation, &queue(max_transfer), &stops);
            prop_assert!(why.is_none_or(|why| matches!(why, Why::Form(_))), "{why:?}");
            prop_assert_eq!(&result, &expected, "{:?}", operation);
            let ours = [dst.bytes(whole).to_vec(), dst2.bytes(whole).to_vec()];
            // A record that was full may have been left after a whole piece, or in it.
            let full = matches!(expected, Ok(Value::Delta(delta)) if !delta.complete);
            prop_assert!(full || ours == written, "{operation:?}");
        }
    }

    #[test]
    fn a_copy_onto_itself_is_right_in_pieces_and_after_faults_in_both_directions(
        len in 1..5_000_usize, from in 0..3_000_usize, to in 0..3_000_usize, max_transfer in 1..3_000_u64,
        stops in prop::collection::vec(0..2_000_usize, 0..6),
    ) {
        let mut bytes: Vec<u8> = (0..8_000_u32).map(|at| (at * 31 + at / 256) as u8).collect();
        let mut expected = bytes.clone();
        expected.copy_within(from..from + len, to);
        let base = bytes.as_mut_ptr();
        let operation = Operation::Copy {
            src: super::super::Source::new(base.wrapping_add(from), len),
            dst: super::super::Destination::new(base.wrapping_add(to), len),
        };
        prop_assert_eq!(drive(&operation, &queue(max_transfer), &stops), (Ok(Value::Nothing), None));
        prop_assert_eq!(bytes, expected);
    }

    #[test]
    fn a_delta_record_made_in_pieces_applies_in_pieces(
        blocks in 1..2_000_usize, max_transfer in 200..5_000_u64,
        stops in prop::collection::vec(0..3_000_usize, 0..4),
        changes in prop::collection::vec(any::<prop::sample::Index>(), 0..100),
    ) {
        let mut original = vec![0_u64; blocks];
        let mut changed = original.clone();
        changes.iter().for_each(|at| changed[at.index(blocks)] += 0x0101);
        let mut record = vec![0_u64; blocks * 2];
        let memory = |words: &mut Vec<u64>| {
            super::super::Destination::new(words.as_mut_ptr().cast(), words.len() * 8)
        };
        let operation = Operation::CreateDelta {
            original: memory(&mut original).as_source(),
            changed: memory(&mut changed).as_source(),
            record: memory(&mut record),
        };
        let (result, _) = drive(&operation, &queue(max_transfer), &stops);
        let Ok(Value::Delta(delta)) = result else { panic!("{result:?}") };
        prop_assert!(delta.complete);
        let record = super::super::Source::new(record.as_ptr().cast(), delta.size);
        let operation = Operation::ApplyDelta { record, dst: memory(&mut original) };
        if delta.size > 0 {
            prop_assert_eq!(drive(&operation, &queue(max_transfer), &stops).0, Ok(Value::Nothing));
        }
        prop_assert_eq!(original, changed);
    }
}

#[test]
fn a_device_that_cannot_do_it_is_not_asked() {
    let mut memory = vec![0_u64; 4096];
    let base = memory.as_mut_ptr().cast::<u8>();
    let src = super::super::Source::new(base, 64);
    let dst = |at: usize| super::super::Destination::new(base.wrapping_add(at), 64);
    let wq = queue(1 << 20);
    let refusal = |operation: Operation, wq: &WqInfo| Progress::new(&operation).piece(&operation, wq).err();
    let copy = Operation::Copy { src, dst: dst(8) };
    assert_eq!(refusal(copy, &wq), None);
    let plain = WqInfo { gen_cap: 0, ..wq.clone() };
    assert_eq!(refusal(copy, &plain), Some(Why::Form("a copy onto itself")));
    assert_eq!(refusal(Operation::Copy { src, dst: dst(64) }, &plain), None);
    let fill = |upper| Operation::Fill { pattern: Pattern::of_16(1, upper), dst: dst(0) };
    assert_eq!(refusal(fill(2), &wq), None);
    assert_eq!(refusal(fill(2), &plain), Some(Why::Form("a pattern of 16 bytes")));
    assert_eq!(refusal(fill(1), &plain), None, "it is a pattern of 8 bytes");
    let dualcast = |second| Operation::Dualcast { src, first: dst(4096), second: dst(second) };
    assert_eq!(refusal(dualcast(8192), &wq), None);
    let why = Why::Form("destinations whose addresses differ in bits 11:0");
    assert_eq!(refusal(dualcast(8256), &wq), Some(why));
    let less = WqInfo { ops: wq.ops.without(Opcode::Drain), ..wq.clone() };
    assert_eq!(refusal(Operation::Drain, &less), Some(Why::Unsupported));
    let small = queue(500);
    let check = Operation::DifCheck {
        src: super::super::Source::new(base, 520),
        dif: DifFlags::empty(),
        flags: SourceFlags::empty(),
        tags: Tags::default(),
    };
    assert_eq!(refusal(check, &small), Some(Why::Form("a block larger than its maximum transfer size")));
}

#[test]
fn a_device_that_fails_leaves_the_piece_to_the_core_unless_the_copy_was_onto_itself() {
    let mut memory = [1_u8; 256];
    let base = memory.as_mut_ptr();
    let copy = |to: usize| Operation::Copy {
        src: super::super::Source::new(base, 64),
        dst: super::super::Destination::new(base.wrapping_add(to), 64),
    };
    let after = |operation: &Operation, status| {
        let record = Completed { completed: 10, ..Completed::of(status) };
        // SAFETY: nothing of the memory is used for a record that is no success and no page fault.
        unsafe { Progress::new(operation).absorb(operation, 64, &record) }
    };
    assert_eq!(after(&copy(128), Status::HARDWARE), Step::Core(Why::Failed(Status::HARDWARE)));
    assert_eq!(after(&copy(32), Status::MISALIGNED), Step::Core(Why::Refused(Status::MISALIGNED)));
    let why = Why::Failed(Status::TRANSLATION);
    assert_eq!(after(&copy(32), Status::TRANSLATION), Step::Failed(OpsError::Damaged { why }));
    let absurd = Completed { completed: 65, ..Completed::of(Status::PAGE_FAULT) };
    // SAFETY: as above: the record is not believed.
    let step = unsafe { Progress::new(&copy(128)).absorb(&copy(128), 64, &absurd) };
    assert_eq!(step, Step::Core(Why::Failed(Status::PAGE_FAULT)));
}
