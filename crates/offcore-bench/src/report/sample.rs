//! Statistics of samples: medians, paired ratios and the stability of the core's clock.

use std::collections::VecDeque;
use std::hint::black_box;

use offcore_stats::{SplitMix, tsc};
use serde::Serialize;

/// Iterations of the loop that measures the core's clock, and repetitions per sample. The fastest repetition counts, so
/// that interrupts do not distort the sample.
const CLOCK_LOOP: u64 = 7_000;
const CLOCK_LOOPS: usize = 3;
/// Number of samples whose median is the usual clock.
const CLOCK_SAMPLES: usize = 31;
/// Tolerated deviation of a sample. If it is exceeded, the block measured next to it is rejected.
const CLOCK_TOLERANCE: f64 = 0.05;
/// Number of bootstrap resamplings.
const RESAMPLES: usize = 2000;
/// Number of consecutive samples that the bootstrap of a ratio of sums draws together, because disturbances of a
/// machine last longer than one sample.
const RUN: usize = 4;

/// Minimum, median and maximum of a number of samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    pub runs: usize,
    pub min: f64,
    pub median: f64,
    pub max: f64,
}

impl Spread {
    /// Returns the spread of `samples`; all fields are zero if the slice is empty.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        match sorted[..] {
            [] => Self::default(),
            [min, ..] => {
                Self { runs: sorted.len(), min, median: middle(&sorted), max: sorted[sorted.len() - 1] }
            }
        }
    }

    /// Returns the spread of the samples multiplied by `factor`, which must be positive.
    pub fn scaled(self, factor: f64) -> Self {
        Self { min: self.min * factor, median: self.median * factor, max: self.max * factor, ..self }
    }
}

fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { (sorted[half - 1] + sorted[half]) / 2.0 } else { sorted[half] }
}

/// Ratio of two alternating variants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    pub median: f64,
    /// Lower bound of the median by bootstrap, of the 90 % interval (95 % one-sided).
    pub lower: f64,
}

/// Returns the ratio `a / b` over `pairs`, or `None` if the slice is empty.
pub fn paired_ratio(pairs: &[(f64, f64)]) -> Option<Ratio> {
    let ratios: Vec<f64> = pairs.iter().map(|(a, b)| a / b).collect();
    if ratios.is_empty() {
        return None;
    }
    // A fixed seed makes the bootstrap reproducible.
    let mut random = SplitMix::new(1);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let mut pick: Vec<f64> =
                (0..ratios.len()).map(|_| ratios[random.below(ratios.len() as u64) as usize]).collect();
            pick.sort_by(f64::total_cmp);
            middle(&pick)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Some(Ratio { median: Spread::of(&ratios).median, lower: medians[RESAMPLES / 20] })
}

/// Ratio of two variants that alternated in blocks of the same length, over all blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumRatio {
    /// Ratio of the sums over all blocks. Unlike the median, it includes rare costs, such as the expensive bursts of a
    /// trial.
    pub sums: f64,
    pub median: f64,
    /// Lower bound of the ratio of sums by bootstrap, of the 90 % interval (95 % one-sided).
    pub lower: f64,
    /// Upper bound of the ratio of sums.
    pub upper: f64,
}

impl SumRatio {
    /// Returns the ratio `a / b` over pairs, or `None` if there are not any pairs.
    pub fn of(a: &[f64], b: &[f64]) -> Option<Self> {
        let pairs: Vec<(f64, f64)> = a.iter().copied().zip(b.iter().copied()).collect();
        if pairs.is_empty() {
            return None;
        }
        let ratio = |(a, b): (f64, f64)| a / b;
        let add = |(a, b): (f64, f64), &(c, d): &(f64, f64)| (a + c, b + d);
        // Few samples are drawn in shorter runs, so that enough runs are available.
        let run = RUN.min(pairs.len() / 4).max(1);
        // A fixed seed makes the bootstrap reproducible.
        let mut random = SplitMix::new(1);
        let mut resampled: Vec<f64> = (0..RESAMPLES)
            .map(|_| {
                let runs = (0..pairs.len().div_ceil(run)).flat_map(|_| {
                    let first = random.below(pairs.len() as u64) as usize;
                    (first..first + run).map(|at| at % pairs.len())
                });
                ratio(runs.map(|at| &pairs[at]).fold((0.0, 0.0), add))
            })
            .collect();
        resampled.sort_by(f64::total_cmp);
        let ratios: Vec<f64> = pairs.iter().copied().map(ratio).collect();
        Some(Self {
            sums: ratio(pairs.iter().fold((0.0, 0.0), add)),
            median: Spread::of(&ratios).median,
            lower: resampled[RESAMPLES / 20],
            upper: resampled[RESAMPLES - 1 - RESAMPLES / 20],
        })
    }
}

