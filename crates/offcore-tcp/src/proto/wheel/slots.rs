//! The slots of a timer wheel: rings of timers linked by index, and a bitmap of the slots in use.

use super::Node;

/// Slots per level.
pub(super) const SLOTS: u32 = 256;

/// Number of levels. Each slot covers all slots of the level below.
pub(super) const LEVELS: u32 = 4;

/// The slot of an unlinked timer.
pub(super) const NONE: u16 = u16::MAX;

/// No timer.
const NOBODY: u32 = u32::MAX;

/// 64-bit words in a level's bitmap.
const WORDS: usize = SLOTS as usize / 64;

#[derive(Debug)]
pub(super) struct Slots {
    /// The first timer of each slot, level by level. Its `prev` is the last one.
    first: Box<[u32; (LEVELS * SLOTS) as usize]>,
    used: [[u64; WORDS]; LEVELS as usize],
}

impl Slots {
    pub(super) fn new() -> Self {
        Self { first: Box::new([NOBODY; _]), used: [[0; WORDS]; _] }
    }

    /// Returns the first timer of a slot.
    #[inline]
    pub(super) fn first(&self, slot: u16) -> Option<u32> {
        let first = self.first[usize::from(slot)];
        (first != NOBODY).then_some(first)
    }

    /// Adds an unlinked timer to the end of a slot.
    #[inline]
    pub(super) fn push(&mut self, nodes: &mut [Node], slot: u16, index: u32) {
        let first = &mut self.first[usize::from(slot)];
        if *first == NOBODY {
            *first = index;
            let node = &mut nodes[index as usize];
            (node.next, node.prev, node.slot) = (index, index, slot);
            let (word, bit) = bit(slot);
            self.used[usize::from(slot) / SLOTS as usize][word] |= bit;
        } else {
            let next = *first;
            let prev = std::mem::replace(&mut nodes[next as usize].prev, index);
            nodes[prev as usize].next = index;
            let node = &mut nodes[index as usize];
            (node.next, node.prev, node.slot) = (next, prev, slot);
        }
    }

    /// Unlinks a timer from its slot.
    #[inline]
    pub(super) fn unlink(&mut self, nodes: &mut [Node], index: u32) {
        let Node { next, prev, slot, .. } = nodes[index as usize];
        nodes[index as usize].slot = NONE;
        nodes[prev as usize].next = next;
        nodes[next as usize].prev = prev;
        let first = &mut self.first[usize::from(slot)];
        if next == index {
            *first = NOBODY;
            let (word, bit) = bit(slot);
            self.used[usize::from(slot) / SLOTS as usize][word] &= !bit;
        } else if *first == index {
            *first = next;
        }
    }

    /// Returns the next slot in use at this tick, and its first tick, which is in the past if the slot is partly
    /// processed.
    ///
    /// High levels have precedence, because a current slot of a high level may contain timers that are earlier than all
    /// others.
    pub(super) fn next(&self, clock: u64) -> Option<(u16, u64)> {
        let present = (1..LEVELS).rev().find(|level| {
            let (word, bit) = bit(digit(clock, *level) as u16);
            self.used[*level as usize][word] & bit != 0
        });
        let slot = match present {
            Some(level) => level * SLOTS + digit(clock, level),
            // The slots of a lower level end before the next slot of a higher level begins.
            None => (0..LEVELS).find_map(|level| {
                let used = &self.used[level as usize];
                let ahead = from(used, digit(clock, level));
                // Only the highest level wraps around. On lower levels, a slot behind the clock's is empty.
                ahead.or_else(|| from(used, 0)).map(|slot| level * SLOTS + slot)
            })?,
        };
        let slot = slot as u16;
        Some((slot, start(clock, slot)))
    }
}

/// Returns the first tick of a slot in use, for this clock.
#[inline]
pub(super) fn start(clock: u64, slot: u16) -> u64 {
    let (level, slot) = (u32::from(slot) / SLOTS, u32::from(slot) % SLOTS);
    let unit = 1 << (8 * level);
    let base = clock & !(unit * u64::from(SLOTS) - 1);
    let around = slot < digit(clock, level);
    base + (u64::from(slot) + u64::from(around) * u64::from(SLOTS)) * unit
}

/// Returns the byte of a tick that is its slot in a level.
#[inline]
const fn digit(tick: u64, level: u32) -> u32 {
    (tick >> (8 * level)) as u32 % SLOTS
}

/// Returns a slot's word and bit in its level's bitmap.
#[inline]
const fn bit(slot: u16) -> (usize, u64) {
    (slot as usize % SLOTS as usize / 64, 1 << (slot % 64))
}

/// Returns the first slot in use at or after `slot`.
fn from(used: &[u64; WORDS], slot: u32) -> Option<u32> {
    let mut mask = u64::MAX << (slot % 64);
    for (word, bits) in (0..).zip(used).skip(slot as usize / 64) {
        if bits & mask != 0 {
            return Some(word * 64 + (bits & mask).trailing_zeros());
        }
        mask = u64::MAX;
    }
    None
}
