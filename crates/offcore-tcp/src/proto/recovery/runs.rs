//! The sent data of a connection as runs of 16 bytes in stream order, with their SACK state.
//!
//! A run is data that was published together and has had the same fate since. The first run begins at the first
//! unacknowledged byte, and each run begins where the previous one ends. A typical ACK therefore removes runs from the
//! front and changes nothing else.

use std::collections::VecDeque;
use std::ops::Range;

use offcore_stats::time::Time;

use super::delivery::{Delivery, Newest, Sent};

/// Maximum number of runs.
pub(super) const MOST: usize = 4096;
/// Number of runs that are always allowed. More are allowed while runs have at least [`LEAST`] bytes on average, so
/// that a program that sends single bytes uses little memory.
const FEW: usize = 64;
const LEAST: u64 = 64;
/// Runs reserved for retransmissions. Without them, losses could not be repaired.
const RESERVED: usize = 256;
/// Adjacent runs are merged periodically once there are this many.
const MERGE_THRESHOLD: usize = 64;

const SACKED: u8 = 1;
const LOST: u8 = 2;
const PLANNED: u8 = 4;
/// The last segment is shorter than the others.
const SHORT: u8 = 8;
/// The flags that distinguish runs.
const FATE: u8 = SACKED | LOST | PLANNED;

/// Data that was published together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Time of the last publication.
    pub(super) time: Time,
    /// The low 32 bits of the end position.
    end: u32,
    /// The size of all segments except the last, counted from the beginning of the run.
    segment: u16,
    flags: u8,
    /// The number of publications.
    sent: u8,
}

impl Run {
    pub(super) fn sacked(&self) -> bool {
        self.flags & SACKED != 0
    }

    #[inline]
    fn sent(&self) -> Sent {
        Sent { time: self.time, repeated: self.sent > 1, known: self.sacked() }
    }

    /// Returns whether the run is lost and its retransmission is not planned.
    pub(super) fn waits(&self) -> bool {
        self.flags & FATE == LOST
    }

    /// Returns whether the run counts as in flight.
    fn is_in_flight(&self) -> bool {
        self.flags & FATE == 0
    }

    /// Returns whether the next run can be merged into this one. The time distinguishes runs only in flight.
    fn joins(&self, next: &Self) -> bool {
        if self.flags & FATE != next.flags & FATE {
            return false;
        }
        self.sacked()
            || (self.flags & SHORT == 0
                && self.segment == next.segment
                && self.sent == next.sent
                && (self.waits() || self.time == next.time))
    }

    /// Merges the next run into this one. The newer time is kept.
    fn absorb(&mut self, next: &Self) {
        self.time = self.time.max(next.time);
        self.end = next.end;
        self.flags |= next.flags & SHORT;
        self.sent = self.sent.max(next.sent);
    }
}

/// The sent data of a connection and its state. All counts are bytes.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: VecDeque<Run>,
    /// The first unacknowledged byte.
    pub(super) una: u64,
    /// The end of the published data.
    pub(super) published: u64,
    /// The end of the retransmitted data.
    repeated: u64,
    /// All lost data that awaits its retransmission is at or above this position.
    lost_from: u64,
    /// SACKed bytes.
    pub(super) sacked: u32,
    /// Lost bytes whose retransmission is not planned.
    pub(super) lost: u32,
    /// Bytes below `published` whose retransmission is planned and not yet published.
    pub(super) replanned: u32,
    /// Send time of the data that was most recently marked lost.
    pub(super) lost_sent: Time,
    /// The number of SACKed segments. An estimate if runs were merged.
    pub(super) segments: u32,
    /// Number of runs at which the next merge pass takes place.
    merge_at: u32,
}

impl Runs {
    /// Returns the number of runs.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Frees the memory of an empty list.
    pub(super) fn release(&mut self) {
        if self.runs.is_empty() {
            self.runs = VecDeque::new();
        }
    }

    /// Returns whether all data is acknowledged.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Returns whether some unacknowledged data may have been sent twice.
    #[inline]
    pub(super) fn repeats(&self) -> bool {
        self.repeated > self.una
    }

