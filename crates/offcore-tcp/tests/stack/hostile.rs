//! Peers that send anything: scripts of random bytes, and those that fuzzing has found worth keeping.

mod input;
mod live;
pub(crate) mod peer;

use std::cell::Cell;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Plays so many scripts of random bytes.
fn survives(cases: u32, longest: usize, play: impl Fn(&[u8])) {
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::with_cases(cases)
    });
    let bytes = proptest::collection::vec(any::<u8>(), 8..longest);
    let result = runner.run(&bytes, |bytes| {
        play(&bytes);
        Ok(())
    });
    result.unwrap();
}

/// Files of `fuzz/corpus/<target>`.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
    let files: Vec<_> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(files.len() > 10);
    files
}

fn check(outcome: live::Outcome, least: u64) {
    let live::Outcome { connected, delivered, acknowledged, closed, finished } = outcome;
    let counts = [connected, delivered / 1000, acknowledged / 1000, closed, finished];
    // Otherwise the scripts are too wild to get anywhere.
    assert!(counts.iter().all(|count| *count >= least), "{outcome:?}");
}

#[test]
fn any_peer_is_survived() {
    let sum = Cell::new(live::Outcome::default());
    survives(1500, 1500, |bytes| sum.set(sum.get().and(live::play(bytes))));
    check(sum.get(), 20);
}

#[test]
fn the_corpus_of_peers_is_survived() {
    let outcomes = corpus("tcp_live").into_iter().map(|script| live::play(&script));
    check(outcomes.fold(live::Outcome::default(), live::Outcome::and), 2);
}

fn check_input(outcome: input::Outcome, least: u64) {
    assert!(outcome.taken.min(outcome.answered).min(outcome.dropped) >= least, "{outcome:?}");
}

#[test]
fn any_frames_are_survived() {
    let sum = Cell::new(input::Outcome::default());
    survives(2000, 800, |bytes| sum.set(sum.get().and(input::play(bytes))));
    check_input(sum.get(), 300);
}

#[test]
fn the_corpus_of_frames_is_survived() {
    let outcomes = corpus("tcp_input").into_iter().map(|script| input::play(&script));
    check_input(outcomes.fold(input::Outcome::default(), input::Outcome::and), 10);
}
