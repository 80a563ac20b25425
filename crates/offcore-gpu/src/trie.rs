//! A pattern set as tables for a device: an Aho-Corasick automaton with its edges in one hash table.
//!
//! Each thread of a device searches a part of a payload. Few bytes begin a pattern: a table with one bit per pair of
//! bytes excludes most of the others. It has 8 KiB, which a GPU keeps in fast memory near its threads. From a byte that
//! may begin a pattern, a walk looks up one edge per byte. If an edge is missing, the walk continues at the failure
//! link of its state. Therefore the time for a packet is proportional to its length, even if it consists of prefixes of
//! patterns.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::layout::{ENDS, Link, PAIRS, TrieView};
use crate::patterns::Patterns;

/// No pattern.
const NONE: u32 = u32::MAX;

/// Computes `og_hash` of `kernels/layout.h`: the finalizer of MurmurHash3.
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
/// Memory: 16 to 32 bytes of edges for each state, because the length of the hash table is a power of two and it is at
/// most half full, 8 bytes of its link, and 9 KiB. 5,000 patterns of 8 to 32 random bytes have about 95,000 states: 2
/// MiB of edges, 0.8 MiB of links. The maximum number of states takes 256 MiB and 128 MiB.
#[derive(Clone, Debug)]
pub struct Trie {
    edges: Box<[u64]>,
    links: Box<[Link]>,
    first: Box<[u32; 256]>,
    pairs: Box<[u32; PAIRS]>,
    longest: u32,
    /// The patterns of the trie.
    patterns: Patterns,
}

/// The tables to copy to a device, as `og_trie` describes them.
#[derive(Clone, Copy, Debug)]
pub struct Tables<'a> {
    /// The hash table of edges; its length is a power of two.
    pub edges: &'a [u64],
    /// For each state.
    pub links: &'a [Link],
    /// Next after this first byte, or 0.
    pub first: &'a [u32; 256],
    /// A bit for every two bytes that a walk may begin with.
    pub pairs: &'a [u32; PAIRS],
}

impl Trie {
    /// Builds the trie of `patterns`. 5,000 patterns of 8 to 32 bytes take some milliseconds, 65,536 take about 0.1 s.
    pub fn new(patterns: &Patterns) -> Self {
        // One edge leads to each state but the root.
        let entries = (2 * (patterns.states() - 1)).next_power_of_two();
        let mut edges = Edges { table: vec![0; entries].into() };
        let mut links = Vec::with_capacity(patterns.states());
        links.push(Link::default());
        // By state: the lowest pattern that ends there.
        let mut lowest = vec![NONE; patterns.states()];
        // Patterns that have bytes left: number, state, remaining bytes.
        let mut walks: Vec<(u32, u32, &[u8])> = (0..).zip(patterns.iter()).map(|(n, p)| (n, 0, p)).collect();
        // All walks advance by one byte at a time, so that states are numbered by their distance from the root, and
        // links lead to lower numbers.
        while !walks.is_empty() {
            walks.retain_mut(|(number, state, rest)| {
                // Not empty, because no pattern is empty and finished walks are removed.
                let Some((byte, behind)) = rest.split_first() else { return false };
                *state = edges.follow(*state, *byte, &mut links);
                *rest = behind;
                if behind.is_empty() {
                    let lowest = &mut lowest[*state as usize];
                    *lowest = (*lowest).min(*number);
                }
                !behind.is_empty()
            });
        }
        for (state, link) in links.iter_mut().enumerate() {
            // A pattern that ends at the link ends here, too.
            lowest[state] = lowest[state].min(lowest[link.state as usize]);
            // The number fits, because there are at most 65,536 patterns.
            link.lowest = if lowest[state] == NONE { 0 } else { lowest[state] as u16 };
            if link.len < 2 {
                (link.state, link.len) = (0, 1);
            }
        }
        for entry in edges.table.iter_mut().filter(|entry| lowest[(**entry >> 32) as usize] != NONE) {
            *entry |= u64::from(ENDS) << 32;
        }
        let first = Box::new(std::array::from_fn(|byte| edges.find(byte as u32).unwrap_or(0)));
        let pairs = pairs(patterns);
        let longest = patterns.longest() as u32;
        Self { edges: edges.table, links: links.into(), first, pairs, longest, patterns: patterns.clone() }
    }

    /// Returns the trie of `patterns`. Concurrent users share one trie.
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

    /// Returns the tables.
    pub fn tables(&self) -> Tables<'_> {
        Tables { edges: &self.edges, links: &self.links, first: &self.first, pairs: &self.pairs }
    }

    /// Returns the trie with its addresses in this process, valid as long as `self`. A device that copies the
    /// [`tables`](Self::tables) replaces the four addresses.
    pub fn view(&self) -> TrieView {
        TrieView {
            edges: self.edges.as_ptr(),
            links: self.links.as_ptr(),
            first: self.first.as_ptr(),
            pairs: self.pairs.as_ptr(),
            // Both fit: there are at most 2^24 - 1 states.
            mask: (self.edges.len() - 1) as u32,
            states: self.links.len() as u32,
            longest: self.longest,
            reserved: 0,
        }
    }
}

/// Returns the bits of the first two bytes of each pattern. A pattern of one byte may be followed by any byte.
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
    /// Returns the index of `key`, or of the empty entry for it. Half of the entries stay empty, so the search ends.
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

    /// Returns the state after `byte` from `state`. Creates the state and its link if they do not exist.
    fn follow(&mut self, state: u32, byte: u8, links: &mut Vec<Link>) -> u32 {
        let key = state << 8 | u32::from(byte);
        let place = self.place(key);
        if self.table[place] == 0 {
            // The longest suffix of `state` with an edge for `byte`. All shorter states exist already.
            let mut from = state;
            let mut link = Link::default();
            while from != 0 && link.state == 0 {
                let shorter = links[from as usize];
                from = shorter.state;
                if let Some(state) = self.find(from << 8 | u32::from(byte)) {
                    link = Link { state, len: shorter.len + 1, lowest: 0 };
                }
            }
            self.table[place] = u64::from(key) | (links.len() as u64) << 32;
            links.push(link);
        }
        (self.table[place] >> 32) as u32
    }
}

#[cfg(test)]
mod tests;
