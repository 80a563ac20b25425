//! Tests with a model device that stops at any byte: the results must equal an uninterrupted execution.

use proptest::prelude::*;

use super::*;
use crate::descriptor::Opcode;
use crate::ops::Destination;
use crate::wq::OpSet;

fn queue() -> WqInfo {
    WqInfo { ops: OpSet([u64::MAX, 0, 0, 0]), ..WqInfo::default() }
}

/// Executes a descriptor up to a page fault at byte `stop`. A copy that stops at an odd byte runs backwards.
///
/// # Safety
///
/// The descriptor's memory is valid, and nothing else uses it.
unsafe fn device(descriptor: &Descriptor, stop: usize) -> Completed {
    let size = descriptor.size as usize;
    let (src, dst) = (descriptor.src, descriptor.dst);
    let done = stop.min(size);
    // SAFETY: the caller guarantees that the descriptor's memory is valid; `at` is one of its addresses.
    let bytes = |at: u64| unsafe { from_raw_parts(at as *const u8, done) };
    // SAFETY: as for `bytes`; nothing else uses the memory.
    let bytes_mut = |at: u64| unsafe { from_raw_parts_mut(at as *mut u8, done) };
    let mut record = Completed::of(Status::SUCCESS);
    if done < size {
        record =
            Completed { completed: done as u32, fault_address: src, ..Completed::of(Status::PAGE_FAULT) };
    }
    match descriptor.opcode().unwrap() {
        Opcode::MemoryMove => {
            let backwards = done < size && done % 2 == 1;
            record.result = backwards.into();
            let from = if backwards { size - done } else { 0 };
            // SAFETY: both ranges are within the descriptor's memory, which is valid as the caller guarantees.
            unsafe { std::ptr::copy((src as *const u8).add(from), (dst as *mut u8).add(from), done) };
        }
        Opcode::Fill => fill(bytes_mut(dst), src),
        Opcode::Compare => {
            if let Some(at) = compare(bytes(src), bytes(dst)) {
                record = Completed { result: 1, completed: at as u32, ..Completed::of(Status::SUCCESS) };
            }
        }
        _ => {
            let crc = crc32c::crc32c_append(descriptor.specific[0] as u32, bytes(src));
            record.specific[0] = if done > 0 { crc.into() } else { 0xdead_beef };
        }
    }
    record
}

/// The final results of an operation: the first difference and the CRC.
type Outcome = (Option<usize>, u32);

