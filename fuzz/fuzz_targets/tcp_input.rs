//! Frames with arbitrary content for a host with ARP, ICMP, UDP and TCP over IPv4 and IPv6.
#![no_main]

#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-tcp/tests/stack/host.rs"]
mod host;
#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-tcp/tests/stack/hostile/input.rs"]
mod input;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    input::play(input);
});
