//! C.6, 3: batches.

use crate::rig::*;
use offcore_dsa::completion::Completed;
use offcore_dsa::{Descriptor, Flags, Opcode, Status};

fn statuses(records: &[Option<Completed>]) -> Vec<u8> {
    records.iter().map(|record| record.as_ref().map_or(0, |record| record.status.0)).collect()
}

#[test]
fn rule_3_batch_of_wrong_size_is_refused() {
    let mut rig = Rig::plain();
    let members = vec![noop(); 65];
    for count in [0, 1, 65] {
        assert_eq!(rig.run(batch(&members[..count])).status, Status::BAD_DESCRIPTOR_COUNT, "{count}");
    }
    assert_eq!(rig.run(batch(&members[..64])).status, Status::SUCCESS);
    assert_eq!(rig.run(batch(&members[..2])).status, Status::SUCCESS);
}

#[test]
fn rule_3_misaligned_list_is_refused() {
    let mut rig = Rig::plain();
    let members = vec![noop(); 4];
    let descriptor = Descriptor { src: members.as_ptr() as u64 + 32, ..batch(&members[..2]) };
    assert_eq!(rig.run(descriptor).status, Status::LIST_MISALIGNED);
}

#[test]
fn rule_3_no_batch_or_drain_in_a_batch() {
    let mut rig = Rig::plain();
    let inner = vec![noop(); 2];
    let drain = Descriptor::new(Opcode::Drain, RECORD);
    let (record, members) = rig.run_batch(&[noop(), batch(&inner), drain, noop()]);
    assert_eq!(statuses(&members), [1, 0x10, 0x10, 1]);
    assert_eq!((record.status, record.completed), (Status::BATCH_FAILED, 4));
}

#[test]
fn rule_3_members_use_batch_pasid() {
    let mut rig = Rig::new(options(layout(&[shared(48)], 1)));
    let member = Descriptor { pasid: 0x8000_1234, ..noop() };
    let (record, members) = rig.run_batch(&[member, member]);
    assert_eq!((record.status, statuses(&members)), (Status::SUCCESS, vec![1, 1]));
}

#[test]
fn rule_3_members_are_not_ordered() {
    let mut rig = Rig::plain();
    let mut disordered = false;
    let members = vec![noop(); 16];
    let members: Vec<Descriptor> =
        members.iter().zip(1..).map(|(member, index)| rig.with_record(*member, index)).collect();
    for _ in 0..8 {
        (0..17).for_each(|index| rig.record(index).clear());
        rig.submit(batch(&members), 0);
        while rig.engine.step() {
            let done: Vec<bool> = (1..17).map(|index| rig.record(index).read().is_some()).collect();
            disordered |= done.windows(2).any(|pair| !pair[0] && pair[1]);
        }
    }
    assert!(disordered);
}

#[test]
fn rule_3_fence_waits_for_earlier_members() {
    let mut rig = Rig::with_engines(4);
    for _ in 0..20 {
        let src = pattern(50_000, 7);
        let (mut middle, mut dst) = (vec![0; 50_000], vec![0; 50_000]);
        let first = copy(&src, &mut middle);
        let second = copy(&middle, &mut dst).with_flags(Flags::FENCE);
        let (record, members) = rig.run_batch(&[noop(), noop(), first, second, noop()]);
        assert_eq!((record.status, statuses(&members)), (Status::SUCCESS, vec![1; 5]));
        assert_eq!(dst, src);
    }
}

#[test]
fn rule_3_fence_abandons_after_a_failure() {
    let mut rig = Rig::plain();
    let (src, mut dst) = (pattern(64, 3), vec![0; 64]);
    let wrong = operation(Opcode::MemoryMove, 0, 0, 0);
    let fenced = copy(&src, &mut dst).with_flags(Flags::FENCE);
    let (record, members) = rig.run_batch(&[noop(), wrong, noop(), fenced, noop()]);
    assert_eq!(statuses(&members), [1, 0x13, 1, 0, 0]);
    assert_eq!((record.status, record.completed), (Status::BATCH_FAILED, 3));
    assert_eq!(dst, [0; 64]);
    // Without a fence, all members are processed.
    let (record, members) = rig.run_batch(&[noop(), wrong, noop(), noop(), noop()]);
    assert_eq!(statuses(&members), [1, 0x13, 1, 1, 1]);
    assert_eq!((record.status, record.completed), (Status::BATCH_FAILED, 5));
}

