use proptest::prelude::*;

use super::*;

/// Returns the lowest number of a pattern that is a window of the payload, plus one.
fn naive(patterns: &Patterns, payload: &[u8]) -> u32 {
    let occurs = |pattern: &[u8]| payload.windows(pattern.len()).any(|window| window == pattern);
    (1..).zip(patterns.iter()).find(|(_, pattern)| occurs(pattern)).map_or(0, |(number, _)| number)
}

/// Returns one matcher of each kind: DFA or NFA, with and without a filter.
fn matchers(patterns: &Patterns) -> [Matcher; 4] {
    [(DFA_LIMIT, true), (0, true), (DFA_LIMIT, false), (0, false)].map(|(limit, filtered)| {
        let mut matcher = Matcher::with_limit(patterns, limit).unwrap();
        assert_eq!(matcher.is_dfa(), limit != 0);
        if !filtered {
            matcher.filter = None;
        }
        matcher
    })
}

fn results(matcher: &Matcher, payloads: &[Vec<u8>]) -> Vec<u32> {
    let mut results = vec![u32::MAX; payloads.len()];
    matcher.results(payloads.iter().map(Vec::as_slice).zip(&mut results));
    results
}

#[test]
fn dfa_size_estimate_is_accurate() {
    let text = Patterns::from_list(["GET /evil", "POST /", "cmd.exe"]).unwrap();
    let edges = Patterns::from_list([&b"\x00"[..], b"\xff\xff", b"\x80"]).unwrap();
    for patterns in [text, edges, Patterns::random(1, 500, 8..=32).unwrap()] {
        let nfa = noncontiguous::NFA::new(patterns.iter()).unwrap();
        let mut builder = dfa::Builder::new();
        builder.prefilter(false).start_kind(StartKind::Unanchored);
        let dfa = builder.build_from_noncontiguous(&nfa).unwrap();
        let (found, expected) = (dfa_size(&patterns), dfa.memory_usage());
        // In addition to its table a DFA has lists of matches and a few states that are not in the trie.
        let beside = 4 * 1024 + 40 * patterns.len();
        assert!((found..found + beside).contains(&expected), "{found}, in truth {expected}");
    }
}

#[test]
fn large_sets_get_an_nfa() {
    let large = Patterns::random(1, 40_000, 8..=32).unwrap();
    let matcher = Matcher::new(&large).unwrap();
    assert!(!matcher.is_dfa() && matcher.filter.is_none() && matcher.memory() < 100 << 20, "{matcher:?}");
    for (number, pattern) in (1..).zip(large.iter()).step_by(4001) {
        assert_eq!(matcher.result(std::iter::once(pattern)), number);
    }
    let small = Matcher::new(&Patterns::from_list(["one", "two"]).unwrap()).unwrap();
    assert!(small.is_dfa() && small.filter.is_some() && small.memory() > 0, "{small:?}");
}

#[test]
fn suffix_and_equal_patterns_are_distinct() {
    let patterns = Patterns::from_list(["aaaa", "x", "aa", "aa", "a", "xa"]).unwrap();
    for matcher in matchers(&patterns) {
        let found =
            ["a", "aa", "aaa", "aaaa", "xa", "bxab", "b", ""].map(|payload| payload.as_bytes().to_vec());
        assert_eq!(results(&matcher, &found), [5, 3, 3, 1, 2, 2, 0, 0]);
    }
    // The longest pattern, which ends last, has the highest number, and vice versa.
    let nested: Vec<Vec<u8>> = (1..=1024).map(|len| vec![b'a'; len]).collect();
    let payload = [vec![b'a'; 1024]];
    assert_eq!(results(&Matcher::new(&Patterns::from_list(&nested).unwrap()).unwrap(), &payload), [1]);
    let nested = Patterns::from_list(nested.iter().rev()).unwrap();
    assert_eq!(results(&Matcher::new(&nested).unwrap(), &payload), [1]);
    assert_eq!(results(&Matcher::new(&nested).unwrap(), &[vec![b'a'; 1000]]), [25]);
}

#[test]
fn set_of_65536_equal_patterns_is_built() {
    let matcher = Matcher::new(&Patterns::from_list(vec!["same"; 65_536]).unwrap()).unwrap();
    assert_eq!(results(&matcher, &[b"the same".to_vec(), b"other".to_vec()]), [1, 0]);
}

fn alphabet() -> impl Strategy<Value = u8> {
    prop::sample::select(vec![0x00, b'a', b'b', 0xff])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn results_match_a_naive_search(
        patterns in prop::collection::vec(prop::collection::vec(alphabet(), 1..7), 1..20),
        payloads in prop::collection::vec(prop::collection::vec(alphabet(), 0..40), 0..40),
    ) {
        let patterns = Patterns::from_list(&patterns).unwrap();
        let expected: Vec<u32> = payloads.iter().map(|payload| naive(&patterns, payload)).collect();
        for matcher in matchers(&patterns) {
            prop_assert_eq!(&results(&matcher, &payloads), &expected);
        }
    }

    #[test]
    fn split_payload_matches_whole_payload(
        patterns in prop::collection::vec(prop::collection::vec(alphabet(), 1..9), 1..10),
        parts in prop::collection::vec(prop::collection::vec(alphabet(), 0..12), 0..6),
    ) {
        let patterns = Patterns::from_list(&patterns).unwrap();
        let expected = naive(&patterns, &parts.concat());
        for matcher in matchers(&patterns) {
            prop_assert_eq!(matcher.result(parts.iter().map(Vec::as_slice)), expected);
        }
    }
}