    /// Returns the first unacknowledged run.
    pub(super) fn head(&self) -> Option<&Run> {
        self.runs.front()
    }

    /// Returns whether the retransmission of the first unacknowledged data is planned.
    pub(super) fn head_planned(&self) -> bool {
        self.head().is_some_and(|run| run.flags & PLANNED != 0)
    }

    /// Adds new data up to `end`, published in segments of at most `mss` bytes.
    #[inline]
    pub(super) fn push(&mut self, now: Time, end: u64, mss: u32) {
        let bytes = end.min(self.una + (1 << 31) - 1).saturating_sub(self.published) as u32;
        if bytes == 0 {
            return;
        }
        self.published += u64::from(bytes);
        let segment = bytes.min(mss).min(u32::from(u16::MAX)).max(1) as u16;
        let short = bytes > mss && !bytes.is_multiple_of(u32::from(segment));
        let flags = if short { SHORT } else { 0 };
        let run = Run { time: now, end: self.published as u32, segment, flags, sent: 1 };
        if let Some(last) = self.runs.back_mut() {
            // A shorter segment becomes the last segment of the run.
            if last.flags == 0 && last.time == now && last.sent == 1 && last.segment >= segment {
                last.flags |= if segment < last.segment { SHORT } else { flags };
                last.end = run.end;
                return;
            }
            if self.runs.len() >= FEW && self.is_full() {
                return self.push_merged(run);
            }
        }
        self.runs.push_back(run);
    }

    /// Returns the maximum number of runs without retransmissions.
    fn most(&self) -> usize {
        let bytes = self.published - self.una;
        ((bytes / LEAST) as usize).clamp(FEW, MOST - RESERVED)
    }

    fn is_full(&self) -> bool {
        self.runs.len() >= self.most()
    }

    /// Adds a run when there are too many: it is merged into the last run, which takes the newer time.
    #[cold]
    fn push_merged(&mut self, run: Run) {
        self.merge();
        let many = self.is_full();
        match self.runs.back_mut() {
            Some(last) if many && last.is_in_flight() => {
                last.absorb(&run);
                last.flags |= SHORT;
            }
            _ => self.runs.push_back(run),
        }
    }

    /// Does the same as [`Runs::advance`] up to `to` if everything is in flight and was sent once. Returns the send
    /// times of the first and the last segment.
    #[inline]
    pub(super) fn advance_plain(&mut self, to: u64) -> (Time, Time) {
        let first = self.runs.front().map_or(Time::ZERO, |run| run.time);
        let mut last = first;
        let una = self.una as u32;
        let acked = (to as u32).wrapping_sub(una);
        let mut covered = 0;
        while covered < acked {
            let Some(run) = self.runs.front() else { break };
            last = run.time;
            covered = run.end.wrapping_sub(una);
            if covered <= acked {
                self.runs.pop_front();
            }
        }
        self.una = to;
        (first, last)
    }

    /// Removes the data that a cumulative ACK up to `to` covers.
    #[inline]
    pub(super) fn advance(&mut self, to: u64, delivery: &mut Delivery) {
        let to = to.min(self.published);
        while self.una < to {
            let Some(&run) = self.runs.front() else { break };
            let end = self.position(run.end);
            let until = end.min(to);
            let bytes = (until - self.una) as u32;
            delivery.ack(run.sent(), until, u64::from(bytes));
            if run.flags & FATE != 0 {
                self.uncount(&run, bytes);
            }
            self.una = until;
            if until == end {
                self.runs.pop_front();
            }
        }
    }

