//! Samples: medians, paired ratios, and whether the clock held still.

use std::hint::black_box;

use offcore_stats::tsc;

/// Iterations of the loop that tells how fast the core runs.
const CLOCK_LOOP: u64 = 20_000;
/// How far the loop may be off before a round is rejected.
const CLOCK_TOLERANCE: f64 = 0.05;
/// Resamplings of the bootstrap.
const RESAMPLES: usize = 2000;

/// Minimum, median and maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Number of samples.
    pub runs: usize,
    /// Smallest.
    pub min: f64,
    /// Middle.
    pub median: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// The spread of `samples`; zeroes when there are none.
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

    /// The spread of the samples times `factor`, which is positive.
    pub fn scaled(self, factor: f64) -> Self {
        Self { min: self.min * factor, median: self.median * factor, max: self.max * factor, ..self }
    }
}

fn middle(sorted: &[f64]) -> f64 {
    let half = sorted.len() / 2;
    if sorted.len().is_multiple_of(2) { (sorted[half - 1] + sorted[half]) / 2.0 } else { sorted[half] }
}

/// A ratio of two things that alternated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Median of the pairs' ratios.
    pub median: f64,
    /// Lower bound of the median, by bootstrap, at 90 % (one-sided 95 %).
    pub lower: f64,
}

/// The ratio `a / b` over pairs; `None` without pairs.
pub fn paired_ratio(pairs: &[(f64, f64)]) -> Option<Ratio> {
    let ratios: Vec<f64> = pairs.iter().map(|(a, b)| a / b).collect();
    if ratios.is_empty() {
        return None;
    }
    let mut random = Random::default();
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let mut pick: Vec<f64> = (0..ratios.len()).map(|_| ratios[random.below(ratios.len())]).collect();
            pick.sort_by(f64::total_cmp);
            middle(&pick)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Some(Ratio { median: Spread::of(&ratios).median, lower: medians[RESAMPLES / 20] })
}

/// A ratio of two things that alternated in blocks of the same length, all blocks together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SumRatio {
    /// Ratio of the sums over all blocks: what short blocks hide, such as the dear bursts of a trial, is in it.
    pub sums: f64,
    /// Median of the pairs' ratios.
    pub median: f64,
    /// Lower bound of the ratio of sums, by bootstrap, at 90 % (one-sided 95 %).
    pub lower: f64,
    /// Upper bound of the same.
    pub upper: f64,
}

impl SumRatio {
    /// The ratio `a / b` over pairs; `None` without pairs.
    pub fn of(a: &[f64], b: &[f64]) -> Option<Self> {
        let pairs: Vec<(f64, f64)> = a.iter().copied().zip(b.iter().copied()).collect();
        if pairs.is_empty() {
            return None;
        }
        let ratio = |(a, b): (f64, f64)| a / b;
        let add = |(a, b): (f64, f64), &(c, d): &(f64, f64)| (a + c, b + d);
        let mut random = Random::default();
        let mut resampled: Vec<f64> = (0..RESAMPLES)
            .map(|_| ratio((0..pairs.len()).map(|_| &pairs[random.below(pairs.len())]).fold((0.0, 0.0), add)))
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

    /// How far the ratio of a thing to itself is from 1, as far as this one tells: the noise floor of an A/A run.
    pub fn noise(self) -> f64 {
        (self.upper - 1.0).max(1.0 - self.lower)
    }
}

/// A fixed generator: every run of a bootstrap goes the same way.
#[derive(Debug)]
struct Random(u64);

impl Default for Random {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

/// Watches the core's clock: the TSC does not slow down with it.
#[derive(Debug)]
pub struct ClockCheck {
    fastest: u64,
}

impl ClockCheck {
    /// Measures the loop a few times.
    pub fn new() -> Self {
        let fastest = (0..50).map(|_| dependent_loop()).min().unwrap_or(1);
        Self { fastest }
    }

    /// Whether the core runs as fast as it did at its fastest, within 5 %.
    pub fn holds(&mut self) -> bool {
        let now = dependent_loop();
        self.fastest = self.fastest.min(now);
        now as f64 <= self.fastest as f64 * (1.0 + CLOCK_TOLERANCE)
    }

    /// Core cycles a TSC tick: a multiplication that depends on the one before takes three.
    pub fn core_cycles_per_tick(&self) -> f64 {
        3.0 * CLOCK_LOOP as f64 / self.fastest as f64
    }
}

impl Default for ClockCheck {
    fn default() -> Self {
        Self::new()
    }
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
    fn sums_see_what_medians_do_not() {
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
        assert_eq!((same.sums, same.noise()), (1.0, 0.0));
        assert!(ratio.noise() > 0.09 && SumRatio::of(&[], &[]).is_none());
    }
}
