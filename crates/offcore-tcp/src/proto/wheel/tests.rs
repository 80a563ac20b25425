use std::collections::{BTreeMap, BTreeSet};

use offcore_stats::time::{Micros, Time};
use proptest::prelude::*;

use super::*;

const TIMERS: u32 = 40;

#[derive(Clone, Debug)]
enum Op {
    Set(u32, u64),
    Cancel(u32),
    Pass(u64),
}

/// Times near a power of 256 ticks, where levels meet, and beyond the horizon.
fn span() -> impl Strategy<Value = u64> {
    (0u32..36, any::<u64>(), 0u64..3).prop_map(|(bits, random, add)| {
        let span = 1u64 << (bits + 6);
        if random % 4 == 0 { span + add * TICK_US - TICK_US } else { random % span }
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..TIMERS, span()).prop_map(|(index, after)| Op::Set(index, after)),
        1 => (0..TIMERS).prop_map(Op::Cancel),
        3 => span().prop_map(Op::Pass),
    ]
}

/// The timers as a set of ticks and indices.
#[derive(Default)]
struct Model {
    due: BTreeSet<(u64, u32)>,
    by_index: BTreeMap<u32, u64>,
}

impl Model {
    fn cancel(&mut self, index: u32) {
        if let Some(at) = self.by_index.remove(&index) {
            self.due.remove(&(at, index));
        }
    }

    fn set(&mut self, index: u32, deadline: Time) {
        self.cancel(index);
        self.by_index.insert(index, ticks(deadline));
        self.due.insert((ticks(deadline), index));
    }
}

/// Checks that the links, the slot and the bitmap of every timer are consistent.
fn check_links(wheel: &Wheel) {
    let mut linked = 0;
    for slot in 0..(LEVELS * SLOTS) as u16 {
        let Some(first) = wheel.slots.first(slot) else { continue };
        let mut index = first;
        loop {
            let node = &wheel.nodes[index as usize];
            assert_eq!((node.slot, wheel.nodes[node.next as usize].prev), (slot, index));
            assert!(
                node.deadline == Time::NEVER || ticks(node.deadline).max(wheel.clock) >= wheel.start(slot)
            );
            linked += 1;
            index = node.next;
            if index == first {
                break;
            }
        }
    }
    assert_eq!(linked, wheel.nodes.iter().filter(|node| node.slot != NONE).count());
}

proptest! {
    #[test]
    fn wheel_matches_set_model(start in span(), ops in proptest::collection::vec(op(), 0..200)) {
        let mut now = Time::from_micros(start);
        let mut wheel = Wheel::new(now);
        wheel.reserve(TIMERS);
        let mut model = Model::default();
        for op in ops {
            match op {
                Op::Set(index, after) => {
                    wheel.set(index, now + Micros::new(after));
                    model.set(index, now + Micros::new(after));
                }
                Op::Cancel(index) => {
                    wheel.cancel(index);
                    model.cancel(index);
                }
                Op::Pass(time) => {
                    let next = wheel.next_deadline();
                    if let Some((first, _)) = model.due.first() {
                        prop_assert!(next.is_some_and(|next| next <= Time::from_micros(*first * TICK_US).max(now)));
                    }
                    now += Micros::new(time);
                    let mut found = Vec::new();
                    // A call stops early if too many timers move down.
                    let mut count = wheel.expire(now, usize::MAX, |index| found.push(index));
                    while wheel.next_deadline().is_some_and(|next| next <= now) {
                        count += wheel.expire(now, usize::MAX, |index| found.push(index));
                    }
                    prop_assert_eq!(count, found.len());
                    found.sort_unstable();
                    let later = model.due.split_off(&(now.as_micros() / TICK_US + 1, 0));
                    let mut expected: Vec<u32> = model.due.iter().map(|(_, index)| *index).collect();
                    expected.sort_unstable();
                    model.by_index.retain(|index, _| !expected.contains(index));
                    model.due = later;
                    prop_assert_eq!(found, expected);
                }
            }
            check_links(&wheel);
        }
        for index in 0..TIMERS {
            let found = wheel.deadline(index).map(ticks);
            prop_assert_eq!(found, model.by_index.get(&index).copied());
        }
    }
}

