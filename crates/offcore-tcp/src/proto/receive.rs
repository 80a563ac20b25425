//! The receiving half of a connection: expected data, received data, and pending acknowledgements.

mod ack;
mod growth;

use std::ops::Range;

use offcore_session::layout::SMALL;
use offcore_stats::time::{Micros, Time};
use offcore_wire::Timestamps;

pub(crate) use ack::AckNeed;
use ack::DelayedAck;
use growth::Round;

use super::packet::DropReason;
use super::reassembly::Reassembly;
use super::segment::position;

/// Time for which a timestamp is valid for comparison: 24 days (RFC 7323, 5.5).
const TIMESTAMP_AGE: Micros = Micros::from_secs(2073600);
/// Minimum window when memory is short: a small block.
pub(super) const LEAST: u16 = SMALL as u16;
/// The new part of a segment's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Text {
    /// The range of the stream to copy.
    pub range: Range<u64>,
    /// Position up to which the application may see data when this and all earlier copies are complete.
    pub commit_to: u64,
}

/// The limit that the user's share of a busy worker sets for a window.
#[derive(Debug)]
struct WindowShare {
    /// The maximum position of the window's right edge; `u64::MAX` without a limit.
    edge: u64,
    /// The connection waits for its turn to extend the window.
    is_waiting: bool,
}

/// The receive sequence space. Positions are offsets in the stream; a FIN occupies one position behind the last byte.
#[derive(Debug)]
pub(crate) struct Receiver {
    /// Sequence number of position 0.
    first: u32,
    /// Next expected position. Copies up to this position have been submitted.
    next: u64,
    /// Right edge that has been advertised. It never moves left (RFC 9293, 3.8.6).
    announced: u64,
    pub ack: DelayedAck,
    /// Position up to which the application has read.
    consumed: u64,
    /// Maximum number of unread bytes, which the window promises.
    promise: u32,
    /// The limit of the window by memory.
    granted: u64,
    share: WindowShare,
    round: Round,
    /// Position of the peer's FIN if it has arrived. `next` is beyond it when all data before it has also arrived.
    fin: Option<u64>,
    pub scale: u8,
    /// Newest timestamp of the peer, and its arrival time (RFC 7323, 4.3).
    recent: Option<(u32, Time)>,
    /// The range of duplicate data to report once (RFC 2883).
    duplicate: Option<Range<u64>>,
    islands: Option<Box<Reassembly>>,
    /// The position after the newest urgent byte.
    urgent: u64,
    /// A congestion mark was received. It is echoed until the peer has reduced its window (RFC 3168, 6.1.3).
    pub echo_congestion: bool,
}

impl Receiver {
    /// Creates the state after a SYN with sequence number `irs`. The window promises `promise` bytes.
    pub(crate) fn new(irs: u32, promise: u32, scale: u8) -> Self {
        Self {
            first: irs.wrapping_add(1),
            next: 0,
            announced: 0,
            ack: DelayedAck::new(),
            consumed: 0,
            promise,
            granted: u64::MAX,
            share: WindowShare { edge: u64::MAX, is_waiting: false },
            round: Round::default(),
            fin: None,
            scale,
            recent: None,
            duplicate: None,
            islands: None,
            urgent: 0,
            echo_congestion: false,
        }
    }

    /// Returns the next expected position.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// Returns the sequence number of a position.
    #[inline]
    pub(crate) fn seq(&self, position: u64) -> u32 {
        self.first.wrapping_add(position as u32)
    }

    /// Returns the position of a sequence number, or `None` if it is before the beginning of the stream.
    #[inline]
    pub(crate) fn position(&self, seq: u32) -> Option<u64> {
        position(seq, self.first, self.next)
    }

    /// Handles the urgent pointer of a segment that begins at `start`. Returns the position of the urgent byte if it is
    /// newer. As on Linux, the pointer is the position after the urgent byte (RFC 6093, 3.1).
    pub(crate) fn urge(&mut self, start: u64, pointer: u16) -> Option<u64> {
        let behind = start + u64::from(pointer);
        let newer = pointer > 0 && behind > self.urgent && behind > self.consumed;
        if newer {
            self.urgent = behind;
        }
        newer.then(|| behind - 1)
    }

    /// Returns the end of the peer's stream if all of it has arrived.
    pub(crate) fn end(&self) -> Option<u64> {
        self.fin.filter(|fin| *fin < self.next)
    }

    /// Returns the position up to which data has arrived, without the FIN.
    pub(crate) fn data_end(&self) -> u64 {
        self.end().unwrap_or(self.next)
    }

