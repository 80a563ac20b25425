//! Holding of short segments: Nagle's algorithm (RFC 9293, 3.7.4), `MSG_MORE` and `TCP_CORK`.

use std::ops::Range;

use offcore_session::slot::CORKED;

use super::NOWHERE;

/// The reasons to hold a short segment.
#[derive(Debug)]
pub(crate) struct Nagle {
    /// Small segments are sent immediately.
    pub no_delay: bool,
    corked: bool,
    /// Short segments from this position on are held because of `MSG_MORE` or `TCP_CORK`.
    held_from: u64,
    /// The end of the last sent short segment (Minshall).
    short: u64,
}

impl Nagle {
    pub(super) fn new() -> Self {
        Self { no_delay: false, corked: false, held_from: NOWHERE, short: 0 }
    }

    /// Records that the application has written up to `position`, and up to `before` earlier. Short segments from the
    /// start of `held` on are held while no more than its end is written.
    pub(super) fn written(&mut self, before: u64, position: u64, held: &Range<u64>) {
        self.corked = held.end == CORKED;
        // An acknowledgement ends the wait for the data announced by `MSG_MORE`.
        let holds = self.corked || position > before || self.held_from != NOWHERE;
        self.held_from = if holds && position <= held.end { held.start } else { NOWHERE };
    }

    /// Ends the wait for more data after an acknowledgement.
    #[inline]
    pub(super) fn acknowledged(&mut self) {
        if !self.corked {
            self.held_from = NOWHERE;
        }
    }

    /// Ends the wait for more data after the end of the stream.
    pub(super) fn close(&mut self) {
        self.held_from = NOWHERE;
    }

    /// Records that a short segment up to `end` is sent.
    #[inline]
    pub(super) fn send_short(&mut self, end: u64) {
        self.short = end;
    }

    /// Returns how many of the last `len` written bytes to send. These bytes begin at `at` and do not fill a segment.
    /// They are held by a cork, or by Nagle's algorithm in Minshall's variant as on Linux, while an earlier short
    /// segment is in `flight`. `urgent` data does not wait for that.
    #[inline]
    pub(super) fn allowed_bytes(&self, at: u64, len: u64, flight: Range<u64>, urgent: bool) -> u64 {
        let waits = !self.no_delay && !urgent && self.short > flight.start && self.short <= flight.end;
        if waits { 0 } else { len.min(self.held_from.saturating_sub(at)) }
    }
}
