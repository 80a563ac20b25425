use std::collections::HashMap;

use aho_corasick::AhoCorasick;
use proptest::prelude::*;

use super::*;

/// Performs the walk of `og_trie` as described in `kernels/layout.h`, with only the view.
fn walk(trie: &Trie, payload: &[u8]) -> u32 {
    let (view, tables) = (trie.view(), trie.tables());
    assert_eq!(view.edges, tables.edges.as_ptr());
    let next = |state: u32, byte: u8| {
        let key = (state & !ENDS) << 8 | u32::from(byte);
        let mut place = hash(key) & view.mask;
        loop {
            let entry = tables.edges[place as usize];
            if entry == 0 || entry as u32 == key {
                return (entry >> 32) as u32;
            }
            place = (place + 1) & view.mask;
        }
    };
    for pair in payload.windows(2) {
        let found = tables.first[usize::from(pair[0])];
        assert_eq!(found, next(0, pair[0]), "the first byte's table agrees with the edges");
        let bit = usize::from(pair[0]) << 8 | usize::from(pair[1]);
        let goes_on = found & ENDS != 0 || found != 0 && next(found, pair[1]) != 0;
        assert_eq!(tables.pairs[bit / 32] >> (bit % 32) & 1 == 1, goes_on, "{pair:02x?}");
    }
    // The state is the last `len` bytes before `at`.
    let (mut lowest, mut state, mut len, mut at) = (u32::MAX, 0, 0, 0);
    while at < payload.len() {
        let found = next(state, payload[at]);
        if found != 0 {
            (state, len, at) = (found & !ENDS, len + 1, at + 1);
            assert!(len <= view.longest as usize && state < view.states);
            if found & ENDS != 0 {
                lowest = lowest.min(tables.links[state as usize].lowest.into());
            }
        } else if len > 1 {
            let link = tables.links[state as usize];
            assert!(link.state < state && usize::from(link.len) < len);
            (state, len) = (link.state, usize::from(link.len));
            at -= if state == 0 { len } else { 0 };
            len = if state == 0 { 0 } else { len };
        } else {
            (state, at, len) = (0, at + 1 - len, 0);
        }
    }
    lowest.wrapping_add(1)
}

/// Computes the same result by the crate's overlapping search.
fn expected(patterns: &Patterns, payload: &[u8]) -> u32 {
    let automaton = AhoCorasick::new(patterns.iter()).unwrap();
    let numbers = automaton.find_overlapping_iter(payload).map(|found| found.pattern().as_u32() + 1);
    numbers.min().unwrap_or(0)
}

fn trie(list: &[&[u8]]) -> Trie {
    Trie::new(&Patterns::from_list(list).unwrap())
}

#[test]
fn the_hash_is_murmur3s_finalizer() {
    // MurmurHash3_x86_32 of an empty input is its finalized seed. These values are published.
    assert_eq!((hash(0), hash(1), hash(u32::MAX)), (0, 0x514e_28b7, 0x81f1_6f39));
}

#[test]
fn edges_are_found_by_linear_probing() {
    for patterns in [
        Patterns::from_list([b"\0"]).unwrap(),
        Patterns::from_list((0..=255u8).map(|byte| [byte])).unwrap(),
        Patterns::from_list([[0xffu8; 1024]]).unwrap(),
        Patterns::random(1, 5000, 8..=32).unwrap(),
    ] {
        let trie = Trie::new(&patterns);
        let (view, tables) = (trie.view(), trie.tables());
        assert!(tables.edges.len().is_power_of_two());
        assert_eq!(tables.edges.len(), view.mask as usize + 1);
        assert_eq!((tables.links.len(), view.states as usize), (patterns.states(), patterns.states()));
        assert_eq!((view.longest as usize, view.reserved), (patterns.longest(), 0));
        let used: Vec<u64> = tables.edges.iter().copied().filter(|entry| *entry != 0).collect();
        assert_eq!(used.len(), patterns.states() - 1, "one edge leads to each state but the root");
        assert!(2 * used.len() <= tables.edges.len());

        let mut reached = vec![0; patterns.states()];
        let mut last_at_root = 0;
        for (at, &entry) in tables.edges.iter().enumerate().filter(|(_, entry)| **entry != 0) {
            let (key, next) = (entry as u32, (entry >> 32) as u32 & !ENDS);
            reached[next as usize] += 1;
            assert!(key >> 8 < next, "a state is made after the one that leads to it");
            let mut place = (hash(key) & view.mask) as usize;
            while place != at {
                assert_ne!(tables.edges[place], 0, "no empty entry before a key's place");
                place = (place + 1) & view.mask as usize;
            }
            if key >> 8 == 0 {
                assert_eq!(tables.first[key as usize], (entry >> 32) as u32);
                last_at_root = last_at_root.max(next);
            }
        }
        assert!(reached[0] == 0 && reached[1..].iter().all(|edges| *edges == 1));
        let firsts = tables.first.iter().filter(|state| **state != 0).count();
        assert_eq!(last_at_root as usize, firsts, "the root's children are the first states");
    }
}