    /// Marks the whole segments in `from..to` as SACKed. Splits at most two runs. The range must be within the
    /// published data, and begin after the first unacknowledged byte.
    pub(super) fn sack(&mut self, from: u64, to: u64, delivery: &mut Delivery) {
        let first = self.index(from);
        let Some(run) = self.runs.get(first) else { return };
        if run.sacked() && self.position(run.end) >= to {
            return;
        }
        let (from, to) = (self.round_up(from), self.round_down(to));
        if from >= to {
            return;
        }
        let most = self.most();
        let (Some(_), Some(first)) = (self.cut(to, most), self.cut(from, most)) else {
            return;
        };
        let mut start = from;
        let mut last = first;
        while start < to {
            let Some(&run) = self.runs.get(last) else { break };
            let end = self.position(run.end);
            if !run.sacked() {
                let bytes = (end - start) as u32;
                self.uncount(&run, bytes);
                self.sacked += bytes;
                self.segments += bytes.div_ceil(u32::from(run.segment.max(1)));
                delivery.sack(run.sent(), end, u64::from(bytes));
            }
            self.runs[last].flags = SACKED;
            start = end;
            last += 1;
        }
        // Merges the run with its SACKed neighbours, so that a repeated block takes the early return.
        let first = if first > 0 && self.runs[first - 1].sacked() { first - 1 } else { first };
        let last = if self.runs.get(last).is_some_and(Run::sacked) { last + 1 } else { last };
        self.collapse(first, last);
    }

    /// Marks data as lost that was sent before `newest` and not later than `before` (RACK). Returns the number of lost
    /// bytes, and the latest send time of data that was sent before `newest` and is not lost yet.
    pub(super) fn detect(&mut self, newest: Newest, before: Option<Time>) -> (u64, Option<Time>) {
        let mut start = self.una;
        let (mut bytes, mut waiting) = (0, None);
        for run in &mut self.runs {
            let end = start + u64::from(run.end.wrapping_sub(start as u32));
            let before_newest = newest > (Newest { time: run.time, end });
            // Data that was sent once was sent in order.
            if start >= self.repeated && !before_newest {
                break;
            }
            if run.is_in_flight() && before_newest {
                if before.is_some_and(|before| run.time <= before) {
                    run.flags |= LOST;
                    bytes += end - start;
                    self.lost_from = self.lost_from.min(start);
                    self.lost_sent = run.time;
                } else {
                    waiting = waiting.max(Some(run.time));
                }
            }
            start = end;
        }
        self.lost += bytes as u32;
        (bytes, waiting)
    }

    /// Marks the first unacknowledged segment as lost. Returns its bytes, or 0 if it was not in flight.
    pub(super) fn mark_head_lost(&mut self, mss: u32) -> u64 {
        let end = self.published.min(self.una + u64::from(mss));
        if !self.head().is_some_and(Run::is_in_flight) {
            return 0;
        }
        // If the run cannot be split, the whole run is marked lost.
        self.cut(end, MOST);
        let una = self.una;
        let Some(run) = self.runs.front_mut() else { return 0 };
        run.flags |= LOST;
        let bytes = run.end.wrapping_sub(una as u32);
        self.lost_sent = run.time;
        self.lost += bytes;
        self.lost_from = una;
        u64::from(bytes)
    }

    /// Marks all data as lost that is not SACKed. Returns the number of bytes that were not lost before.
    pub(super) fn mark_all_lost(&mut self) -> u64 {
        let mut start = self.una as u32;
        let mut bytes = 0;
        for run in &mut self.runs {
            if !run.sacked() && run.flags & LOST == 0 {
                run.flags |= LOST;
                self.lost_sent = run.time;
                // Retransmissions that are already planned must not be planned twice.
                if run.flags & PLANNED == 0 {
                    bytes += run.end.wrapping_sub(start);
                }
            }
            start = run.end;
        }
        self.lost += bytes;
        self.lost_from = self.una;
        self.merge();
        u64::from(bytes)
    }

    /// Clears the SACK state because the receiver has reneged (RFC 2018, section 8).
    pub(super) fn forget_sacks(&mut self) {
        for run in &mut self.runs {
            // The segment boundaries of a merged run are unknown.
            run.flags &= !SACKED;
        }
        (self.sacked, self.segments) = (0, 0);
    }

    /// Marks lost data that is not retransmitted as in flight again.
    pub(super) fn find_all(&mut self) {
        for run in &mut self.runs {
            run.flags &= !LOST;
        }
        self.lost = 0;
    }

