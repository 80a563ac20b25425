//! A histogram of ticks: exact to 1/64, whatever the range.

/// Buckets of each power of two, as a power of two.
const BITS: u32 = 6;
/// Longer times count as this long: 2^40 ticks are minutes.
const MOST: u64 = (1 << 40) - 1;
/// Buckets in all.
const BUCKETS: usize = bucket(MOST) + 1;

/// How often each time was seen.
#[derive(Clone, Debug)]
pub struct Histogram {
    counts: Box<[u64]>,
    values: u64,
    min: u64,
    max: u64,
}

/// The bucket of a time: below 2^BITS each has its own, above each power of two has that many.
#[inline(always)]
const fn bucket(value: u64) -> usize {
    let octave = (value >> BITS).checked_ilog2();
    match octave {
        None => value as usize,
        Some(octave) => ((octave as usize) << BITS) + (value >> octave) as usize,
    }
}

/// The longest time of a bucket.
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
    /// A histogram without a time. This allocates; nothing else does.
    pub fn new() -> Self {
        Self { counts: vec![0; BUCKETS].into(), values: 0, min: u64::MAX, max: 0 }
    }

    /// Adds a time; one that is longer than 2^40 ticks counts as that long.
    #[inline(always)]
    pub fn record(&mut self, ticks: u64) {
        let ticks = ticks.min(MOST);
        self.counts[bucket(ticks)] += 1;
        self.values += 1;
        self.min = self.min.min(ticks);
        self.max = self.max.max(ticks);
    }

    /// Adds all times of another one.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.values += other.values;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    /// Forgets all times.
    pub fn clear(&mut self) {
        self.counts.fill(0);
        (self.values, self.min, self.max) = (0, u64::MAX, 0);
    }

    /// Times recorded.
    pub fn values(&self) -> u64 {
        self.values
    }

    /// The shortest; 0 when there is none.
    pub fn min(&self) -> u64 {
        self.min.min(self.max)
    }

    /// The longest.
    pub fn max(&self) -> u64 {
        self.max
    }

    /// What `part` of the times (0 to 1) are no longer than, at most 1/64 too long; 0 when there is none.
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
    fn percentiles_are_those_of_a_sorted_list() {
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
    fn merged_ones_are_as_one() {
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
    fn an_empty_one_has_zeroes() {
        let histogram = Histogram::new();
        assert_eq!((histogram.min(), histogram.percentile(0.99), histogram.max()), (0, 0, 0));
    }
}
