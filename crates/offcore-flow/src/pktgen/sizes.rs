//! Frame sizes of generated packets: one size, several sizes with weights, or a range. Sizes are in bytes, including
//! the FCS.

use std::fmt;
use std::str::FromStr;

use offcore_stats::SplitMix;

use crate::error::{Field, SwitchError};

/// The simple IMIX, with weights seven, four and one.
const IMIX: &str = "64:7,594:4,1518:1";
/// The shortest Ethernet frame.
pub const MIN_SIZE: usize = 64;
/// The longest frame that is generated.
pub const MAX_SIZE: usize = 65_535;
/// Maximum sum of the weights. A cycle has one entry per unit of weight.
const MAX_CYCLE: usize = 4096;

/// The sizes of packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    text: String,
    kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Each size has as many entries as its weight.
    Cycle(Vec<usize>),
    /// All sizes from the first to the last are equally likely.
    Range(usize, usize),
}

impl Sizes {
    /// Returns a single size.
    ///
    /// # Errors
    /// If the size is out of range.
    pub fn fixed(size: usize) -> Result<Self, SwitchError> {
        size.to_string().parse().or_else(|error: String| Field::Sizes.refuse(error))
    }

    /// Returns the smallest size.
    pub fn smallest(&self) -> usize {
        match &self.kind {
            Kind::Cycle(cycle) => cycle.iter().copied().min().unwrap_or(MIN_SIZE),
            Kind::Range(first, _) => *first,
        }
    }

    /// Returns the largest size.
    pub fn largest(&self) -> usize {
        match &self.kind {
            Kind::Cycle(cycle) => cycle.iter().copied().max().unwrap_or(MIN_SIZE),
            Kind::Range(_, last) => *last,
        }
    }
}

impl FromStr for Sizes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected a size such as 64, a range such as 64-1518, sizes with weights such as \
            64:7,1518:1, or imix";
        let size = |text: &str| {
            let found: usize = text.trim().parse().map_err(|_| format!("'{text}' is no size: {EXPECTED}"))?;
            if (MIN_SIZE..=MAX_SIZE).contains(&found) {
                return Ok(found);
            }
            Err(format!("size {found}: expected {MIN_SIZE} to {MAX_SIZE} bytes, FCS included"))
        };
        let kind = if let Some((first, last)) = text.split_once('-') {
            match (size(first)?, size(last)?) {
                (first, last) if first <= last => Kind::Range(first, last),
                (first, last) => {
                    return Err(format!("range {first}-{last} is empty: expected the smaller size first"));
                }
            }
        } else {
            let list = if text == "imix" { IMIX } else { text };
            let mut cycle = Vec::new();
            for part in list.split(',') {
                let (bytes, weight) = part.split_once(':').unwrap_or((part, "1"));
                let weight: usize =
                    weight.parse().map_err(|_| format!("'{weight}' is no weight: {EXPECTED}"))?;
                if weight == 0 || cycle.len() + weight > MAX_CYCLE {
                    return Err(format!(
                        "weight {weight}: expected 1 or more, and no more than {MAX_CYCLE} in all"
                    ));
                }
                cycle.extend(std::iter::repeat_n(size(bytes)?, weight));
            }
            Kind::Cycle(cycle)
        };
        Ok(Self { text: text.into(), kind })
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Draws sizes. The same seed gives the same sizes.
#[derive(Clone, Debug)]
pub(super) struct Draw {
    kind: Kind,
    next: usize,
    random: SplitMix,
}

impl Draw {
    pub(super) fn new(sizes: &Sizes, seed: u64) -> Self {
        let mut draw = Self { kind: sizes.kind.clone(), next: 0, random: SplitMix::new(seed) };
        // The cycle is shuffled, so that sizes are not in a fixed order. Each cycle has the exact shares.
        if let Kind::Cycle(mut cycle) = draw.kind.clone() {
            draw.random.shuffle(&mut cycle);
            draw.kind = Kind::Cycle(cycle);
        }
        draw
    }

    #[inline]
    pub(super) fn size(&mut self) -> usize {
        if let Kind::Range(first, last) = self.kind {
            return first + self.random.below((last - first) as u64 + 1) as usize;
        }
        let Kind::Cycle(cycle) = &self.kind else { return MIN_SIZE };
        let size = cycle[self.next];
        self.next = if self.next + 1 == cycle.len() { 0 } else { self.next + 1 };
        size
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn drawn(text: &str, seed: u64, packets: usize) -> Vec<usize> {
        let mut draw = Draw::new(&text.parse().unwrap(), seed);
        (0..packets).map(|_| draw.size()).collect()
    }

    fn shares(sizes: &[usize]) -> BTreeMap<usize, usize> {
        let mut shares = BTreeMap::new();
        sizes.iter().for_each(|size| *shares.entry(*size).or_default() += 1);
        shares
    }

    #[test]
    fn size_weights_are_exact_per_cycle() {
        let sizes = drawn("imix", 1, 1200);
        assert_eq!(shares(&sizes), [(64, 700), (594, 400), (1518, 100)].into());
        assert_eq!(shares(&sizes[..12]), [(64, 7), (594, 4), (1518, 1)].into());
        assert_eq!(shares(&drawn("128,64:2", 5, 3)), [(64, 2), (128, 1)].into());
        assert_eq!(drawn("1518", 9, 3), [1518; 3]);
    }

    #[test]
    fn range_sizes_are_uniform() {
        let shares = shares(&drawn("64-95", 3, 32_000));
        assert_eq!(shares.len(), 32);
        assert!(shares.values().all(|&packets| (800..1200).contains(&packets)), "{shares:?}");
    }

    #[test]
    fn seed_determines_sizes() {
        assert_eq!(drawn("64-1518", 3, 100), drawn("64-1518", 3, 100));
        assert_ne!(drawn("64-1518", 3, 100), drawn("64-1518", 4, 100));
        assert_ne!(drawn("imix", 3, 12), drawn("imix", 4, 12));
    }

    #[test]
    fn size_spec_limits_are_checked() {
        let sizes: Sizes = "64-9018".parse().unwrap();
        assert_eq!((sizes.smallest(), sizes.largest(), sizes.to_string().as_str()), (64, 9018, "64-9018"));
        let imix: Sizes = "imix".parse().unwrap();
        assert_eq!((imix.smallest(), imix.largest(), imix.to_string().as_str()), (64, 1518, "imix"));
        for (bad, says) in [
            ("", "no size"),
            ("63", "64 to 65535"),
            ("65536", "64 to 65535"),
            ("1518-64", "smaller size first"),
            ("64:x", "no weight"),
            ("64:0", "1 or more"),
            ("64:5000", "4096"),
            ("huge", "imix"),
            ("64,", "no size"),
        ] {
            let error = bad.parse::<Sizes>().unwrap_err();
            assert!(error.contains(says), "{bad}: {error}");
        }
    }
}
