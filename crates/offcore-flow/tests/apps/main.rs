//! Tests of applications on a host, with peers that demand too much.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod http;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod requests;
#[path = "../../../../fuzz/script.rs"]
mod script;
mod streams;
mod world;

#[test]
fn server_survives_arbitrary_requests() {
    let mut sum = requests::Outcome::default();
    replay::play_any(500, 200, |script| requests::play(script, &mut sum));
    replay::corpus("requests").iter().for_each(|script| requests::play(script, &mut sum));
    // Otherwise the scripts are too random to reach most states.
    assert!(sum.served.min(sum.refused).min(sum.ended) > 20, "{sum:?}");
}
