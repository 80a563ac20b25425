//! Capture files with arbitrary content, for the reader and for a pcap port.
#![no_main]

#[path = "../../crates/offcore-port/tests/hostile/pcap.rs"]
mod pcap;
#[path = "../script.rs"]
mod script;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    pcap::play(input, &mut pcap::Outcome::default());
});
