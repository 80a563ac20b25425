//! The persist timer (RFC 9293, 3.8.6.1), and the time without progress.

use offcore_stats::time::{Micros, Time};

/// Maximum interval between two zero-window probes (as Linux).
const MAX: Micros = Micros::from_secs(120);

/// Probes of a closed or too small window.
#[derive(Debug)]
pub(super) struct Persist {
    /// Time of the next probe.
    due: Option<Time>,
    /// Probes since the window was last open.
    tries: u8,
    /// Probes since the last segment of the peer.
    unanswered: u8,
    /// Timeouts that the peer answered with an acknowledgement and a closed window.
    answered: u8,
    /// Start of the current stall: the time when the data was sent or the window closed. After progress, it is
    /// [`Time::NEVER`].
    stalled: Time,
}

impl Persist {
    pub(super) fn new() -> Self {
        Self { due: None, tries: 0, unanswered: 0, answered: 0, stalled: Time::NEVER }
    }

    #[inline]
    pub(super) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Starts the timer, unless it is running.
    pub(super) fn start(&mut self, now: Time, rto: Micros) {
        if self.due.is_none() {
            self.due = Some(now + (rto << self.tries.min(16)).min(MAX));
        }
    }

    #[inline]
    pub(super) fn stop(&mut self) {
        self.due = None;
    }

    /// Returns whether the timer has expired, and counts the probe. Its first interval began at `since`.
    pub(super) fn expire(&mut self, now: Time, since: Time) -> bool {
        if self.due.is_none_or(|due| due > now) {
            return false;
        }
        self.due = None;
        self.stall(since);
        self.tries = self.tries.saturating_add(1);
        self.unanswered = self.unanswered.saturating_add(1);
        true
    }

    /// Records a timeout of data sent at `since`.
    pub(super) fn stall(&mut self, since: Time) {
        self.stalled = self.stalled.min(since);
    }

    /// Records an answer of the peer, which may keep the window closed for any time (MUST-37).
    #[inline]
    pub(super) fn heard(&mut self) {
        self.unanswered = 0;
    }

    /// Records the state after an acknowledgement. Retransmissions act as window probes if the window closed over data
    /// in flight: `backoffs` is the number of their timeouts.
    #[inline]
    pub(super) fn acknowledged(&mut self, closed: bool, progress: bool, backoffs: u8) {
        self.answered = if closed { backoffs } else { 0 };
        if progress {
            (self.due, self.tries) = (None, 0);
            if backoffs == 0 {
                self.stalled = Time::NEVER;
            }
        }
    }

    /// Returns the start of the current stall.
    #[inline]
    pub(super) fn stalled(&self) -> Time {
        self.stalled
    }

    /// Returns the number of consecutive timeouts without an answer from the peer.
    pub(super) fn timeouts(&self, backoffs: u8) -> u8 {
        backoffs.saturating_sub(self.answered).max(self.unanswered)
    }
}
