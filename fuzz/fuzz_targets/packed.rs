//! The hostile other side of a packed queue. The input is its script.
#![no_main]

#[path = "../../crates/offcore-ring/tests/hostile_packed/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    script::play(input);
});
