//! Tests arbitrary input from other parties: random scripts, and those in `fuzz/corpus`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

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
    let mut play = |script: &[u8]| {
        let one = offloads::play(script);
        sum.whole += one.whole;
        sum.summed += one.summed;
        sum.cut += one.cut;
        sum.tunnelled += one.tunnelled;
        sum.dropped += one.dropped;
    };
    play_any(1000, 160, &mut play);
    corpus("offloads").iter().for_each(|script| play(script));
    // Otherwise too few scripts produce valid input.
    assert!(sum.whole.min(sum.summed).min(sum.cut).min(sum.tunnelled).min(sum.dropped) > 50, "{sum:?}");
}

#[test]
fn any_capture_file_is_read_or_refused() {
    let mut sum = pcap::Outcome::default();
    let mut play = |script: &[u8]| {
        let one = pcap::play(script);
        sum.records += one.records;
        sum.refused += one.refused;
        sum.damaged += one.damaged;
        sum.received += one.received;
    };
    play_any(500, 300, &mut play);
    corpus("pcap").iter().for_each(|script| play(script));
    assert!(sum.records.min(sum.received) > 1000 && sum.refused.min(sum.damaged) > 20, "{sum:?}");
}

#[test]
fn random_back_end_scripts_pass() {
    let mut sum = back_end::Outcome::default();
    let mut play = |script: &[u8]| {
        let one = back_end::play(script);
        sum.received += one.received;
        sum.dropped += one.dropped;
        sum.sent += one.sent;
        sum.broken += one.broken;
    };
    play_any(1000, 400, &mut play);
    corpus("back_end").iter().for_each(|script| play(script));
    // Otherwise too few scripts produce valid input.
    assert!(sum.received.min(sum.sent) > 1000 && sum.dropped > 100 && sum.broken > 20, "{sum:?}");
}
