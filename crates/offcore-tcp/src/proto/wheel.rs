//! Timers: a wheel of five levels, after Varghese and Lauck.
//!
//! A timer lies in the slot of the highest byte in which its tick differs from the present one; it moves down a level when
//! time comes to its slot. One node for each number, so setting a timer is linking one node. Setting it later than it is
//! costs one store: a connection's timeout moves with every acknowledgement, and nearly never goes off.

/// Microseconds of a tick, as a shift.
const TICK: u32 = 6;
const SLOTS: usize = 256;
/// Five bytes of ticks are more than two years: no timer is beyond.
const LEVELS: usize = 5;
/// No node.
const NONE: u32 = u32::MAX;
/// Nodes that a call moves down without one going off, for each that may go off.
const MOVES: usize = 4;

#[derive(Debug, Clone, Copy)]
struct Node {
    next: u32,
    prev: u32,
    /// Tick of the slot that it lies in; `u64::MAX` when in none.
    at: u64,
    /// Tick at which it is due: not before `at`. `u64::MAX` when it was cancelled.
    due: u64,
}

const IDLE: Node = Node { next: NONE, prev: NONE, at: u64::MAX, due: u64::MAX };

#[derive(Debug)]
struct Level {
    heads: [u32; SLOTS],
    /// Slots that have nodes.
    used: [u64; SLOTS / 64],
}

impl Level {
    /// The first used slot from `slot` on.
    fn first_used(&self, slot: usize) -> Option<usize> {
        let mut word = slot / 64;
        let mut bits = self.used[word] & (!0 << (slot % 64));
        while bits == 0 {
            word += 1;
            bits = *self.used.get(word)?;
        }
        Some(word * 64 + bits.trailing_zeros() as usize)
    }
}

/// Timers by number, one each.
#[derive(Debug)]
pub(super) struct Wheel {
    /// The present tick: no slot before it has nodes.
    present: u64,
    levels: Box<[Level; LEVELS]>,
    nodes: Vec<Node>,
}

/// Level and slot of a tick, seen from the present one.
fn place(present: u64, tick: u64) -> (usize, usize) {
    let differ = (present ^ tick) | 1;
    let level = ((63 - differ.leading_zeros() as usize) / 8).min(LEVELS - 1);
    (level, (tick >> (8 * level)) as usize % SLOTS)
}

impl Wheel {
    pub(super) fn new() -> Self {
        let level = || Level { heads: [NONE; SLOTS], used: [0; SLOTS / 64] };
        Self { present: 0, levels: Box::new(std::array::from_fn(|_| level())), nodes: Vec::new() }
    }

    /// Timer `index` goes off at `deadline`, in microseconds, or up to a tick later.
    #[inline]
    pub(super) fn set(&mut self, index: u32, deadline: u64) {
        let due = (deadline.saturating_add((1 << TICK) - 1) >> TICK).max(self.present);
        let due = due.min(self.present + (1 << (8 * LEVELS)) / 2);
        if index as usize >= self.nodes.len() {
            self.nodes.resize(index as usize + 1, IDLE);
        }
        let node = &mut self.nodes[index as usize];
        node.due = due;
        if node.at <= due {
            return;
        }
        if node.at != u64::MAX {
            self.unlink(index);
        }
        self.link(index, due);
    }

    /// Timer `index` does not go off.
    pub(super) fn cancel(&mut self, index: u32) {
        if let Some(node) = self.nodes.get_mut(index as usize) {
            node.due = u64::MAX;
            if node.at != u64::MAX {
                self.unlink(index);
            }
        }
    }

    fn link(&mut self, index: u32, at: u64) {
        let (level, slot) = place(self.present, at);
        let Level { heads, used } = &mut self.levels[level];
        let next = std::mem::replace(&mut heads[slot], index);
        used[slot / 64] |= 1 << (slot % 64);
        let node = &mut self.nodes[index as usize];
        (node.next, node.prev, node.at) = (next, NONE, at);
        if next != NONE {
            self.nodes[next as usize].prev = index;
        }
    }

    fn unlink(&mut self, index: u32) {
        let Node { next, prev, at, .. } = self.nodes[index as usize];
        if prev == NONE {
            // Its slot is one of these: time may have passed since it was linked, which can only lower the level.
            let mut levels = self.levels.iter_mut().enumerate();
            let found =
                levels.find(|(level, this)| this.heads[(at >> (8 * level)) as usize % SLOTS] == index);
            if let Some((level, this)) = found {
                let slot = (at >> (8 * level)) as usize % SLOTS;
                this.heads[slot] = next;
                if next == NONE {
                    this.used[slot / 64] &= !(1 << (slot % 64));
                }
            }
        } else {
            self.nodes[prev as usize].next = next;
        }
        if next != NONE {
            self.nodes[next as usize].prev = prev;
        }
        self.nodes[index as usize].at = u64::MAX;
    }

