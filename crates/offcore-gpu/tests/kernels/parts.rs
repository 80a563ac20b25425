//! The search for patterns in each part of a payload: results, and numbers of edges read.

use offcore_gpu::kernel;
use offcore_gpu::patterns::Patterns;
use offcore_gpu::trie::Trie;
use proptest::prelude::*;

/// Returns the lowest pattern in `parts` parts, and the maximum of edges read in a part.
fn lowest(trie: &Trie, payload: &[u8], parts: u32) -> (Option<u32>, u64) {
    // SAFETY: the trie exists during the call.
    let part = |part| unsafe { kernel::match_part(&trie.view(), payload, part, parts) };
    let (found, reads): (Vec<_>, Vec<_>) = (0..parts).map(part).unzip();
    (found.into_iter().flatten().min(), reads.into_iter().max().unwrap_or(0))
}

/// Finds the lowest pattern by trying each pattern at each position.
fn naive(patterns: &Patterns, payload: &[u8]) -> Option<u32> {
    let occurs = |pattern: &[u8]| payload.windows(pattern.len()).any(|window| window == pattern);
    (0..).zip(patterns.iter()).find(|(_, pattern)| occurs(pattern)).map(|(number, _)| number)
}

/// Returns the maximum number of edges that a lookup reads: the longest run of used entries, and the empty entry behind
/// it.
fn longest_lookup(trie: &Trie) -> u64 {
    let edges = trie.tables().edges;
    // Repeated twice, because a lookup wraps around.
    let twice = edges.repeat(2);
    twice.split(|edge| *edge == 0).map(<[u64]>::len).max().unwrap_or(0) as u64 + 1
}

/// Returns the first `len` bytes of the infinite Fibonacci word (abaababa...), whose suffixes are often its prefixes.
fn fibonacci(len: usize) -> Vec<u8> {
    let (mut last, mut word) = (b"b".to_vec(), b"a".to_vec());
    while word.len() < len {
        let longer = [&word[..], &last].concat();
        last = std::mem::replace(&mut word, longer);
    }
    word.truncate(len);
    word
}

/// Returns sets of patterns, each with its most expensive payload.
fn hostile() -> Vec<(Vec<Vec<u8>>, Vec<u8>)> {
    let all_but_last = |len: usize| [vec![b'a'; len - 1], vec![b'b']].concat();
    let counted: Vec<u8> = (0..64).collect();
    let periodic = [&b"ab".repeat(400)[..], b"c"].concat();
    vec![
        (vec![all_but_last(64)], vec![b'a'; 1500]),
        (vec![all_but_last(1024)], vec![b'a'; 1500]),
        (vec![all_but_last(1024)], vec![b'a'; 65_535]),
        ((2..=64).map(all_but_last).collect(), vec![b'a'; 1500]),
        (vec![counted.clone()], counted[..63].repeat(23)),
        (vec![periodic], b"ab".repeat(750)),
        (vec![[fibonacci(987), vec![b'c']].concat()], fibonacci(1500)),
        (vec![[fibonacci(600), vec![b'c']].concat(), fibonacci(611)[11..].to_vec()], fibonacci(610)),
    ]
}

#[test]
fn hostile_packets_take_linear_time() {
    for (case, (patterns, payload)) in hostile().into_iter().enumerate() {
        let patterns = Patterns::from_list(patterns).expect("patterns");
        let trie = Trie::new(&patterns);
        for parts in [1, 2, 32, 1000] {
            let (found, reads) = lowest(&trie, &payload, parts);
            assert_eq!(found, naive(&patterns, &payload), "case {case}, {parts} parts");
            // The length of the part, and of the bytes behind it that a walk may read.
            let bytes = payload.len().div_ceil(parts as usize) + patterns.longest();
            let most = 2 * bytes.min(payload.len()) as u64 * longest_lookup(&trie);
            assert!(reads <= most, "case {case}, {parts} parts: {reads} edges read, at most {most} expected");
        }
    }
}

#[test]
fn matches_across_parts_are_found() {
    let patterns = Patterns::from_list([&b"abcdefgh"[..], b"cdef", b"gh", b"h"]).expect("patterns");
    let trie = Trie::new(&patterns);
    for before in 0..40 {
        for end in 1..=8 {
            let payload = [&vec![b'.'; before][..], &b"abcdefgh"[..end], b"..."].concat();
            for parts in 1..50 {
                let case = format!("{end} bytes behind {before}, {parts} parts");
                assert_eq!(lowest(&trie, &payload, parts).0, naive(&patterns, &payload), "{case}");
            }
        }
    }
}

/// Returns words of one to three different bytes.
fn words(letters: usize, len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(b"ab\xff"[..letters].to_vec()), len)
}

/// Returns patterns, with prefixes and suffixes of them, and a payload of the same letters.
fn overlapping() -> impl Strategy<Value = (Vec<Vec<u8>>, Vec<u8>)> {
    (1..=3usize).prop_flat_map(|letters| {
        let cut = (words(letters, 1..24), 0..24usize, any::<bool>());
        let patterns = prop::collection::vec(cut, 1..8).prop_map(|cuts: Vec<(Vec<u8>, usize, bool)>| {
            let both = |(word, at, begin): (Vec<u8>, usize, bool)| {
                let at = at % word.len();
                let cut = if begin { word[..at.max(1)].to_vec() } else { word[at..].to_vec() };
                [word, cut]
            };
            cuts.into_iter().flat_map(both).collect::<Vec<Vec<u8>>>()
        });
        (patterns.prop_shuffle(), words(letters, 0..150))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]
    #[test]
    fn parts_agree_with_a_naive_search((mut patterns, payload) in overlapping(), short in 1..24usize, parts in 1..64u32) {
        // Most payloads contain all short patterns, so some cases only have long patterns.
        patterns.retain(|pattern| pattern.len() >= short);
        prop_assume!(!patterns.is_empty());
        let patterns = Patterns::from_list(&patterns).unwrap();
        let trie = Trie::new(&patterns);
        for parts in [1, parts] {
            prop_assert_eq!(lowest(&trie, &payload, parts).0, naive(&patterns, &payload), "{} parts", parts);
        }
    }
}
