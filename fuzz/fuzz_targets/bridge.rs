//! Stations that send arbitrary frames to a bridge.
#![no_main]

#[path = "../../crates/offcore-flow/tests/hostile_bridge/bridge.rs"]
mod bridge;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    bridge::play(input);
});
