//! Sent data as runs of 16 bytes, in the order of the stream, and what SACK says of them.
//!
//! A run is data that was published together and has had the same fate since. Runs begin at the first byte that is not
//! acknowledged; each begins where the one before ends. So the usual ACK takes runs from the front and touches nothing else.

use std::collections::VecDeque;
use std::ops::Range;

use super::delivery::{Delivery, Newest, Sent};

/// So many runs there are at most.
pub(super) const MOST: usize = 4096;
/// The last ones are kept for retransmissions: without them nothing could be repaired.
const RESERVED: usize = 256;
/// From so many on, neighbours are merged now and then.
const CROWDED: usize = 64;

const SACKED: u8 = 1;
const LOST: u8 = 2;
const PLANNED: u8 = 4;
/// The last segment is shorter than the others.
const SHORT: u8 = 8;
/// What tells runs apart.
const FATE: u8 = SACKED | LOST | PLANNED;

/// Data that was published together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// When it was published last.
    pub(super) time: u64,
    /// The low 32 bits of where it ends.
    end: u32,
    /// The size of its segments but for the last, counted from its beginning.
    segment: u16,
    flags: u8,
    /// How often it was published.
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

    /// Lost, and its retransmission is not planned.
    pub(super) fn waits(&self) -> bool {
        self.flags & FATE == LOST
    }

    /// Whether it is in flight as far as is known.
    fn flies(&self) -> bool {
        self.flags & FATE == 0
    }

    /// Whether the next run can be made part of this one. What is told apart by time matters only in flight.
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

    /// Makes the next run part of this one, with the newer time.
    fn absorb(&mut self, next: &Self) {
        self.time = self.time.max(next.time);
        self.end = next.end;
        self.flags |= next.flags & SHORT;
        self.sent = self.sent.max(next.sent);
    }
}

/// The sent data of a connection, and what of it is where. All counts are bytes.
#[derive(Debug, Default)]
pub(super) struct Runs {
    runs: VecDeque<Run>,
    /// The first byte that is not acknowledged.
    pub(super) una: u64,
    /// The end of what was published.
    pub(super) published: u64,
    /// The end of what was retransmitted.
    repeated: u64,
    /// No lost data that waits for its retransmission is below.
    lost_from: u64,
    /// SACKed.
    pub(super) sacked: u32,
    /// Lost, and the retransmission is not planned.
    pub(super) lost: u32,
    /// Below `published`, with a retransmission that is planned and not published.
    pub(super) replanned: u32,
    /// When that was sent which was found lost last.
    pub(super) lost_sent: u64,
    /// SACKed segments, as far as merged runs allow to count them.
    pub(super) segments: u32,
    /// Merging is worth a pass at so many runs.
    merge_at: u32,
}

impl Runs {
    /// How many runs there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Gives back the memory of runs when there are none.
    pub(super) fn release(&mut self) {
        if self.runs.is_empty() {
            self.runs = VecDeque::new();
        }
    }

    /// Everything is acknowledged.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Some of what is not acknowledged may have been sent twice.
    #[inline]
    pub(super) fn repeats(&self) -> bool {
        self.repeated > self.una
    }

    /// The first data that is not acknowledged.
    pub(super) fn head(&self) -> Option<&Run> {
        self.runs.front()
    }

    /// The first unacknowledged data is waiting in a queue to be retransmitted.
    pub(super) fn head_planned(&self) -> bool {
        self.head().is_some_and(|run| run.flags & PLANNED != 0)
    }

