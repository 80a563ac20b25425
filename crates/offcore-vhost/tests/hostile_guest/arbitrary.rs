//! Random scripts and messages, and the corpus kept from fuzzing.

use offcore_vhost::message::MAX_PAYLOAD;
use proptest::prelude::*;

use crate::replay::{corpus, play_any};
use crate::script::Outcome;
use crate::{live_script, messages, script};

#[test]
fn random_guest_scripts_pass() {
    let mut sum = Outcome::default();
    play_any(3000, 600, |bytes| script::play(bytes, &mut sum));
    // Makes sure that the scripts exercise the code and are not all rejected at once.
    assert!(sum.dequeued.min(sum.enqueued).min(sum.broken) > 1000 && sum.dropped > 300, "{sum:?}");
}

#[test]
fn random_front_end_scripts_pass() {
    let mut sum = live_script::Outcome::default();
    let mut dice = offcore_stats::SplitMix::new(1);
    for _ in 0..100 {
        let len = 100 + dice.below(900);
        live_script::play(&(0..len).map(|_| dice.next() as u8).collect::<Vec<u8>>(), &mut sum);
    }
    corpus("live").iter().for_each(|script| live_script::play(script, &mut sum));
    // Makes sure that the scripts exercise the code and are not all rejected at once.
    let live_script::Outcome { packets, dropped, broken, messages, refused } = sum;
    assert!(packets > 50 && dropped.min(broken) > 5 && messages > 1500 && refused > 100, "{sum:?}");
}

#[test]
fn guest_corpus_passes() {
    for script in corpus("virtqueue") {
        script::play(&script, &mut Outcome::default());
    }
}

#[test]
fn message_corpus_passes() {
    let accepted: usize = corpus("messages").iter().map(|bytes| messages::decode(bytes)).sum();
    assert!(accepted > 10, "{accepted}");
}

fn payload(longest: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..longest)
}

proptest! {
    #[test]
    fn any_message_is_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        messages::decode(&bytes);
    }

    /// With a valid header, so that payloads are decoded.
    #[test]
    fn any_payload_is_decoded_or_refused(
        code in 0u32..48, flags in 0u32..16, fds in 0u8..34,
        payload in prop_oneof![payload(80), payload(MAX_PAYLOAD + 1)],
    ) {
        let size = payload.len() as u32;
        let words = [code, flags & !3 | 1, size];
        let head = words.into_iter().flat_map(u32::to_ne_bytes);
        messages::decode(&std::iter::once(fds).chain(head).chain(payload).collect::<Vec<u8>>());
    }
}
