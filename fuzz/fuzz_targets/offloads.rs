//! Checksums and segmentation that somebody leaves to be done, to a queue that takes some of it.
#![no_main]

#[path = "../../crates/offcore-port/tests/hostile/offloads.rs"]
mod offloads;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    offloads::play(input);
});