#[test]
fn rule_3_false_predicate_stops_at_a_fence() {
    let mut rig = Rig::plain();
    let (a, b) = (pattern(64, 1), pattern(64, 2));
    let compare =
        operation(Opcode::Compare, a.as_ptr() as u64, b.as_ptr() as u64, 64).with_flags(Flags::CHECK_RESULT);
    let (record, members) = rig.run_batch(&[compare, noop().with_flags(Flags::FENCE)]);
    assert_eq!(statuses(&members), [2, 0]);
    assert_eq!((record.status, record.completed), (Status::BATCH_FAILED, 1));
}

#[test]
fn rule_3_fence_belongs_in_a_batch() {
    let mut rig = Rig::plain();
    let record = rig.run(noop().with_flags(Flags::FENCE));
    assert_eq!(record.status, Status::INVALID_FLAGS);
    assert_eq!(record.specific[0] as u32 & Flags::FENCE.bits(), Flags::FENCE.bits());
    // The flag is also invalid on a batch descriptor itself.
    let members = vec![noop(); 2];
    assert_eq!(rig.run(batch(&members).with_flags(Flags::FENCE)).status, Status::INVALID_FLAGS);
}

#[test]
fn rule_3_batch_ends_where_its_list_faults() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(2, 1..2);
    let members: Vec<Descriptor> = (1..4).map(|index| rig.with_record(noop(), index)).collect();
    for (member, offset) in members.iter().zip((4096 - 3 * 64..).step_by(64)) {
        pages.put(offset, member.bytes());
    }
    let descriptor = Descriptor { src: pages.at(4096 - 3 * 64), size: 9, ..batch(&members) };
    let record = rig.run(descriptor);
    assert_eq!((record.status, record.completed), (Status::BATCH_LIST_FAULT, 3));
    assert_eq!(record.fault_address & !0xfff, pages.at(4096));
    assert!((1..4).all(|index| rig.record(index).is_plain_success()));
}

#[test]
fn rule_3_list_is_read_when_processed() {
    let mut rig = Rig::plain();
    let mut members = vec![noop(), noop()];
    rig.submit(batch(&members), 0);
    let late = rig.with_record(noop(), 1);
    // SAFETY: this function owns the vector, and the device is not running; it reads the list through the address.
    unsafe { members.as_mut_ptr().write_volatile(late) };
    rig.engine.run_until_idle();
    assert!(rig.record(1).is_plain_success() && rig.record(0).is_plain_success());
}

#[test]
fn rule_3_unrequested_record_is_for_errors() {
    let mut rig = Rig::plain();
    let quiet = |index: usize, rig: &Rig, descriptor: Descriptor| {
        let flags = descriptor.flags() | Flags::CRAV;
        Descriptor { completion: rig.place(index), ..descriptor }.with_flags(flags)
    };
    let wrong = operation(Opcode::MemoryMove, 0, 0, 0);
    let members = [quiet(1, &rig, noop()), quiet(2, &rig, wrong)];
    let record = rig.run(batch(&members));
    assert_eq!(record.status, Status::BATCH_FAILED);
    assert!(rig.record(1).read().is_none());
    assert_eq!(rig.record(2).read().unwrap().status, Status::BAD_TRANSFER_SIZE);
    // The batch has no error either: a failed member is not an error of the batch.
    rig.record(3).clear();
    let descriptor = quiet(3, &rig, batch(&members));
    rig.submit_raw(&descriptor);
    rig.engine.run_until_idle();
    assert!(rig.record(3).read().is_none());
}
