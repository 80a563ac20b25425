//! The sending half of a connection: the data that may be sent, the data in flight, and the peer's acknowledgements.

mod nagle;
mod persist;
mod window;

use std::ops::Range;

use offcore_stats::time::{Micros, Time};

use super::ahead::FIRST_GRANT;
use super::packet::Next;
use super::recovery::{Ack, Acked, Algorithm, Recovery, TimerAction};
use super::segment::position;
use nagle::Nagle;
use persist::Persist;
use window::PeerWindow;

/// Maximum number of bytes of one connection in copies.
const COPYING: u64 = 256 << 10;
/// A position beyond all data.
const NOWHERE: u64 = u64::MAX;

/// An unacceptable acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnacceptableAck {
    /// It acknowledges data that has not been sent.
    Unsent,
    /// It is older than the largest window (RFC 5961, 5.2).
    Ancient,
}

/// The acknowledgement information of a segment.
#[derive(Debug, Clone)]
pub(crate) struct Report<'a> {
    pub ack: u32,
    /// The window in bytes, scaled.
    pub window: u32,
    /// Position of the segment itself in the peer's stream.
    pub at: u64,
    pub sacks: &'a [(u64, u64)],
    /// The range that the peer received twice (RFC 2883).
    pub duplicate: Option<(u64, u64)>,
    /// Round-trip time of the echoed timestamp.
    pub rtt: Option<Micros>,
    /// The peer has received a congestion mark (ECN).
    pub congestion: bool,
    pub has_data: bool,
}

/// The send sequence space. Positions are offsets in the stream; a FIN occupies one position behind the last byte.
/// There are two edges: copies are submitted up to [`next`](Self::next), and the port has the data before
/// [`published_to`](Self::published_to). The peer can acknowledge only the latter.
#[derive(Debug)]
pub(crate) struct Sender {
    /// Sequence number of position 0.
    first: u32,
    window: PeerWindow,
    pub scale: u8,
    /// Position up to which the application has written.
    written: u64,
    pub nagle: Nagle,
    /// The position after the newest urgent byte; 0 without one.
    urgent: u64,
    /// The application has ended its stream.
    closing: bool,
    fin_planned: bool,
    /// Maximum number of payload bytes per segment.
    mss: u16,
    /// Payload bytes of the longest acknowledged segment.
    largest_acked_payload: u16,
    persist: Persist,
    /// State of the data in flight, including both edges.
    pub recovery: Recovery,
}

impl Sender {
    /// Creates the state after a SYN with sequence number `iss`, for segments of `mss` bytes.
    pub(crate) fn new(iss: u32, mss: u16, algorithm: Algorithm, sack: bool, timestamps: bool) -> Self {
        Self {
            first: iss.wrapping_add(1),
            window: PeerWindow::default(),
            scale: 0,
            written: 0,
            nagle: Nagle::new(),
            urgent: 0,
            closing: false,
            fin_planned: false,
            mss,
            largest_acked_payload: 0,
            persist: Persist::new(),
            recovery: Recovery::new(mss.into(), algorithm, sack, timestamps),
        }
    }

    /// Returns the sequence number of a position.
    #[inline]
    pub(crate) fn seq(&self, position: u64) -> u32 {
        self.first.wrapping_add(position as u32)
    }

    /// Returns the sequence number of a segment without data. It must not be ahead of the data that the port has.
    #[inline]
    pub(crate) fn published_seq(&self) -> u32 {
        self.seq(self.published_to())
    }

    /// Returns the oldest unacknowledged position.
    #[inline]
    pub(crate) fn una(&self) -> u64 {
        self.recovery.una()
    }