    /// Stores the timestamp of a SYN.
    pub(crate) fn start_timestamps(&mut self, now: Time, value: u32) {
        self.recent = Some((value, now));
    }

    /// Returns the timestamp to echo, or `None` without the option.
    pub(crate) fn recent(&self) -> Option<u32> {
        self.recent.map(|(value, _)| value)
    }

    /// Returns whether a segment's timestamp is older than the newest one (RFC 7323, 5.3 R1).
    #[inline]
    pub(crate) fn is_old(&self, now: Time, timestamps: Timestamps) -> bool {
        self.recent.is_some_and(|(recent, at)| {
            timestamps.value.wrapping_sub(recent).cast_signed() < 0 && now - at < TIMESTAMP_AGE
        })
    }

    /// Stores the timestamp of an acceptable segment that begins at `start` (RFC 7323, 5.3 R3).
    #[inline]
    pub(crate) fn take_timestamp(&mut self, now: Time, start: Option<u64>, timestamps: Timestamps) {
        if start.is_none_or(|start| self.ack.covers(start)) && self.recent.is_some() {
            self.recent = Some((timestamps.value, now));
        }
    }

    /// Returns the position of a sequence number if it is the next expected one, no data is missing, and the window is
    /// open.
    #[inline]
    pub(crate) fn in_order_position(&self, seq: u32) -> Option<u64> {
        let whole = self.islands.is_none() && self.fin.is_none();
        (whole && self.next < self.announced && seq == self.seq(self.next)).then_some(self.next)
    }

    /// Returns whether any of a segment's sequence numbers is in the window (RFC 9293, 3.10.7.4, first check).
    #[inline]
    pub(crate) fn is_acceptable(&self, start: Option<u64>, seq_len: u32) -> bool {
        let Some(start) = start else { return false };
        let end = start + u64::from(seq_len);
        match (seq_len, self.announced == self.next) {
            (0, true) => start == self.next,
            (0, false) => (self.next..self.announced).contains(&start),
            // With a zero window, only a segment without text at the expected position is acceptable.
            (_, true) => false,
            (_, false) => start < self.announced && end > self.next,
        }
    }

    /// Processes the text of an acceptable segment. `cover` allocates memory for a range, and returns whether it
    /// succeeded.
    ///
    /// # Errors
    /// Returns the reason if nothing is accepted.
    #[inline]
    pub(crate) fn text(
        &mut self,
        now: Time,
        segment: Range<u64>,
        fin: bool,
        mut cover: impl FnMut(Range<u64>) -> bool,
    ) -> Result<Text, DropReason> {
        let limit = self.announced.min(self.fin.unwrap_or(u64::MAX));
        let wanted = segment.start.max(self.next)..segment.end.min(limit);
        if segment.start < self.next {
            self.note_duplicate(segment.start..segment.end.min(self.next));
        }
        // A FIN counts if the segment's end fits the window.
        if fin && segment.end <= self.announced && segment.end >= self.next && self.fin.is_none() {
            self.fin = Some(segment.end);
        }
        if wanted.is_empty() {
            self.finish();
            self.ack.request();
            let commit_to = self.data_end();
            return Ok(Text { range: self.next..self.next, commit_to });
        }
        let in_order = wanted.start == self.next && self.islands.is_none();
        let range = if in_order { wanted } else { self.missing(wanted) };
        if range.is_empty() {
            self.ack.request();
            return Ok(Text { commit_to: self.data_end(), range });
        }
        if !cover(range.clone()) {
            self.ack.request();
            return Err(DropReason::NoSpace);
        }
        if in_order {
            self.next = range.end;
            self.ack.arrived(now, range.end, range.end - range.start);
        } else {
            self.ack.request();
            self.out_of_order(&range)?;
        }
        self.finish();
        Ok(Text { commit_to: self.data_end(), range })
    }

    /// Returns the first part of `wanted` that has not arrived.
    #[cold]
    fn missing(&mut self, wanted: Range<u64>) -> Range<u64> {
        let islands = self.islands.get_or_insert_default();
        let missing = islands.missing(wanted.clone());
        if missing.start > wanted.start {
            islands.touch(wanted.start);
            // The reported range must be within this segment (RFC 2883, 4).
            self.note_duplicate(wanted.start..missing.start.min(wanted.end));
        }
        missing
    }

    #[cold]
    fn out_of_order(&mut self, range: &Range<u64>) -> Result<(), DropReason> {
        let islands = self.islands.get_or_insert_default();
        if range.start == self.next {
            self.next = islands.advance(range.end);
        } else {
            islands.insert(range.clone()).map_err(|_| DropReason::TooManyHoles)?;
        }
        if islands.is_empty() {
            self.islands = None;
        }
        Ok(())
    }

