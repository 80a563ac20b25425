//! Tests a hostile device and configuration files of any content by random scripts and by those in `fuzz/corpus`.
#![allow(clippy::unwrap_used, reason = "a test that cannot continue has failed")]

mod completions;
mod configuration;
#[path = "../../src/driver/fixture.rs"]
#[allow(dead_code, reason = "the driver's own tests use the rest")]
mod fixture;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
#[path = "../../../../fuzz/script.rs"]
mod script;

use offcore_dsa::completion::Completed;
use offcore_dsa::driver::Roots;
use offcore_dsa::{CompletionRecord, Descriptor, Flags, Opcode, Status};

#[test]
fn any_completion_is_accounted_for() {
    let mut sum = completions::Outcome::default();
    replay::play_any(1000, 400, |script| completions::play(script, &mut sum));
    replay::corpus("completions").iter().for_each(|script| completions::play(script, &mut sum));
    // Checks that the scripts reach all outcomes often enough.
    assert!(sum.done.min(sum.failed).min(sum.taken_out).min(sum.batches).min(sum.resumed) > 100, "{sum:?}");
}

#[test]
fn any_configuration_is_parsed_or_refused() {
    let mut sum = configuration::Outcome::default();
    replay::play_any(1000, 60, |script| configuration::play(script, &mut sum));
    replay::corpus("configuration").iter().for_each(|script| configuration::play(script, &mut sum));
    // Checks that the scripts reach all outcomes often enough.
    assert!(sum.parsed.min(sum.refused).min(sum.valid) > 50, "{sum:?}");
}
