//! A packed queue whose other side writes arbitrary data: random scripts, and the corpus in `fuzz/corpus/packed`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod script;

use script::Outcome;

#[test]
fn random_ring_scripts_pass() {
    let mut sum = Outcome::default();
    replay::play_any(5000, 600, |bytes| sum = sum.and(script::play(bytes)));
    // Makes sure that the scripts exercise the code and are not all rejected at once.
    assert!(sum.taken.min(sum.refused).min(sum.popped).min(sum.disowned) > 1000, "{sum:?}");
}

#[test]
fn fuzz_corpus_passes() {
    let outcomes = replay::corpus("packed").into_iter().map(|script| script::play(&script));
    let sum = outcomes.fold(Outcome::default(), Outcome::and);
    assert!(sum.taken.min(sum.refused).min(sum.popped).min(sum.disowned) > 10, "{sum:?}");
}
