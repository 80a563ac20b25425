//! Peers that send arbitrary data: random scripts, and scripts that fuzzing found useful.

mod input;
mod live;
pub(crate) mod peer;

use crate::replay::{corpus, play_any};

fn check(outcome: live::Outcome, least: u64) {
    let live::Outcome { connected, delivered, acknowledged, closed, finished } = outcome;
    let counts = [connected, delivered / 1000, acknowledged / 1000, closed, finished];
    // Lower numbers would mean that the scripts are too random to exercise the stack.
    assert!(counts.iter().all(|count| *count >= least), "{outcome:?}");
}

#[test]
fn stack_survives_arbitrary_peer() {
    let mut sum = live::Outcome::default();
    play_any(1500, 1500, |bytes| sum = sum.and(live::play(bytes)));
    check(sum, 20);
}

#[test]
fn stack_survives_peer_corpus() {
    let outcomes = corpus("tcp_live").into_iter().map(|script| live::play(&script));
    check(outcomes.fold(live::Outcome::default(), live::Outcome::and), 2);
}

fn check_input(outcome: input::Outcome, least: u64) {
    assert!(outcome.taken.min(outcome.answered).min(outcome.dropped) >= least, "{outcome:?}");
}

#[test]
fn stack_survives_arbitrary_frames() {
    let mut sum = input::Outcome::default();
    play_any(2000, 800, |bytes| sum = sum.and(input::play(bytes)));
    check_input(sum, 300);
}

#[test]
fn stack_survives_frame_corpus() {
    let outcomes = corpus("tcp_input").into_iter().map(|script| input::play(&script));
    check_input(outcomes.fold(input::Outcome::default(), input::Outcome::and), 10);
}
