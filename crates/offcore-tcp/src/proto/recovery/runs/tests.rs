//! Comparison of runs with a map of bytes.

use offcore_stats::random::SplitMix;
use offcore_stats::time::Time;

use super::*;

const MSS: u32 = 10;

/// The state of every byte: the naive version of [`Runs`].
#[derive(Debug, Default)]
struct Oracle {
    una: u64,
    published: u64,
    bytes: std::collections::BTreeMap<u64, u8>,
}

impl Oracle {
    fn count(&self, fate: impl Fn(u8) -> bool) -> u32 {
        self.bytes.values().filter(|flags| fate(**flags)).count() as u32
    }

    fn set(&mut self, range: Range<u64>, change: impl Fn(u8) -> u8) {
        for (_, flags) in self.bytes.range_mut(range) {
            *flags = change(*flags);
        }
    }

    fn check(&self, runs: &Runs) {
        assert_eq!((runs.una, runs.published), (self.una, self.published));
        assert_eq!(runs.sacked, self.count(|flags| flags & SACKED != 0));
        assert_eq!(runs.lost, self.count(|flags| flags == LOST));
        assert_eq!(runs.replanned, self.count(|flags| flags & PLANNED != 0));
        let mut start = runs.una;
        for run in &runs.runs {
            let end = runs.position(run.end);
            assert!(end > start);
            for at in start..end {
                assert_eq!(run.flags & FATE, self.bytes[&at], "at {at}: {runs:?}");
            }
            start = end;
        }
        assert_eq!(start, runs.published);
    }
}

fn nothing(now: Time) -> Delivery {
    Delivery::new(now, Newest::default(), 0, None, None)
}

/// Creates runs with `segments` of [`MSS`] bytes, published together at time 1.
fn sent(segments: u64) -> Runs {
    let mut runs = Runs::default();
    runs.push(Time::from_micros(1), segments * u64::from(MSS), MSS);
    runs
}

fn sack(runs: &mut Runs, from: u64, to: u64) -> u64 {
    let mut delivery = nothing(Time::from_micros(100));
    runs.sack(from, to, &mut delivery);
    delivery.sacked
}

/// The accepted part of a block is visible only in the counts. It must consist of whole runs inside the block.
fn sack_both(runs: &mut Runs, oracle: &mut Oracle, from: u64, to: u64) {
    let before = runs.sacked;
    let newly = sack(runs, from, to);
    assert_eq!(u64::from(runs.sacked - before), newly);
    let mut start = runs.una;
    for run in &runs.runs {
        let end = runs.position(run.end);
        for at in start..end {
            if run.sacked() && oracle.bytes[&at] & SACKED == 0 {
                assert!((from..to).contains(&at), "{at} is not in {from}..{to}");
                oracle.bytes.insert(at, SACKED);
            }
        }
        start = end;
    }
}

#[test]
fn runs_match_byte_map() {
    for seed in 0..60 {
        let mut random = SplitMix::new(seed);
        // End positions wrap at 32 bits during the test.
        let origin = (1_u64 << 32) - 200 + seed * 7;
        let mut runs = Runs { una: origin, published: origin, ..Runs::default() };
        let mut oracle = Oracle { una: origin, published: origin, ..Oracle::default() };
        let mut planned: Vec<Range<u64>> = Vec::new();
        for now in 1..400 {
            let len = oracle.published - oracle.una;
            let from = oracle.una + random.below(len + 1);
            let to = from + random.below(oracle.published - from + 1);
            match random.below(9) {
                0 | 1 if len < 600 => {
                    let end = oracle.published + random.below(45);
                    runs.push(Time::from_micros(now / 3), end, MSS);
                    oracle.bytes.extend((oracle.published..end).map(|at| (at, 0)));
                    oracle.published = end;
                }
                2 => {
                    let mut delivery = nothing(Time::from_micros(now));
                    let known = oracle.bytes.range(..from).filter(|(_, flags)| **flags & SACKED != 0).count();
                    runs.advance(from, &mut delivery);
                    assert_eq!(delivery.acked, from - oracle.una);
                    assert_eq!(delivery.fresh, delivery.acked - known as u64);
                    oracle.una = from;
                    oracle.bytes = oracle.bytes.split_off(&from);
                }
                3 | 4 if from > oracle.una && from < to => sack_both(&mut runs, &mut oracle, from, to),
                5 => {
                    if let Some(range) = runs.next_lost(1 + random.below(40) as u32) {
                        assert!(oracle.bytes.range(range.clone()).all(|(_, flags)| *flags == LOST));
                        assert!(oracle.bytes.range(..range.start).all(|(_, flags)| *flags != LOST));
                        oracle.set(range.clone(), |_| LOST | PLANNED);
                        planned.push(range);
                    } else {
                        assert_eq!(oracle.count(|flags| flags == LOST), 0);
                    }
                }
                6 if !planned.is_empty() => {
                    let range = planned.swap_remove(random.below(planned.len() as u64) as usize);
                    if random.happens(0.3) {
                        runs.abandon(&range);
                        oracle.set(range, |flags| flags & !PLANNED);
                    } else {
                        runs.transmit(Time::from_micros(now), range.clone(), MSS);
                        oracle.set(range, |flags| flags & SACKED);
                    }
                }
                7 if random.happens(0.2) => {
                    runs.mark_all_lost();
                    oracle.set(0..u64::MAX, |flags| if flags & SACKED != 0 { flags } else { flags | LOST });
                }
                8 if random.happens(0.1) => {
                    runs.find_all();
                    oracle.set(0..u64::MAX, |flags| flags & !LOST);
                }
                8 if random.happens(0.1) => {
                    runs.forget_sacks();
                    oracle.set(0..u64::MAX, |flags| flags & !SACKED);
                }
                _ => {}
            }
            oracle.check(&runs);
        }
    }
}

