//! A hostile guest's rings, tables and buffers. The input is the guest's script.
#![no_main]

#[path = "../../crates/offcore-vhost/tests/hostile_guest/arena.rs"]
mod arena;
#[path = "../script.rs"]
mod bytes;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/neighbour.rs"]
mod neighbour;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/rig.rs"]
mod rig;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    script::play(input, &mut script::Outcome::default());
});
