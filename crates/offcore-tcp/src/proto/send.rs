//! The sending half of a connection: what may be sent, what has been, and what the peer says of it.

use std::ops::Range;

use offcore_session::slot::CORKED;

use super::ahead::FIRST_GRANT;
use super::packet::Next;
use super::recovery::{Ack, Acked, Algorithm, Recovery, TimerAction};
use super::segment::position;

/// Bytes of one connection whose copies are under way, at most.
const COPYING: u64 = 256 << 10;
/// Longest time between two probes of a window of zero (RFC 9293, 3.8.6.1; as Linux).
const PERSIST_MAX: u64 = 120_000_000;
/// A position beyond all data.
const NOWHERE: u64 = u64::MAX;

/// An acknowledgement that means nothing here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strange {
    /// It acknowledges what has not been sent.
    Unsent,
    /// It is older than the largest window (RFC 5961, 5.2).
    Ancient,
}

/// What a segment says about what was sent.
#[derive(Debug, Clone)]
pub(crate) struct Report<'a> {
    pub ack: u32,
    /// Bytes, scaled.
    pub window: u32,
    /// Position of the segment itself in the peer's stream.
    pub at: u64,
    pub sacks: &'a [(u64, u64)],
    /// A duplicate that it reports (RFC 2883).
    pub duplicate: Option<(u64, u64)>,
    /// Microseconds that a timestamp took to come back.
    pub rtt: Option<u64>,
    /// The peer has had a mark of congestion.
    pub congestion: bool,
    pub has_data: bool,
}

/// Send sequence space. Positions are offsets of the stream's first byte; a FIN takes one behind the last byte. There are
/// two edges: copies are ordered up to [`next`](Self::next), and the port has
/// what is before [`published_to`](Self::published_to). The peer can know of that
/// only.
#[derive(Debug)]
pub(crate) struct Sender {
    /// Sequence number of position 0.
    first: u32,
    /// Right edge of the peer's window.
    edge: u64,
    /// Segment of the last update of the window: its position and its acknowledgement.
    updated: (u64, u64),
    /// Largest window that the peer has had, in bytes.
    largest: u32,
    pub scale: u8,
    /// Position up to which the application has written.
    written: u64,
    /// From here on short segments wait because of `MSG_MORE` or `TCP_CORK`.
    held_from: u64,
    corked: bool,
    /// The end of the last sent short segment (Minshall).
    short: u64,
    /// The position after the newest urgent byte; 0 without one.
    urgent: u64,
    /// The application has ended its stream.
    closing: bool,
    fin_planned: bool,
    /// Small segments go out at once (RFC 9293, 3.7.4).
    pub no_delay: bool,
    /// Bytes of payload in a segment, at most.
    mss: u16,
    /// Bytes of the longest segment that has got through.
    proven: u16,
    /// When a window that is closed, or too small, is looked at again.
    persist: Option<u64>,
    /// Probes of the window since it was open.
    persist_tries: u8,
    /// Probes of the window since the peer has said anything.
    unanswered: u8,
    /// Timeouts that the peer answered with an acknowledgement and a closed window.
    answered: u8,
    /// Start of the present stall: the time when the data was sent or the window closed; [`NOWHERE`] after progress.
    stalled: u64,
    /// What is in flight; it knows the edges.
    pub recovery: Recovery,
}

impl Sender {
    /// After a SYN of sequence number `iss`, of segments of `mss` bytes.
    pub(crate) fn new(iss: u32, mss: u16, algorithm: Algorithm, sack: bool, timestamps: bool) -> Self {
        Self {
            first: iss.wrapping_add(1),
            edge: 0,
            updated: (0, 0),
            largest: 0,
            scale: 0,
            written: 0,
            held_from: NOWHERE,
            corked: false,
            short: 0,
            urgent: 0,
            closing: false,
            fin_planned: false,
            no_delay: false,
            mss,
            proven: 0,
            persist: None,
            persist_tries: 0,
            unanswered: 0,
            answered: 0,
            stalled: NOWHERE,
            recovery: Recovery::new(mss.into(), algorithm, sack, timestamps),
        }
    }

    /// The sequence number of a position.
    #[inline]
    pub(crate) fn seq(&self, position: u64) -> u32 {
        self.first.wrapping_add(position as u32)
    }

    /// The sequence number of what a segment without data carries: it must not be ahead of what the port has.
    #[inline]
    pub(crate) fn published_seq(&self) -> u32 {
        self.seq(self.published_to())
    }

