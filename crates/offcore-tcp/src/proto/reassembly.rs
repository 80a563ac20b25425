//! Out-of-order data: ranges of the stream behind a hole.

use std::collections::BTreeMap;
use std::ops::Range;

use arrayvec::ArrayVec;

/// Limits of the ranges: up to [`FEW`] are always kept, more only with at least [`LEAST`] bytes on average, and never
/// more than [`MOST`]. A peer that sends single bytes thus gets little memory (CVE-2018-5390).
const FEW: usize = 64;
const LEAST: u64 = 256;
const MOST: usize = 2048;
/// Number of ranges whose order of arrival is stored. An acknowledgement reports four of them.
const RECENT: usize = 8;

/// Ranges behind the next expected byte. They do not touch each other.
#[derive(Debug, Default)]
pub(crate) struct Reassembly {
    /// The ranges as a map from start to end.
    ranges: BTreeMap<u64, u64>,
    /// Bytes in all ranges.
    bytes: u64,
    /// A position in each of the ranges that grew last, newest first.
    recent: ArrayVec<u64, RECENT>,
}

/// The limit of the ranges is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TooMany;

impl Reassembly {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the first missing part of `range`, so that a received byte is never written again. It is empty if all of
    /// it has arrived.
    pub(crate) fn missing(&self, range: Range<u64>) -> Range<u64> {
        let start = self.ranges.range(..=range.start).next_back().map_or(0, |(_, end)| *end).max(range.start);
        let next = self.ranges.range(start..).next().map_or(range.end, |(next, _)| *next);
        start..range.end.min(next).max(start)
    }

    /// Makes the range at `position` the newest, after a duplicate segment there.
    pub(crate) fn touch(&mut self, position: u64) {
        if let Some(range) = self.range_at(position) {
            self.renew(&range);
        }
    }

    /// Returns the range that contains a position.
    fn range_at(&self, position: u64) -> Option<Range<u64>> {
        let (start, end) = self.ranges.range(..=position).next_back()?;
        (*end > position).then_some(*start..*end)
    }

    /// Makes a range the newest.
    fn renew(&mut self, range: &Range<u64>) {
        self.recent.retain(|position| !range.contains(position));
        if self.recent.is_full() {
            self.recent.pop();
        }
        self.recent.insert(0, range.start);
    }

    /// Adds a missing range.
    ///
    /// # Errors
    /// [`TooMany`] without any change if the limit of the ranges is reached.
    pub(crate) fn insert(&mut self, range: Range<u64>) -> Result<(), TooMany> {
        let bytes = self.bytes + (range.end - range.start);
        let before = self.ranges.range(..range.start).next_back().filter(|(_, end)| **end == range.start);
        let start = before.map_or(range.start, |(start, _)| *start);
        let after = self.ranges.get(&range.end).copied();
        let count = self.ranges.len();
        let is_dense = count < FEW || count < MOST && count as u64 * LEAST < bytes;
        if start == range.start && after.is_none() && !is_dense {
            return Err(TooMany);
        }
        if after.is_some() {
            self.ranges.remove(&range.end);
        }
        let whole = start..after.unwrap_or(range.end);
        self.ranges.insert(whole.start, whole.end);
        self.bytes = bytes;
        self.renew(&whole);
        Ok(())
    }

    /// Moves the edge after everything up to `edge` has arrived: it advances over adjacent ranges. Returns its new
    /// position.
    pub(crate) fn advance(&mut self, edge: u64) -> u64 {
        let mut edge = edge;
        while let Some(first) = self.ranges.first_entry().filter(|first| *first.key() <= edge) {
            let (start, end) = first.remove_entry();
            self.bytes -= end - start;
            edge = edge.max(end);
        }
        self.recent.retain(|position| *position >= edge);
        edge
    }

