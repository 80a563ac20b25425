//! Checks of status, statistics, reset and the end of a channel.

use super::{Canvas, Deadline, Open, Pump, Rig, source};
use crate::channel::{Channel, ChannelStats, CopyOp, Failure, Reset, Token};

pub(super) fn too_long_is_refused(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(8), pump);
    let max = rig.channel.info().max_len;
    let (source, mut canvas) = (source(64), Canvas::new(1024));
    if max < u32::MAX {
        let op = CopyOp { len: max + 1, ..canvas.copy(0, &[], 1) };
        // SAFETY: the channel reports that it refuses this length, so it accesses no memory.
        assert_eq!(unsafe { rig.channel.copy(&[op]) }, 1);
        rig.channel.submit();
        rig.drain();
        let refused: Vec<_> = rig.failed.drain(..).map(|f| (f.copy.token, f.failure, f.done)).collect();
        assert_eq!(refused, [(1, Failure::Refused, 0)]);
    }
    // The channel continues to work, and a copy of an allowed length succeeds.
    let op = canvas.copy(1, &source, 2);
    rig.copy_all(&[op], 1);
    rig.expect_tokens([2]);
    canvas.check("after a refusal");
}

pub(super) fn statistics_are_exact(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    let (source, mut canvas) = (source(2048), Canvas::new(256 * 1024));
    assert_eq!(rig.channel.stats(), ChannelStats::default());
    let lens = |tokens: &[Token]| tokens.iter().map(|&token| u64::from(token * 3)).sum::<u64>();
    let mut accepted = 0;
    let expect = |rig: &mut Rig<'_>, accepted: u64| {
        let stats = rig.channel.stats();
        let expected = ChannelStats {
            submitted: accepted,
            completed: rig.tokens.len() as u64,
            failed: 0,
            bytes: lens(&rig.tokens),
        };
        assert_eq!(stats, expected);
        assert_eq!(stats.submitted, stats.completed + stats.failed + rig.channel.in_flight() as u64);
    };
    for burst in [1u32, 64, 17, 40] {
        let ops: Vec<CopyOp> =
            (0..burst).map(|token| canvas.copy(0, &source[..3 * token as usize], token)).collect();
        // SAFETY: canvas and source outlive the rig.
        accepted += unsafe { rig.channel.copy(&ops) } as u64;
        expect(&mut rig, accepted);
        rig.channel.submit();
        expect(&mut rig, accepted);
        let deadline = Deadline::new();
        while rig.channel.in_flight() > 0 {
            rig.turn();
            expect(&mut rig, accepted);
            deadline.check(&*rig.channel);
        }
        canvas.check("statistics");
    }
}

pub(super) fn after_a_reset_nothing_lands(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    let (source, mut canvas) = (source(256), Canvas::new(64 * 1024));
    for (round, submitted) in [true, false, true, true].into_iter().enumerate() {
        let ops: Vec<CopyOp> = (0..64).map(|token| canvas.copy(0, &source, token)).collect();
        // SAFETY: canvas and source outlive the rig.
        assert_eq!(unsafe { rig.channel.copy(&ops) }, 64);
        if submitted {
            rig.channel.submit();
        }
        let deadline = Deadline::new();
        while rig.channel.reset() == Reset::Pending {
            (rig.pump)();
            deadline.check(&*rig.channel);
        }
        if round % 2 == 0 {
            rig.turn();
        }
        let mut outstanding = Vec::new();
        rig.channel.take_outstanding(&mut outstanding);
        assert_eq!(rig.channel.in_flight(), 0);
        // Nothing may be written from here on, neither by operations taken out nor by operations never submitted.
        canvas.expected.fill(0x5a);
        canvas.memory.fill(0x5a);
        rig.channel.submit();
        for _ in 0..200 {
            assert_eq!(rig.turn(), 0, "taken out and reported");
        }
        canvas.check("after a reset");
        let mut all: Vec<Token> = outstanding.iter().map(|copy| copy.token).collect();
        for op in &outstanding {
            let original = &ops[op.token as usize];
            assert_eq!((op.src, op.dst, op.len), (original.src, original.dst, original.len));
        }
        all.append(&mut rig.tokens);
        all.sort_unstable();
        assert_eq!(all, (0..64).collect::<Vec<_>>(), "reported or taken out, once each");
        // The channel works like a new one.
        let ops: Vec<CopyOp> = (0..64).map(|token| canvas.copy(7, &source, token)).collect();
        rig.copy_all(&ops, 32);
        rig.expect_tokens(0..64);
        canvas.check("a copy after a reset");
    }
}

pub(super) fn after_a_drop_nothing_lands(open: Open<'_>, pump: Pump<'_>) {
    let (source, mut canvas) = (source(256), Canvas::new(64 * 1024));
    for submitted in [true, false] {
        let mut channel = open(64);
        let ops: Vec<CopyOp> = (0..64).map(|token| canvas.copy(0, &source, token)).collect();
        // SAFETY: canvas and source outlive the channel.
        assert_eq!(unsafe { channel.copy(&ops) }, 64);
        if submitted {
            channel.submit();
        }
        drop(channel);
        canvas.expected.fill(0x5a);
        canvas.memory.fill(0x5a);
        for _ in 0..200 {
            pump();
        }
        canvas.check("after a channel was dropped");
    }
}

pub(super) fn a_channel_moves_to_another_thread(open: Open<'_>, pump: Pump<'_>) {
    let (source, mut canvas) = (source(256), Canvas::new(16 * 1024));
    let ops: Vec<CopyOp> = (0..32).map(|token| canvas.copy(0, &source, token)).collect();
    let mut channel: Box<dyn Channel> = open(32);
    let channel = std::thread::scope(|scope| {
        let submitter = scope.spawn(move || {
            // SAFETY: canvas and source outlive the channel.
            assert_eq!(unsafe { channel.copy(&ops) }, 32);
            channel.submit();
            channel
        });
        submitter.join()
    });
    let Ok(channel) = channel else { panic!("the submitting thread failed") };
    let mut rig = Rig::new(channel, pump);
    rig.drain();
    rig.expect_tokens(0..32);
    canvas.check("another thread");
}