/// Bounds of the ratio of sums of two variants that were created again after half of their samples.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// The minimum of the bootstrap's lower bound and the ratios of sums of both halves.
    pub lower: f64,
    /// The maximum of the bootstrap's upper bound and the ratios of sums of both halves.
    pub upper: f64,
}

impl Bounds {
    /// Computes the bounds from the samples of both variants. The first `half` samples form the first half, the rest
    /// the second half. Returns `None` without samples.
    pub fn of(a: &[f64], b: &[f64], half: usize) -> Option<Self> {
        let whole = SumRatio::of(a, b)?;
        let half = half.min(a.len()).min(b.len());
        let halves = [SumRatio::of(&a[..half], &b[..half]), SumRatio::of(&a[half..], &b[half..])];
        let halves = halves.into_iter().flatten().map(|ratio| ratio.sums);
        let (lower, upper) = (whole.lower, whole.upper);
        Some(halves.fold(Self { lower, upper }, |all, ratio| Self {
            lower: all.lower.min(ratio),
            upper: all.upper.max(ratio),
        }))
    }

    /// Returns the noise floor, for a variant compared with itself (A/A): the deviation from 1 that occurs by chance.
    pub fn noise_floor(self) -> f64 {
        (self.upper - 1.0).max(1.0 - self.lower)
    }
}

/// Monitors the core's clock, because the TSC does not slow down with it.
#[derive(Debug)]
pub struct ClockCheck {
    /// Ticks of the loop, the oldest sample first.
    recent: VecDeque<u64>,
}

impl ClockCheck {
    /// Takes the initial samples.
    pub fn new() -> Self {
        Self { recent: (0..CLOCK_SAMPLES).map(|_| clock_sample()).collect() }
    }

    /// Takes a sample. Returns whether the core runs at its recent usual speed, within 5 %.
    pub fn holds(&mut self) -> bool {
        self.note(clock_sample())
    }

    /// Records a sample. The median follows the recorded samples: neither a single fast sample nor a permanent change
    /// of the clock causes the rejection of all later samples.
    fn note(&mut self, ticks: u64) -> bool {
        let off = ticks as f64 / self.usual() - 1.0;
        self.recent.pop_front();
        self.recent.push_back(ticks);
        off.abs() <= CLOCK_TOLERANCE
    }

    fn usual(&self) -> f64 {
        Spread::of(&self.recent.iter().map(|&ticks| ticks as f64).collect::<Vec<_>>()).median
    }

    /// Returns the core cycles per TSC tick. A multiplication that depends on the previous one takes three cycles.
    pub fn core_cycles_per_tick(&self) -> f64 {
        3.0 * CLOCK_LOOP as f64 / self.usual()
    }
}

impl Default for ClockCheck {
    fn default() -> Self {
        Self::new()
    }
}

fn clock_sample() -> u64 {
    (0..CLOCK_LOOPS).map(|_| dependent_loop()).min().unwrap_or(1)
}

fn dependent_loop() -> u64 {
    let start = tsc::now();
    let mut x = black_box(3u64);
    for _ in 0..CLOCK_LOOP {
        x = black_box(x.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }
    black_box(x);
    tsc::now() - start
}

/// Stability of the machine during a cell, as in a row: of the core's clock, or for TCP end to end, of the share of the
/// cores that other processes used.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Steadiness {
    /// Blocks, rounds or windows that were discarded because the clock had changed or other processes had used the
    /// cores.
    pub rejected: usize,
    /// Blocks that were counted although they were disturbed, because too many had already been discarded. If not 0,
    /// the row is unreliable.
    pub unsteady: usize,
    /// Core cycles per TSC tick, measured with a calibrated loop.
    pub core_cycles_per_tick: Option<f64>,
}