    /// New data up to `end` was published, in segments of at most `mss` bytes.
    #[inline]
    pub(super) fn push(&mut self, now: u64, end: u64, mss: u32) {
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
            // A segment that is shorter than those before it is their last.
            if last.flags == 0 && last.time == now && last.sent == 1 && last.segment >= segment {
                last.flags |= if segment < last.segment { SHORT } else { flags };
                last.end = run.end;
                return;
            }
            if self.runs.len() >= MOST - RESERVED {
                return self.push_crowded(run);
            }
        }
        self.runs.push_back(run);
    }

    /// With too many runs, new data takes its predecessor in, whose clock then begins anew.
    #[cold]
    fn push_crowded(&mut self, run: Run) {
        self.merge();
        let many = self.runs.len() >= MOST - RESERVED;
        match self.runs.back_mut() {
            Some(last) if many && last.flies() => {
                last.absorb(&run);
                last.flags |= SHORT;
            }
            _ => self.runs.push_back(run),
        }
    }

    /// The same as [`Runs::advance`] up to `to` where everything is in flight and was sent once. Returns when the first and
    /// the last segment were sent.
    #[inline]
    pub(super) fn advance_plain(&mut self, to: u64) -> (u64, u64) {
        let first = self.runs.front().map_or(0, |run| run.time);
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

    /// Takes what a cumulative ACK up to `to` covers.
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

    /// SACK covers `from..to`, as far as whole segments go. Splits two runs at most. The range is within what is published,
    /// and begins after the first unacknowledged byte.
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
        let (Some(_), Some(first)) = (self.cut(to, MOST - RESERVED), self.cut(from, MOST - RESERVED)) else {
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
        // One run with its SACKed neighbours, so that the same block costs nothing the next time.
        let first = if first > 0 && self.runs[first - 1].sacked() { first - 1 } else { first };
        let last = if self.runs.get(last).is_some_and(Run::sacked) { last + 1 } else { last };
        self.collapse(first, last);
    }

    /// What RACK finds lost: what was sent before `newest` and no later than `before`. Returns the bytes, and when the
    /// newest was sent of what was sent before `newest` and is given more time.
    pub(super) fn detect(&mut self, newest: Newest, before: Option<u64>) -> (u64, Option<u64>) {
        let mut start = self.una;
        let (mut bytes, mut waiting) = (0, None);
        for run in &mut self.runs {
            let end = start + u64::from(run.end.wrapping_sub(start as u32));
            let before_newest = newest > (Newest { time: run.time, end });
            // What was sent once was sent in order.
            if start >= self.repeated && !before_newest {
                break;
            }
            if run.flies() && before_newest {
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

    /// The first segment that is not acknowledged is lost. Returns its bytes, 0 if that was known.
    pub(super) fn lose_head(&mut self, mss: u32) -> u64 {
        let end = self.published.min(self.una + u64::from(mss));
        if !self.head().is_some_and(Run::flies) {
            return 0;
        }
        // Where there is no room for a split, the whole run is lost.
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

    /// Everything that is not SACKed is lost. Returns the bytes that were not before.
    pub(super) fn lose_all(&mut self) -> u64 {
        let mut start = self.una as u32;
        let mut bytes = 0;
        for run in &mut self.runs {
            if !run.sacked() && run.flags & LOST == 0 {
                run.flags |= LOST;
                self.lost_sent = run.time;
                // What is planned already is not to be given again.
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

    /// The receiver took back what it SACKed (RFC 2018, section 8).
    pub(super) fn forget_sacks(&mut self) {
        for run in &mut self.runs {
            // Which segments a merged run had is not known.
            run.flags &= !SACKED;
        }
        (self.sacked, self.segments) = (0, 0);
    }

    /// What was taken for lost, and is not retransmitted, is in flight after all.
    pub(super) fn find_all(&mut self) {
        for run in &mut self.runs {
            run.flags &= !LOST;
        }
        self.lost = 0;
    }

    /// Lost data to be retransmitted next, at most so many bytes: planned from now on.
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

    /// The last segment, to be sent again as a probe: planned from now on. None where it is not in flight.
    pub(super) fn next_probe(&mut self, mss: u32) -> Option<Range<u64>> {
        let last = *self.runs.back()?;
        if !last.flies() {
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

    /// A retransmission was published. Returns the bytes that are still of use.
    pub(super) fn transmit(&mut self, now: u64, range: Range<u64>, mss: u32) -> u64 {
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
            // Its segments are those of this packet now.
            self.collapse(first, last);
            let run = &mut self.runs[first];
            run.segment = bytes.min(u64::from(mss)).clamp(1, u64::from(u16::MAX)) as u16;
            run.flags = if bytes.is_multiple_of(u64::from(run.segment)) { 0 } else { SHORT };
        }
        bytes
    }

    /// A retransmission will not be published.
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

    /// Takes `bytes` of a run out of the counts that its fate puts it in.
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

    /// Splits at both ends of the part of `range` that is sent and not acknowledged, where there is room, and returns the
    /// runs in it.
    fn cut_out(&mut self, range: &Range<u64>) -> Option<(usize, usize)> {
        let (from, to) = (range.start.max(self.una), range.end.min(self.published));
        if from >= to {
            return None;
        }
        self.cut(to, MOST);
        let first = self.cut(from, MOST).unwrap_or_else(|| self.index(from));
        Some((first, (self.index(to - 1) + 1).max(first + 1)))
    }

    /// Splits the run that `at` is inside of, if there are fewer than `most`, and returns the run that begins there.
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

    /// The first end of a segment from `at` on.
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

    /// The last end of a segment up to `at`.
    fn round_down(&self, at: u64) -> u64 {
        let index = self.index(at);
        let start = self.start(index);
        let Some(run) = self.runs.get(index) else { return at.min(start) };
        if run.sacked() {
            return self.position(run.end);
        }
        at - (at - start) % u64::from(run.segment.max(1))
    }

    /// Makes runs `first..last` one, with the newest time.
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

    /// Merges neighbours when there are twice as many as the last time.
    fn tidy(&mut self) {
        if self.runs.len() >= (self.merge_at as usize).max(CROWDED) {
            self.merge();
        }
    }

    /// Merges neighbours that nothing tells apart; with too many runs, pairs that were sent at different times also.
    fn merge(&mut self) {
        let many = self.runs.len() >= MOST - RESERVED;
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
        self.merge_at = (2 * len).min(MOST - RESERVED).max(len + CROWDED) as u32;
    }

    /// The run that has the byte at `at`: the first that ends after it.
    fn index(&self, at: u64) -> usize {
        let at = at.saturating_sub(self.una);
        let una = self.una as u32;
        self.runs.partition_point(|run| u64::from(run.end.wrapping_sub(una)) <= at)
    }

    /// Where the run begins.
    fn start(&self, index: usize) -> u64 {
        match index.checked_sub(1).and_then(|before| self.runs.get(before)) {
            Some(before) => self.position(before.end),
            None => self.una,
        }
    }

    /// The offset whose low 32 bits these are. All are less than 2^31 from the first unacknowledged byte.
    #[inline]
    fn position(&self, end: u32) -> u64 {
        self.una + u64::from(end.wrapping_sub(self.una as u32))
    }
}

#[cfg(test)]
mod tests;
