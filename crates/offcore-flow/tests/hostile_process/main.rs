//! A hostile process of an application: random scripts, and the scripts in `fuzz/corpus`. The test forks, so it has a
//! separate executable: a child briefly has a copy of each descriptor.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod hostile;
#[allow(dead_code, reason = "other tests need more of it")]
#[path = "../serve/process.rs"]
mod process;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
#[path = "../../../../fuzz/script.rs"]
mod script;
#[allow(dead_code, reason = "other tests need more of it")]
#[path = "../serve/setup.rs"]
mod setup;
#[allow(dead_code, reason = "other tests need more of it")]
#[path = "../apps/world.rs"]
mod world;

#[test]
fn server_survives_arbitrary_process() {
    let mut sum = hostile::Outcome::default();
    replay::play_any(200, 1000, |script| hostile::play(script, &mut sum));
    replay::corpus("process").iter().for_each(|script| hostile::play(script, &mut sum));
    // Otherwise the scripts are too random to reach most states.
    assert!(sum.answers.min(sum.sessions) > 100 && sum.ended > 5, "{sum:?}");
}
