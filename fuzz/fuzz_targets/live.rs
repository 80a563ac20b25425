//! A hostile front end and its guest at a real socket, against a running worker. The input is a script for them.
#![no_main]

#[path = "../script.rs"]
mod bytes;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/live.rs"]
mod live;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/live_script.rs"]
mod live_script;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/neighbour.rs"]
mod neighbour;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    live_script::play(input, &mut live_script::Outcome::default());
});
