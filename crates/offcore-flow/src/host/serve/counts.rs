//! Counters of a server of applications, and a limit of one warning per second.

use offcore_stats::counters;
use offcore_stats::time::{Micros, Time};

counters! {
    /// Counters of a server of applications. The first four are current values, the others count from its start.
    pub struct ServeCounts {
        applications,
        processes,
        sessions,
        /// Applications whose marks are read in each round.
        awake,
        /// Bytes written to announce data.
        tokens,
        /// Gates that were opened.
        gates,
        /// Bytes written without the library: sent bytes, and lost bytes.
        relayed,
        unsent,
        /// Number of times an application woke the worker.
        woken,
        /// Processes that were refused, and connections that were reset because descriptors, numbers or memory were
        /// exhausted.
        refused,
        /// Sessions that were reset, and processes whose socket was closed, because of invalid data.
        misused,
    }
}

/// Limits a warning to one per second.
#[derive(Debug, Default)]
pub(super) struct WarningLimit {
    /// Earliest time of the next warning.
    next: Time,
}

impl WarningLimit {
    pub(super) fn may(&mut self, now: Time) -> bool {
        let may = now >= self.next;
        if may {
            self.next = now + Micros::from_secs(1);
        }
        may
    }
}
