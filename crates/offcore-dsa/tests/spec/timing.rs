//! The timing model: the duration of descriptors, alone and concurrent with others, and the end of the clock.

use crate::rig::*;
use offcore_dsa::sim::{Faults, Timing};
use offcore_dsa::{Descriptor, SubmitResult};

const MODEL: Timing = Timing::PUBLISHED;

fn rig(profile: &str) -> Rig {
    Rig::new(format!("profile={profile}").parse().unwrap())
}

/// Returns the nanoseconds until the last of `n` copies of `size` bytes is completed.
fn takes(profile: &str, size: usize, n: usize) -> f64 {
    let mut rig = rig(profile);
    let (src, mut dst) = (vec![1; size], vec![0; size]);
    for index in 0..n {
        rig.submit(copy(&src, &mut dst), index);
    }
    assert_eq!(rig.engine.run_until_idle(), n);
    rig.engine.now() as f64
}

/// Checks that a time equals the model's, up to a relative error.
fn is_near(ns: f64, model: f64, error: f64) {
    assert!((ns / model - 1.0).abs() < error, "{ns} ns, model {model}");
}

#[test]
fn copies_take_the_models_time() {
    for size in [1, 1518, 4096, 65_536, 1 << 20] {
        let (ns, model) = (takes("vpp", size, 1), MODEL.alone_ns(size as u64));
        assert!((ns - model).abs() <= 1.0, "{size} bytes: {ns} ns, model {model}");
    }
    // Bandwidth limits long copies, the front limits short ones.
    is_near(takes("vpp", 256 << 10, 16) - MODEL.fixed_ns(), MODEL.transfer_ns(16 * (256 << 10), 1), 0.01);
    is_near(takes("vpp", 64, 16) - MODEL.fixed_ns(), 15.0 * MODEL.occupancy_ns, 0.02);
    let each = [1, 2, 4, 8, 32].map(|depth| takes("vpp", 256, depth) / depth as f64);
    assert!(each.is_sorted_by(|a, b| a > b), "{each:?}");
    is_near(takes("vpp,slower=10", 4096, 1), 10.0 * takes("vpp", 4096, 1), 0.01);
}

#[test]
fn moving_engines_share_the_device() {
    // Four groups of one DSA engine each: four concurrent large copies take four times as long as a single one.
    let mut rig = rig("net");
    let (src, mut dst) = (vec![1; 16 << 10], vec![0; 16 << 10]);
    rig.submit(copy(&src, &mut dst), 0);
    let queues = rig.device.work_queues();
    let mut portals: Vec<_> = queues[1..].iter().map(|wq| rig.device.open(&wq.name).unwrap()).collect();
    for (portal, index) in portals.iter_mut().zip(1..) {
        let descriptor = rig.with_record(copy(&src, &mut dst), index);
        assert_eq!(portal.send(&descriptor), SubmitResult::Accepted);
    }
    assert_eq!(rig.engine.run_until_idle(), 4);
    is_near(rig.engine.now() as f64, MODEL.fixed_ns() + 4.0 * MODEL.transfer_ns(16 << 10, 1), 0.01);
}

#[test]
fn batch_adds_its_list_and_its_record() {
    let mut rig = rig("vpp");
    let (src, mut dst) = ([1], [0]);
    let (record, members) = rig.run_batch(&[copy(&src, &mut dst); 32]);
    assert!(record.status.is_success() && members.iter().all(|member| member.unwrap().status.is_success()));
    let model = MODEL.fixed_ns() + 31.0 * MODEL.occupancy_ns + MODEL.read_ns + MODEL.record_ns;
    is_near(rig.engine.now() as f64, model, 0.01);
}

#[test]
fn latest_completion_saturates_the_clock() {
    let mut rig = rig("vpp");
    rig.device.set_faults(Faults { late: 1.0, late_ns: u64::MAX, ..Faults::default() });
    for completed in [1, 0] {
        rig.submit(noop(), completed);
        assert_eq!(rig.engine.run_until_idle(), completed);
    }
    assert!(rig.record(1).is_plain_success() && rig.record(0).read().is_none());
    assert_eq!(rig.engine.now(), u64::MAX / 1000);
}

#[test]
fn device_without_its_engine_is_dead() {
    let Rig { device, engine, mut portal, .. } = rig("vpp");
    assert!(portal.is_alive());
    drop(engine);
    assert!(!portal.is_alive());
    // Submission succeeds, although the device never executes the descriptor.
    assert_eq!(portal.send(&Descriptor::default()), SubmitResult::Accepted);
    drop(portal);
    device.reset();
}