#[test]
fn segments_published_together_form_run() {
    let mut runs = Runs::default();
    runs.push(Time::from_micros(1), 10, MSS);
    runs.push(Time::from_micros(1), 40, MSS);
    runs.push(Time::from_micros(1), 45, MSS);
    assert_eq!(runs.len(), 1);
    runs.push(Time::from_micros(1), 55, MSS);
    assert_eq!(runs.len(), 2, "a short segment is the last of a run");
    runs.push(Time::from_micros(2), 65, MSS);
    assert_eq!(runs.len(), 3);
}

// RFC 2018, section 4: the receiver holds whole segments only if it reports whole segments.
#[test]
fn sack_blocks_round_to_whole_segments() {
    let mut runs = sent(10);
    assert_eq!(sack(&mut runs, 11, 19), 0);
    assert_eq!(sack(&mut runs, 15, 39), 10, "only 20 to 30 is whole");
    assert_eq!(sack(&mut runs, 15, 40), 10);
    assert_eq!(runs.len(), 3);
    assert_eq!(sack(&mut runs, 15, 40), 0, "the same again");
    assert_eq!(sack(&mut runs, 35, 60), 20, "a neighbour");
    assert_eq!(runs.len(), 3);
}

// CVE-2019-11477, -11478, -11479: tiny blocks do not fragment the sent data.
#[test]
fn sack_fragmentation_is_bounded() {
    let mut runs = Runs::default();
    runs.push(Time::from_micros(1), 20_000 * u64::from(MSS), MSS);
    for segment in (1..20_000_u64).step_by(2) {
        let from = segment * u64::from(MSS);
        let before = runs.len();
        sack(&mut runs, from, from + u64::from(MSS));
        assert!(runs.len() <= (before + 2).min(MOST - RESERVED + 1));
    }
    // All lost data is still retransmitted.
    runs.mark_all_lost();
    let (mut given, mut most) = (0, runs.len());
    while let Some(range) = runs.next_lost(MSS) {
        given += range.end - range.start;
        runs.transmit(Time::from_micros(2), range, MSS);
        most = most.max(runs.len());
    }
    assert_eq!((given, runs.lost), (200_000 - u64::from(runs.sacked), 0));
    // 256 of 4096 runs are reserved for cuts by retransmissions.
    assert_eq!(most, 4096 - 256 - 1);
}

#[test]
fn new_data_merges_at_run_limit() {
    let mut runs = Runs::default();
    for time in 1..=50_000 {
        runs.push(Time::from_micros(time), time * u64::from(MSS), MSS);
    }
    assert!(runs.len() <= MOST - RESERVED);
    assert_eq!(runs.published, 500_000);
    // The newer time is kept: the first run is newer than its first segment.
    assert!(runs.head().unwrap().time > Time::from_micros(1));
    let mut delivery = nothing(Time::from_millis(60));
    runs.advance(500_000, &mut delivery);
    assert_eq!((delivery.acked, runs.len()), (500_000, 0));
}

#[test]
fn single_bytes_use_few_runs() {
    let mut runs = Runs::default();
    for time in 1..=4000 {
        runs.push(Time::from_micros(time), time, MSS);
        assert!(runs.len() <= FEW);
    }
    for at in (1..4000).step_by(2) {
        sack(&mut runs, at, at + 1);
    }
    assert!(runs.len() <= FEW + 1, "{} runs", runs.len());
}

#[test]
fn adjacent_losses_are_retransmitted_together() {
    let mut runs = Runs::default();
    (1..=6).for_each(|small| runs.push(Time::from_micros(small), small * 3, MSS));
    sack(&mut runs, 9, 12);
    runs.mark_all_lost();
    assert_eq!(runs.next_lost(20), Some(0..9));
    assert_eq!(runs.next_lost(4), Some(12..16));
    runs.transmit(Time::from_micros(9), 0..9, MSS);
    assert_eq!(runs.replanned, 4);
    runs.abandon(&(12..16));
    assert_eq!(runs.next_lost(20), Some(12..18));
    assert_eq!(runs.next_lost(20), None);
}

#[test]
fn probe_is_last_segment() {
    let mut runs = Runs::default();
    runs.push(Time::from_micros(1), 35, MSS);
    assert_eq!(runs.next_probe(MSS), Some(30..35));
    assert_eq!(runs.next_probe(MSS), None, "it is planned");
    runs.transmit(Time::from_micros(2), 30..35, MSS);
    assert_eq!((runs.replanned, runs.next_probe(MSS)), (0, Some(30..35)));
}

#[test]
fn idle_runs_release_memory() {
    let mut runs = Runs::default();
    runs.push(Time::from_micros(1), 35, MSS);
    runs.release();
    assert_eq!(runs.len(), 1);
    runs.advance(35, &mut nothing(Time::from_micros(2)));
    runs.release();
    assert_eq!(runs.runs.capacity(), 0);
}

#[test]
fn plain_advance_matches_full_advance() {
    let mut random = SplitMix::new(5);
    let (mut short, mut long) = (Runs::default(), Runs::default());
    for now in 1..5000 {
        let end = short.published + random.below(60);
        short.push(Time::from_micros(now / 2), end, MSS);
        long.push(Time::from_micros(now / 2), end, MSS);
        let to = short.una + random.below((short.published - short.una).min(90) + 1);
        if to == short.una {
            continue;
        }
        let mut delivery = nothing(Time::from_micros(now));
        long.advance(to, &mut delivery);
        assert_eq!(short.advance_plain(to), (delivery.first.unwrap(), delivery.newest.time));
        assert_eq!((short.una, short.len()), (long.una, long.len()));
    }
}
