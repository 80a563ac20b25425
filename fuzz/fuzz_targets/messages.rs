//! vhost-user messages: the first byte is the number of file descriptors beside each, the rest is what the peer sends.
#![no_main]

#[path = "../../crates/offcore-vhost/tests/hostile_guest/messages.rs"]
mod messages;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    messages::decode(input);
});
