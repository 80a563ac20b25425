//! Two hostile guests with checksum and segmentation offloads, connected by one copy or by two.
#![no_main]

#[path = "../script.rs"]
mod bytes;
#[path = "../../crates/offcore-vhost/tests/hostile_guest/neighbour.rs"]
mod neighbour;
#[path = "../../crates/offcore-vhost/tests/pair_hostile/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    script::play(input, &mut [0; 2]);
});
