//! What has been received out of order: ranges of the stream behind a hole.

use std::ops::Range;

use arrayvec::ArrayVec;

/// Ranges that are kept, at most: a peer can make no more work than this per segment (CVE-2018-5390).
pub(crate) const RANGES: usize = 64;

/// A range, and when it last grew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Island {
    start: u64,
    end: u64,
    /// Number of the segment that it last grew by.
    touched: u32,
}

/// Ranges behind the next byte expected, in order, none touching another.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    islands: ArrayVec<Island, RANGES>,
    /// Segments so far.
    segments: u32,
}

/// There are as many ranges as are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMany;

impl Reassembly {
    pub(crate) fn is_empty(&self) -> bool {
        self.islands.is_empty()
    }

    /// The first part of `range` that is not there yet: a received byte is never written again. Empty when all is there.
    pub(crate) fn missing(&self, range: Range<u64>) -> Range<u64> {
        let mut start = range.start;
        for island in &self.islands {
            if island.start > start {
                return start..range.end.min(island.start).max(start);
            }
            start = start.max(island.end);
        }
        start..range.end.max(start)
    }

    /// A segment has come that begins at `position`, which is there already: its range is the newest.
    pub(crate) fn touch(&mut self, position: u64) {
        self.segments = self.segments.wrapping_add(1);
        let at = self.islands.partition_point(|island| island.end <= position);
        if let Some(island) = self.islands.get_mut(at).filter(|island| island.start <= position) {
            island.touched = self.segments;
        }
    }

    /// Adds a range of which nothing is there.
    ///
    /// # Errors
    /// [`TooMany`] when it would be one range too many; nothing has changed.
    pub(crate) fn insert(&mut self, range: Range<u64>) -> Result<(), TooMany> {
        self.segments = self.segments.wrapping_add(1);
        let mut new = Island { start: range.start, end: range.end, touched: self.segments };
        let at = self.islands.partition_point(|island| island.end < new.start);
        let behind = self.islands[at..].iter().take_while(|island| island.start <= new.end).count();
        if behind == 0 {
            return self.islands.try_insert(at, new).map_err(|_| TooMany);
        }
        new.start = new.start.min(self.islands[at].start);
        new.end = new.end.max(self.islands[at + behind - 1].end);
        self.islands[at] = new;
        self.islands.drain(at + 1..at + behind);
        Ok(())
    }

    /// Everything up to `edge` is there: the edge moves over ranges that it touches. Returns where it is then.
    pub(crate) fn advance(&mut self, edge: u64) -> u64 {
        let reached = self.islands.iter().take_while(|island| island.start <= edge);
        let (count, edge) =
            reached.fold((0, edge), |(count, edge), island| (count + 1, edge.max(island.end)));
        self.islands.drain(..count);
        edge
    }

    /// The ranges that SACK blocks report: the one that grew last is first, then the others in the order in which they
    /// grew (RFC 2018, 4).
    pub(crate) fn newest(&self, at_most: usize) -> ArrayVec<Range<u64>, 4> {
        let age = |island: &Island| self.segments.wrapping_sub(island.touched);
        let mut found: ArrayVec<Island, 4> = ArrayVec::new();
        for island in &self.islands {
            let at = found.partition_point(|other| age(other) < age(island));
            if at < at_most.min(4) {
                if found.len() == at_most.min(4) {
                    found.pop();
                }
                found.insert(at, *island);
            }
        }
        found.iter().map(|island| island.start..island.end).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn newest_range_is_reported_first() {
        // RFC 2018, 4: "The first SACK block MUST specify the contiguous block of data containing the segment which
        // triggered this ACK".
        let mut reassembly = Reassembly::default();
        for start in [10, 30, 50, 70, 90] {
            reassembly.insert(start..start + 5).unwrap();
        }
        reassembly.insert(35..40).unwrap();
        assert_eq!(reassembly.newest(3).as_slice(), [30..40, 90..95, 70..75]);
        assert_eq!(reassembly.newest(4).len(), 4);
        reassembly.touch(12);
        assert_eq!(reassembly.newest(2).as_slice(), [10..15, 30..40], "a duplicate is a segment, too");
        reassembly.touch(20);
        assert_eq!(reassembly.newest(2).as_slice(), [10..15, 30..40]);
    }

    #[test]
    fn one_range_too_many_changes_nothing() {
        let mut reassembly = Reassembly::default();
        for number in 0..RANGES as u64 {
            reassembly.insert(number * 10 + 1..number * 10 + 5).unwrap();
        }
        assert_eq!(reassembly.insert(9_999..10_000), Err(TooMany));
        reassembly.insert(5..7).unwrap();
        assert_eq!(reassembly.advance(1), 7);
    }

    proptest! {
        /// Against a set of bytes.
        #[test]
        fn agrees_with_a_byte_set(segments in prop::collection::vec((0u64..300, 1u64..40), 0..60)) {
            let mut reassembly = Reassembly::default();
            let mut bytes = BTreeSet::new();
            let mut edge = 0;
            for (start, len) in segments {
                let range = start.max(edge)..(start + len).max(edge);
                let missing = reassembly.missing(range.clone());
                let naive = range.clone().find(|byte| !bytes.contains(byte));
                prop_assert_eq!(missing.is_empty(), naive.is_none());
                if let Some(first) = naive {
                    prop_assert_eq!(missing.start, first);
                    prop_assert!(missing.clone().all(|byte| !bytes.contains(&byte)));
                    prop_assert!(missing.end == range.end || bytes.contains(&missing.end));
                    if missing.start == edge {
                        edge = reassembly.advance(missing.end);
                        bytes.extend(missing);
                    } else if reassembly.insert(missing.clone()).is_ok() {
                        bytes.extend(missing);
                    }
                }
                let expected = (0..).find(|byte| !bytes.contains(byte)).unwrap();
                prop_assert_eq!(edge, expected);
                for island in reassembly.newest(4) {
                    prop_assert!(island.clone().all(|byte| bytes.contains(&byte)));
                    prop_assert!(!bytes.contains(&island.end) && !bytes.contains(&(island.start - 1)));
                }
            }
        }
    }
}
