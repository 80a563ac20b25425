//! A packed queue whose other side writes anything: scripts of random bytes, and those kept in `fuzz/corpus/packed`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod script;

use std::cell::Cell;
use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use script::Outcome;

#[test]
fn any_other_side_is_survived() {
    let sum = Cell::new(Outcome::default());
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        max_shrink_iters: 300,
        ..ProptestConfig::with_cases(5000)
    });
    let bytes = proptest::collection::vec(any::<u8>(), 8..600);
    let result = runner.run(&bytes, |bytes| {
        sum.set(sum.get().and(script::play(&bytes)));
        Ok(())
    });
    result.unwrap();
    let Outcome { taken, refused, popped, disowned } = sum.get();
    // Otherwise the scripts are too wild to get anywhere.
    assert!(taken.min(refused).min(popped).min(disowned) > 1000, "{:?}", sum.get());
}

#[test]
fn the_corpus_is_survived() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/packed");
    let files: Vec<_> = std::fs::read_dir(&corpus).unwrap().collect();
    assert!(files.len() > 10);
    let mut sum = Outcome::default();
    for file in files {
        sum = sum.and(script::play(&std::fs::read(file.unwrap().path()).unwrap()));
    }
    assert!(sum.taken.min(sum.refused).min(sum.popped).min(sum.disowned) > 10, "{sum:?}");
}
