//! C.6, 4 and 5: order, drain, arbitration, read buffers, progress limits.

use crate::rig::*;
use offcore_dsa::config::WqConfig;
use offcore_dsa::sim::SimDevice;
use offcore_dsa::{Descriptor, Opcode, Status, SubmitResult};

/// Submits copies of alternately large and small sizes. Returns the order in which their records appeared.
fn completion_order(rig: &mut Rig, copies: usize) -> Vec<usize> {
    let src = pattern(60_000, 5);
    let mut targets: Vec<Vec<u8>> = (0..copies)
        .map(|index| vec![0; if index.is_multiple_of(3) { 60_000 } else { 100 + index }])
        .collect();
    for (index, dst) in targets.iter_mut().enumerate() {
        rig.record(index).clear();
        let len = dst.len();
        rig.submit(copy(&src[..len], dst), index);
    }
    let mut order = Vec::new();
    while rig.engine.step() {
        for index in 0..copies {
            if rig.record(index).read().is_some() && !order.contains(&index) {
                order.push(index);
            }
        }
    }
    assert!(targets.iter().all(|dst| dst[..] == src[..dst.len()]));
    assert_eq!(order.len(), copies);
    order
}

#[test]
fn rule_4_one_engine_keeps_the_order() {
    let mut rig = Rig::plain();
    for _ in 0..4 {
        assert!(completion_order(&mut rig, 48).is_sorted());
    }
}

#[test]
fn rule_4_four_engines_lose_the_order() {
    let mut rig = Rig::with_engines(4);
    assert!(!completion_order(&mut rig, 48).is_sorted());
}

#[test]
fn rule_4_one_engine_keeps_batches_in_order() {
    let mut rig = Rig::plain();
    let members = vec![noop(); 64];
    for index in 0..20 {
        let count = if index % 2 == 0 { 64 } else { 2 };
        rig.submit(batch(&members[..count]), index);
    }
    while rig.engine.step() {
        let done: Vec<bool> = (0..20).map(|index| rig.record(index).read().is_some()).collect();
        assert!(done.windows(2).all(|pair| pair[0] || !pair[1]), "{done:?}");
    }
    assert_eq!(rig.device.stats().batches, 20);
}

#[test]
fn rule_4_error_stops_no_later_descriptor() {
    for engines in [1, 4] {
        let mut rig = Rig::with_engines(engines);
        let pages = Pages::with_holes(1, 0..1);
        let (src, mut dst) = (pattern(64, 9), vec![0; 64]);
        rig.submit(operation(Opcode::MemoryMove, pages.at(0), dst.as_mut_ptr() as u64, 64), 0);
        rig.submit(Descriptor::new(Opcode::ScatterFill, offcore_dsa::Flags::empty()), 1);
        rig.submit(copy(&src, &mut dst), 2);
        rig.engine.run_until_idle();
        assert!(is_error(&rig.record(0).read().unwrap()) && is_error(&rig.record(1).read().unwrap()));
        assert_eq!((rig.record(2).read().unwrap().status, dst), (Status::SUCCESS, src));
    }
}

#[test]
fn drain_waits_for_earlier_descriptors() {
    let mut rig = Rig::with_engines(4);
    for round in 0..10 {
        let src = pattern(100_000, round);
        let mut targets = vec![vec![0; 100_000]; 8];
        for (index, dst) in targets.iter_mut().enumerate() {
            rig.record(index).clear();
            rig.submit(copy(&src, dst), index);
        }
        rig.record(20).clear();
        rig.submit(Descriptor::new(Opcode::Drain, RECORD), 20);
        while rig.engine.step() {
            let drained = rig.record(20).read().is_some();
            assert!(!drained || (0..8).all(|index| rig.record(index).is_plain_success()));
        }
        assert!(rig.record(20).is_plain_success());
    }
}

