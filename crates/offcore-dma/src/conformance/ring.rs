//! Checks of the ring: capacity, wrapping, tokens, order.

use offcore_stats::SplitMix;

use super::{Canvas, Open, Pump, Rig, source};
use crate::channel::{Completions, CopyOp};

pub(super) fn a_full_ring_takes_no_more(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(32), pump);
    let (source, mut canvas) = (source(256), Canvas::new(64 * 1024));
    for _ in 0..3 {
        let ops: Vec<CopyOp> = (0..40).map(|token| canvas.copy(token as usize, &source, token)).collect();
        // Copies that do not fit must not be made.
        canvas.expected.clone_from(&canvas.memory);
        for op in &ops[..32] {
            let at = op.dst.addr() - canvas.memory.as_ptr().addr();
            canvas.expected[at..at + source.len()].copy_from_slice(&source);
        }
        assert_eq!((rig.channel.room(), rig.channel.in_flight()), (32, 0));
        // SAFETY: canvas and source outlive the rig.
        unsafe {
            assert_eq!(rig.channel.copy(&ops[..20]), 20);
            assert_eq!((rig.channel.room(), rig.channel.in_flight()), (12, 20));
            assert_eq!(rig.channel.copy(&ops[20..]), 12, "as many as fit");
            assert_eq!((rig.channel.room(), rig.channel.in_flight()), (0, 32));
            assert_eq!(rig.channel.copy(&ops[32..]), 0);
        }
        rig.channel.submit();
        rig.drain();
        rig.expect_tokens(0..32);
        canvas.check("a full ring");
    }
}

pub(super) fn rings_wrap_in_bursts_of_every_length(open: Open<'_>, pump: Pump<'_>) {
    for size in [4, 64] {
        let mut rig = Rig::new(open(size), pump);
        let (source, mut canvas) = (source(2048), Canvas::new(512 * 1024));
        for burst in 1..=2 * size {
            let ops: Vec<CopyOp> = (0..3 * size as u32 + 1)
                .map(|token| {
                    let at = token as usize;
                    canvas.copy(at, &source[at..at + (at * 37 + burst) % 700], token)
                })
                .collect();
            rig.copy_all(&ops, burst);
            rig.expect_tokens(ops.iter().map(|op| op.token));
            canvas.check(&format!("bursts of {burst} in a ring of {size}"));
        }
    }
}

pub(super) fn each_token_comes_back_once(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    let (source, mut canvas) = (source(64), Canvas::new(256 * 1024));
    let mut random = SplitMix::new(5);
    // Any number is a valid token, and several operations may have the same token, for example pieces of one packet.
    let tokens: Vec<u32> =
        (0..500u32).map(|i| [0, u32::MAX, i, random.next() as u32][i as usize % 4]).collect();
    let ops: Vec<CopyOp> = tokens.iter().map(|&token| canvas.copy(0, &source, token)).collect();
    rig.copy_all(&ops, 23);
    for _ in 0..100 {
        assert_eq!(rig.turn(), 0, "a completion without an operation");
    }
    rig.expect_tokens(tokens);
    canvas.check("tokens");
}

pub(super) fn order_is_kept_unless_out_of_order(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(256), pump);
    let (source, mut canvas) = (source(4096), Canvas::new(1 << 20));
    let mut random = SplitMix::new(6);
    // The lengths differ widely: an engine that works on several copies at a time finishes the short ones first.
    let ops: Vec<CopyOp> =
        (0..1000).map(|token| canvas.copy(0, &source[..1 << random.below(10)], token)).collect();
    rig.copy_all(&ops, 32);
    if rig.tokens != (0..1000).collect::<Vec<_>>() {
        assert!(rig.channel.info().capabilities.out_of_order, "order was not kept, and not declared open");
    }
    rig.expect_tokens(0..1000);
    canvas.check("order");
}

pub(super) fn poll_appends_what_fits(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(512), pump);
    let (source, mut canvas) = (source(8), Canvas::new(512 * 256));
    let ops: Vec<CopyOp> = (0..512).map(|token| canvas.copy(0, &source, token)).collect();
    // SAFETY: canvas and source outlive the rig.
    assert_eq!(unsafe { rig.channel.copy(&ops) }, 512);
    rig.channel.submit();
    let mut completions = Completions::default();
    let capacity = completions.tokens.capacity();
    // Only the last entry is free until the list is emptied.
    completions.tokens.extend(std::iter::repeat_n(9999, capacity - 1));
    let deadline = super::Deadline::new();
    while !completions.is_full() {
        (rig.pump)();
        rig.channel.poll(&mut completions);
        deadline.check(&*rig.channel);
    }
    assert!(completions.tokens[..capacity - 1].iter().all(|&token| token == 9999), "a poll adds");
    for _ in 0..10 {
        (rig.pump)();
        rig.channel.poll(&mut completions);
    }
    assert_eq!((completions.tokens.len(), rig.channel.in_flight()), (capacity, 511));
    rig.tokens.push(completions.tokens[capacity - 1]);
    rig.drain();
    rig.expect_tokens(0..512);
    canvas.check("full completion lists");
}

pub(super) fn channels_do_not_mix(open: Open<'_>, pump: Pump<'_>) {
    let (source, mut canvas) = (source(512), Canvas::new(512 * 1024));
    let mut channels: Vec<_> = (0..3).map(|_| open(32)).collect();
    for round in 0..20u32 {
        let mut all = Vec::new();
        for (c, channel) in (0..).zip(&mut channels) {
            let ops: Vec<CopyOp> = (0..32)
                .map(|i| canvas.copy(i as usize, &source[..(round + i) as usize], c << 16 | round << 8 | i))
                .collect();
            // SAFETY: canvas and source outlive the channels.
            assert_eq!(unsafe { channel.copy(&ops) }, 32);
            all.push(ops.iter().map(|op| op.token).collect::<Vec<_>>());
        }
        // The doorbells are rung in another order.
        channels.iter_mut().rev().for_each(|channel| channel.submit());
        for (channel, expected) in channels.iter_mut().zip(all) {
            let mut rig = Rig::new(std::mem::replace(channel, open(1)), pump);
            rig.drain();
            rig.expect_tokens(expected);
            *channel = rig.channel;
        }
        canvas.check(&format!("three channels, round {round}"));
    }
}

pub(super) fn ring_sizes_match_request(open: Open<'_>, pump: Pump<'_>) {
    let (source, mut canvas) = (source(64), Canvas::new(1 << 18));
    for size in [2, 8, 128, 1024] {
        let mut rig = Rig::new(open(size), pump);
        assert_eq!((rig.channel.info().ring_size, rig.channel.room()), (size, size));
        let ops: Vec<CopyOp> = (0..size as u32).map(|token| canvas.copy(0, &source[..8], token)).collect();
        // SAFETY: canvas and source outlive the rig.
        assert_eq!(unsafe { rig.channel.copy(&ops) }, size);
        rig.channel.submit();
        rig.drain();
        rig.expect_tokens(0..size as u32);
        canvas.check(&format!("a ring of {size}"));
    }
}
