//! A hierarchical timer wheel (Varghese and Lauck): one timer for each connection, four levels of 256 slots.
//!
//! A slot of level 0 is one tick of 64 µs, a slot of level n 256^n ticks. A timer is linked at the level of the highest
//! byte in which its tick differs from the clock's, and moves down when the clock reaches its slot. Most timers are put
//! off again and again (retransmission, keepalive): a later deadline is a store, found out when the slot's turn comes.
//! Slots in use are bits of a map, so the clock passes empty ones at once.

mod slots;

use slots::{LEVELS, NONE, SLOTS, Slots};

/// Microseconds of a tick.
const TICK_US: u64 = 64;

/// Timers of one call that are looked at and not due: put off, cancelled, or moved to a lower level.
///
/// A slot of a high level may hold every connection there is. Then other timers wait for some calls rather than the data
/// path for this one.
const MOVES: usize = 256;

/// Ticks ahead that a timer is linked at most: 76 hours. One further off is moved on when it gets there. The highest
/// level's present slot stays free, as it would stand for two times.
const HORIZON: u64 = (1 << (8 * LEVELS)) - (1 << (8 * (LEVELS - 1)));

/// The deadline of a timer that is not set.
const NEVER: u64 = u64::MAX;

/// A timer, 24 bytes.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// Microseconds, or [`NEVER`]. The node may be linked earlier.
    deadline: u64,
    next: u32,
    prev: u32,
    /// Where it is linked: level × 256 + slot, or [`NONE`].
    slot: u16,
}

impl Node {
    const UNLINKED: Self = Self { deadline: NEVER, next: 0, prev: 0, slot: NONE };
}

/// Timers by connection index. Times are in microseconds.
#[derive(Debug)]
pub(super) struct Wheel {
    /// The tick up to which slots have been emptied.
    clock: u64,
    /// A tick before which no slot in use begins.
    earliest: u64,
    nodes: Vec<Node>,
    slots: Slots,
}

impl Wheel {
    /// A wheel whose clock begins at `now_us`, without timers.
    pub(super) fn new(now_us: u64) -> Self {
        Self { clock: now_us / TICK_US, earliest: NEVER, nodes: Vec::new(), slots: Slots::new() }
    }

    /// Makes timers for the indices below `count`. Allocates: call it where connections are allocated.
    pub(super) fn reserve(&mut self, count: u32) {
        if count as usize > self.nodes.len() {
            self.nodes.resize(count as usize, Node::UNLINKED);
        }
    }

    /// Sets the timer of `index`, in place of what it was set to. An index without a timer is left alone.
    ///
    /// It expires in the first call of [`Self::expire`] from `deadline_us` on, rounded up to a tick; at the next call
    /// where that has passed.
    #[inline]
    pub(super) fn set(&mut self, index: u32, deadline_us: u64) {
        debug_assert!((index as usize) < self.nodes.len(), "no timer {index}");
        let Some(node) = self.nodes.get_mut(index as usize) else { return };
        // The last value is the mark of a timer that is not set, and half a million years off.
        node.deadline = deadline_us.min(NEVER - 1);
        let slot = node.slot;
        if slot == NONE {
            self.link(index);
        } else if ticks(deadline_us) < self.start(slot) {
            self.slots.unlink(&mut self.nodes, index);
            self.link(index);
        }
    }

    /// Sets the timer of `index` unless it is set to an earlier time.
    #[inline]
    pub(super) fn set_earlier(&mut self, index: u32, deadline_us: u64) {
        if self.nodes.get(index as usize).is_some_and(|node| deadline_us < node.deadline) {
            self.set(index, deadline_us);
        }
    }

    /// Switches the timer of `index` off. It stays linked until its slot's turn comes, unless it is set again.
    #[inline]
    pub(super) fn cancel(&mut self, index: u32) {
        if let Some(node) = self.nodes.get_mut(index as usize) {
            node.deadline = NEVER;
        }
    }

    /// What the timer of `index` is set to.
    #[cfg(test)]
    fn deadline(&self, index: u32) -> Option<u64> {
        let deadline = self.nodes.get(index as usize)?.deadline;
        (deadline != NEVER).then_some(deadline)
    }

    /// Calls `expired` for timers whose deadline has come, `at_most` so many; the number of them. The others stay due.
    ///
    /// An expired timer is not set any more. The cost is bounded whatever time has passed: besides those that expire,
    /// 256 timers are looked at. Deadlines in one tick expire in the order in which they were linked there.
    pub(super) fn expire(&mut self, now_us: u64, at_most: usize, mut expired: impl FnMut(u32)) -> usize {
        let now = now_us / TICK_US;
        let (mut count, mut moves) = (0, 0);
        while self.earliest <= now {
            let next = self.slots.next(self.clock);
            self.earliest = next.map_or(NEVER, |(_, start)| start);
            let Some((slot, start)) = next.filter(|(_, start)| *start <= now) else { break };
            self.clock = start.max(self.clock);
            while let Some(index) = self.slots.first(slot) {
                let deadline = self.nodes[index as usize].deadline;
                let due = deadline != NEVER && ticks(deadline) <= self.clock;
                let enough = if due { count >= at_most } else { moves >= MOVES };
                if enough {
                    return count;
                }
                self.slots.unlink(&mut self.nodes, index);
                if due {
                    self.nodes[index as usize].deadline = NEVER;
                    count += 1;
                    expired(index);
                    continue;
                }
                moves += 1;
                if deadline != NEVER {
                    self.link(index);
                }
            }
        }
        self.clock = now.max(self.clock);
        count
    }

    /// A time in microseconds before which no timer expires, to sleep until; none where no timer is linked.
    ///
    /// A lower bound: timers may have been put off, cancelled, or be on a high level. [`Self::expire`] at that time
    /// brings it forward.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        let (_, start) = self.slots.next(self.clock)?;
        Some(start.saturating_mul(TICK_US))
    }

    /// Links an unlinked timer where its deadline belongs.
    #[inline]
    fn link(&mut self, index: u32) {
        let at = ticks(self.nodes[index as usize].deadline).clamp(self.clock, self.clock + HORIZON);
        // The horizon's carry may reach past the highest level, whose slots go round.
        let highest = u64::BITS - 1 - ((at ^ self.clock) | 1).leading_zeros();
        let level = (highest / 8).min(LEVELS - 1);
        let slot = level * SLOTS + (at >> (8 * level)) as u32 % SLOTS;
        self.slots.push(&mut self.nodes, slot as u16, index);
        self.earliest = self.earliest.min(self.start(slot as u16));
    }

    /// The first tick of a slot in use.
    #[inline]
    fn start(&self, slot: u16) -> u64 {
        slots::start(self.clock, slot)
    }
}

/// The tick that ends at or after a time: a timer is late by less than a tick, and never early.
#[inline]
const fn ticks(us: u64) -> u64 {
    us.div_ceil(TICK_US)
}

#[cfg(test)]
mod tests;
