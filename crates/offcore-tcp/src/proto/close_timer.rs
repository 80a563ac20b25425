//! The time limit of a connection that the application has closed.

use offcore_stats::time::{Micros, Time};

use super::options::ConnOptions;

/// Time that a connection closed by the application waits for the peer's FIN or for any progress (as Linux).
const FIN_TIMEOUT: Micros = Micros::from_secs(60);
/// Maximum time that a reset waits for data that was written before, and the interval of checks.
const RESET_TIMEOUT: Micros = Micros::from_secs(1);
const RESET_CHECK: Micros = Micros::from_millis(1);
/// Extra time for a peer that keeps its window closed and answers probes. Linux gives up after a similar time.
const CLOSED_WINDOW: Micros = Micros::from_secs(240);
/// Minimum average rate of the peer in that case, in bytes per second.
const ORPHAN_RATE: u64 = 1 << 10;

/// State of a connection with regard to the application's close.
#[derive(Debug)]
pub(crate) struct CloseTimer {
    /// Time at which the connection is given up, and the upper limit of this time.
    due: Option<Time>,
    ends_by: Time,
    /// The application has closed the connection. `resets`: a reset follows the written data.
    orphan: bool,
    resets: bool,
}

impl CloseTimer {
    pub(crate) fn new() -> Self {
        Self { due: None, ends_by: Time::NEVER, orphan: false, resets: false }
    }

    /// Returns whether the application has closed the connection.
    #[inline]
    pub(crate) fn is_orphan(&self) -> bool {
        self.orphan
    }

    /// Returns whether the connection ends with a reset.
    #[inline]
    pub(crate) fn resets(&self) -> bool {
        self.resets
    }

    /// Returns the time at which the connection is given up.
    #[inline]
    pub(crate) fn due(&self) -> Option<Time> {
        self.due
    }

    /// Records that no application owns the connection any more.
    pub(crate) fn orphan(&mut self) {
        self.orphan = true;
    }

    /// Limits the time in which the peer must accept the `unacknowledged` bytes.
    pub(crate) fn limit(&mut self, now: Time, unacknowledged: u64) {
        let transfer = Micros::new(unacknowledged * 1_000_000 / ORPHAN_RATE);
        self.ends_by = now + FIN_TIMEOUT + CLOSED_WINDOW + transfer;
    }

    /// Starts the wait for the peer's FIN in FIN-WAIT-2.
    pub(crate) fn await_fin(&mut self, now: Time, options: &ConnOptions) {
        if !self.resets {
            self.due = self.orphan.then_some(now + options.fin_timeout(FIN_TIMEOUT));
        }
    }

    /// Extends the life of a closed connection after the peer has accepted more data. A peer that accepts nothing would
    /// otherwise hold the memory (similar to Linux's limits of orphans).
    pub(crate) fn extend(&mut self, now: Time) {
        if !self.resets {
            self.due = Some(self.ends_by.min(now + FIN_TIMEOUT));
        }
    }

    /// Starts the wait for the peer to accept written data, after which the connection is reset.
    pub(crate) fn reset_after_data(&mut self, now: Time) {
        (self.resets, self.ends_by, self.due) = (true, now + RESET_TIMEOUT, Some(now + RESET_CHECK));
    }

    /// Handles the expired timer. Returns whether the connection continues: a reset waits while data `may_be_sent`, and
    /// a closed connection while its peer only keeps the window closed (`is_blocked`).
    pub(crate) fn postpone(&mut self, now: Time, may_be_sent: bool, is_blocked: bool) -> bool {
        let waits = if self.resets { may_be_sent } else { self.orphan && is_blocked };
        if !waits || now >= self.ends_by {
            return false;
        }
        self.due = Some(if self.resets { now + RESET_CHECK } else { self.ends_by.min(now + FIN_TIMEOUT) });
        true
    }

    /// Stops the timer of a connection that has ended.
    pub(crate) fn stop(&mut self) {
        self.due = None;
    }
}
