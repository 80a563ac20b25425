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
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .map(|_| {
            let mut pick: Vec<f64> = (0..ratios.len())
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    ratios[(state >> 33) as usize % ratios.len()]
                })
                .collect();
            pick.sort_by(f64::total_cmp);
            middle(&pick)
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    Some(Ratio { median: Spread::of(&ratios).median, lower: medians[RESAMPLES / 20] })
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
}
