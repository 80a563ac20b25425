//! A packed queue whose other side writes arbitrary data: random scripts, and the corpus in `fuzz/corpus/packed`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../../../fuzz/script.rs"]
mod bytes;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod script;

use script::Outcome;

#[test]
fn random_ring_scripts_pass() {
    let mut sum = Outcome::default();
    replay::play_any(5000, 600, |bytes| script::play(bytes, &mut sum));
    // Makes sure that the scripts exercise the code and are not all rejected at once.
    assert!(sum.taken.min(sum.refused).min(sum.popped).min(sum.disowned) > 1000, "{sum:?}");
}

#[test]
fn fuzz_corpus_passes() {
    let mut sum = Outcome::default();
    replay::corpus("packed").iter().for_each(|bytes| script::play(bytes, &mut sum));
    assert!(sum.taken.min(sum.refused).min(sum.popped).min(sum.disowned) > 10, "{sum:?}");
}