    /// Oldest position not acknowledged.
    #[inline]
    pub(crate) fn una(&self) -> u64 {
        self.recovery.una()
    }

    /// Position up to which copies have been ordered.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.recovery.planned_to()
    }

    /// Position up to which the port has everything.
    #[inline]
    pub(crate) fn published_to(&self) -> u64 {
        self.recovery.published_to()
    }

    /// The sequence number that a keep-alive or a probe of a closed window has: an old one.
    pub(crate) fn probe_seq(&self) -> u32 {
        self.seq(self.una()).wrapping_sub(1)
    }

    /// Whether nothing is under way, and nothing waits to be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.una() == self.written.max(self.next())
    }

    /// Whether the peer's window is closed.
    #[inline]
    fn is_shut(&self) -> bool {
        self.edge <= self.una()
    }

    /// The number of bytes that the network takes within about two round trips.
    pub(crate) fn takes_soon(&self) -> u64 {
        let now = self.edge.saturating_sub(self.una()).min(self.recovery.cwnd());
        // A small block is enough for a small window.
        if now <= FIRST_GRANT { now } else { 2 * now }
    }

    /// Whether data waits for a closed window, and the peer answers window probes.
    pub(crate) fn is_held_up(&self) -> bool {
        self.is_shut() && !self.is_idle() && self.timeouts() <= 1
    }

    /// Whether something is written that the peer's window has room for, and the port lacks.
    pub(crate) fn may_send(&self) -> bool {
        self.published_to() < self.written.min(self.edge)
    }

    /// Position of the FIN, when it has been planned.
    fn fin(&self) -> Option<u64> {
        self.fin_planned.then_some(self.written)
    }

    /// Whether the application has written nothing beyond `position`.
    pub(crate) fn is_last(&self, position: u64) -> bool {
        position == self.written
    }

    /// Whether the peer has acknowledged our FIN.
    pub(crate) fn fin_acknowledged(&self) -> bool {
        self.fin().is_some_and(|fin| self.una() > fin)
    }

    /// Bytes of the stream that are acknowledged: their memory is free.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.una().min(self.written)
    }

    /// Bytes that are written and not acknowledged.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.written - self.acknowledged()
    }

    pub(crate) fn mss(&self) -> u16 {
        self.mss
    }

    /// Bytes of the longest segment that has got through since it was last cut.
    pub(crate) fn proven(&self) -> u16 {
        self.proven
    }

    pub(crate) fn set_mss(&mut self, mss: u16) {
        (self.mss, self.proven) = (mss, self.proven.min(mss));
        self.recovery.set_mss(mss.into());
    }

    /// The window of the handshake's last segment.
    pub(crate) fn open_window(&mut self, window: u32) {
        self.edge = u64::from(window);
        self.largest = window;
    }

    /// The application has written up to `position`. From the beginning of `held` on short segments wait, while not more than
    /// its end is written.
    pub(crate) fn written(&mut self, position: u64, held: &Range<u64>) {
        if self.closing {
            return;
        }
        self.corked = held.end == CORKED;
        // An acknowledgement ends the wait for the data announced by `MSG_MORE`.
        let holds = self.corked || position > self.written || self.held_from != NOWHERE;
        self.held_from = if holds && position <= held.end { held.start } else { NOWHERE };
        self.written = self.written.max(position);
    }

    /// The byte before position `end` is urgent.
    pub(crate) fn urge(&mut self, end: u64) {
        self.urgent = end;
    }

    /// The urgent pointer of a segment at `position`, if it has one.
    #[inline]
    pub(crate) fn urgent_pointer(&self, position: u64) -> Option<u16> {
        self.urgent
            .checked_sub(position)
            .and_then(|pointer| pointer.try_into().ok())
            .filter(|pointer| *pointer > 0)
    }

    /// Whether the peer lacks the urgent byte.
    #[inline]
    fn is_urgent(&self) -> bool {
        self.urgent > self.una()
    }

    /// The application has ended its stream.
    pub(crate) fn close(&mut self) {
        (self.closing, self.held_from) = (true, NOWHERE);
    }

    /// Takes an acknowledgement and a window.
    ///
    /// # Errors
    /// It means nothing here; nothing has changed.
    #[inline]
    pub(crate) fn report(&mut self, now: u64, report: &Report<'_>) -> Result<Acked, Strange> {
        let una = self.una();
        let Some(ack) = position(report.ack, self.first, una) else { return Err(Strange::Ancient) };
        if ack > self.published_to() {
            return Err(Strange::Unsent);
        }
        if ack + u64::from(self.largest) < self.una() {
            return Err(Strange::Ancient);
        }
        // A peer that answers may keep the window closed for any time (RFC 9293, 3.8.6.1, MUST-37).
        self.unanswered = 0;
        if !self.corked {
            self.held_from = NOWHERE;
        }
        let moved = self.update_window(ack, report);
        let advanced = ack > self.una();
        let acked = self.recovery.ack(
            now,
            &Ack {
                una: ack.max(una),
                sacks: report.sacks,
                dsack: report.duplicate,
                rtt_sample: report.rtt,
                ece: report.congestion,
                window_changed: moved,
                has_data: report.has_data,
            },
        );
        if acked.newly_acked >= self.mss.into() {
            self.proven = self.mss;
        }
        // Retransmissions act as window probes if the window closed over data in flight.
        self.answered = if self.is_shut() { self.recovery.backoffs() } else { 0 };
        if advanced || self.edge > self.next() {
            self.persist = None;
            self.persist_tries = 0;
            if self.recovery.backoffs() == 0 {
                self.stalled = NOWHERE;
            }
        }
        Ok(acked)
    }

    /// A segment at position `at` that goes on with the last one repeats its acknowledgement and its window, which is the
    /// present one. Whether that says nothing: all of ours is acknowledged by it, and was quietly.
    #[inline]
    pub(crate) fn hears_again(&mut self, ack: u32, at: u64) -> bool {
        let una = self.una();
        if ack != self.seq(una) || !self.recovery.is_done() {
            return false;
        }
        self.updated = (at, una);
        true
    }

    /// Whether the peer's window has this size.
    pub(crate) fn has_window(&self, window: u32) -> bool {
        self.edge == self.una() + u64::from(window)
    }

    /// Whether the window is that of the segment at position `at`.
    pub(crate) fn has_window_of(&self, at: Option<u64>) -> bool {
        at == Some(self.updated.0)
    }

    /// RFC 9293, 3.10.7.4: the window of a newer segment counts. Returns whether it has changed.
    #[inline]
    fn update_window(&mut self, ack: u64, report: &Report<'_>) -> bool {
        let newer = ack > self.una() || (report.at, ack) >= self.updated;
        if ack < self.una() || !newer {
            return false;
        }
        let edge = ack + u64::from(report.window);
        let moved = edge != self.edge;
        self.edge = edge;
        self.updated = (report.at, ack);
        self.largest = self.largest.max(report.window);
        moved
    }

    /// What is to be sent next, in packets of at most `at_most` bytes; when nothing can be sent now, none.
    #[inline]
    pub(crate) fn plan(&mut self, now: u64, at_most: u32) -> Option<Next> {
        // A port that segments repeats the urgent pointer.
        let at_most = if self.is_urgent() { self.mss.into() } else { at_most.max(self.mss.into()) };
        if let Some(range) = self.recovery.next_lost(at_most) {
            return Some(self.again(range));
        }
        // A probe for a lost tail is new data where there is some, however little (RFC 8985, 7.3).
        let Some((len, fin)) = self.usable(now, at_most, self.recovery.probe_is_due()) else {
            if self.recovery.has_nothing_new()
                && let Some(range) = self.recovery.next_lost(at_most)
            {
                return Some(self.again(range));
            }
            self.watch_window(now);
            if self.written.saturating_sub(self.next()) < self.mss.into() {
                self.recovery.lacks_data();
            }
            return self.recovery.next_probe().map(|range| self.again(range));
        };
        Some(self.advance(now, len, fin))
    }

    fn again(&self, range: Range<u64>) -> Next {
        let fin = self.fin().is_some_and(|fin| range.end > fin);
        Next { range: range.start..range.end - u64::from(fin), fin, again: true }
    }

    #[inline]
    fn advance(&mut self, now: u64, len: u64, fin: bool) -> Next {
        let range = self.next()..self.next() + len;
        self.fin_planned |= fin;
        self.persist = None;
        let mss = u64::from(self.mss);
        if len != mss && !(len as u32).is_multiple_of(mss as u32) {
            self.short = range.end;
        }
        self.recovery.plan_new(now, len + u64::from(fin));
        Next { range, fin, again: false }
    }

    /// New bytes that may be sent, and whether the FIN is sent with them. `now_or_never` sends less than Nagle's algorithm,
    /// corks and silly window avoidance allow.
    #[inline]
    fn usable(&self, now: u64, at_most: u32, now_or_never: bool) -> Option<(u64, bool)> {
        if self.fin_planned {
            return None;
        }
        let mss = u64::from(self.mss);
        let data = self.written - self.next();
        let window = self.edge.saturating_sub(self.next());
        let copying = COPYING.saturating_sub(self.next() - self.published_to());
        let len = data.min(window).min(copying).min(self.recovery.window(now)).min(at_most.into());
        let whole = len == data;
        let fin = self.closing && whole && (window > len || data > 0);
        if len == 0 {
            return (fin && data == 0).then_some((0, true));
        }
        if whole && (fin || now_or_never) {
            return Some((len, fin));
        }
        let tail = if len < mss { len } else { u64::from(len as u32 % u32::from(self.mss)) };
        let tail_goes = if tail == 0 {
            0
        } else if whole {
            self.may_end(self.next() + len - tail, tail)
        } else if len < mss && (now_or_never || len >= u64::from(self.largest / 2)) {
            // Otherwise silly window avoidance holds it (3.8.6.2.1).
            tail
        } else {
            0
        };
        let len = len - tail + tail_goes;
        (len > 0).then_some((len, false))
    }

    /// The number of bytes to send of the last `len` written bytes, which begin at `at` and do not fill a segment. A cork holds them,
    /// and so does Nagle's algorithm (RFC 9293, 3.7.4), in Minshall's variant as on Linux, while an earlier short segment is not
    /// acknowledged.
    #[inline]
    fn may_end(&self, at: u64, len: u64) -> u64 {
        let waits =
            !self.no_delay && !self.is_urgent() && self.short > self.una() && self.short <= self.next();
        if waits { 0 } else { len.min(self.held_from.saturating_sub(at)) }
    }

    /// Nothing can be sent: when that is for the peer's window, and nothing is under way whose acknowledgement would
    /// open it, somebody has to ask.
    fn watch_window(&mut self, now: u64) {
        let blocked = self.written > self.next() || self.closing && !self.fin_planned;
        if blocked && self.next() == self.una() && self.persist.is_none() && !self.recovery.is_held() {
            let wait = self.recovery.rto() << self.persist_tries.min(16);
            self.persist = Some(now + wait.min(PERSIST_MAX));
        }
    }

    /// The port has the bytes of `next`.
    #[inline]
    pub(crate) fn published(&mut self, now: u64, next: &Next) {
        let range = next.range.start..next.range.end + u64::from(next.fin);
        self.recovery.published(now, range, next.again);
    }

    /// Nothing of `next` is going to be sent.
    pub(crate) fn unplanned(&mut self, next: &Next) {
        // Nothing comes behind a FIN: it is to be planned anew.
        self.fin_planned &= next.again || !next.fin;
        self.recovery.unplanned(next.range.start..next.range.end + u64::from(next.fin));
    }

    /// When [`timer`](Self::timer) is to be called.
    pub(crate) fn deadline(&self) -> Option<u64> {
        [self.persist, self.recovery.deadline()].into_iter().flatten().min()
    }

    /// Something may be due.
    pub(crate) fn timer(&mut self, now: u64) -> Due {
        // A timer that expires for the first time was started one timeout ago.
        let since = now.saturating_sub(self.recovery.rto());
        if self.persist.is_some_and(|due| due <= now) {
            self.persist = None;
            self.stalled = self.stalled.min(since);
            self.persist_tries = self.persist_tries.saturating_add(1);
            self.unanswered = self.unanswered.saturating_add(1);
            return match self.usable(now, self.mss.into(), true) {
                Some((len, fin)) => Due::Send(self.advance(now, len, fin)),
                None => {
                    self.watch_window(now);
                    Due::AskForWindow
                }
            };
        }
        match self.recovery.timer(now) {
            TimerAction::None => Due::Nothing,
            TimerAction::Probe | TimerAction::Reorder => Due::Plan,
            TimerAction::Retransmit => {
                self.stalled = self.stalled.min(since);
                Due::Plan
            }
        }
    }

    /// The end of a connection without progress, with a `TCP_USER_TIMEOUT` in microseconds.
    pub(crate) fn over_at(&self, user_timeout: u64) -> u64 {
        self.stalled.saturating_add(user_timeout)
    }

    /// Timeouts in a row without a sign of the peer.
    pub(crate) fn timeouts(&self) -> u8 {
        self.recovery.backoffs().saturating_sub(self.answered).max(self.unanswered)
    }
}

/// What a timer of the sender asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    /// There may be something to be planned.
    Plan,
    /// This, at once.
    Send(Next),
    /// A segment that the peer answers with its window.
    AskForWindow,
}
