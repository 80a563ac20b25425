//! Reproducible pseudo-random numbers.

/// SplitMix64, the generator by Steele, Lea and Flood. It is small and accepts any seed.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix(u64);

impl SplitMix {
    /// Creates the sequence of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    #[inline]
    #[allow(clippy::should_implement_trait, reason = "the sequence does not end")]
    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Returns a number below `end`, which must not be 0. The numbers are equally likely, except for a bias of `end` /
    /// 2^64.
    #[inline]
    pub const fn below(&mut self, end: u64) -> u64 {
        ((self.next() as u128 * end as u128) >> 64) as u64
    }

    /// Returns a number in the range from 0 to 1 without 1.
    pub const fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns true with this probability. For probability 0 no number is drawn: a disabled feature does not change the
    /// sequence.
    #[inline]
    pub fn happens(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.fraction() < probability
    }

    /// Shuffles the items (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_determines_sequence() {
        let draw = |seed| {
            let mut random = SplitMix::new(seed);
            [(); 8].map(|()| random.below(1000))
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        let mut random = SplitMix::new(1);
        let hits = (0..10_000).filter(|_| random.happens(0.25)).count();
        assert!((2300..2700).contains(&hits), "{hits}");
        assert!((0..100).all(|_| !random.happens(0.0) && random.below(1) == 0));
    }
}
