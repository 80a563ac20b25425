//! The table in which a flow's hash leads to its connection.
//!
//! Buckets of eight entries, a cache line each; an entry is in one of two buckets, the emptier one when it came. A table
//! that fills is followed by one of double size, to which entries move little by little: no call moves more than
//! [`STEP`] buckets. New memory is zero pages that the kernel gives on first use, so even that call is short.

/// Entries of a bucket.
const WAYS: usize = 8;
/// Buckets that a call moves.
const STEP: usize = 4;
/// Entries without room in either bucket that are kept aside.
const ASIDE: usize = 64;

/// An entry; 0 is none. Upper half: what of the hash chooses no bucket. Lower half: the value, plus one.
type Slot = u64;

#[derive(Debug, Clone, Copy, Default)]
#[repr(align(64))]
struct Bucket([Slot; WAYS]);

/// Buckets, a power of two.
#[derive(Debug, Default)]
struct Table {
    buckets: Vec<Bucket>,
}

fn slot(hash: u64, value: u32) -> Slot {
    hash >> 32 << 32 | (u64::from(value) + 1)
}

impl Table {
    fn new(buckets: usize) -> Self {
        Self { buckets: vec![Bucket::default(); buckets] }
    }

    /// Both buckets of a hash.
    #[inline]
    fn places(&self, hash: u64) -> [usize; 2] {
        let mask = self.buckets.len() - 1;
        let second = (hash ^ hash >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        [hash as usize & mask, second as usize & mask]
    }

    #[inline]
    fn find(&self, hash: u64, is: &mut impl FnMut(u32) -> bool) -> Option<u32> {
        if self.buckets.is_empty() {
            return None;
        }
        let tag = hash >> 32;
        for place in self.places(hash) {
            for slot in self.buckets[place].0 {
                if slot >> 32 == tag && slot as u32 != 0 && is(slot as u32 - 1) {
                    return Some(slot as u32 - 1);
                }
            }
        }
        None
    }

    fn insert(&mut self, hash: u64, value: u32) -> bool {
        let places = self.places(hash);
        let free = places.map(|place| self.buckets[place].0.iter().filter(|slot| **slot == 0).count());
        let place = if free[1] > free[0] { places[1] } else { places[0] };
        let empty = self.buckets[place].0.iter_mut().find(|slot| **slot == 0);
        empty.map(|empty| *empty = slot(hash, value)).is_some()
    }

    fn remove(&mut self, hash: u64, value: u32) -> bool {
        if self.buckets.is_empty() {
            return false;
        }
        let wanted = slot(hash, value);
        for place in self.places(hash) {
            if let Some(found) = self.buckets[place].0.iter_mut().find(|slot| **slot == wanted) {
                *found = 0;
                return true;
            }
        }
        false
    }
}

/// There is no room; a larger table would have been needed earlier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Full;

/// Values by hash. Different flows may have the same hash: who looks something up says which is meant.
#[derive(Debug, Default)]
pub(super) struct Demux {
    table: Table,
    /// What has not been moved yet, from `moved` on.
    old: Table,
    moved: usize,
    aside: Vec<(u64, u32)>,
    len: usize,
}

impl Demux {
    /// With room for `entries` before it grows.
    pub(super) fn new(entries: usize) -> Self {
        let buckets = (entries.max(64) / WAYS * 10 / 7).next_power_of_two();
        Self { table: Table::new(buckets), old: Table::default(), moved: 0, aside: Vec::new(), len: 0 }
    }

    /// The value of this hash for which `is` says yes.
    #[inline]
    pub(super) fn lookup(&self, hash: u64, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        if let Some(found) = self.table.find(hash, &mut is) {
            return Some(found);
        }
        if self.old.buckets.is_empty() && self.aside.is_empty() {
            return None;
        }
        let aside = || self.aside.iter().filter(|aside| aside.0 == hash).map(|aside| aside.1);
        self.old.find(hash, &mut is).or_else(|| aside().find(|value| is(*value)))
    }

