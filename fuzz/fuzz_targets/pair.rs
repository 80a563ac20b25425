//! Two hostile guests with checksums and segmentation negotiated, and the way between them in one copy or in two.
#![no_main]

#[path = "../../crates/offcore-vhost/tests/hostile_guest/neighbour.rs"]
mod neighbour;
#[path = "../../crates/offcore-vhost/tests/pair_hostile/script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    script::play(input, &mut [0; 2]);
});