fn wheel() -> Wheel {
    let mut wheel = Wheel::new(Time::ZERO);
    wheel.reserve(1000);
    wheel
}

fn expired(wheel: &mut Wheel, now: Time, at_most: usize) -> Vec<u32> {
    let mut found = Vec::new();
    wheel.expire(now, at_most, |index| found.push(index));
    found
}

#[test]
fn later_deadline_is_stored_lazily() {
    let mut wheel = wheel();
    wheel.set(7, Time::from_micros(6400));
    let slot = wheel.nodes[7].slot;
    wheel.set(7, Time::from_secs(64));
    assert_eq!((wheel.nodes[7].slot, wheel.deadline(7)), (slot, Some(Time::from_secs(64))));
    assert_eq!(expired(&mut wheel, Time::from_micros(6400), 64), []);
    assert_ne!(wheel.nodes[7].slot, slot);
    assert_eq!(expired(&mut wheel, Time::from_micros(63_999_999), 64), []);
    assert_eq!(expired(&mut wheel, Time::from_secs(64), 64), [7]);
    assert_eq!((wheel.deadline(7), wheel.next_deadline()), (None, None));
}

#[test]
fn expiries_of_a_call_are_bounded() {
    let mut wheel = wheel();
    (0..200).for_each(|index| wheel.set(index, Time::from_millis(1)));
    let mut order = Vec::new();
    for count in [64, 64, 64, 8, 0] {
        assert_eq!(wheel.next_deadline().is_some(), count > 0);
        let found = expired(&mut wheel, Time::from_millis(5), 64);
        assert_eq!(found.len(), count);
        order.extend(found);
    }
    assert!(order.into_iter().eq(0..200));
}

#[test]
fn cascade_is_bounded_per_call() {
    let mut wheel = wheel();
    // One slot of the highest level, two hours ahead.
    let two_hours = Time::from_secs(7200);
    (0..1000).for_each(|index| wheel.set(index, two_hours + Micros::new(index.into())));
    let mut calls = 0;
    while wheel.next_deadline().is_some_and(|next| next <= two_hours - Micros::from_millis(1)) {
        assert_eq!(expired(&mut wheel, two_hours - Micros::from_millis(1), 64), []);
        check_links(&wheel);
        calls += 1;
    }
    // Each timer moves down two or three levels.
    assert!((8..=12).contains(&calls), "{calls}");
    // Timers set in the meantime are not delayed by the crowd.
    wheel.set(3, two_hours - Micros::new(640));
    assert_eq!(expired(&mut wheel, two_hours - Micros::new(640), 64), [3]);
}

#[test]
fn wheel_handles_jumps_of_years() {
    let mut wheel = wheel();
    let year = Micros::from_secs(365 * 24 * 3600);
    let tick = Micros::new(TICK_US);
    (0..10).for_each(|index| wheel.set(index, Time::from_micros(1) + u64::from(index) * year));
    for index in 0..10 {
        let now = Time::ZERO + u64::from(index) * year;
        // The others move from horizon to horizon.
        while wheel.next_deadline().is_some_and(|next| next <= now) {
            assert_eq!(expired(&mut wheel, now, 64), []);
        }
        assert_eq!(expired(&mut wheel, now + tick, 64), [index]);
    }
    wheel.set(1, Time::NEVER);
    assert_eq!(expired(&mut wheel, Time::NEVER - tick, 64), []);
    wheel.set(2, Time::from_micros(5));
    assert_eq!(expired(&mut wheel, Time::NEVER, 64), [2]);
}

#[test]
fn a_cancelled_timer_can_be_set_again() {
    let mut wheel = wheel();
    wheel.set(1, Time::from_micros(6400));
    wheel.cancel(1);
    assert_eq!((wheel.deadline(1), expired(&mut wheel, Time::from_micros(3200), 64)), (None, vec![]));
    wheel.set(1, Time::from_millis(6));
    assert_eq!(expired(&mut wheel, Time::from_micros(6080), 64), [1]);
    wheel.set(1, Time::from_millis(7));
    wheel.cancel(1);
    assert_eq!(expired(&mut wheel, Time::from_millis(8), 64), []);
    assert_eq!((wheel.nodes[1].slot, wheel.next_deadline()), (NONE, None));
}
