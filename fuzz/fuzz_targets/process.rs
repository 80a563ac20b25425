//! An application process that sends arbitrary messages and writes arbitrary values to the shared memory.
#![no_main]
#![allow(dead_code, reason = "tests need more of the modules")]

#[path = "../../crates/offcore-flow/tests/hostile_process/hostile.rs"]
mod hostile;
#[path = "../../crates/offcore-flow/tests/serve/process.rs"]
mod process;
#[path = "../script.rs"]
mod script;
#[path = "../../crates/offcore-flow/tests/serve/setup.rs"]
mod setup;
#[path = "../../crates/offcore-flow/tests/apps/world.rs"]
mod world;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    hostile::play(input, &mut hostile::Outcome::default());
});
