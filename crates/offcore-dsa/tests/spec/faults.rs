//! Injected faults have the documented effects and are counted.

use crate::rig::*;
use offcore_dsa::sim::{Faults, SimDevice, SimOptions};
use offcore_dsa::{Flags, Status, SubmitResult};

fn rig(faults: &str) -> Rig {
    Rig::new(SimOptions { faults: faults.parse().unwrap(), ..options(layout(&[dedicated()], 1)) })
}

/// Copies 100 bytes each. Returns the statuses in the records, and the number of bytes copied to each destination.
fn copies(rig: &mut Rig, n: usize) -> Vec<(Option<u8>, usize)> {
    let src = vec![0xaa; 100];
    let mut targets = vec![vec![0; 100]; n];
    for (index, dst) in targets.iter_mut().enumerate() {
        rig.record(index % 64).clear();
        rig.submit(copy(&src, dst), index % 64);
    }
    rig.engine.run_until_idle();
    let copied = targets.iter().map(|dst| dst.iter().filter(|&&byte| byte == 0xaa).count());
    (0..n).map(|index| rig.record(index).read().map(|record| record.status.0)).zip(copied).collect()
}

#[test]
fn injected_page_fault_copies_reported_bytes() {
    let mut rig = rig("page:1");
    let seen = copies(&mut rig, 64);
    for (index, (status, copied)) in seen.iter().enumerate() {
        let record = rig.record(index).read().unwrap();
        assert_eq!((*status, *copied), (Some(Status::PAGE_FAULT.0), record.completed as usize));
    }
    assert_eq!(rig.device.stats().injected_page_faults, 64);
}

#[test]
fn injected_hardware_errors_are_reported() {
    let mut rig = rig("hw:1");
    assert!(copies(&mut rig, 64).iter().all(|(status, _)| *status == Some(Status::HARDWARE.0)));
    assert_eq!(rig.device.stats().injected_hardware_errors, 64);
}

#[test]
fn dropped_and_lost_are_different() {
    let mut rig = rig("drop:1");
    assert_eq!(copies(&mut rig, 64), vec![(None, 0); 64]);
    assert_eq!(rig.device.stats().injected_drops, 64);
    rig.device.set_faults("lost:1".parse().unwrap());
    assert_eq!(copies(&mut rig, 64), vec![(None, 100); 64]);
    assert_eq!(rig.device.stats().injected_lost, 64);
    rig.device.set_faults(Faults::default());
    assert_eq!(copies(&mut rig, 64), vec![(Some(1), 100); 64]);
}

#[test]
fn late_completion_brings_data_and_record() {
    let mut rig = rig("late:1:500");
    let (src, mut dst) = (pattern(100, 1), vec![0; 100]);
    rig.submit(copy(&src, &mut dst), 0);
    rig.engine.run_until(400_000);
    assert_eq!((rig.record(0).read(), dst[0]), (None, 0));
    rig.engine.run_until(600_000);
    assert_eq!((rig.record(0).is_plain_success(), dst), (true, src));
    assert_eq!(rig.device.stats().injected_late, 1);
}

#[test]
fn device_halts_after_given_count() {
    let mut rig = rig("halt:10");
    let done = copies(&mut rig, 30).iter().filter(|(status, _)| status.is_some()).count();
    assert_eq!((done, rig.portal.is_alive(), rig.device.stats().halts), (10, false, 1));
    rig.device.reset();
    rig.portal = rig.device.open("wq0.0").unwrap();
    assert_eq!(copies(&mut rig, 30), vec![(Some(1), 100); 30], "it halts once");
}

#[test]
fn a_storm_of_retries_ends() {
    let faults = "retry:0.01:20".parse().unwrap();
    let wq = shared(60);
    let (device, mut engine) =
        SimDevice::stepped("dsa-sim0", SimOptions { faults, ..options(layout(&[wq], 1)) }).unwrap();
    let mut portal = device.open("wq0.0").unwrap();
    let mut accepted = 0;
    for _ in 0..2000 {
        accepted += u64::from(portal.send(&noop()) == SubmitResult::Accepted);
        engine.run_until_idle();
    }
    let stats = device.stats();
    assert_eq!((stats.completed, stats.retried, accepted + stats.injected_retries), (accepted, 0, 2000));
    assert!(stats.injected_retries >= 20 && accepted > 1000);
}

#[test]
fn reused_record_without_fence_is_lost() {
    let mut rig = rig("weak");
    for (fenced, arrives) in [(true, true), (false, false), (true, true)] {
        rig.record(0).clear();
        if fenced {
            rig.portal.fence();
        }
        rig.submit(noop(), 0);
        rig.engine.run_until_idle();
        assert_eq!(rig.record(0).read().is_some(), arrives);
    }
    assert_eq!(rig.device.stats().injected_overwritten, 1);
    // Without a record, no store can overwrite it.
    rig.submit_raw(&noop().with_flags(Flags::empty()));
    rig.engine.run_until_idle();
    assert_eq!(rig.device.stats().completed, 4);
}
