//! Applications in other processes: what their ends of sessions show, and what becomes of them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod awake;
mod calls;
mod datagrams;
mod door;
mod hostile;
mod kernels;
mod lingering;
mod listening;
mod ports;
mod process;
mod processes;
mod raw;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
#[path = "../../../../fuzz/script.rs"]
mod script;
mod setup;
mod streams;
mod turns;
mod waking;
#[path = "../apps/world.rs"]
mod world;

#[test]
fn any_process_is_survived() {
    let mut sum = hostile::Outcome::default();
    replay::play_any(200, 1000, |script| sum = sum.and(hostile::play(script)));
    let files = replay::corpus("process").into_iter().map(|script| hostile::play(&script));
    sum = files.fold(sum, hostile::Outcome::and);
    // Other scripts are too wild to get anywhere.
    assert!(sum.answers.min(sum.sessions) > 100 && sum.ended > 5, "{sum:?}");
}
