//! Two hostile guests and the path between them, with the features that drivers negotiate today: random scripts, and
//! the corpus in `fuzz/corpus/pair`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../../fuzz/script.rs"]
mod bytes;
#[path = "../hostile_guest/neighbour.rs"]
mod neighbour;
#[path = "../../../../fuzz/replay.rs"]
#[allow(dead_code, reason = "these scripts are longer")]
mod replay;
mod script;

use offcore_stats::SplitMix;

/// Number of pairs of guests, and bytes of the script for each. They take about five seconds, because copies get lost.
const CASES: u64 = 50;
const BYTES: usize = 8192;

#[test]
fn random_guest_pair_scripts_pass() {
    let mut ways = [0; 2];
    for seed in 1..=CASES {
        let mut dice = SplitMix::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let script: Vec<u8> = (0..BYTES).map(|_| dice.next() as u8).collect();
        script::play(&script, &mut ways);
    }
    assert!(ways.iter().all(|&packets| packets > 100), "{ways:?} packets in one copy, and in two");
}

#[test]
fn fuzz_corpus_passes() {
    let mut ways = [0; 2];
    for script in replay::corpus("pair") {
        script::play(&script, &mut ways);
    }
    assert!(ways.iter().all(|&packets| packets > 10), "{ways:?} packets in one copy, and in two");
}
