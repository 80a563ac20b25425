//! A DSA device that writes arbitrary completions.
#![no_main]

#[path = "../../crates/offcore-dsa/tests/hostile/completions.rs"]
mod completions;
#[path = "../../crates/offcore-dsa/src/driver/fixture.rs"]
#[allow(dead_code, reason = "the driver's own tests use the rest")]
mod fixture;
#[path = "../script.rs"]
mod script;

use offcore_dsa::completion::Completed;
use offcore_dsa::driver::Roots;
use offcore_dsa::{CompletionRecord, Descriptor, Flags, Opcode, Status};

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    completions::play(input, &mut completions::Outcome::default());
});