    /// Returns the position up to which copies have been submitted.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.recovery.planned_to()
    }

    /// Returns the position up to which the port has all data.
    #[inline]
    pub(crate) fn published_to(&self) -> u64 {
        self.recovery.published_to()
    }

    /// Returns the sequence number of a keep-alive or window probe, which is an already acknowledged one.
    pub(crate) fn probe_seq(&self) -> u32 {
        self.seq(self.una()).wrapping_sub(1)
    }

    /// Returns whether no data is in flight or waits to be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.una() == self.written.max(self.next())
    }

    /// Returns whether the peer's window is closed.
    #[inline]
    fn is_zero_window(&self) -> bool {
        self.window.edge() <= self.una()
    }

    /// Returns the number of bytes that the network can carry within about two round trips.
    pub(crate) fn bytes_in_two_rtts(&self) -> u64 {
        let now = self.window.edge().saturating_sub(self.una()).min(self.recovery.cwnd());
        // A small block is enough for a small window.
        if now <= FIRST_GRANT { now } else { 2 * now }
    }

    /// Returns whether data waits for a closed window and the peer answers window probes.
    pub(crate) fn is_blocked_by_window(&self) -> bool {
        self.is_zero_window() && !self.is_idle() && self.timeouts() <= 1
    }

    /// Returns whether the application has written data that fits the peer's window and that the port does not have
    /// yet.
    pub(crate) fn may_send(&self) -> bool {
        self.published_to() < self.written.min(self.window.edge())
    }

    /// Returns the position of the FIN if it has been planned.
    fn fin(&self) -> Option<u64> {
        self.fin_planned.then_some(self.written)
    }

    /// Returns whether the application has written nothing beyond `position`.
    pub(crate) fn is_last(&self, position: u64) -> bool {
        position == self.written
    }

    /// Returns whether the peer has acknowledged our FIN.
    pub(crate) fn fin_acknowledged(&self) -> bool {
        self.fin().is_some_and(|fin| self.una() > fin)
    }

    /// Returns the number of acknowledged bytes of the stream, whose memory is free.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.una().min(self.written)
    }

    /// Returns the number of written and unacknowledged bytes.
    pub(crate) fn unacknowledged(&self) -> u64 {
        self.written - self.acknowledged()
    }

    pub(crate) fn mss(&self) -> u16 {
        self.mss
    }

    /// Returns the payload bytes of the longest segment acknowledged since the MSS was last reduced.
    pub(crate) fn largest_acked_payload(&self) -> u16 {
        self.largest_acked_payload
    }

    pub(crate) fn set_mss(&mut self, mss: u16) {
        (self.mss, self.largest_acked_payload) = (mss, self.largest_acked_payload.min(mss));
        self.recovery.set_mss(mss.into());
    }

    /// Sets the window from the last segment of the handshake.
    pub(crate) fn open_window(&mut self, window: u32) {
        self.window.open(window);
    }

    /// Records that the application has written up to `position`. Short segments from the start of `held` on are held
    /// while no more than its end is written.
    pub(crate) fn written(&mut self, position: u64, held: &Range<u64>) {
        if self.closing {
            return;
        }
        self.nagle.written(self.written, position, held);
        self.written = self.written.max(position);
    }

    /// Marks the byte before position `end` as urgent.
    pub(crate) fn urge(&mut self, end: u64) {
        self.urgent = end;
    }

    /// Returns the urgent pointer of a segment at `position`, if it needs one.
    #[inline]
    pub(crate) fn urgent_pointer(&self, position: u64) -> Option<u16> {
        self.urgent
            .checked_sub(position)
            .and_then(|pointer| pointer.try_into().ok())
            .filter(|pointer| *pointer > 0)
    }

    /// Returns whether the peer has not acknowledged the urgent byte.
    #[inline]
    fn is_urgent(&self) -> bool {
        self.urgent > self.una()
    }

    /// Records that the application has ended its stream.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.nagle.close();
    }

    /// Processes an acknowledgement and a window.
    ///
    /// # Errors
    /// Fails without any change if the acknowledgement is unacceptable.
    #[inline]
    pub(crate) fn report(&mut self, now: Time, report: &Report<'_>) -> Result<Acked, UnacceptableAck> {
        let una = self.una();
        let Some(ack) = position(report.ack, self.first, una) else { return Err(UnacceptableAck::Ancient) };
        if ack > self.published_to() {
            return Err(UnacceptableAck::Unsent);
        }
        if ack + u64::from(self.window.largest()) < self.una() {
            return Err(UnacceptableAck::Ancient);
        }
        self.persist.heard();
        self.nagle.acknowledged();
        let moved = self.window.update(una, report.at, ack, report.window);
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
            self.largest_acked_payload = self.mss;
        }
        let progress = advanced || self.window.edge() > self.next();
        self.persist.acknowledged(self.is_zero_window(), progress, self.recovery.backoffs());
        Ok(acked)
    }

    /// Processes an in-order segment at position `at` that repeats the current window. Returns whether its
    /// acknowledgement also repeats: all sent data is acknowledged, and no recovery is in progress.
    #[inline]
    pub(crate) fn repeats_last_ack(&mut self, ack: u32, at: u64) -> bool {
        let una = self.una();
        if ack != self.seq(una) || !self.recovery.is_done() {
            return false;
        }
        self.window.repeat(at, una);
        true
    }

    /// Returns whether the peer's window has this size.
    pub(crate) fn has_window(&self, window: u32) -> bool {
        self.window.edge() == self.una() + u64::from(window)
    }

    /// Returns whether the segment at position `at` set the window.
    pub(crate) fn has_window_of(&self, at: Option<u64>) -> bool {
        self.window.is_of(at)
    }

    /// Plans the next packet of at most `at_most` bytes. Returns `None` if nothing can be sent now.
    #[inline]
    pub(crate) fn plan(&mut self, now: Time, at_most: u32) -> Option<Next> {
        // A port that segments would repeat the urgent pointer in each segment.
        let at_most = if self.is_urgent() { self.mss.into() } else { at_most.max(self.mss.into()) };
        if let Some(range) = self.recovery.next_lost(at_most) {
            return Some(self.again(range));
        }
        // A tail loss probe is new data if there is any, however little (RFC 8985, 7.3).
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

    #[inline(always)]
    fn advance(&mut self, now: Time, len: u64, fin: bool) -> Next {
        let range = self.next()..self.next() + len;
        self.fin_planned |= fin;
        self.persist.stop();
        let mss = u64::from(self.mss);
        if len != mss && !(len as u32).is_multiple_of(mss as u32) {
            self.nagle.send_short(range.end);
        }
        self.recovery.plan_new(now, len + u64::from(fin));
        Next { range, fin, again: false }
    }

    /// Returns the number of new bytes that may be sent, and whether the FIN is sent with them. With `now_or_never`,
    /// Nagle's algorithm, corks and silly window avoidance do not apply.
    #[inline(always)]
    fn usable(&self, now: Time, at_most: u32, now_or_never: bool) -> Option<(u64, bool)> {
        if self.fin_planned {
            return None;
        }
        let mss = u64::from(self.mss);
        let data = self.written - self.next();
        let window = self.window.edge().saturating_sub(self.next());
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
            let (at, flight) = (self.next() + len - tail, self.una()..self.next());
            self.nagle.allowed_bytes(at, tail, flight, self.is_urgent())
        } else if len < mss && (now_or_never || len >= u64::from(self.window.largest() / 2)) {
            // Otherwise silly window avoidance holds it (3.8.6.2.1).
            tail
        } else {
            0
        };
        let len = len - tail + tail_goes;
        (len > 0).then_some((len, false))
    }

    /// Starts the persist timer if the peer's window blocks transmission and no data is in flight whose acknowledgement
    /// could open it.
    fn watch_window(&mut self, now: Time) {
        let blocked = self.written > self.next() || self.closing && !self.fin_planned;
        if blocked && self.next() == self.una() && !self.recovery.is_held() {
            self.persist.start(now, self.recovery.rto());
        }
    }

    /// Reports that the port has the bytes of `next`.
    #[inline]
    pub(crate) fn published(&mut self, now: Time, next: &Next) {
        let range = next.range.start..next.range.end + u64::from(next.fin);
        self.recovery.published(now, range, next.again);
    }

    /// Cancels `next`, which will not be sent.
    pub(crate) fn unplanned(&mut self, next: &Next) {
        // Nothing follows a FIN, so it must be planned again.
        self.fin_planned &= next.again || !next.fin;
        self.recovery.unplanned(next.range.start..next.range.end + u64::from(next.fin));
    }

    /// Returns the time of the next [`timer`](Self::timer) call.
    pub(crate) fn deadline(&self) -> Option<Time> {
        [self.persist.due(), self.recovery.deadline()].into_iter().flatten().min()
    }

    /// Processes expired timers.
    pub(crate) fn timer(&mut self, now: Time) -> Due {
        // A timer that expires for the first time was started one timeout ago.
        let since = now.saturating_sub(self.recovery.rto());
        if self.persist.expire(now, since) {
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
                self.persist.stall(since);
                Due::Plan
            }
        }
    }

    /// Returns the time when a connection without progress ends, with a `TCP_USER_TIMEOUT`.
    pub(crate) fn user_timeout_deadline(&self, user_timeout: Micros) -> Time {
        self.persist.stalled().saturating_add(user_timeout)
    }

    /// Returns the number of consecutive timeouts without an answer from the peer.
    pub(crate) fn timeouts(&self) -> u8 {
        self.persist.timeouts(self.recovery.backoffs())
    }
}

/// The action that an expired timer requires.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    Nothing,
    /// Data may be ready for planning.
    Plan,
    /// Send this immediately.
    Send(Next),
    /// Send a segment that the peer answers with its window.
    AskForWindow,
}
