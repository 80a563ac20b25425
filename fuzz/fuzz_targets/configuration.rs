//! accel-config files with arbitrary content.
#![no_main]

#[path = "../../crates/offcore-dsa/tests/hostile/configuration.rs"]
mod configuration;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    configuration::play(input, &mut configuration::Outcome::default());
});