    /// The first used slot: its level, its number, and the first of its ticks that is not past. A slot of a higher level
    /// may be the present one, when its nodes have not all moved down yet.
    fn first(&self) -> Option<(usize, usize, u64)> {
        let first_of = |(level, this): (usize, &Level)| {
            let shift = 8 * level;
            let here = (self.present >> shift) as usize % SLOTS;
            let slot = this.first_used(here)?;
            let start = ((self.present >> shift) - here as u64 + slot as u64) << shift;
            Some((level, slot, start.max(self.present)))
        };
        self.levels.iter().enumerate().filter_map(first_of).min_by_key(|(.., start)| *start)
    }

    /// Calls `fire` for each timer that is due by `now`, `at_most` times. What is left goes off in the next call.
    pub(super) fn expire(&mut self, now: u64, at_most: usize, mut fire: impl FnMut(u32)) {
        let target = now >> TICK;
        let (mut fired, mut moved) = (0, 0);
        while fired < at_most && moved < at_most * MOVES {
            let Some((level, slot, start)) = self.first().filter(|(.., start)| *start <= target) else {
                self.present = self.present.max(target);
                return;
            };
            self.present = start;
            let index = self.levels[level].heads[slot];
            self.unlink(index);
            let due = self.nodes[index as usize].due;
            if due <= start {
                fired += 1;
                self.nodes[index as usize].due = u64::MAX;
                fire(index);
            } else if due != u64::MAX {
                moved += 1;
                self.link(index, due);
            }
        }
    }

    /// A time before which nothing goes off, in microseconds; `None` when nothing is set.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.first().map(|(_, _, start)| start << TICK)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Set(u32, u64),
        Cancel(u32),
        Pass(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let span = prop_oneof![0..1000u64, 0..1_000_000u64, 0..10_000_000_000u64];
        let step = prop_oneof![
            (0..40u32, span.clone()).prop_map(|(index, after)| Step::Set(index, after)),
            (0..40u32).prop_map(Step::Cancel),
            span.prop_map(Step::Pass),
        ];
        prop::collection::vec(step, 0..120)
    }

    proptest! {
        /// Against a map: everything goes off, at its time and not before.
        #[test]
        fn agrees_with_a_map(steps in steps()) {
            let (mut wheel, mut map, mut now) = (Wheel::new(), BTreeMap::new(), 0);
            for step in steps {
                match step {
                    Step::Set(index, after) => {
                        wheel.set(index, now + after);
                        map.insert(index, now + after);
                    }
                    Step::Cancel(index) => {
                        wheel.cancel(index);
                        map.remove(&index);
                    }
                    Step::Pass(time) => {
                        now += time;
                        let mut fired = Vec::new();
                        wheel.expire(now, 1000, |index| fired.push(index));
                        for index in fired {
                            prop_assert!(map.remove(&index).is_some_and(|due| due <= now));
                        }
                        prop_assert!(map.values().all(|due| due + (1 << TICK) > now), "{:?} at {}", map, now);
                    }
                }
                let first = map.values().min().copied();
                prop_assert!(wheel.next_deadline().is_none_or(|next| first.is_none_or(|due| next < due + 64)));
                prop_assert!(first.is_none() || wheel.next_deadline().is_some());
            }
        }
    }

    #[test]
    fn later_is_one_store() {
        let mut wheel = Wheel::new();
        wheel.set(0, 1000);
        let at = wheel.nodes[0].at;
        wheel.set(0, 500_000);
        assert_eq!(wheel.nodes[0].at, at);
        wheel.expire(100_000, 8, |_| panic!("it is due later"));
        let mut fired = 0;
        wheel.expire(600_000, 8, |_| fired += 1);
        assert_eq!(fired, 1);
    }

    #[test]
    fn what_is_too_much_goes_off_next() {
        let mut wheel = Wheel::new();
        (0..1000).for_each(|index| wheel.set(index, 5000));
        let (mut fired, mut calls) = (0, 0);
        while fired < 1000 {
            let mut now = 0;
            wheel.expire(1_000_000, 64, |_| now += 1);
            assert!(now <= 64);
            fired += now;
            calls += 1;
            assert!(calls < 40);
        }
    }

    #[test]
    fn a_long_sleep_is_short_work() {
        let mut wheel = Wheel::new();
        wheel.set(0, 3_600_000_000);
        let day = 86_400_000_000;
        let mut fired = Vec::new();
        wheel.expire(365 * day, 8, |index| fired.push(index));
        assert_eq!(fired, [0]);
        wheel.set(1, 366 * day);
        wheel.expire(367 * day, 8, |index| fired.push(index));
        assert_eq!(fired, [0, 1]);
    }
}
