//! Random scripts of hostile networks, and the scripts in `fuzz/corpus`.

use crate::hostile::{Outcome, play};
use crate::replay::{corpus, play_any};

#[test]
fn any_network_is_survived() {
    let mut sum = Outcome::default();
    play_any(1000, 600, |bytes| sum = sum.and(play(bytes)));
    let files = corpus("network").into_iter().map(|script| play(&script));
    sum = files.fold(sum, Outcome::and);
    // Otherwise the scripts are too wild to get anywhere.
    assert!(sum.accepted.min(sum.sent) > 1000 && sum.configured > 100, "{sum:?}");
}
