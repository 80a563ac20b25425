//! A pattern set as tables for a device: a trie without failure links, its edges in one hash table.
//!
//! A device's threads start a walk at every byte of a payload. Nearly all walks end after a byte or two: a bit for every two
//! bytes says which do, in 8 KiB that a GPU keeps next to its threads, and the others look for an edge for each byte.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::layout::{ENDS, PAIRS, TrieView};
use crate::patterns::Patterns;

/// `og_hash` of `kernels/layout.h`: the finalizer of MurmurHash3.
#[inline]
pub const fn hash(key: u32) -> u32 {
    let mut key = key;
    key ^= key >> 16;
    key = key.wrapping_mul(0x85eb_ca6b);
    key ^= key >> 13;
    key = key.wrapping_mul(0xc2b2_ae35);
    key ^ key >> 16
}

/// The tables of `og_trie` (`kernels/layout.h`) for a set of patterns.
///
/// Memory: 16 to 32 bytes of edges for each state, since the hash table is a power of two long and at most half full,
/// 4 bytes of `lowest`, and 9 KiB. 5,000 patterns of 8 to 32 random bytes have some 95,000 states: 2 MiB of edges, 0.4
/// MiB of `lowest`. The most states there can be take 256 MiB and 64 MiB.
#[derive(Clone, Debug)]
pub struct Trie {
    edges: Box<[u64]>,
    lowest: Box<[u32]>,
    first: Box<[u32; 256]>,
    pairs: Box<[u32; PAIRS]>,
    longest: u32,
    /// What it was made of.
    patterns: Patterns,
}

/// The tables to copy to a device, as `og_trie` describes them.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    /// The hash table of edges; its length is a power of two.
    pub edges: &'a [u64],
    /// For each state: 1 + number of the lowest pattern that ends there, or 0.
    pub lowest: &'a [u32],
    /// Next after this first byte, or 0.
    pub first: &'a [u32; 256],
    /// A bit for every two bytes that a walk may begin with.
    pub pairs: &'a [u32; PAIRS],
}

impl Trie {
    /// Builds the trie of `patterns`. 5,000 patterns of 8 to 32 bytes take some milliseconds, 65,536 some 0.1 s.
    pub fn new(patterns: &Patterns) -> Self {
        // One edge leads to each state but the root.
        let entries = (2 * (patterns.states() - 1)).next_power_of_two();
        let mut edges = Edges { table: vec![0; entries].into() };
        let mut lowest = vec![0u32; patterns.states()].into_boxed_slice();
        // Patterns that have bytes left: number, state, remaining bytes.
        let mut walks: Vec<(u32, u32, &[u8])> = (0..).zip(patterns.iter()).map(|(n, p)| (n, 0, p)).collect();
        let mut states = 1;
        // All walks advance by one byte at a time, so that states are numbered by their distance from the root.
        while !walks.is_empty() {
            walks.retain_mut(|(number, state, rest)| {
                // Not empty: no pattern is, and finished walks are removed.
                let Some((byte, behind)) = rest.split_first() else { return false };
                *state = edges.follow(*state, *byte, &mut states);
                *rest = behind;
                let lowest = &mut lowest[*state as usize];
                if behind.is_empty() && *lowest == 0 {
                    // Walks are sorted by number, so the first to end here is the lowest.
                    *lowest = *number + 1;
                }
                !behind.is_empty()
            });
        }
        for entry in edges.table.iter_mut().filter(|entry| lowest[(**entry >> 32) as usize] != 0) {
            *entry |= u64::from(ENDS) << 32;
        }
        let first = Box::new(std::array::from_fn(|byte| edges.find(byte as u32).unwrap_or(0)));
        let pairs = pairs(patterns);
        let longest = patterns.longest() as u32;
        Self { edges: edges.table, lowest, first, pairs, longest, patterns: patterns.clone() }
    }

    /// That of `patterns`: one for all who have it at the same time.
    pub fn shared(patterns: &Patterns) -> Arc<Self> {
        static TRIES: Mutex<Vec<Weak<Trie>>> = Mutex::new(Vec::new());
        let mut tries = TRIES.lock().unwrap_or_else(PoisonError::into_inner);
        tries.retain(|trie| trie.strong_count() > 0);
        if let Some(known) = tries.iter().filter_map(Weak::upgrade).find(|trie| trie.patterns == *patterns) {
            return known;
        }
        let trie = Arc::new(Self::new(patterns));
        tries.push(Arc::downgrade(&trie));
        trie
    }

    /// The tables.
    pub fn tables(&self) -> Tables<'_> {
        Tables { edges: &self.edges, lowest: &self.lowest, first: &self.first, pairs: &self.pairs }
    }

    /// The trie with its addresses in this process, valid as long as `self`. A device that copies the
    /// [`tables`](Self::tables) replaces the four addresses.
    pub fn view(&self) -> TrieView {
        TrieView {
            edges: self.edges.as_ptr(),
            lowest: self.lowest.as_ptr(),
            first: self.first.as_ptr(),
            pairs: self.pairs.as_ptr(),
            // Both fit: there are at most 2^24 - 1 states.
            mask: (self.edges.len() - 1) as u32,
            states: self.lowest.len() as u32,
            longest: self.longest,
            reserved: 0,
        }
    }
}

/// The bits of the first two bytes of each pattern; after a pattern of one byte any byte may come.
fn pairs(patterns: &Patterns) -> Box<[u32; PAIRS]> {
    let mut pairs = Box::new([0; PAIRS]);
    for pattern in patterns.iter() {
        let seconds = match *pattern {
            [_, second, ..] => second..=second,
            _ => 0..=u8::MAX,
        };
        for second in seconds {
            let pair = usize::from(pattern[0]) << 8 | usize::from(second);
            pairs[pair / 32] |= 1 << (pair % 32);
        }
    }
    pairs
}

/// The hash table of edges during construction.
struct Edges {
    table: Box<[u64]>,
}

impl Edges {
    /// The index of `key`, or of the empty entry where it belongs. Half of the entries stay empty, so the search ends.
    fn place(&self, key: u32) -> usize {
        let mask = self.table.len() - 1;
        let mut place = hash(key) as usize & mask;
        while self.table[place] != 0 && self.table[place] as u32 != key {
            place = (place + 1) & mask;
        }
        place
    }

    fn find(&self, key: u32) -> Option<u32> {
        match self.table[self.place(key)] {
            0 => None,
            entry => Some((entry >> 32) as u32),
        }
    }

    /// The state after `byte` from `state`; creates it as number `states` if there is none.
    fn follow(&mut self, state: u32, byte: u8, states: &mut u32) -> u32 {
        let key = state << 8 | u32::from(byte);
        let place = self.place(key);
        if self.table[place] == 0 {
            self.table[place] = u64::from(key) | u64::from(*states) << 32;
            *states += 1;
        }
        (self.table[place] >> 32) as u32
    }
}

#[cfg(test)]
mod tests;
