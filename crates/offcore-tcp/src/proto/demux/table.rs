//! A hash table with fixed size: bucketised cuckoo hashing with two choices (Pagh and Rodler; Dietzfelbinger and
//! Weidling).

use std::fmt;

use arrayvec::ArrayVec;

use super::Full;

/// Entries per bucket, which fill one cache line.
pub(super) const SLOTS: usize = 8;

/// Maximum number of buckets: 1 GiB.
pub(super) const MAX_BUCKETS: usize = 1 << 24;

/// Number of buckets that an insert searches for a free place before it fails.
///
/// At 90 % load about half of the buckets are full. The first two lead to 14 others and those to about 100.
const SEARCHED: usize = 128;

/// A tag of 0 is a free place.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket {
    tags: [u32; SLOTS],
    values: [u32; SLOTS],
}

impl Bucket {
    /// Returns a mask with one bit for each slot with this tag.
    #[inline]
    fn matches(&self, tag: u32) -> u32 {
        // No early exit: eight comparisons are two vector instructions.
        let bits = self.tags.iter().enumerate().map(|(slot, found)| u32::from(*found == tag) << slot);
        bits.fold(0, |mask, bit| mask | bit)
    }

    #[inline]
    fn free(&self) -> Option<usize> {
        first(self.matches(0))
    }
}

/// Returns the index of the lowest set bit.
#[inline]
fn first(mask: u32) -> Option<usize> {
    (mask != 0).then(|| mask.trailing_zeros() as usize % SLOTS)
}

/// A bucket on the path to a free place, and the entry that would move there.
#[derive(Clone, Copy)]
struct Step {
    bucket: usize,
    /// The step whose bucket contains the entry that moves here, and its slot.
    from: Option<(usize, usize)>,
}

/// A table of fixed size.
pub(in crate::proto) struct Table {
    /// The number of buckets is a power of two.
    buckets: Box<[Bucket]>,
    len: usize,
}

impl Table {
    pub(super) fn new(size: usize) -> Self {
        let buckets = size.div_ceil(SLOTS).clamp(2, MAX_BUCKETS).next_power_of_two();
        Self { buckets: vec![Bucket::default(); buckets].into(), len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn buckets(&self) -> usize {
        self.buckets.len()
    }

    pub(super) const fn capacity(&self) -> usize {
        self.buckets.len() * SLOTS
    }

    /// Returns the two buckets of a tag: one from its low bits, the other from the high bits of its product with an odd
    /// number, which depend on all bits.
    #[inline]
    fn choices(&self, tag: u32) -> [usize; 2] {
        let mask = self.buckets.len() - 1;
        // There are at least two buckets, so the shift is at most 31.
        let shift = 32 - self.buckets.len().trailing_zeros();
        [tag as usize & mask, (tag.wrapping_mul(0x9e37_79b1) >> shift) as usize & mask]
    }

    #[inline]
    pub(super) fn find(&self, tag: u32, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        for choice in self.choices(tag) {
            let bucket = &self.buckets[choice];
            let mut mask = bucket.matches(tag);
            while let Some(slot) = first(mask) {
                if is(bucket.values[slot]) {
                    return Some(bucket.values[slot]);
                }
                mask &= mask - 1;
            }
        }
        None
    }

    /// Inserts the entry into the emptier bucket, which balances both.
    #[inline]
    pub(super) fn insert(&mut self, tag: u32, value: u32) -> Result<(), Full> {
        let [a, b] = self.choices(tag);
        let (in_a, in_b) = (self.buckets[a].matches(0), self.buckets[b].matches(0));
        let (bucket, mask) = if in_a.count_ones() >= in_b.count_ones() { (a, in_a) } else { (b, in_b) };
        let (bucket, slot) = match first(mask) {
            Some(slot) => (bucket, slot),
            None => self.make_room([a, b]).ok_or(Full)?,
        };
        self.put(bucket, slot, tag, value);
        self.len += 1;
        Ok(())
    }

    #[inline]
    pub(super) fn remove(&mut self, tag: u32, value: u32) -> bool {
        match self.position(tag, value) {
            Some((bucket, slot)) => {
                self.clear(bucket, slot);
                true
            }
            None => false,
        }
    }

    #[inline]
    pub(super) fn replace(&mut self, tag: u32, value: u32, new: u32) -> bool {
        match self.position(tag, value) {
            Some((bucket, slot)) => {
                self.put(bucket, slot, tag, new);
                true
            }
            None => false,
        }
    }

    pub(super) fn entry(&self, bucket: usize, slot: usize) -> Option<(u32, u32)> {
        let Bucket { tags, values } = &self.buckets[bucket];
        (tags[slot] != 0).then_some((tags[slot], values[slot]))
    }

    /// Frees a used place.
    pub(super) fn clear(&mut self, bucket: usize, slot: usize) {
        self.put(bucket, slot, 0, 0);
        self.len -= 1;
    }

    #[inline]
    fn position(&self, tag: u32, value: u32) -> Option<(usize, usize)> {
        self.choices(tag).into_iter().find_map(|choice| {
            let Bucket { tags, values } = &self.buckets[choice];
            let slot = (0..SLOTS).find(|slot| (tags[*slot], values[*slot]) == (tag, value))?;
            Some((choice, slot))
        })
    }

    #[inline]
    fn put(&mut self, bucket: usize, slot: usize, tag: u32, value: u32) {
        self.buckets[bucket].tags[slot] = tag;
        self.buckets[bucket].values[slot] = value;
    }

    /// Frees a place in either of two full buckets: the entries on the shortest path to a free place each move to their
    /// other bucket. The search is breadth-first, so that few entries move.
    #[cold]
    fn make_room(&mut self, choices: [usize; 2]) -> Option<(usize, usize)> {
        let mut steps = ArrayVec::<Step, SEARCHED>::new();
        steps.extend(choices.map(|bucket| Step { bucket, from: None }));
        let mut at = 0;
        while let Some(Step { bucket, .. }) = steps.get(at).copied() {
            for slot in 0..SLOTS {
                let other = self.other(bucket, self.buckets[bucket].tags[slot]);
                // A bucket that is already on the list gives no new path.
                if steps.iter().any(|step| step.bucket == other) {
                    continue;
                }
                let step = Step { bucket: other, from: Some((at, slot)) };
                if let Some(free) = self.buckets[other].free() {
                    return Some(self.shift(&steps, step, free));
                }
                if steps.try_push(step).is_err() {
                    break;
                }
            }
            at += 1;
        }
        None
    }

    /// Moves each entry on the path to `last`, whose slot `free` is free, by one step. Returns the freed place.
    fn shift(&mut self, steps: &[Step], last: Step, free: usize) -> (usize, usize) {
        let (mut step, mut free) = (last, free);
        while let Some((from, slot)) = step.from {
            let Bucket { tags, values } = self.buckets[steps[from].bucket];
            self.put(step.bucket, free, tags[slot], values[slot]);
            (step, free) = (steps[from], slot);
        }
        (step.bucket, free)
    }

    /// Returns the other bucket of a tag, unless both are the same.
    fn other(&self, bucket: usize, tag: u32) -> usize {
        let [a, b] = self.choices(tag);
        if a == bucket { b } else { a }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table").field("capacity", &self.capacity()).field("len", &self.len).finish()
    }
}
