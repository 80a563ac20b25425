//! DHCP servers, routers and queriers that send arbitrary packets to a host.
#![no_main]

#[path = "../../crates/offcore-tcp/tests/network/hostile.rs"]
mod hostile;
#[path = "../script.rs"]
mod script;
#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-tcp/tests/network/station.rs"]
mod station;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    hostile::play(input, &mut hostile::Outcome::default());
});
