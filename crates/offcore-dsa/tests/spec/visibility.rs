//! C.6, 8 and 12, and the simulator's own guarantee: nothing happens before its time.

use crate::rig::*;
use offcore_dsa::config::WqConfig;
use offcore_dsa::sim::{Faults, SimDevice, SimOptions};
use offcore_dsa::{CompletionRecord, Descriptor, Opcode, Status, SubmitResult};

#[test]
fn rule_8_nothing_changes_before_completion() {
    let mut rig = Rig::plain();
    let (src, mut dst) = (pattern(4096, 1), vec![0xee; 4096]);
    rig.submit(copy(&src, &mut dst), 0);
    let (mut steps, mut before) = (0, 0);
    while rig.record(0).read().is_none() {
        assert!(dst.iter().all(|&byte| byte == 0xee), "changed at {} ns", rig.engine.now());
        before = rig.engine.now();
        assert!(rig.engine.step());
        steps += 1;
    }
    assert!(steps > 2 && before > 100, "{steps} steps, {before} ns");
    assert_eq!(dst, src);
}

/// This test runs a device on its own thread. It takes some seconds on a machine with a single core.
#[test]
fn rule_8_data_is_visible_before_its_record() {
    let device = SimDevice::start("dsa-sim0", options(layout(&[dedicated()], 1)), 0).unwrap();
    let mut portal = device.open("wq0.0").unwrap();
    let record = CompletionRecord::default();
    let src = vec![0_u8; 3000];
    let dst = vec![0xff_u8; 3000];
    for round in 0..500_u32 {
        // SAFETY: this test owns both vectors, and the device has no descriptor at this time; it uses their addresses.
        unsafe {
            src.as_ptr().cast_mut().write_bytes(round as u8, 3000);
        }
        record.clear();
        let mut descriptor =
            operation(Opcode::MemoryMove, src.as_ptr() as u64, dst.as_ptr() as u64, 3000).with_flags(RECORD);
        descriptor.completion = &raw const record as u64;
        portal.fence();
        assert_eq!(portal.send(&descriptor), SubmitResult::Accepted);
        while record.status_byte() == 0 {
            std::hint::spin_loop();
        }
        for at in (0..3000).chain([2999]) {
            // SAFETY: the byte is in the vector.
            assert_eq!(unsafe { dst.as_ptr().add(at).read_volatile() }, round as u8, "{round} {at}");
        }
        assert_eq!(record.read().unwrap().status, Status::SUCCESS);
    }
}

#[test]
fn rule_8_write_faults_may_go_unreported() {
    let wq = WqConfig { ats_disable: true, ..dedicated() };
    let mut rig = Rig::new(options(layout(&[wq], 1)));
    let pages = Pages::with_holes(1, 0..1);
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let record = rig.run(operation(Opcode::MemoryMove, src.as_ptr() as u64, pages.at(0), 64));
    assert_eq!(record.status, Status::SUCCESS);
    // A read of a missing page cannot succeed.
    for from in [pages.at(0), 0] {
        let record = rig.run(operation(Opcode::MemoryMove, from, dst.as_mut_ptr() as u64, 64));
        assert_eq!(record.status, Status::HARDWARE);
    }
}

#[test]
fn rule_12_status_zero_is_never_written() {
    let faults = Faults { page: 0.3, hardware: 0.3, ..Faults::default() };
    let mut rig = Rig::new(SimOptions { faults, ..options(layout(&[dedicated()], 1)) });
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    for _ in 0..200 {
        // A record that is not cleared keeps its old status until the new one is written.
        rig.submit(copy(&src, &mut dst), 0);
        let mut last = rig.record(0).status_byte();
        while rig.engine.step() {
            let now = rig.record(0).status_byte();
            assert!(now != 0 || last == 0);
            last = now;
        }
        assert_ne!(last, 0);
    }
}

#[test]
fn same_seed_gives_same_trace() {
    let trace = |seed| {
        let faults: Faults = "page:0.1+hw:0.05+drop:0.05+late:0.1:5+lost:0.05".parse().unwrap();
        let mut rig = Rig::new(SimOptions { seed, faults, ..options(layout(&[dedicated()], 4)) });
        let src = pattern(9000, 1);
        let mut targets = vec![vec![0; 9000]; 48];
        for (index, dst) in targets.iter_mut().enumerate() {
            let len = 100 + index * 150;
            rig.submit(copy(&src[..len], &mut dst[..len]), index);
        }
        let mut trace = Vec::new();
        while rig.engine.step() {
            let records: Vec<_> = (0..48)
                .map(|index| {
                    rig.record(index).read().map(|record| (record.status.0, record.completed, record.result))
                })
                .collect();
            trace.push((rig.engine.now(), records));
        }
        (trace, targets)
    };
    let (first, again, other) = (trace(7), trace(7), trace(8));
    assert!(first == again);
    assert!(first.0 != other.0);
}