/// Runs an operation on the model device, in pieces of at most `most` bytes. The device stops after each of the given
/// bytes in turn.
fn drive(operation: &Operation<'_>, most: u64, stops: &[usize]) -> Outcome {
    operation.check().unwrap();
    assert_eq!(refusal(operation, &queue()), None);
    let mut progress = Progress::new(operation);
    let mut stops = stops.iter().copied();
    loop {
        let descriptor = progress.piece(operation, most);
        assert!(u64::from(descriptor.size) <= most, "{descriptor:?}");
        // SAFETY: the operations use memory of the tests, which is valid.
        let record = unsafe { device(&descriptor, stops.next().unwrap_or(usize::MAX)) };
        match progress.absorb(operation, descriptor.size as usize, &record) {
            Step::Done => return (progress.difference, progress.crc),
            Step::Next | Step::Faulted(_) => {}
            // SAFETY: as above.
            Step::Core(Why::PageFault { .. }) if record.result == 1 => unsafe {
                progress.finish(operation);
                return (progress.difference, progress.crc);
            },
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the results that the core alone computes.
fn by_core(operation: &Operation<'_>) -> Outcome {
    let mut progress = Progress::new(operation);
    // SAFETY: the operations use memory of the tests, which is valid.
    unsafe { progress.finish(operation) };
    (progress.difference, progress.crc)
}

/// Returns an operation, selected by `which`, on two sources and a destination.
fn operations<'a>([src, other]: [&'a [u8]; 2], dst: &'a mut [u8], which: usize) -> Operation<'a> {
    let (src, dst) = (Source::from(src), Destination::from(dst));
    match which {
        0 => Operation::Copy { src, dst },
        1 => Operation::Fill { pattern: 0x1122_3344_5566_7788, dst },
        2 => Operation::Compare { first: src, second: other.into() },
        3 => Operation::Compare { first: src, second: src },
        _ => Operation::Crc { src, seed: 7 },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn stopped_operation_ends_the_same(
        len in 1..20_000_usize, most in 5_000..12_000_u64,
        stops in prop::collection::vec(prop_oneof![Just(0), 0..9_000_usize], 0..6),
        differs: prop::sample::Index, seed: u8,
    ) {
        let src: Vec<u8> = (0..len).map(|at| (at * 31 + at / 256) as u8 ^ seed).collect();
        let mut other = src.clone();
        other[differs.index(len)..].iter_mut().for_each(|byte| *byte ^= 4);
        for which in 0..5 {
            let run = |by: &dyn Fn(&Operation<'_>) -> Outcome| {
                let mut dst = vec![0; len];
                (by(&operations([&src, &other], &mut dst, which)), dst)
            };
            let by_device = run(&|operation| drive(operation, most, &stops));
            prop_assert!(by_device == run(&by_core), "operation {which}: {:?}", by_device.0);
        }
    }

    #[test]
    fn core_makes_overlapping_copies(
        len in 1..5_000_usize, from in 0..3_000_usize, to in 0..3_000_usize,
    ) {
        let mut bytes: Vec<u8> = (0..8_000_u32).map(|at| (at * 31 + at / 256) as u8).collect();
        let mut expected = bytes.clone();
        expected.copy_within(from..from + len, to);
        by_core(&copy(bytes.as_mut_ptr(), from, to, len));
        prop_assert_eq!(bytes, expected);
    }
}

/// Returns a copy within the memory at `base`.
fn copy(base: *mut u8, from: usize, to: usize, len: usize) -> Operation<'static> {
    // SAFETY: the tests' memory is larger, and nothing else uses it meanwhile.
    unsafe {
        let src = Source::new(base.wrapping_add(from), len);
        Operation::Copy { src, dst: Destination::new(base.wrapping_add(to), len) }
    }
}

#[test]
fn unsupported_operations_run_on_core() {
    let mut memory = vec![0; 20_000];
    let wq = queue();
    let base = memory.as_mut_ptr();
    assert_eq!(refusal(&copy(base, 0, 63, 64), &wq), Some(Why::Overlap));
    assert_eq!(refusal(&copy(base, 63, 0, 64), &wq), Some(Why::Overlap));
    assert_eq!(refusal(&copy(base, 0, 64, 64), &wq), None);
    let less = WqInfo { ops: wq.ops.without(Opcode::MemoryMove), ..wq.clone() };
    assert_eq!(refusal(&copy(base, 0, 64, 64), &less), Some(Why::Unsupported));
}

#[test]
fn core_repeats_failed_piece() {
    let mut memory = [1_u8; 256];
    let operation = copy(memory.as_mut_ptr(), 0, 128, 64);
    let after = |status, completed| {
        Progress::new(&operation).absorb(&operation, 64, &Completed { completed, ..Completed::of(status) })
    };
    assert_eq!(after(Status::HARDWARE, 10), Step::Core(Why::Failed(Status::HARDWARE)));
    assert_eq!(after(Status::MISALIGNED, 10), Step::Core(Why::Refused(Status::MISALIGNED)));
    assert_eq!(after(Status::TRANSLATION, 10), Step::Core(Why::Failed(Status::TRANSLATION)));
    assert_eq!(after(Status::PAGE_FAULT, 65), Step::Core(Why::Failed(Status::PAGE_FAULT)), "65 of 64");
}

/// Descriptors according to section 8.3, written by hand.
#[test]
fn descriptors_match_byte_for_byte() {
    const SRC: [u8; 8] = [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
    const DST: [u8; 8] = [0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28];
    const SIZE: [u8; 4] = [0x31, 0x32, 0x33, 0x34];
    let len = u32::from_le_bytes(SIZE) as usize;
    // SAFETY: the memory is never accessed.
    let src = |at| unsafe { Source::new(u64::from_le_bytes(at) as *const u8, len) };
    // SAFETY: as for `src`.
    let dst = |at| unsafe { Destination::new(u64::from_le_bytes(at) as *mut u8, len) };
    let is = |operation: Operation<'_>, code: u8, flags: u8, fields: &[(usize, &[u8])]| {
        let mut bytes = [0; 64];
        (bytes[6], bytes[7]) = (flags, code);
        bytes[32..36].copy_from_slice(&SIZE);
        for (at, value) in fields {
            bytes[*at..at + value.len()].copy_from_slice(value);
        }
        assert_eq!(Progress::new(&operation).piece(&operation, u64::MAX).bytes(), &bytes, "{operation:?}");
    };
    is(Operation::Copy { src: src(SRC), dst: dst(DST) }, 0x03, 0, &[(16, &SRC), (24, &DST)]);
    let fill = Operation::Fill { pattern: u64::from_le_bytes(SRC), dst: dst(DST) };
    is(fill, 0x04, 0, &[(16, &SRC), (24, &DST)]);
    is(Operation::Compare { first: src(SRC), second: src(DST) }, 0x05, 0, &[(16, &SRC), (24, &DST)]);
    let crc = Operation::Crc { src: src(SRC), seed: 0x0102_0304 };
    is(crc, 0x10, 0, &[(16, &SRC), (40, &[4, 3, 2, 1])]);
}