    /// Plans the next retransmission of at most `at_most` bytes, and returns its range.
    pub(super) fn next_lost(&mut self, at_most: u32) -> Option<Range<u64>> {
        if self.lost == 0 || at_most == 0 {
            return None;
        }
        self.tidy();
        let mut at = self.index(self.lost_from.max(self.una));
        at += self.runs.iter().skip(at).take_while(|run| !run.waits()).count();
        let start = self.start(at);
        let limit = start + u64::from(at_most);
        let mut end = start;
        while end < limit && self.runs.get(at).is_some_and(Run::waits) {
            if self.position(self.runs[at].end) > limit && self.cut(limit, MOST).is_none() {
                break;
            }
            self.runs[at].flags |= PLANNED;
            end = self.position(self.runs[at].end);
            at += 1;
        }
        let bytes = (end - start) as u32;
        self.lost -= bytes;
        self.replanned += bytes;
        self.lost_from = end;
        (bytes > 0).then_some(start..end)
    }

    /// Plans the retransmission of the last segment as a probe, and returns its range. Returns `None` if it is not in
    /// flight.
    pub(super) fn next_probe(&mut self, mss: u32) -> Option<Range<u64>> {
        let last = *self.runs.back()?;
        if !last.is_in_flight() {
            return None;
        }
        let start = self.start(self.runs.len() - 1);
        let segment = u64::from(last.segment.max(1)).min(u64::from(mss));
        let start = start.max(self.published - ((self.published - start - 1) % segment + 1));
        let at = self.cut(start, MOST)?;
        self.runs[at].flags |= PLANNED;
        self.replanned += (self.published - start) as u32;
        Some(start..self.published)
    }

    /// Marks a retransmission as published. Returns the number of bytes that still need it.
    pub(super) fn transmit(&mut self, now: Time, range: Range<u64>, mss: u32) -> u64 {
        self.tidy();
        let Some((first, last)) = self.cut_out(&range) else { return 0 };
        let mut start = self.start(first);
        let mut bytes = 0;
        let mut whole = true;
        for at in first..last {
            let run = self.runs[at];
            let end = self.position(run.end);
            if run.sacked() {
                whole = false;
            } else {
                self.uncount(&run, (end - start) as u32);
                bytes += end - start;
                let run = &mut self.runs[at];
                run.flags &= SHORT;
                run.sent = run.sent.saturating_add(1);
                run.time = now;
                self.repeated = self.repeated.max(end);
            }
            start = end;
        }
        if whole {
            // The retransmitted packet determines the segment boundaries now.
            self.collapse(first, last);
            let run = &mut self.runs[first];
            run.segment = bytes.min(u64::from(mss)).clamp(1, u64::from(u16::MAX)) as u16;
            run.flags = if bytes.is_multiple_of(u64::from(run.segment)) { 0 } else { SHORT };
        }
        bytes
    }

    /// Cancels a planned retransmission.
    pub(super) fn abandon(&mut self, range: &Range<u64>) {
        let Some((first, last)) = self.cut_out(range) else { return };
        let mut start = self.start(first);
        for at in first..last {
            let run = self.runs[at];
            let end = self.position(run.end);
            if run.flags & PLANNED != 0 {
                let bytes = (end - start) as u32;
                self.runs[at].flags &= !PLANNED;
                self.replanned -= bytes;
                if run.flags & LOST != 0 {
                    self.lost += bytes;
                    self.lost_from = self.lost_from.min(start);
                }
            }
            start = end;
        }
    }

    /// Subtracts `bytes` of a run from the counter of its state.
    fn uncount(&mut self, run: &Run, bytes: u32) {
        if run.sacked() {
            self.sacked -= bytes;
            let segments = bytes.div_ceil(u32::from(run.segment.max(1)));
            self.segments = if self.sacked == 0 { 0 } else { self.segments.saturating_sub(segments).max(1) };
        } else if run.flags & PLANNED != 0 {
            self.replanned -= bytes;
        } else if run.flags & LOST != 0 {
            self.lost -= bytes;
        }
    }

