//! What is copied and filled, byte by byte.

use std::collections::BTreeSet;

use super::{Canvas, Open, Pump, Rig, source};
use crate::channel::Copy;
use crate::fault::SplitMix;

const LONGEST: usize = 64 * 1024;

pub(super) fn every_length_at_odd_offsets(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    let (source, mut canvas) = (source(LONGEST + 64), Canvas::new(8 * LONGEST));
    let dense = (0..1600).chain((1600..4096).step_by(17));
    let sparse = (4096..LONGEST).step_by(3989).chain([4095, 4096, 4097, 9018, LONGEST - 1, LONGEST]);
    let lens: Vec<usize> = dense.chain(sparse).collect();
    let mut random = SplitMix::new(1);
    let mut rest = &lens[..];
    while !rest.is_empty() {
        let mut ops: Vec<Copy> = Vec::new();
        let mut bytes = 0;
        while let Some((&len, others)) = rest.split_first() {
            bytes += len + 256;
            if bytes > canvas.memory.len() || ops.len() == 64 {
                break;
            }
            let (from, to) = (random.below(64) as usize, random.below(64) as usize);
            ops.push(canvas.copy(to, &source[from..from + len], random.below(u32::MAX)));
            rest = others;
        }
        rig.copy_all(&ops, 64);
        rig.expect_tokens(ops.iter().map(|op| op.token));
        canvas.check(&format!("lengths {:?}", ops.iter().map(|op| op.len).collect::<Vec<_>>()));
    }
}

pub(super) fn every_alignment(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    let (source, mut canvas) = (source(4096), Canvas::new(64 * 2048));
    for len in [1, 15, 33, 64, 129, 1514] {
        for from in 0..64 {
            let ops: Vec<Copy> =
                (0u32..64).map(|to| canvas.copy(to as usize, &source[from..from + len], to)).collect();
            rig.copy_all(&ops, 64);
            rig.expect_tokens(0..64);
            canvas.check(&format!("{len} bytes from offset {from}"));
        }
    }
}

pub(super) fn scatter_gather(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(256), pump);
    let (source, mut canvas) = (source(8192), Canvas::new(64 * 1024));
    let mut random = SplitMix::new(2);
    for round in 0..200u32 {
        let total = random.below(6000) as usize;
        let pieces = |random: &mut SplitMix| {
            let mut pieces = Vec::new();
            let mut at = 0;
            while at < total {
                let len = (random.below(1500) as usize).min(total - at);
                pieces.push(at..at + len);
                at += len;
            }
            pieces
        };
        let srcs: Vec<(*const u8, u32)> =
            pieces(&mut random).into_iter().map(|r| (source[r.clone()].as_ptr(), r.len() as u32)).collect();
        let dsts: Vec<(*mut u8, u32)> = pieces(&mut random)
            .into_iter()
            .map(|r| canvas.place(random.below(64) as usize, source[r].iter().copied()))
            .collect();
        // SAFETY: both sides' buffers outlive the rig and are only read while nothing is in flight.
        let n = unsafe { rig.channel.copy_sg(&srcs, &dsts, round) };
        let ends: BTreeSet<u32> =
            ends(srcs.iter().map(|src| src.1)).chain(ends(dsts.iter().map(|dst| dst.1))).collect();
        let expected = ends.iter().filter(|&&end| end > 0).count();
        assert_eq!(n, Some(expected), "pieces of {srcs:?} into {dsts:?}");
        rig.channel.submit();
        rig.drain();
        rig.expect_tokens(vec![round; expected]);
        canvas.check(&format!("scatter-gather round {round}"));
    }
    let (src, (dst, _)) = (source.as_ptr(), canvas.place(0, std::iter::empty()));
    // SAFETY: nothing is to be accepted; the buffers hold the few bytes named all the same.
    unsafe {
        assert_eq!(rig.channel.copy_sg(&[(src, 3)], &[(dst, 4)], 0), None, "the sides differ in length");
        assert_eq!(
            rig.channel.copy_sg(&[(src, 1); 257], &[(dst, 257)], 0),
            None,
            "more pieces than the ring has"
        );
    }
    assert_eq!((rig.channel.in_flight(), rig.channel.room()), (0, 256), "all or nothing");
}

/// Where each of several buffers ends, laid one after the other.
fn ends(lens: impl Iterator<Item = u32>) -> impl Iterator<Item = u32> {
    lens.scan(0, |end, len| {
        *end += len;
        Some(*end)
    })
}

pub(super) fn fills(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    let mut canvas = Canvas::new(2 * LONGEST);
    if !rig.channel.info().capabilities.fill {
        let op = canvas.fill(0, 0, 0, 0);
        // SAFETY: a fill of no bytes touches none.
        assert_eq!(unsafe { rig.channel.fill(&[op]) }, 0, "a channel that cannot fill takes none");
        return;
    }
    let mut random = SplitMix::new(3);
    for lens in [(0..64).collect::<Vec<usize>>(), (64..1600).step_by(31).collect(), vec![4096], vec![LONGEST]]
    {
        let ops: Vec<_> = (0..)
            .zip(&lens)
            .map(|(token, &len)| canvas.fill(random.below(64) as usize, random.next(), len, token))
            .collect();
        // SAFETY: the canvas outlives the rig.
        assert_eq!(unsafe { rig.channel.fill(&ops) }, ops.len());
        rig.channel.submit();
        rig.drain();
        rig.expect_tokens(ops.iter().map(|op| op.token));
        canvas.check(&format!("fills of {lens:?} bytes"));
    }
}

pub(super) fn copies_and_fills_mixed(open: Open<'_>, pump: Pump<'_>) {
    let mut rig = Rig::new(open(64), pump);
    if !rig.channel.info().capabilities.fill {
        return;
    }
    let (source, mut canvas) = (source(2048), Canvas::new(256 * 1024));
    let mut random = SplitMix::new(4);
    for round in 0..50 {
        let kinds = random.next();
        for token in 0..64 {
            let (len, offset) = (random.below(1600) as usize, random.below(64) as usize);
            // SAFETY: canvas and source outlive the rig.
            let accepted = unsafe {
                match kinds >> token & 1 {
                    0 => rig.channel.copy(&[canvas.copy(offset, &source[offset..offset + len], token)]),
                    _ => rig.channel.fill(&[canvas.fill(offset, random.next(), len, token)]),
                }
            };
            assert_eq!(accepted, 1);
        }
        rig.channel.submit();
        rig.drain();
        rig.expect_tokens(0..64);
        canvas.check(&format!("mixed round {round}"));
    }
}
