//! vhost-user messages. The first byte is the number of file descriptors with each message, the rest is the peer's
//! data.
#![no_main]

#[path = "../../crates/offcore-vhost/tests/hostile_guest/messages.rs"]
mod messages;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    messages::decode(input);
});
