//! The hostile other side of a packed queue. The input is its script.
#![no_main]

#[path = "../script.rs"]
mod bytes;
#[path = "../../crates/offcore-ring/tests/hostile_packed/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    script::play(input, &mut script::Outcome::default());
});
