//! Stations that send arbitrary frames to a bridge, from generated scripts and the scripts in `fuzz/corpus`.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod bridge;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
#[path = "../../../../fuzz/script.rs"]
mod script;

#[test]
fn any_frame_stays_in_its_vlan() {
    let mut sum = bridge::Outcome::default();
    let mut play = |script: &[u8]| {
        let one = bridge::play(script);
        sum.sent += one.sent;
        sum.retagged += one.retagged;
        sum.kept += one.kept;
    };
    replay::play_any(2000, 600, &mut play);
    replay::corpus("bridge").iter().for_each(|script| play(script));
    // Otherwise, the scripts are too random to be useful.
    assert!(sum.sent.min(sum.retagged).min(sum.kept) > 500, "{sum:?}");
}
