//! The hostile other side of a packed queue: the input is a script that it follows.
#![no_main]

#[path = "../../crates/offcore-ring/tests/hostile_packed/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    script::play(input);
});
