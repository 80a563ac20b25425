//! Scripts for the targets, on stable: the corpus of one, and random ones. Part of the crates' tests.

use std::path::Path;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

/// Files of `fuzz/corpus/<target>`.
pub(crate) fn corpus(target: &str) -> Vec<Vec<u8>> {
    let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let files = std::fs::read_dir(&at).unwrap_or_else(|error| panic!("{}: {error}", at.display()));
    let files: Vec<Vec<u8>> = files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(files.len() > 10, "{}: {} files", at.display(), files.len());
    files
}

/// Plays `cases` scripts of random bytes, fewer than `longest` of them.
pub(crate) fn play_any(cases: u32, longest: usize, mut play: impl FnMut(&[u8])) {
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
