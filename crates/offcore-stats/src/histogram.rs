//! A histogram of ticks with a relative error of at most 1/64 over the whole range.

/// Binary logarithm of the number of buckets per power of two.
const BITS: u32 = 6;
/// The longest distinguishable time, 2^40 - 1 ticks (minutes). Longer times are clamped to it.
const MOST: u64 = (1 << 40) - 1;
/// Total number of buckets.
const BUCKETS: usize = bucket(MOST) + 1;

/// A histogram of times in ticks.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    values: u64,
    min: u64,
    max: u64,
}

/// Returns the bucket of a time. Times below 2^BITS have one bucket each, and each higher power of two has 2^BITS
/// buckets.
#[inline(always)]
const fn bucket(value: u64) -> usize {
    let octave = (value >> BITS).checked_ilog2();
    match octave {
        None => value as usize,
        Some(octave) => ((octave as usize) << BITS) + (value >> octave) as usize,
    }
}

/// Returns the longest time of a bucket.
const fn longest(bucket: usize) -> u64 {
    let (octave, part) = (bucket >> BITS, bucket as u64 & ((1 << BITS) - 1));
    match octave {
        0 => part,
        _ => (((1 << BITS) + part + 1) << (octave - 1)) - 1,
    }
}

impl Default for Histogram {
    fn default() -> Self {
        Self::new()
    }
}

impl Histogram {
    /// Creates an empty histogram. Only this function allocates.
    pub fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into(), values: 0, min: u64::MAX, max: 0 }
    }

    /// Adds a time. A time of 2^40 ticks or more is clamped to 2^40 - 1 ticks.
    #[inline(always)]
    pub fn record(&mut self, ticks: u64) {
        let ticks = ticks.min(MOST);
        self.counts[bucket(ticks)] += 1;
        self.values += 1;
        self.min = self.min.min(ticks);
        self.max = self.max.max(ticks);
    }

    /// Adds all times of another histogram.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.values += other.values;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Removes all times.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        (self.values, self.min, self.max) = (0, u64::MAX, 0);
    }

    /// Returns the number of recorded times.
    pub fn values(&self) -> u64 {
        self.values
    }

    /// Returns the shortest time; 0 if the histogram is empty.
    pub fn min(&self) -> u64 {
        self.min.min(self.max)
    }

    /// Returns the longest time.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// Returns a time that `part` of the times (0 to 1) do not exceed, at most 1/64 too long; 0 if the histogram is
    /// empty.
    pub fn percentile(&self, part: f64) -> u64 {
        let wanted = ((self.values as f64 * part).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return longest(bucket).min(self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_follow_each_other_and_are_narrow() {
        for at in 0..BUCKETS - 1 {
            let value = longest(at);
            assert_eq!((bucket(value), bucket(value + 1)), (at, at + 1), "{value}");
        }
        for value in [0, 1, 63, 64, 65, 127, 128, 1000, 12_345_678, MOST] {
            let at_most = longest(bucket(value));
            assert!(at_most >= value && at_most - value <= value / 64, "{value}: {at_most}");
        }
    }

    #[test]
    fn percentiles_match_sorted_list() {
        let mut one = Histogram::new();
        let values: Vec<u64> = (0..10_000u64).map(|i| i * i % 99_991).collect();
        values.iter().for_each(|&value| one.record(value));
        let mut sorted = values;
        sorted.sort_unstable();
        assert_eq!((one.values(), one.min(), one.max()), (10_000, sorted[0], sorted[9_999]));
        for (part, index) in [(0.5, 4_999), (0.99, 9_899), (0.999, 9_989), (1.0, 9_999)] {
            let (found, exact) = (one.percentile(part), sorted[index]);
            assert!(found >= exact && found - exact <= exact / 64, "{part}: {found}, {exact}");
        }
    }

    #[test]
    fn merged_histograms_equal_one() {
        let (mut one, mut low, mut high) = (Histogram::new(), Histogram::new(), Histogram::new());
        for value in 0..5_000u64 {
            one.record(value * 7);
            (if value < 1_000 { &mut low } else { &mut high }).record(value * 7);
        }
        high.merge(&low);
        let all = |h: &Histogram| (h.values(), h.min(), h.max(), h.percentile(0.5), h.percentile(0.999));
        assert_eq!(all(&high), all(&one));
        high.clear();
        high.merge(&low);
        assert_eq!(all(&high), all(&low));
    }

    #[test]
    fn empty_histogram_reports_zero() {
        let histogram = Histogram::new();
        assert_eq!((histogram.min(), histogram.percentile(0.99), histogram.max()), (0, 0, 0));
    }
}
