//! Tests arbitrary input from other parties: random scripts, and those in `fuzz/corpus`.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod back_end;
mod offloads;
mod pcap;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
#[path = "../../../../fuzz/script.rs"]
mod script;

use replay::{corpus, play_any};

#[test]
fn any_packet_is_finished_or_dropped() {
    let mut sum = offloads::Outcome::default();
    play_any(1000, 160, |script| offloads::play(script, &mut sum));
    corpus("offloads").iter().for_each(|script| offloads::play(script, &mut sum));
    // Otherwise too few scripts produce valid input.
    assert!(sum.whole.min(sum.summed).min(sum.cut).min(sum.tunnelled).min(sum.dropped) > 50, "{sum:?}");
}

#[test]
fn any_capture_file_is_read_or_refused() {
    let mut sum = pcap::Outcome::default();
    play_any(500, 300, |script| pcap::play(script, &mut sum));
    corpus("pcap").iter().for_each(|script| pcap::play(script, &mut sum));
    assert!(sum.records.min(sum.received) > 1000 && sum.refused.min(sum.damaged) > 20, "{sum:?}");
}

#[test]
fn random_back_end_scripts_pass() {
    let mut sum = back_end::Outcome::default();
    play_any(1000, 400, |script| back_end::play(script, &mut sum));
    corpus("back_end").iter().for_each(|script| back_end::play(script, &mut sum));
    // Otherwise too few scripts produce valid input.
    assert!(sum.received.min(sum.sent) > 1000 && sum.dropped > 100 && sum.broken > 20, "{sum:?}");
}
