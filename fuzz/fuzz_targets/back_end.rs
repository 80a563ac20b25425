//! A hostile back end at a `virtio-user` port.
#![no_main]

#[path = "../../crates/offcore-port/tests/hostile/back_end.rs"]
mod back_end;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    back_end::play(input, &mut back_end::Outcome::default());
});
