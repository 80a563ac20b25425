//! A hierarchical timer wheel (Varghese and Lauck): one timer per connection, four levels of 256 slots.
//!
//! A slot of level 0 is one tick of 64 µs, a slot of level n 256^n ticks. A timer is linked at the level of the highest
//! byte in which its tick differs from the clock's, and moves down when the clock reaches its slot. Most timers are
//! postponed repeatedly (retransmission, keepalive). Postponing only stores the deadline, which is checked when the
//! clock reaches the slot. A bitmap marks slots in use, so that the clock skips empty ones.

mod slots;

use offcore_stats::time::Time;

use slots::{LEVELS, NONE, SLOTS, Slots};

/// Duration of a tick in microseconds.
const TICK_US: u64 = 64;

/// Maximum number of timers per call that are processed without expiry: postponed, cancelled, or moved to a lower
/// level.
///
/// A slot of a high level may contain all connections. In that case other timers are delayed by some calls, rather than
/// blocking the data path.
const MOVES: usize = 256;

/// Maximum distance in ticks at which a timer is linked: 76 hours. A timer farther away is linked again when this time
/// is reached. The current slot of the highest level stays free, because it would be ambiguous.
const HORIZON: u64 = (1 << (8 * LEVELS)) - (1 << (8 * (LEVELS - 1)));

/// The deadline of a timer that is not set.
const NEVER: u64 = u64::MAX;

/// The last deadline. [`Time::NEVER`] marks a timer that is not set. Both are half a million years away.
const LAST: Time = Time::from_micros(u64::MAX - 1);

/// A timer, 24 bytes.
#[derive(Clone, Copy, Debug)]
struct Node {
    /// [`Time::NEVER`] if it is not set. The node may be linked at an earlier slot.
    deadline: Time,
    next: u32,
    prev: u32,
    /// Its slot: level × 256 + slot, or [`NONE`].
    slot: u16,
}

impl Node {
    const UNLINKED: Self = Self { deadline: Time::NEVER, next: 0, prev: 0, slot: NONE };
}

/// Timers by connection index.
#[derive(Debug)]
pub(super) struct Wheel {
    /// The tick up to which slots have been emptied.
    clock: u64,
    /// A lower bound of the first tick of all slots in use.
    earliest: u64,
    nodes: Vec<Node>,
    slots: Slots,
}

impl Wheel {
    /// Creates a wheel without timers, whose clock begins at `now`.
    pub(super) fn new(now: Time) -> Self {
        Self { clock: now.as_micros() / TICK_US, earliest: NEVER, nodes: Vec::new(), slots: Slots::new() }
    }

    /// Allocates timers for the indices below `count`. Must be called where connections are allocated.
    pub(super) fn reserve(&mut self, count: u32) {
        if count as usize > self.nodes.len() {
            self.nodes.resize(count as usize, Node::UNLINKED);
        }
    }

    /// Sets the timer of `index` and replaces its previous deadline. An index without a timer is ignored.
    ///
    /// The timer expires in the first call of [`Self::expire`] at or after `deadline`, rounded up to a tick. If this
    /// time has passed, it expires in the next call.
    #[inline]
    pub(super) fn set(&mut self, index: u32, deadline: Time) {
        debug_assert!((index as usize) < self.nodes.len(), "no timer {index}");
        let Some(node) = self.nodes.get_mut(index as usize) else { return };
        node.deadline = deadline.min(LAST);
        let slot = node.slot;
        if slot == NONE {
            self.link(index);
        } else if ticks(deadline) < self.start(slot) {
            self.slots.unlink(&mut self.nodes, index);
            self.link(index);
        }
    }

    /// Sets the timer of `index` unless it is set to an earlier time.
    #[inline]
    pub(super) fn set_earlier(&mut self, index: u32, deadline: Time) {
        if self.nodes.get(index as usize).is_some_and(|node| deadline < node.deadline) {
            self.set(index, deadline);
        }
    }

    /// Cancels the timer of `index`. It stays linked until the clock reaches its slot, unless it is set again.
    #[inline]
    pub(super) fn cancel(&mut self, index: u32) {
        if let Some(node) = self.nodes.get_mut(index as usize) {
            node.deadline = Time::NEVER;
        }
    }

    /// Returns the deadline of the timer of `index`.
    #[cfg(test)]
    fn deadline(&self, index: u32) -> Option<Time> {
        let deadline = self.nodes.get(index as usize)?.deadline;
        (deadline != Time::NEVER).then_some(deadline)
    }

    /// Calls `expired` for up to `at_most` expired timers, and returns their number. The others stay due.
    ///
    /// An expired timer is not set any more. The cost is bounded, regardless of the elapsed time: at most 256 other
    /// timers are processed. Timers that expire in the same tick do so in the order in which they were linked there.
    pub(super) fn expire(&mut self, now: Time, at_most: usize, mut expired: impl FnMut(u32)) -> usize {
        let now = now.as_micros() / TICK_US;
        let (mut count, mut moves) = (0, 0);
        while self.earliest <= now {
            let next = self.slots.next(self.clock);
            self.earliest = next.map_or(NEVER, |(_, start)| start);
            let Some((slot, start)) = next.filter(|(_, start)| *start <= now) else { break };
            self.clock = start.max(self.clock);
            while let Some(index) = self.slots.first(slot) {
                let deadline = self.nodes[index as usize].deadline;
                let due = deadline != Time::NEVER && ticks(deadline) <= self.clock;
                let enough = if due { count >= at_most } else { moves >= MOVES };
                if enough {
                    return count;
                }
                self.slots.unlink(&mut self.nodes, index);
                if due {
                    self.nodes[index as usize].deadline = Time::NEVER;
                    count += 1;
                    expired(index);
                    continue;
                }
                moves += 1;
                if deadline != Time::NEVER {
                    self.link(index);
                }
            }
        }
        self.clock = now.max(self.clock);
        count
    }

    /// Returns a time before which no timer expires, or `None` if no timer is linked. The caller can
    /// sleep until then.
    ///
    /// This is a lower bound: timers may have been postponed or cancelled, or may be on a high level. A call of
    /// [`Self::expire`] at that time updates it.
    pub(super) fn next_deadline(&self) -> Option<Time> {
        let (_, start) = self.slots.next(self.clock)?;
        Some(Time::from_micros(start.saturating_mul(TICK_US)))
    }

    /// Links an unlinked timer in the slot of its deadline.
    #[inline]
    fn link(&mut self, index: u32) {
        let at = ticks(self.nodes[index as usize].deadline).clamp(self.clock, self.clock + HORIZON);
        // The horizon's carry may reach beyond the highest level, whose slots wrap around.
        let highest = u64::BITS - 1 - ((at ^ self.clock) | 1).leading_zeros();
        let level = (highest / 8).min(LEVELS - 1);
        let slot = level * SLOTS + (at >> (8 * level)) as u32 % SLOTS;
        self.slots.push(&mut self.nodes, slot as u16, index);
        self.earliest = self.earliest.min(self.start(slot as u16));
    }

    /// Returns the first tick of a slot in use.
    #[inline]
    fn start(&self, slot: u16) -> u64 {
        slots::start(self.clock, slot)
    }
}

/// Returns the tick that ends at or after a time. A timer is late by less than a tick, and never early.
#[inline]
const fn ticks(time: Time) -> u64 {
    time.as_micros().div_ceil(TICK_US)
}

#[cfg(test)]
mod tests;