/// Keeps two queues full. Returns the completed descriptors of each queue when `of` descriptors were completed in
/// total.
fn shares(wqs: [WqConfig; 2], of: u64) -> [u64; 2] {
    let (device, mut engine) = SimDevice::stepped("dsa-sim0", options(layout(&wqs, 1))).unwrap();
    let mut portals = ["wq0.0", "wq0.1"].map(|name| device.open(name).unwrap());
    let records: Vec<[offcore_dsa::CompletionRecord; 64]> =
        (0..2).map(|_| std::array::from_fn(|_| Default::default())).collect();
    let mut done = [0; 2];
    let mut fill = [[true; 64]; 2];
    while done[0] + done[1] < of {
        for queue in 0..2 {
            for index in 0..64 {
                let record = &records[queue][index];
                if record.read().is_some() {
                    done[queue] += 1;
                    fill[queue][index] = true;
                }
                if fill[queue][index] {
                    record.clear();
                    fill[queue][index] = false;
                    let completion = record as *const _ as u64;
                    let descriptor = Descriptor { completion, ..Descriptor::new(Opcode::Noop, RECORD) };
                    assert_eq!(portals[queue].send(&descriptor), SubmitResult::Accepted);
                }
            }
        }
        engine.step();
    }
    done
}

#[test]
fn rule_5_priority_starves_no_queue() {
    let with = |priority| WqConfig { priority, ..dedicated() };
    let [high, low] = shares([with(15), with(1)], 4000);
    assert!(high > 12 * low && low > 100, "{high} {low}");
    let [one, other] = shares([with(5), with(5)], 4000);
    assert!(one.abs_diff(other) < 200, "{one} {other}");
}

/// Returns the virtual nanoseconds for 40 copies of 256 KiB.
fn duration(rig: &mut Rig) -> u64 {
    let src = pattern(256 << 10, 1);
    let mut dst = vec![0; 256 << 10];
    for index in 0..40 {
        rig.submit(copy(&src, &mut dst), index);
    }
    rig.engine.run_until_idle();
    assert_eq!(rig.device.stats().completed, 40);
    rig.engine.now()
}

#[test]
fn rule_5_read_buffers_limit_a_group() {
    let mut config = layout(&[dedicated()], 1);
    let all = duration(&mut Rig::new(options(config.clone())));
    config.groups[0].read_buffers_allowed = Some(4);
    let few = duration(&mut Rig::new(options(config.clone())));
    assert!(few > 2 * all, "{few} {all}");
    config.groups[0].read_buffers_allowed = None;
    config.groups[0].use_read_buffer_limit = true;
    config.read_buffer_limit = 4;
    assert_eq!(duration(&mut Rig::new(options(config))), few);
}

#[test]
fn rule_5_progress_limits_hold_back() {
    let most_in_progress = |limit| {
        let mut config = layout(&[dedicated()], 1);
        config.groups[0].desc_progress_limit = limit;
        let mut rig = Rig::new(second_generation(config));
        let src = pattern(1 << 20, 1);
        let mut dst = vec![0; 1 << 20];
        for index in 0..64 {
            rig.submit(copy(&src, &mut dst), index);
        }
        // All descriptors have arrived and none is completed. Descriptors that are not in the queue are in progress, so
        // the free entries show how many.
        rig.engine.run_until(5_000);
        assert_eq!(rig.device.stats().completed, 0);
        for index in 64..128 {
            rig.submit(noop(), index);
        }
        rig.engine.run_until(10_000);
        64 - rig.device.stats().overflowed
    };
    let [full, half, quarter, eighth] = [0, 1, 2, 3].map(most_in_progress);
    assert!(eighth > 0, "{full} {half} {quarter} {eighth}");
    assert_eq!([full, half, quarter], [2 * half, 2 * quarter, 2 * eighth]);
}

#[test]
fn rule_5_class_needs_a_virtual_channel() {
    let mut config = layout(&[dedicated()], 1);
    config.groups[0].traffic_class_b = Some(5);
    let mut rig = Rig::new(options(config));
    let (src, mut dst) = (pattern(64, 1), vec![0; 64]);
    assert_eq!(rig.run(copy(&src, &mut dst)).status, Status::SUCCESS);
    let flagged = copy(&src, &mut dst).with_flags(offcore_dsa::Flags::ADDR1_TC);
    assert_eq!(rig.run(flagged).status, Status::TRAFFIC_CLASS);
}
