//! What other parties write, of any bytes: scripts made up here, and those kept in `fuzz/corpus`.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod offloads;
mod pcap;
mod script;

use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Files of `fuzz/corpus/<target>`.
fn corpus(target: &str) -> Vec<Vec<u8>> {
    let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
    let files: Vec<Vec<u8>> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(files.len() > 10);
    files
}

/// Plays as many scripts of random bytes, up to `longest` of them.
fn play_any(cases: u32, longest: usize, mut play: impl FnMut(&[u8])) {
    let config = ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::with_cases(cases)
    };
    let play = std::cell::RefCell::new(&mut play);
    let script = proptest::collection::vec(any::<u8>(), 8..longest);
    let result = TestRunner::new(config).run(&script, |script| {
        play.borrow_mut()(&script);
        Ok(())
    });
    result.unwrap();
}

#[test]
fn any_packet_is_finished_or_dropped() {
    let mut sum = offloads::Outcome::default();
    let mut play = |script: &[u8]| {
        let one = offloads::play(script);
        sum.whole += one.whole;
        sum.summed += one.summed;
        sum.cut += one.cut;
        sum.dropped += one.dropped;
    };
    play_any(1000, 160, &mut play);
    corpus("offloads").iter().for_each(|script| play(script));
    // Otherwise the scripts are too wild to get anywhere.
    assert!(sum.whole.min(sum.summed).min(sum.cut).min(sum.dropped) > 100, "{sum:?}");
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