    /// Processes the FIN when all data before it has arrived.
    #[inline]
    fn finish(&mut self) {
        if self.fin == Some(self.next) {
            self.next += 1;
            self.ack.request();
        }
    }

    pub(crate) fn note_duplicate(&mut self, range: Range<u64>) {
        self.ack.request();
        self.duplicate = Some(range);
    }

    /// Returns whether an acknowledgement must be sent before more segments of the same vector are processed.
    #[inline]
    pub(crate) fn needs_immediate_ack(&self) -> bool {
        self.ack.is_immediate(self.islands.is_some())
    }

    /// Records that the application has read up to `position`.
    pub(crate) fn consumed(&mut self, position: u64) {
        self.consumed = self.consumed.max(position.min(self.data_end()));
    }

    /// Requests a window update after the window has grown. As on Linux, it is sent only if at most half of the window
    /// is left and the update doubles it. Otherwise the next acknowledgement carries the new window.
    pub(crate) fn update_window(&mut self) {
        let (edge, left) = (self.edge(), self.announced.saturating_sub(self.next));
        let half = u64::from(self.promise / 2);
        let grows = edge > self.announced && edge - self.announced >= self.least_step(2);
        if self.fin.is_none() && left <= half && grows && edge.saturating_sub(self.next) >= 2 * left {
            self.ack.request();
        }
    }

    /// Sets the limit of unread bytes. The right edge of the window does not retreat.
    pub(crate) fn set_promise(&mut self, promise: u32) {
        // The field has 16 bits.
        self.promise = if self.scale > 0 { promise } else { promise.min(u16::MAX.into()) };
    }

    /// Returns the limit of the window by the receive buffer.
    #[inline]
    pub(crate) fn wanted(&self) -> u64 {
        self.consumed + u64::from(self.promise)
    }

    /// Returns the limit of the window by memory.
    #[inline]
    pub(crate) fn granted(&self) -> u64 {
        self.granted
    }

    /// Raises the limit by memory to `edge`.
    pub(crate) fn grant(&mut self, edge: u64) {
        self.granted = self.granted.max(edge);
    }

    /// Removes the limit that the user's share sets. Returns whether there was one.
    #[inline]
    pub(crate) fn remove_window_limit(&mut self) -> bool {
        std::mem::replace(&mut self.share.edge, u64::MAX) < u64::MAX
    }

    /// Limits the window to its present right edge, unless it already has a limit. Returns whether a segment would
    /// exceed the limit.
    pub(crate) fn limit_window(&mut self) -> bool {
        if self.share.edge == u64::MAX {
            self.share.edge = self.announced;
        }
        self.share.edge.saturating_sub(self.next) < u64::from(self.ack.peer_mss().max(LEAST / 2))
    }

    /// Returns whether the connection waits for [`raise_window_limit`](Self::raise_window_limit).
    pub(crate) fn waits_for_window(&self) -> bool {
        self.share.is_waiting
    }

    /// Records whether the connection waits for [`raise_window_limit`](Self::raise_window_limit).
    pub(crate) fn wait_for_window(&mut self, waits: bool) {
        self.share.is_waiting = waits;
    }

    /// Raises the limit that the user's share sets by `more` bytes, at most to the end of the receive buffer, but at
    /// least to a window of `chunk` bytes. Returns the growth of the limit in bytes.
    pub(crate) fn raise_window_limit(&mut self, more: u64, chunk: u64) -> u64 {
        let before = self.share.edge;
        let edge = (before + more).min(self.wanted()).max(self.next + chunk);
        self.share.edge = before.max(edge);
        self.share.edge - before
    }

    /// Returns the number of bytes that have arrived and that the application has not read.
    pub(crate) fn unread(&self) -> u64 {
        self.data_end() - self.consumed
    }

    /// Returns the right edge of the window, as a whole number of window units. The edge does not move by less than a
    /// segment or half of the promise, because peers would fill the window with small segments (RFC 9293, 3.8.6.2.2).
    #[inline]
    fn edge(&self) -> u64 {
        let unit = !((1u64 << self.scale) - 1);
        let largest = u64::from(u16::MAX) << self.scale;
        let window =
            self.wanted().min(self.granted).min(self.share.edge).saturating_sub(self.next).min(largest);
        let edge = self.next + (window & unit);
        if edge >= self.announced + self.least_step(1) { edge } else { self.announced }
    }

