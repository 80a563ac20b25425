//! HTTP requests with arbitrary content for the file server.
#![no_main]

#[path = "../../crates/offcore-flow/tests/apps/requests.rs"]
mod requests;
#[path = "../script.rs"]
mod script;
#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-flow/tests/apps/world.rs"]
mod world;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    requests::play(input, &mut requests::Outcome::default());
});