    /// Adds a value. `hash_of` tells the hash of any value that is there.
    ///
    /// # Errors
    /// [`Full`]: nothing has changed.
    pub(super) fn insert(
        &mut self,
        hash: u64,
        value: u32,
        hash_of: impl Fn(u32) -> Option<u64>,
    ) -> Result<(), Full> {
        self.step(&hash_of);
        if self.len * 10 >= self.table.buckets.len() * WAYS * 7 && self.old.buckets.is_empty() {
            let larger = Table::new(self.table.buckets.len() * 2);
            self.old = std::mem::replace(&mut self.table, larger);
            self.moved = 0;
        }
        if !self.table.insert(hash, value) {
            if self.aside.len() == ASIDE {
                return Err(Full);
            }
            self.aside.push((hash, value));
        }
        self.len += 1;
        Ok(())
    }

    /// Takes a value out.
    pub(super) fn remove(&mut self, hash: u64, value: u32) {
        let found = self.table.remove(hash, value) || self.old.remove(hash, value) || {
            let before = self.aside.len();
            self.aside.retain(|aside| *aside != (hash, value));
            self.aside.len() < before
        };
        self.len -= usize::from(found);
    }

    /// Moves a little of the old table to the new one.
    fn step(&mut self, hash_of: &impl Fn(u32) -> Option<u64>) {
        for _ in 0..STEP {
            let Some(bucket) = self.old.buckets.get_mut(self.moved) else { break };
            for slot in std::mem::take(bucket).0 {
                if slot == 0 {
                    continue;
                }
                let value = slot as u32 - 1;
                let Some(hash) = hash_of(value) else { continue };
                if !self.table.insert(hash, value) {
                    self.aside.push((hash, value));
                }
            }
            self.moved += 1;
        }
        if self.moved >= self.old.buckets.len() {
            self.old = Table::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    /// A hash for a number, as good as any.
    fn hash(value: u32) -> u64 {
        let mixed = (u64::from(value) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9)
    }

    #[test]
    fn grows_without_losing_anything() {
        let mut demux = Demux::new(64);
        for value in 0..100_000 {
            demux.insert(hash(value), value, |value| Some(hash(value))).unwrap();
            let before = value / 2;
            assert_eq!(demux.lookup(hash(before), |found| found == before), Some(before));
        }
        assert_eq!(demux.len, 100_000);
        for value in 0..100_000 {
            assert_eq!(demux.lookup(hash(value), |found| found == value), Some(value));
            demux.remove(hash(value), value);
            assert_eq!(demux.lookup(hash(value), |found| found == value), None);
        }
        assert_eq!(demux.len, 0);
    }

    #[test]
    fn equal_hashes_are_told_apart() {
        let mut demux = Demux::new(64);
        for value in 0..10 {
            demux.insert(5, value, |_| Some(5)).unwrap();
        }
        assert_eq!(demux.lookup(5, |value| value == 9), Some(9));
        assert_eq!(demux.lookup(5, |value| value == 10), None);
    }

    #[test]
    fn chosen_collisions_end_in_full() {
        let mut demux = Demux::new(1 << 16);
        let inserted = (0..1000).take_while(|value| demux.insert(5, *value, |_| Some(5)).is_ok()).count();
        assert!((WAYS..=2 * WAYS + ASIDE).contains(&inserted), "{inserted}");
    }

    proptest! {
        #[test]
        fn agrees_with_a_map(steps in prop::collection::vec((0u32..400, any::<bool>()), 0..2000)) {
            let mut demux = Demux::new(64);
            let mut map = HashMap::new();
            for (value, add) in steps {
                if add && !map.contains_key(&value) {
                    demux.insert(hash(value), value, |value| Some(hash(value))).unwrap();
                    map.insert(value, ());
                } else if !add {
                    demux.remove(hash(value), value);
                    map.remove(&value);
                }
                let found = demux.lookup(hash(value), |found| found == value);
                prop_assert_eq!(found.is_some(), map.contains_key(&value));
                prop_assert_eq!(demux.len, map.len());
            }
        }
    }
}
