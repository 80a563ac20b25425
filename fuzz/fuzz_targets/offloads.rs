//! Packets with missing checksums and segmentation, sent to a queue that supports some offloads.
#![no_main]

#[path = "../../crates/offcore-port/tests/hostile/offloads.rs"]
mod offloads;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    offloads::play(input, &mut offloads::Outcome::default());
});
