use offcore_stats::SplitMix;
use std::collections::BTreeSet;

use super::*;

const STREAM: u16 = 5;

fn stamp(flow: u16, number: u32) -> Stamp {
    Stamp { stream: STREAM, flow, number, due: 0 }
}

/// Computes the expected counters from all arrivals, which are pairs of flow and number.
fn model(arrivals: &[(u16, u32)]) -> Received {
    let mut counts = Received { received: arrivals.len() as u64, ..Received::default() };
    for flow in 0..4 {
        let mut seen = BTreeSet::new();
        for &(_, number) in arrivals.iter().filter(|(of, _)| *of == flow) {
            if seen.contains(&number) {
                counts.duplicates += 1;
            } else if seen.last().is_some_and(|last| *last > number) {
                counts.reordered += 1;
            }
            seen.insert(number);
        }
        counts.lost += seen.last().map_or(0, |last| u64::from(*last) + 1 - seen.len() as u64);
    }
    counts
}

/// Returns arrivals with losses, duplicates and late packets. `seed` determines them.
fn disturbed(packets: u32, seed: u64) -> Vec<(u16, u32)> {
    let mut random = SplitMix::new(seed);
    let mut below = |end: u64| random.below(end);
    let mut arrivals = Vec::new();
    for index in 0..packets {
        let packet = ((index % 4) as u16, index / 4);
        match below(20) {
            0 => {}
            1 => arrivals.extend([packet; 2]),
            _ => arrivals.push(packet),
        }
    }
    for _ in 0..packets / 10 {
        let from = below(arrivals.len() as u64) as usize;
        let to = (from + below(300) as usize).min(arrivals.len() - 1);
        arrivals[from..=to].rotate_left(1);
    }
    arrivals
}

#[test]
fn receiver_counts_match_a_model() {
    for seed in 1..400 {
        let arrivals = disturbed(40 + seed as u32 * 5, seed);
        let mut check = Check::new(Expected::Stream(STREAM), 0);
        for (index, &(flow, number)) in arrivals.iter().enumerate() {
            let first = !arrivals[..index].contains(&(flow, number));
            assert_eq!(check.arrive(stamp(flow, number)), first, "seed {seed}");
        }
        assert_eq!(check.counts, model(&arrivals), "seed {seed}");
    }
}

#[test]
fn sequence_numbers_exceed_32_bits() {
    let mut check = Check::new(Expected::Stream(STREAM), 0);
    let flow = &mut check.flows[3];
    flow.next = (1 << 32) - 2;
    flow.sequence.arrive(flow.next - 1);
    for number in [0xffff_fffe_u32, 0xffff_ffff, 1, 0, 2] {
        check.arrive(stamp(3, number));
    }
    assert_eq!(check.flows[3].next, (1 << 32) + 3);
    assert_eq!((check.counts.reordered, check.counts.duplicates, check.counts.lost), (1, 0, 0));
}

#[test]
fn number_before_first_is_corrupt() {
    let mut check = Check::new(Expected::Stream(STREAM), 0);
    assert!(!check.arrive(stamp(0, u32::MAX)));
    assert_eq!((check.counts.corrupt, check.counts.received), (1, 0));
}
