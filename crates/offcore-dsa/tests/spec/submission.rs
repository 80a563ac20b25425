//! C.6, 1, 2 and 9: full queues, portals, and submissions that a device does not accept.

use crate::rig::*;
use offcore_dsa::sim::{SimDevice, SimError};
use offcore_dsa::{Status, Submitted};

#[test]
fn rule_1_full_dedicated_queue_drops() {
    let mut rig = Rig::plain();
    for index in 0..70 {
        rig.submit(noop(), index);
    }
    rig.engine.run_until_idle();
    let completed = (0..70).filter(|&index| rig.record(index).read().is_some()).count();
    assert_eq!(completed, 64);
    assert!(rig.record(69).read().is_none(), "the descriptors too many are the last ones");
    let errors = rig.device.errors();
    assert_eq!(errors.first.map(|error| (error.status, error.wq)), Some((None, 0)));
    assert!(errors.overflow);
    assert_eq!(rig.device.stats().overflowed, 6);
}

#[test]
fn rule_1_dedicated_queue_has_room_again() {
    let mut rig = Rig::plain();
    for round in 0..4 {
        for index in 0..64 {
            rig.submit(noop(), index);
        }
        rig.engine.run_until_idle();
        assert_eq!(rig.device.stats().completed, (round + 1) * 64);
    }
    assert_eq!(rig.device.errors().first, None);
}

#[test]
fn rule_1_shared_queue_retries_at_threshold() {
    let mut rig = Rig::new(options(layout(&[shared(48)], 1)));
    let answers: Vec<Submitted> = (0..60)
        .map(|index| {
            let descriptor = rig.with_record(noop(), index);
            rig.portal.send(&descriptor)
        })
        .collect();
    assert!(answers[..48].iter().all(|&answer| answer == Submitted::Accepted));
    assert!(answers[48..].iter().all(|&answer| answer == Submitted::Retry));
    rig.engine.run_until_idle();
    assert_eq!(rig.device.stats().completed, 48);
    assert_eq!(rig.device.stats().retried, 12);
    // Nothing was lost, so nothing is reported. The queue has free entries again.
    assert_eq!(rig.device.errors().first, None);
    assert_eq!(rig.portal.send(&noop()), Submitted::Accepted);
}

#[test]
fn rule_1_closed_client_frees_its_entries() {
    let Rig { device, mut engine, mut portal, .. } = Rig::new(options(layout(&[shared(48)], 1)));
    for step in [false, true, true] {
        assert!((0..48).all(|_| portal.send(&noop()) == Submitted::Accepted));
        assert_eq!(portal.send(&noop()), Submitted::Retry);
        assert!(!step || engine.step());
        drop(portal);
        portal = device.open("wq0.0").unwrap();
    }
    assert!((0..48).all(|_| portal.send(&noop()) == Submitted::Accepted));
    engine.run_until_idle();
    assert_eq!(device.stats().completed, 48);
    assert!((0..48).all(|_| portal.send(&noop()) == Submitted::Accepted));
    assert_eq!(portal.send(&noop()), Submitted::Retry);
}

#[test]
fn rule_2_dedicated_queue_has_one_client() {
    let (device, mut engine) =
        SimDevice::stepped("dsa-sim3", options(layout(&[shared(60), dedicated()], 1))).unwrap();
    let mut portals: Vec<_> = (0..4).map(|_| device.open("wq3.0").unwrap()).collect();
    for portal in &mut portals {
        assert_eq!(portal.send(&noop()), Submitted::Accepted);
    }
    engine.run_until_idle();
    assert_eq!(device.stats().completed, 4);
    let first = device.open("wq3.1").unwrap();
    assert!(matches!(device.open("wq3.1"), Err(SimError::Busy { .. })));
    drop(first);
    assert!(device.open("wq3.1").is_ok());
    assert!(matches!(device.open("wq0.0"), Err(SimError::NoWorkQueue { .. })));
}

