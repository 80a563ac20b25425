//! C.6, 6 and 7: partial completion, overlap and sizes.

use crate::rig::*;
use offcore_dsa::config::DeviceCapabilities;
use offcore_dsa::sim::{Faults, SimOptions};
use offcore_dsa::wq::gen_cap;
use offcore_dsa::{Descriptor, Flags, Opcode, Status};

#[test]
fn rule_6_fault_stops_at_the_page() {
    let mut rig = Rig::plain();
    let data = pattern(1000, 3);
    // The second page is not accessible, or not writable.
    for (protection, write, before) in
        [(libc::PROT_NONE, false, 300), (libc::PROT_NONE, true, 77), (libc::PROT_READ, true, 0)]
    {
        let pages = Pages::protected(2, 1..2, protection);
        let mut dst = vec![0; 1000];
        let at = pages.at(4096 - before);
        let (from, to) = match write {
            true => (data.as_ptr() as u64, at),
            false => (at, dst.as_mut_ptr() as u64),
        };
        pages.put(4096 - before, &data[..before]);
        let record = rig.run(operation(Opcode::MemoryMove, from, to, 1000));
        assert_eq!((record.status, record.completed, record.result), (Status::PAGE_FAULT, before as u32, 0));
        assert_eq!((record.fault_was_write, record.fault_address & !0xfff), (write, pages.at(4096)));
        let copied = if write { pages.bytes(4096 - before, before) } else { dst[..before].to_vec() };
        assert!(copied == data[..before] && dst[before..].iter().all(|&byte| byte == 0));
    }
}

/// Continues after every page fault as the specification describes, until the copy is complete. Returns the directions.
fn resume(rig: &mut Rig, mut descriptor: Descriptor) -> [usize; 2] {
    let mut directions = [0; 2];
    loop {
        let record = rig.run(descriptor);
        if record.status == Status::SUCCESS {
            return directions;
        }
        assert_eq!(record.status, Status::PAGE_FAULT);
        assert!(record.completed < descriptor.size);
        directions[usize::from(record.result)] += 1;
        if record.result == 0 {
            descriptor.src += u64::from(record.completed);
            descriptor.dst += u64::from(record.completed);
        }
        descriptor.size -= record.completed;
    }
}

#[test]
fn rule_6_partial_copy_resumes_both_ways() {
    let faults = Faults { page: 0.6, ..Faults::default() };
    let mut rig = Rig::new(SimOptions { faults, ..options(layout(&[dedicated()], 1)) });
    let mut directions = [0; 2];
    for round in 0..60 {
        let src = pattern(5000, round);
        let mut dst = vec![0; 5000];
        let seen = resume(&mut rig, copy(&src, &mut dst));
        assert_eq!(dst, src);
        directions = [directions[0] + seen[0], directions[1] + seen[1]];
    }
    assert!(directions[0] > 10 && directions[1] > 10, "{directions:?}");
}

#[test]
fn rule_6_block_on_fault_resumes() {
    let faults = Faults { page: 1.0, ..Faults::default() };
    let mut rig = Rig::new(SimOptions { faults, ..options(layout(&[dedicated()], 1)) });
    let (src, mut dst) = (pattern(5000, 1), vec![0; 5000]);
    let before = rig.engine.now();
    let record = rig.run(copy(&src, &mut dst).with_flags(Flags::BLOCK_ON_FAULT));
    assert_eq!((record.status, &dst), (Status::SUCCESS, &src));
    assert!(rig.engine.now() - before > 50_000, "a page fault takes tens of microseconds");
    assert_eq!(rig.device.stats().injected_page_faults, 1);
}

#[test]
fn rule_6_hopeless_page_is_invalid_request() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(2, 1..2);
    let mut dst = vec![0; 500];
    let descriptor = operation(Opcode::MemoryMove, pages.at(4096 - 99), dst.as_mut_ptr() as u64, 500)
        .with_flags(Flags::BLOCK_ON_FAULT);
    let record = rig.run(descriptor);
    assert_eq!((record.status, record.completed), (Status::PAGE_REQUEST_INVALID, 99));
}

#[test]
fn rule_6_block_on_fault_needs_the_queue() {
    let wq = offcore_dsa::config::WqConfig { block_on_fault: false, ..dedicated() };
    let mut rig = Rig::new(options(layout(&[wq], 1)));
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let record = rig.run(copy(&src, &mut dst).with_flags(Flags::BLOCK_ON_FAULT));
    assert_eq!(record.status, Status::INVALID_FLAGS);
    assert_eq!(record.specific[0] as u32, Flags::BLOCK_ON_FAULT.bits());
}

#[test]
fn rule_7_overlap_is_as_if_buffered() {
    let mut rig = Rig::plain();
    for (from, to) in [(0, 100), (100, 0), (0, 1), (1, 0), (5, 5)] {
        let mut bytes = pattern(1200, 9);
        let expected = bytes[from..from + 1000].to_vec();
        let base = bytes.as_mut_ptr() as u64;
        let record = rig.run(operation(Opcode::MemoryMove, base + from as u64, base + to as u64, 1000));
        assert_eq!(record.status, Status::SUCCESS);
        assert_eq!(bytes[to..to + 1000], expected, "{from} to {to}");
    }
}

#[test]
fn rule_7_stopped_overlap_has_a_direction() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(3, 0..1);
    let data = pattern(4096, 4);
    pages.put(4096, &data);
    // The source begins 200 bytes before the first accessible page; the copy begins at its end.
    let descriptor = operation(Opcode::MemoryMove, pages.at(4096 - 200), pages.at(4096 - 100), 1200);
    let record = rig.run(descriptor);
    assert_eq!((record.status, record.result, record.completed), (Status::PAGE_FAULT, 1, 1000));
    assert_eq!(pages.bytes(4096 + 100, 1000), data[..1000]);
}

#[test]
fn rule_7_overlap_needs_its_capability() {
    let capabilities = DeviceCapabilities {
        gen_cap: DeviceCapabilities::spr().gen_cap & !gen_cap::OVERLAP,
        ..DeviceCapabilities::spr()
    };
    let mut rig =
        Rig::new(SimOptions { capabilities: Some(capabilities), ..options(layout(&[dedicated()], 1)) });
    let mut bytes = pattern(1200, 9);
    let base = bytes.as_mut_ptr() as u64;
    let record = rig.run(operation(Opcode::MemoryMove, base, base + 100, 1000));
    assert_eq!(record.status, Status::OVERLAP);
    assert_eq!(bytes, pattern(1200, 9));
    assert_eq!(rig.run(operation(Opcode::MemoryMove, base, base + 600, 600)).status, Status::SUCCESS);
}

#[test]
fn rule_7_no_bytes_or_too_many_are_refused() {
    let mut rig = Rig::plain();
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let whole = copy(&src, &mut dst);
    assert_eq!(rig.run(Descriptor { size: 0, ..whole }).status, Status::BAD_TRANSFER_SIZE);
    assert_eq!(rig.run(Descriptor { size: (2 << 20) + 1, ..whole }).status, Status::BAD_TRANSFER_SIZE);
    assert_eq!(dst, [0; 64]);
}

#[test]
fn rule_7_one_of_several_errors_is_told() {
    let mut rig = Rig::plain();
    let wrong = Descriptor { size: 0, reserved: 7, interrupt: 3, ..operation(Opcode::MemoryMove, 1, 1, 0) };
    assert!(is_error(&rig.run(wrong.with_flags(Flags::FENCE | Flags::CACHE_CONTROL_3))));
}
