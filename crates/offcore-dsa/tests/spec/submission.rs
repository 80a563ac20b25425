//! C.6, 1, 2 and 9: full queues, portals, and submissions that a device does not accept.

use crate::rig::*;
use offcore_dsa::sim::{SimDevice, SimError};
use offcore_dsa::{Descriptor, Flags, Opcode, Status, SubmitResult};

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
    assert_eq!(rig.device.stats().overflowed, 0);
}

#[test]
fn rule_1_shared_queue_retries_at_threshold() {
    let mut rig = Rig::new(options(layout(&[shared(48)], 1)));
    let answers: Vec<SubmitResult> = (0..60)
        .map(|index| {
            let descriptor = rig.with_record(noop(), index);
            rig.portal.send(&descriptor)
        })
        .collect();
    assert!(answers[..48].iter().all(|&answer| answer == SubmitResult::Accepted));
    assert!(answers[48..].iter().all(|&answer| answer == SubmitResult::Retry));
    rig.engine.run_until_idle();
    assert_eq!(rig.device.stats().completed, 48);
    assert_eq!(rig.device.stats().retried, 12);
    // The queue has free entries again.
    assert_eq!(rig.portal.send(&noop()), SubmitResult::Accepted);
}

#[test]
fn rule_1_closed_client_frees_its_entries() {
    let Rig { device, mut engine, mut portal, .. } = Rig::new(options(layout(&[shared(48)], 1)));
    for step in [false, true, true] {
        assert!((0..48).all(|_| portal.send(&noop()) == SubmitResult::Accepted));
        assert_eq!(portal.send(&noop()), SubmitResult::Retry);
        assert!(!step || engine.step());
        drop(portal);
        portal = device.open("wq0.0").unwrap();
    }
    assert!((0..48).all(|_| portal.send(&noop()) == SubmitResult::Accepted));
    engine.run_until_idle();
    assert_eq!(device.stats().completed, 48);
    assert!((0..48).all(|_| portal.send(&noop()) == SubmitResult::Accepted));
    assert_eq!(portal.send(&noop()), SubmitResult::Retry);
}

#[test]
fn rule_2_dedicated_queue_has_one_client() {
    let (device, mut engine) =
        SimDevice::stepped("dsa-sim3", options(layout(&[shared(60), dedicated()], 1))).unwrap();
    let mut portals: Vec<_> = (0..4).map(|_| device.open("wq3.0").unwrap()).collect();
    for portal in &mut portals {
        assert_eq!(portal.send(&noop()), SubmitResult::Accepted);
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

    let mut rig = Rig::new(options(layout(&[shared(48)], 1)));
    rig.device.halt();
    assert!((0..100).all(|_| rig.portal.send(&noop()) == SubmitResult::Retry));
}

#[test]
fn rule_9_some_errors_have_no_record() {
    let pages = Pages::with_holes(1, 0..1);
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let empty = operation(Opcode::MemoryMove, 64, 128, 0);
    for (wq, status) in [
        (dedicated(), Status::CR_MISALIGNED),
        (dedicated(), Status::CR_ADDRESS_FAULT),
        (dedicated(), Status::BAD_TRANSFER_SIZE),
        // On a dedicated queue, the device uses the privilege of the queue instead of the descriptor's.
        (shared(48), Status::PRIVILEGE),
    ] {
        let mut rig = Rig::new(options(layout(&[wq], 1)));
        let whole = rig.with_record(copy(&src, &mut dst), 0);
        let wrong = match status {
            Status::CR_MISALIGNED => Descriptor { completion: whole.completion + 16, ..whole },
            Status::CR_ADDRESS_FAULT => Descriptor { completion: pages.at(0), ..whole },
            Status::PRIVILEGE => Descriptor { pasid: 1 << 31, ..whole },
            _ => empty,
        };
        rig.submit_raw(&wrong);
        rig.submit(noop(), 2);
        rig.engine.run_until_idle();
        assert!(rig.record(0).read().is_none() && rig.record(1).read().is_none());
        assert!(rig.record(2).is_plain_success(), "later descriptors are executed");
        assert_eq!((rig.device.stats().failed, dst[0]), (1, 0), "{status:?}");
    }
    let mut rig = Rig::plain();
    assert_eq!(rig.run(Descriptor { pasid: 1 << 31, ..noop() }).status, Status::SUCCESS);
    // Success needs no record and is not an error.
    rig.submit_raw(&noop());
    rig.engine.run_until_idle();
    assert_eq!((rig.device.stats().failed, rig.device.stats().completed), (0, 2));
}

#[test]
fn rule_9_interrupt_handles_are_invalid() {
    let wrong = Descriptor { interrupt: 9, ..noop().with_flags(Flags::RCI) };
    assert_eq!(Rig::plain().run(wrong).status, Status::INTERRUPT_HANDLE);
}