/// Links and lowest patterns, from the bytes of each state.
#[test]
fn failure_links_match_longest_suffix() {
    for patterns in [
        Patterns::from_list([&b"aaaa"[..], b"aab", b"b", b"aab", b"ba"]).unwrap(),
        Patterns::from_list([[0xffu8; 1024]]).unwrap(),
        Patterns::random(1, 5000, 8..=32).unwrap(),
        Patterns::random(2, 20_000, 1..=4).unwrap(),
    ] {
        let trie = Trie::new(&patterns);
        let tables = trie.tables();
        let edges = tables.edges.iter().filter(|entry| **entry != 0);
        let next: HashMap<u32, u32> = edges.map(|entry| (*entry as u32, (*entry >> 32) as u32)).collect();
        let mut states: HashMap<&[u8], u32> = HashMap::new();
        for pattern in patterns.iter() {
            let mut state = 0;
            for len in 1..=pattern.len() {
                state = next[&((state & !ENDS) << 8 | u32::from(pattern[len - 1]))];
                states.insert(&pattern[..len], state);
            }
        }
        assert_eq!(states.len() + 1, patterns.states());
        let mut numbers = HashMap::new();
        (0..).zip(patterns.iter()).for_each(|(number, pattern)| {
            numbers.entry(pattern).or_insert(number);
        });
        for (bytes, state) in &states {
            let ends = || (0..bytes.len()).map(|begin| &bytes[begin..]);
            let link = tables.links[(state & !ENDS) as usize];
            let lowest = ends().filter_map(|end| numbers.get(end).copied()).min();
            assert_eq!(
                (state & ENDS != 0, link.lowest),
                (lowest.is_some(), lowest.unwrap_or(0)),
                "{bytes:02x?}"
            );
            let longest = ends()
                .skip(1)
                .filter(|end| end.len() > 1)
                .find_map(|end| Some((states.get(end)?, end.len())));
            let expected = longest.map_or((0, 1), |(state, len)| (state & !ENDS, len));
            assert_eq!((link.state, usize::from(link.len)), expected, "{bytes:02x?}");
        }
    }
}

#[test]
fn lowest_number_wins() {
    let trie = trie(&[b"cde", b"abcd", b"bc", b"bc", b"z", b"abcdef"]);
    assert_eq!(walk(&trie, b"abcd"), 2);
    assert_eq!(walk(&trie, b"abcde"), 1);
    assert_eq!(walk(&trie, b"xbcx"), 3, "of equal patterns, the lower number");
    assert_eq!(walk(&trie, b"zabcd"), 2);
    assert_eq!(walk(&trie, b"zab"), 5);
    assert_eq!(walk(&trie, b"ab"), 0);
    assert_eq!(walk(&trie, b""), 0);
}

#[test]
fn the_most_patterns_are_all_found() {
    let patterns = Patterns::random(3, 65_536, 8..=32).unwrap();
    let trie = Trie::new(&patterns);
    for (number, pattern) in (1..).zip(patterns.iter()).step_by(97) {
        assert_eq!(walk(&trie, pattern), number);
        assert_eq!(walk(&trie, &pattern[..pattern.len() - 1]), 0);
    }
}

/// Returns bytes of a small alphabet that includes the extreme values, so that many patterns contain each other.
fn alphabet() -> impl Strategy<Value = u8> {
    prop::sample::select(vec![0x00, b'a', b'b', 0xff])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn trie_agrees_with_aho_corasick(
        patterns in prop::collection::vec(prop::collection::vec(alphabet(), 1..7), 1..20),
        payload in prop::collection::vec(alphabet(), 0..60),
    ) {
        let patterns = Patterns::from_list(&patterns).unwrap();
        prop_assert_eq!(walk(&Trie::new(&patterns), &payload), expected(&patterns, &payload));
    }

    #[test]
    fn trie_finds_patterns_from_the_payload(
        payload in prop::collection::vec(any::<u8>(), 1..200),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 1..40usize, any::<Option<u8>>()), 1..20),
    ) {
        let cut = |(at, len, other): &(prop::sample::Index, usize, Option<u8>)| {
            let mut pattern: Vec<u8> = payload[at.index(payload.len())..].iter().take(*len).copied().collect();
            pattern.extend(other);
            pattern
        };
        let patterns = Patterns::from_list(cuts.iter().map(cut)).unwrap();
        prop_assert_eq!(walk(&Trie::new(&patterns), &payload), expected(&patterns, &payload));
    }
}