#[test]
fn rule_9_halted_device_answers_retry() {
    let mut rig = Rig::plain();
    rig.device.halt();
    rig.submit(noop(), 0);
    rig.engine.run_until_idle();
    assert!(rig.record(0).read().is_none() && !rig.portal.is_alive());
    assert_eq!(rig.device.errors().first, None);

    let mut rig = Rig::new(options(layout(&[shared(48)], 1)));
    rig.device.halt();
    assert!((0..100).all(|_| rig.portal.send(&noop()) == Submitted::Retry));
}

#[test]
fn rule_9_misaligned_record_is_in_swerror() {
    let mut rig = Rig::plain();
    let mut descriptor = rig.with_record(noop(), 0);
    descriptor.completion += 16;
    rig.submit_raw(&descriptor);
    rig.submit(noop(), 2);
    rig.engine.run_until_idle();
    assert!(rig.record(0).read().is_none() && rig.record(1).read().is_none());
    assert!(rig.record(2).read().is_some(), "later descriptors go on");
    let error = rig.device.errors().first.unwrap();
    assert_eq!((error.status, error.address), (Some(Status::CR_MISALIGNED), descriptor.completion));
}

#[test]
fn rule_9_absent_record_is_in_swerror() {
    let mut rig = Rig::plain();
    let pages = Pages::with_holes(1, 0..1);
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let mut descriptor = rig.with_record(copy(&src, &mut dst), 0);
    descriptor.completion = pages.at(0);
    rig.submit_raw(&descriptor);
    rig.engine.run_until_idle();
    let error = rig.device.errors().first.unwrap();
    assert_eq!((error.status, error.address), (Some(Status::CR_ADDRESS_FAULT), pages.at(0)));
    assert_eq!(dst, [0; 64]);
}

#[test]
fn rule_9_bad_handle_is_in_both() {
    let mut rig = Rig::plain();
    let mut descriptor = noop().with_flags(offcore_dsa::Flags::RCI);
    descriptor.interrupt = 9;
    let record = rig.run(descriptor);
    assert_eq!(record.status, Status::INTERRUPT_HANDLE);
    assert_eq!(rig.device.errors().first.unwrap().status, Some(Status::INTERRUPT_HANDLE));
}

#[test]
fn rule_9_no_record_means_swerror() {
    let mut rig = Rig::plain();
    let descriptor = operation(offcore_dsa::Opcode::MemoryMove, 64, 128, 0);
    rig.submit_raw(&descriptor);
    rig.engine.run_until_idle();
    assert_eq!(rig.device.errors().first.unwrap().status, Some(Status::BAD_TRANSFER_SIZE));
    // Success needs no record and is not an error.
    rig.device.clear_errors();
    rig.submit_raw(&noop());
    rig.engine.run_until_idle();
    assert_eq!((rig.device.errors().first, rig.device.stats().completed), (None, 2));
}

#[test]
fn rule_9_privilege_is_in_swerror_only() {
    let mut rig = Rig::new(options(layout(&[shared(48)], 1)));
    let descriptor = offcore_dsa::Descriptor { pasid: 1 << 31, ..rig.with_record(noop(), 0) };
    rig.submit_raw(&descriptor);
    rig.engine.run_until_idle();
    assert!(rig.record(0).read().is_none());
    assert_eq!(rig.device.errors().first.unwrap().status, Some(Status::PRIVILEGE));
    // On a dedicated queue, the device uses the privilege of the queue instead.
    let mut rig = Rig::plain();
    assert_eq!(rig.run(offcore_dsa::Descriptor { pasid: 1 << 31, ..noop() }).status, Status::SUCCESS);
}

#[test]
fn rule_9_event_log_keeps_errors() {
    let mut rig = Rig::new(second_generation(layout(&[dedicated()], 1)));
    for _ in 0..3 {
        rig.submit_raw(&operation(offcore_dsa::Opcode::MemoryMove, 64, 128, 0));
    }
    rig.engine.run_until_idle();
    let errors = rig.device.errors();
    assert_eq!((errors.log.len(), errors.first), (3, None));
}