    /// Returns the minimum move of the right edge: `segments` segments, or less with a small buffer or little memory.
    #[inline]
    fn least_step(&self, segments: u64) -> u64 {
        let least = u64::from(self.promise / 2).min(segments * u64::from(self.ack.peer_mss()));
        if self.granted.min(self.share.edge) < self.wanted() { least.min(LEAST.into()) } else { least }
    }

    /// Returns the acknowledgement number and the window of a segment that is sent now. No acknowledgement is due
    /// afterwards.
    #[inline]
    pub(crate) fn acknowledge(&mut self) -> (u32, u16) {
        self.announced = self.edge();
        self.ack.sent(self.next);
        let window = (self.announced.saturating_sub(self.next) >> self.scale).min(u64::from(u16::MAX));
        (self.seq(self.next), window as u16)
    }

    /// Records the window of our SYN, which is not scaled (RFC 7323, 2.2). It is the first limit by memory. Returns the
    /// largest window of a SYN so far.
    pub(crate) fn announce_syn(&mut self, window: u16) -> u16 {
        self.announced = self.announced.max(window.into());
        self.granted = self.announced;
        self.announced as u16
    }

    /// Returns the largest window of our SYNs, before the first data.
    pub(crate) fn syn_window(&self) -> u16 {
        self.announced as u16
    }

    /// Returns up to `at_most` SACK blocks: a duplicate first (RFC 2883, 4), then data behind holes.
    pub(crate) fn sack_ranges(&mut self, at_most: usize) -> arrayvec::ArrayVec<Range<u64>, 4> {
        let mut ranges = arrayvec::ArrayVec::new();
        ranges.extend(self.duplicate.take());
        let left = at_most.min(4).saturating_sub(ranges.len());
        if let Some(islands) = self.islands.as_deref().filter(|_| left > 0) {
            ranges.extend(islands.newest(left));
        }
        ranges
    }

    /// Returns whether data has arrived behind a hole.
    pub(crate) fn has_holes(&self) -> bool {
        self.islands.is_some()
    }

    /// Discards the data behind holes, as a receiver may (RFC 2018, 8). The peer retransmits it.
    pub(crate) fn renege(&mut self) {
        self.islands = None;
        if self.fin.is_some_and(|fin| fin > self.next) {
            self.fin = None;
        }
    }