#[test]
fn closing_a_portal_gives_up_its_work() {
    let Rig { device, mut engine, mut portal, .. } = Rig::plain();
    let record = CompletionRecord::default();
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    let mut descriptor = copy(&src, &mut dst).with_flags(RECORD);
    descriptor.completion = &raw const record as u64;
    for steps in 0..4 {
        assert_eq!(portal.send(&descriptor), SubmitResult::Accepted);
        for _ in 0..steps {
            assert!(engine.step());
        }
        drop(portal);
        engine.run_until_idle();
        assert_eq!((dst[0], record.read()), (0, None), "after {steps} steps");
        portal = device.open("wq0.0").unwrap();
    }
    // The queue works for the next client.
    assert_eq!(portal.send(&descriptor), SubmitResult::Accepted);
    engine.run_until_idle();
    assert!(record.is_plain_success() && dst == src);
    assert_eq!(device.stats().aborted, 4);
}

/// Spins until the device on its thread has begun to write.
fn wait_for_the_first_byte(dst: &[u8], byte: u8) {
    // SAFETY: the byte is in the slice.
    while unsafe { dst.as_ptr().read_volatile() } != byte {
        std::hint::spin_loop();
    }
}

/// This test runs devices on their own threads. It takes some seconds on a machine with a single core.
#[test]
fn closing_a_portal_waits_for_the_thread() {
    let device = SimDevice::start("dsa-sim0", options(layout(&[shared(48)], 2)), 0).unwrap();
    let src = vec![1_u8; 2 << 20];
    let mut dst = vec![0_u8; 2 << 20];
    for _ in 0..20 {
        dst.fill(0);
        let mut portal = device.open("wq0.0").unwrap();
        assert_eq!(portal.send(&copy(&src, &mut dst)), SubmitResult::Accepted);
        wait_for_the_first_byte(&dst, 1);
        drop(portal);
        // A copy in progress is completed first, and a copy that has not begun never starts. The memory can then be
        // freed.
        // SAFETY: the byte is in the vector.
        let last = unsafe { dst.as_ptr().add(dst.len() - 1).read_volatile() };
        let snapshot = dst.clone();
        run_one(&device);
        assert!(dst == snapshot && dst[dst.len() - 1] == last);
    }
}

/// Checks that a device on its own thread still works: it completes a descriptor.
fn run_one(device: &SimDevice) {
    let record = CompletionRecord::default();
    let mut portal = device.open("wq0.0").unwrap();
    let completion = &raw const record as u64;
    assert_eq!(portal.send(&Descriptor { completion, ..noop().with_flags(RECORD) }), SubmitResult::Accepted);
    while record.status_byte() == 0 {
        std::hint::spin_loop();
    }
}

/// This test runs a device on its own thread, which is halted while it has copies to finish.
#[test]
fn reset_after_a_halt_finishes_nothing() {
    let device = SimDevice::start("dsa-sim0", options(layout(&[dedicated()], 1)), 0).unwrap();
    let src = vec![1_u8; 256];
    for _ in 0..300 {
        let mut targets = vec![vec![0_u8; 256]; 48];
        let mut portal = device.open("wq0.0").unwrap();
        for dst in &mut targets {
            assert_eq!(portal.send(&copy(&src, dst)), SubmitResult::Accepted);
        }
        wait_for_the_first_byte(&targets[0], 1);
        device.halt();
        let snapshot = targets.clone();
        device.reset();
        run_one(&device);
        assert!(targets == snapshot);
    }
}

#[test]
fn reset_gives_up_all_and_enables_again() {
    let mut rig = Rig::plain();
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    rig.submit(copy(&src, &mut dst), 0);
    assert!(rig.engine.step());
    rig.device.halt();
    assert!(!rig.engine.step() && !rig.portal.is_alive());
    rig.device.reset();
    rig.engine.run_until_idle();
    assert_eq!((dst[0], rig.record(0).read(), rig.portal.is_alive()), (0, None, false));
    // The old portal has no effect; a new one works.
    rig.submit(copy(&src, &mut dst), 1);
    rig.engine.run_until_idle();
    assert_eq!(rig.record(1).read(), None);
    rig.portal = rig.device.open("wq0.0").unwrap();
    rig.submit(copy(&src, &mut dst), 2);
    rig.engine.run_until_idle();
    assert!(rig.record(2).is_plain_success() && rig.portal.is_alive());
    assert_eq!((rig.device.stats().halts, rig.device.stats().resets), (1, 1));
}