    /// Returns the ranges for SACK blocks: the newest first (RFC 2018, 4), then the lowest of those whose order is not
    /// stored.
    pub(crate) fn newest(&self, at_most: usize) -> ArrayVec<Range<u64>, 4> {
        let recent = self.recent.iter().filter_map(|position| self.range_at(*position));
        let lowest = self.ranges.iter().map(|(start, end)| *start..*end);
        let mut found = ArrayVec::<Range<u64>, 4>::new();
        for range in recent.chain(lowest) {
            if found.len() >= at_most.min(4) {
                break;
            }
            if !found.contains(&range) {
                found.push(range);
            }
        }
        found
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
    fn short_ranges_are_limited() {
        let mut reassembly = Reassembly::default();
        for number in 0..FEW as u64 {
            reassembly.insert(number * 10 + 1..number * 10 + 5).unwrap();
        }
        assert_eq!(reassembly.insert(9_999..10_000), Err(TooMany));
        reassembly.insert(5..7).unwrap();
        assert_eq!(reassembly.advance(1), 7);
    }

    #[test]
    fn segments_behind_many_holes_are_kept() {
        let mut reassembly = Reassembly::default();
        let segment = |number: u64| number * 1000 + 500..number * 1000 + 1000;
        for number in 0..MOST as u64 {
            reassembly.insert(segment(number)).unwrap();
        }
        assert_eq!(reassembly.insert(segment(MOST as u64)), Err(TooMany));
        let last = MOST as u64 - 1;
        assert_eq!(reassembly.newest(2).as_slice(), [segment(last), segment(last - 1)]);
        // Each filled hole advances over one range.
        for number in 0..MOST as u64 {
            assert_eq!(reassembly.advance(number * 1000 + 500), number * 1000 + 1000);
            let left = MOST - 1 - number as usize;
            assert_eq!(reassembly.newest(4).len(), left.min(4), "the lowest are reported without newer ones");
        }
        assert!(reassembly.is_empty() && reassembly.bytes == 0);
    }

    proptest! {
        /// Compares with a set of bytes.
        #[test]
        fn reassembly_matches_byte_set(segments in prop::collection::vec((0u64..300, 1u64..40), 0..60)) {
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

    /// Processes a segment as a receiver does. `bytes` has one bit per received byte.
    fn take(reassembly: &mut Reassembly, edge: &mut u64, bytes: &mut u32, segment: Range<u64>) {
        let missing = reassembly.missing(segment.start.max(*edge)..segment.end.max(*edge));
        let first = segment.clone().find(|at| *bytes >> at & 1 == 0);
        assert_eq!((!missing.is_empty()).then_some(missing.start), first);
        if missing.start == *edge {
            *edge = reassembly.advance(missing.end);
        } else if !missing.is_empty() {
            reassembly.insert(missing.clone()).unwrap();
        }
        missing.for_each(|at| *bytes |= 1 << at);
        assert_eq!(*edge, u64::from(bytes.trailing_ones()));
        let behind: u32 = (bytes.wrapping_shr(*edge as u32)).count_ones();
        assert_eq!(reassembly.bytes, behind.into());
        let (mut found, islands) = (0, reassembly.newest(4));
        for island in islands {
            assert!(
                !island.is_empty() && *bytes >> island.end & 1 == 0 && *bytes >> (island.start - 1) & 1 == 0
            );
            found += island.end - island.start;
        }
        assert_eq!(found, reassembly.bytes, "at most three islands");
    }

    /// All sequences of four segments within seven bytes.
    #[test]
    fn every_order_of_short_segments() {
        let segments: Vec<Range<u64>> =
            (0..7).flat_map(|start| (start + 1..=7).map(move |end| start..end)).collect();
        for row in 0..segments.len().pow(4) {
            let (mut reassembly, mut edge, mut bytes, mut rest) = (Reassembly::default(), 0, 0, row);
            for _ in 0..4 {
                let segment = segments[rest % segments.len()].clone();
                take(&mut reassembly, &mut edge, &mut bytes, segment);
                rest /= segments.len();
            }
        }
    }
}