    /// Splits runs at both ends of the sent and unacknowledged part of `range`, if there is room. Returns the indices
    /// of the runs in it.
    fn cut_out(&mut self, range: &Range<u64>) -> Option<(usize, usize)> {
        let (from, to) = (range.start.max(self.una), range.end.min(self.published));
        if from >= to {
            return None;
        }
        self.cut(to, MOST);
        let first = self.cut(from, MOST).unwrap_or_else(|| self.index(from));
        Some((first, (self.index(to - 1) + 1).max(first + 1)))
    }

    /// Splits the run that contains `at`, if there are fewer than `most` runs. Returns the index of the run that begins
    /// at `at`.
    fn cut(&mut self, at: u64, most: usize) -> Option<usize> {
        let index = self.index(at);
        let start = self.start(index);
        if start == at || index == self.runs.len() {
            return Some(index);
        }
        if self.runs.len() >= most.min(MOST) {
            return None;
        }
        let mut front = self.runs[index];
        let inside = !(at - start).is_multiple_of(u64::from(front.segment.max(1)));
        front.end = at as u32;
        front.flags = front.flags & !SHORT | if inside { SHORT } else { 0 };
        self.runs.insert(index, front);
        Some(index + 1)
    }

    /// Returns the first segment boundary at or after `at`.
    fn round_up(&self, at: u64) -> u64 {
        let index = self.index(at);
        let Some(run) = self.runs.get(index) else { return at };
        let start = self.start(index);
        if run.sacked() {
            return start;
        }
        let segments = (at - start).div_ceil(u64::from(run.segment.max(1)));
        (start + segments * u64::from(run.segment.max(1))).min(self.position(run.end))
    }

    /// Returns the last segment boundary at or before `at`.
    fn round_down(&self, at: u64) -> u64 {
        let index = self.index(at);
        let start = self.start(index);
        let Some(run) = self.runs.get(index) else { return at.min(start) };
        if run.sacked() {
            return self.position(run.end);
        }
        at - (at - start) % u64::from(run.segment.max(1))
    }

    /// Merges runs `first..last`. The newest time is kept.
    fn collapse(&mut self, first: usize, last: usize) {
        if last <= first + 1 {
            return;
        }
        for at in first + 1..last {
            let next = self.runs[at];
            self.runs[first].absorb(&next);
        }
        self.runs.drain(first + 1..last);
    }

    /// Merges adjacent runs if their number has doubled since the last pass.
    fn tidy(&mut self) {
        if self.runs.len() >= (self.merge_at as usize).max(MERGE_THRESHOLD) {
            self.merge();
        }
    }

    /// Merges adjacent runs that do not differ. If there are too many runs, also merges pairs with different send
    /// times.
    fn merge(&mut self) {
        let many = self.is_full();
        let (mut kept, mut paired) = (0, false);
        for at in 1..self.runs.len() {
            let next = self.runs[at];
            let last = &mut self.runs[kept];
            let pair = many && !paired && last.flags & FATE == next.flags & FATE;
            if last.joins(&next) {
                last.absorb(&next);
            } else if pair {
                last.absorb(&next);
                last.flags |= SHORT;
                paired = true;
            } else {
                kept += 1;
                self.runs[kept] = next;
                paired = false;
            }
        }
        self.runs.truncate(kept + 1);
        let len = self.runs.len();
        self.merge_at = (2 * len).min(MOST - RESERVED).max(len + MERGE_THRESHOLD) as u32;
    }

    /// Returns the index of the run that contains the byte at `at`, which is the first run that ends after it.
    fn index(&self, at: u64) -> usize {
        let at = at.saturating_sub(self.una);
        let una = self.una as u32;
        self.runs.partition_point(|run| u64::from(run.end.wrapping_sub(una)) <= at)
    }

    /// Returns the start position of a run.
    fn start(&self, index: usize) -> u64 {
        match index.checked_sub(1).and_then(|before| self.runs.get(before)) {
            Some(before) => self.position(before.end),
            None => self.una,
        }
    }

    /// Returns the position with these low 32 bits. All positions are less than 2^31 from the first unacknowledged
    /// byte.
    #[inline]
    fn position(&self, end: u32) -> u64 {
        self.una + u64::from(end.wrapping_sub(self.una as u32))
    }
}

#[cfg(test)]
mod tests;