impl Steadiness {
    /// Returns whether a block counts. A block during which the clock changed is discarded and repeated, until `most`
    /// blocks have been discarded. From then on every block counts.
    pub(crate) fn counts(&mut self, steady: bool, most: usize) -> bool {
        let rejected = !steady && self.rejected < most;
        self.rejected += usize::from(rejected);
        self.unsteady += usize::from(!steady && !rejected);
        !rejected
    }

    /// Records the clock at the end of the measurement.
    pub(crate) fn note(&mut self, clock: &ClockCheck) {
        self.core_cycles_per_tick = Some(clock.core_cycles_per_tick());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_ratios() {
        let spread = Spread::of(&[3.0, 1.0, 2.0, 10.0]);
        assert_eq!((spread.runs, spread.min, spread.median, spread.max), (4, 1.0, 2.5, 10.0));
        let pairs: Vec<(f64, f64)> = (1..50).map(|i| (2.0 * f64::from(i), f64::from(i))).collect();
        let ratio = paired_ratio(&pairs).unwrap();
        assert_eq!((ratio.median, ratio.lower), (2.0, 2.0));
        let noisy: Vec<(f64, f64)> = (0..40).map(|i| (1.0 + f64::from(i % 5) / 10.0, 1.0)).collect();
        let ratio = paired_ratio(&noisy).unwrap();
        assert!(ratio.lower <= ratio.median && ratio.lower >= 1.0, "{ratio:?}");
        assert_eq!(paired_ratio(&[]), None);
    }

    #[test]
    fn sum_ratio_includes_outliers() {
        let steady = [10.0; 100];
        let mut dear_now_and_then = steady;
        for block in dear_now_and_then.iter_mut().step_by(10) {
            *block = 20.0;
        }
        let ratio = SumRatio::of(&steady, &dear_now_and_then).unwrap();
        assert_eq!(ratio.median, 1.0);
        assert!((ratio.sums - 1.0 / 1.1).abs() < 1e-9, "{ratio:?}");
        assert!(ratio.lower < ratio.sums && ratio.sums < ratio.upper && ratio.upper < 1.0, "{ratio:?}");
        let same = SumRatio::of(&steady, &steady).unwrap();
        assert_eq!((same.sums, same.lower, same.upper), (1.0, 1.0, 1.0));
        assert!(SumRatio::of(&[], &[]).is_none());
    }

    #[test]
    fn lasting_change_widens_the_interval() {
        // The same number of expensive samples, scattered or in a row.
        let width = |dear: fn(usize) -> bool| {
            let samples: Vec<f64> = (0..100).map(|i| if dear(i) { 20.0 } else { 10.0 }).collect();
            let ratio = SumRatio::of(&samples, &[10.0; 100]).unwrap();
            ratio.upper - ratio.lower
        };
        let (scattered, in_a_row) = (width(|i| i % 5 == 0), width(|i| i >= 80));
        assert!(in_a_row > 1.5 * scattered, "{in_a_row} {scattered}");
    }

    #[test]
    fn the_noise_floor_spans_both_halves() {
        let (a, mut b) = ([10.0; 20], [10.0; 20]);
        let floor = |b: &[f64]| Bounds::of(&a, b, 10).unwrap();
        assert_eq!((floor(&b), floor(&b).noise_floor()), (Bounds { lower: 1.0, upper: 1.0 }, 0.0));
        // In the second half one variant is 10 % more expensive, in the first half 10 % cheaper. Over all samples both
        // are the same.
        b[..10].fill(9.0);
        b[10..].fill(11.0);
        let floor = floor(&b);
        assert_eq!((floor.lower, floor.upper), (10.0 / 11.0, 10.0 / 9.0));
        assert!((floor.noise_floor() - 1.0 / 9.0).abs() < 1e-9);
        assert_eq!(Bounds::of(&[], &[], 3), None);
    }

    #[test]
    fn one_fast_sample_rejects_no_later_one() {
        let mut clock = ClockCheck { recent: VecDeque::from([1000; CLOCK_SAMPLES]) };
        assert!(clock.note(1040) && !clock.note(1060) && !clock.note(900));
        assert!((0..100).all(|_| clock.note(1000)));
        let off = (0..CLOCK_SAMPLES).filter(|_| !clock.note(1200)).count();
        assert_eq!(off, CLOCK_SAMPLES / 2 + 1);
        assert!(clock.note(1200) && !clock.note(1000));
    }
}
