//! Random scripts of hostile networks, and the scripts in `fuzz/corpus`.

use crate::hostile::{Outcome, play};
use crate::replay::{corpus, play_any};

#[test]
fn stack_survives_arbitrary_network() {
    let mut sum = Outcome::default();
    play_any(1000, 600, |bytes| play(bytes, &mut sum));
    corpus("network").iter().for_each(|script| play(script, &mut sum));
    // Lower numbers would mean that the scripts are too random to exercise the stack.
    assert!(sum.accepted.min(sum.sent) > 1000 && sum.configured > 100, "{sum:?}");
}
