//! Checks of the copied bytes.

use offcore_stats::SplitMix;

use super::{Canvas, Open, Pump, Rig, source};
use crate::channel::CopyOp;

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
        let mut ops: Vec<CopyOp> = Vec::new();
        let mut bytes = 0;
        while let Some((&len, others)) = rest.split_first() {
            bytes += len + 256;
            if bytes > canvas.memory.len() || ops.len() == 64 {
                break;
            }
            let (from, to) = (random.below(64) as usize, random.below(64) as usize);
            ops.push(canvas.copy(to, &source[from..from + len], random.next() as u32));
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
            let ops: Vec<CopyOp> =
                (0u32..64).map(|to| canvas.copy(to as usize, &source[from..from + len], to)).collect();
            rig.copy_all(&ops, 64);
            rig.expect_tokens(0..64);
            canvas.check(&format!("{len} bytes from offset {from}"));
        }
    }
}
