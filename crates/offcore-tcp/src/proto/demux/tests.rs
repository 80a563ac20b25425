use std::collections::HashMap;

use offcore_stats::SplitMix;
use proptest::prelude::*;

use super::*;

/// Operations on the table and on the model, with keys from few hashes, some with equal tags.
#[derive(Clone, Debug)]
enum Op {
    Insert(u16),
    Remove(u16),
    Replace(u16),
    Lookup(u16),
    Round,
    Grow,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => any::<u16>().prop_map(Op::Insert),
        3 => any::<u16>().prop_map(Op::Remove),
        1 => any::<u16>().prop_map(Op::Replace),
        4 => any::<u16>().prop_map(Op::Lookup),
        1 => Just(Op::Round),
        1 => Just(Op::Grow),
    ]
}

/// Four keys share one hash.
fn hash(key: u16) -> u64 {
    SplitMix::new(u64::from(key % 256 / 4)).next()
}

/// The table, its model, and the flows' keys by value, as in a slab of connections.
struct Pair {
    demux: Demux,
    model: HashMap<u16, u32>,
    keys: Vec<u16>,
}

impl Pair {
    fn lookup(&self, key: u16) -> Option<u32> {
        self.demux.lookup(hash(key), |value| self.keys[value as usize] == key)
    }

    fn value(&mut self, key: u16) -> u32 {
        self.keys.push(key);
        self.keys.len() as u32 - 1
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Insert(key) => {
                let key = key % 256;
                let value = self.value(key);
                if !self.model.contains_key(&key) && self.demux.insert(hash(key), value).is_ok() {
                    self.model.insert(key, value);
                }
            }
            Op::Remove(key) => {
                let key = key % 256;
                let expected = self.model.remove(&key);
                assert_eq!(self.demux.remove(hash(key), expected.unwrap_or(u32::MAX)), expected.is_some());
            }
            Op::Replace(key) => {
                let key = key % 256;
                let new = self.value(key);
                let old = self.model.get_mut(&key).map(|value| std::mem::replace(value, new));
                assert_eq!(self.demux.replace(hash(key), old.unwrap_or(u32::MAX), new), old.is_some());
            }
            Op::Lookup(key) => assert_eq!(self.lookup(key % 256), self.model.get(&(key % 256)).copied()),
            Op::Round => self.demux.round(),
            Op::Grow => {
                let table = Demux::table(self.demux.capacity() * 2);
                let growing = self.demux.growth.is_some();
                assert_eq!(self.demux.grow(table).is_err(), growing);
            }
        }
        assert_eq!(self.demux.len(), self.model.len());
    }
}

proptest! {
    #[test]
    fn table_matches_map_model(ops in proptest::collection::vec(op(), 0..600)) {
        let demux = Demux::new(Demux::table(16));
        let mut pair = Pair { demux, model: HashMap::new(), keys: Vec::new() };
        for op in &ops {
            pair.apply(op);
        }
        for key in 0..256 {
            prop_assert_eq!(pair.lookup(key), pair.model.get(&key).copied());
        }
    }
}

#[test]
fn table_fills_to_nine_tenths() {
    for size in [1 << 10, 1 << 17] {
        for seed in 0..8 {
            let mut random = SplitMix::new(seed);
            let mut demux = Demux::new(Demux::table(size));
            for value in 0..size as u32 * 9 / 10 {
                assert_eq!(demux.insert(random.next(), value), Ok(()), "{value} of {size}");
            }
            let mut random = SplitMix::new(seed);
            for value in 0..size as u32 * 9 / 10 {
                assert_eq!(demux.lookup(random.next(), |found| found == value), Some(value));
            }
        }
    }
}

#[test]
fn full_table_keeps_its_entries() {
    let mut demux = Demux::new(Demux::table(64));
    let hashes: Vec<u64> = (0..100).scan(SplitMix::new(1), |random, _| Some(random.next())).collect();
    let kept: Vec<u32> =
        (0..100).filter(|value| demux.insert(hashes[*value as usize], *value).is_ok()).collect();
    assert!(kept.len() <= 64 && kept.len() > 57, "{}", kept.len());
    for value in kept {
        assert_eq!(demux.lookup(hashes[value as usize], |found| found == value), Some(value));
    }
}

#[test]
fn flows_with_equal_tags_are_distinguished() {
    let mut demux = Demux::new(Demux::table(1024));
    for value in 0..16 {
        demux.insert(0x1234_5678_0000_0000 | u64::from(value), value).unwrap();
    }
    for value in 0..16 {
        assert_eq!(demux.lookup(0x1234_5678_0000_0000, |found| found == value), Some(value));
    }
    assert_eq!(demux.lookup(0x1234_5678_0000_0000, |_| false), None);
    // Both buckets of the tag contain only this tag, so no entry can move away.
    assert_eq!(demux.insert(0x1234_5678_0000_0000, 16), Err(Full));
    assert!(demux.remove(0x1234_5678_0000_0000, 3));
    assert_eq!(demux.lookup(0x1234_5678_0000_0000, |found| found == 3), None);
    assert_eq!(demux.len(), 15);
}

#[test]
fn growth_returns_old_table() {
    let mut random = SplitMix::new(5);
    let mut demux = Demux::new(Demux::table(1024));
    let mut hashes = Vec::new();
    while !demux.wants_growth() {
        hashes.push(random.next());
        demux.insert(hashes[hashes.len() - 1], hashes.len() as u32 - 1).unwrap();
    }
    assert_eq!(demux.len(), 717);
    assert!(demux.grow(Demux::table(1024)).is_err());
    demux.grow(Demux::table(2048)).unwrap();
    let mut rounds = 0;
    while demux.take_emptied().is_none() {
        assert!(!demux.wants_growth());
        for (value, hash) in (0..).zip(&hashes) {
            assert_eq!(demux.lookup(*hash, |found| found == value), Some(value));
        }
        demux.round();
        rounds += 1;
    }
    assert_eq!(rounds, 1024 / 8 / 4);
    assert_eq!((demux.len(), demux.capacity()), (717, 2048));
    for (value, hash) in (0..).zip(&hashes) {
        assert_eq!(demux.lookup(*hash, |found| found == value), Some(value));
    }
}

#[test]
fn lookup_compares_few_keys() {
    let mut random = SplitMix::new(9);
    let mut demux = Demux::new(Demux::table(1 << 18));
    while !demux.wants_growth() {
        demux.insert(random.next(), 0).unwrap();
    }
    let mut asked = 0;
    for _ in 0..1_000_000 {
        demux.lookup(random.next(), |_| {
            asked += 1;
            false
        });
    }
    // 183,501 tags of 2^32 each.
    assert!(asked < 100, "{asked}");
}
