//! A TCP connection whose peer, application and routers follow the input.
#![no_main]

#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-tcp/tests/stack/frame.rs"]
mod frame;
#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-tcp/tests/stack/host.rs"]
mod host;
#[allow(dead_code, reason = "tests need more of it")]
#[path = "../../crates/offcore-tcp/tests/stack/hostile"]
mod hostile {
    pub(crate) mod live;
    pub(crate) mod peer;
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    hostile::live::play(input);
});