    /// Returns whether SACK blocks are due.
    pub(crate) fn has_sack(&self) -> bool {
        self.duplicate.is_some() || self.islands.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::ack::DELAYED_ACK;
    use super::*;

    /// Creates a receiver of 64 KiB whose window has been advertised.
    fn receiver() -> Receiver {
        let mut receiver = Receiver::new(999, 65_535, 0);
        receiver.acknowledge();
        receiver
    }

    fn take(receiver: &mut Receiver, range: Range<u64>) -> Result<Text, DropReason> {
        receiver.text(Time::ZERO, range, false, |_| true)
    }

    #[test]
    fn every_second_segment_is_acknowledged() {
        // RFC 9293, 3.8.6.3 (SHLD-18, MUST-58).
        let mut receiver = receiver();
        take(&mut receiver, 0..1000).unwrap();
        assert_eq!(receiver.ack.need(), AckNeed::By(Time::ZERO + DELAYED_ACK));
        take(&mut receiver, 1000..2000).unwrap();
        assert_eq!(receiver.ack.need(), AckNeed::Now);
        assert_eq!(receiver.acknowledge(), (3000, 63_535));
        assert_eq!(receiver.ack.need(), AckNeed::No);
    }

    #[test]
    fn segment_acceptability_matches_rfc_9293() {
        // RFC 9293, 3.10.7.4, table 6.
        let mut receiver = receiver();
        take(&mut receiver, 0..100).unwrap();
        assert!(receiver.is_acceptable(Some(100), 0));
        assert!(!receiver.is_acceptable(Some(99), 0));
        assert!(receiver.is_acceptable(Some(65_534), 0));
        assert!(!receiver.is_acceptable(Some(65_535), 0));
        assert!(receiver.is_acceptable(Some(50), 51));
        assert!(!receiver.is_acceptable(Some(50), 50));
        assert!(!receiver.is_acceptable(None, 5));
    }

    #[test]
    fn window_does_not_shrink() {
        // RFC 9293, 3.8.6: "the right edge of the window is never moved to the left".
        let mut receiver = Receiver::new(0, 10_000, 0);
        let (_, first) = receiver.acknowledge();
        for start in [0, 1000, 2000, 3000] {
            take(&mut receiver, start..start + 1000).unwrap();
        }
        let (_, second) = receiver.acknowledge();
        assert_eq!((first, second), (10_000, 6000));
        receiver.consumed(4000);
        receiver.update_window();
        assert_eq!(receiver.ack.need(), AckNeed::No, "more than half is left");
        assert_eq!(receiver.acknowledge().1, 10_000);
        for start in [4000, 5000, 6000, 7000, 8000, 9000] {
            take(&mut receiver, start..start + 1000).unwrap();
        }
        assert_eq!(receiver.acknowledge().1, 4000);
        receiver.consumed(10_000);
        receiver.update_window();
        assert_eq!(receiver.ack.need(), AckNeed::Now, "it has doubled");
        assert_eq!(receiver.acknowledge().1, 10_000);
    }

    #[test]
    fn receiver_avoids_silly_window() {
        // RFC 9293, 3.8.6.2.2: silly window avoidance.
        let mut receiver = Receiver::new(0, 10_000, 0);
        receiver.acknowledge();
        for start in [0, 1000, 2000, 3000] {
            take(&mut receiver, start..start + 1000).unwrap();
        }
        receiver.acknowledge();
        receiver.consumed(100);
        receiver.update_window();
        assert_eq!(receiver.ack.need(), AckNeed::No);
    }

    #[test]
    fn filled_hole_commits_later_data() {
        let mut receiver = receiver();
        assert_eq!(take(&mut receiver, 100..200).unwrap(), Text { range: 100..200, commit_to: 0 });
        assert_eq!(receiver.ack.need(), AckNeed::Now);
        assert_eq!(receiver.sack_ranges(3).first(), Some(&(100..200)));
        assert_eq!(take(&mut receiver, 0..100).unwrap(), Text { range: 0..100, commit_to: 200 });
        assert!(!receiver.has_sack());
    }

    #[test]
    fn received_bytes_are_not_written_again() {
        let mut receiver = receiver();
        take(&mut receiver, 100..200).unwrap();
        assert_eq!(take(&mut receiver, 50..150).unwrap().range, 50..100);
        assert_eq!(take(&mut receiver, 0..300).unwrap(), Text { range: 0..50, commit_to: 200 });
        assert_eq!(take(&mut receiver, 0..300).unwrap().range, 200..300);
    }

    #[test]
    fn duplicate_segment_is_dsacked_once() {
        // RFC 2883, 4: the first block reports the duplicate segment.
        let mut receiver = receiver();
        take(&mut receiver, 0..300).unwrap();
        receiver.acknowledge();
        assert!(take(&mut receiver, 100..200).unwrap().range.is_empty());
        assert_eq!(receiver.ack.need(), AckNeed::Now);
        assert_eq!(receiver.sack_ranges(3).first(), Some(&(100..200)));
        assert!(receiver.sack_ranges(3).is_empty());
    }

    #[test]
    fn fin_waits_for_missing_data() {
        let mut receiver = receiver();
        receiver.text(Time::ZERO, 100..200, true, |_| true).unwrap();
        assert_eq!((receiver.next(), receiver.end()), (0, None));
        let text = take(&mut receiver, 0..100).unwrap();
        assert_eq!((receiver.next(), receiver.end(), text.commit_to), (201, Some(200), 200));
    }

    #[test]
    fn data_after_fin_is_dropped() {
        let mut receiver = receiver();
        receiver.text(Time::ZERO, 100..200, true, |_| true).unwrap();
        assert!(take(&mut receiver, 200..300).unwrap().range.is_empty());
    }

    #[test]
    fn segment_without_memory_is_dropped() {
        let mut receiver = receiver();
        assert_eq!(receiver.text(Time::ZERO, 0..100, false, |_| false), Err(DropReason::NoSpace));
        assert_eq!((receiver.next(), receiver.ack.need()), (0, AckNeed::Now));
    }

    #[test]
    fn paws_detects_old_timestamps() {
        let mut receiver = receiver();
        receiver.start_timestamps(Time::ZERO, 1000);
        let at = |value| Timestamps { value, echo: 0 };
        assert!(receiver.is_old(Time::from_micros(1), at(999)));
        assert!(!receiver.is_old(Time::from_micros(1), at(1000)));
        assert!(!receiver.is_old(Time::ZERO + TIMESTAMP_AGE, at(999)), "RFC 7323, 5.5");
        receiver.take_timestamp(Time::from_micros(1), Some(1), at(2000));
        assert_eq!(receiver.recent(), Some(1000), "not the one that covers the last acknowledged byte");
        receiver.take_timestamp(Time::from_micros(1), Some(0), at(2000));
        assert_eq!(receiver.recent(), Some(2000));
    }
}
