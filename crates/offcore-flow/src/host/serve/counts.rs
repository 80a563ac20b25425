//! Counters of a server of applications, and a limit of one warning per second.

use offcore_stats::time::{Micros, Time};
use offcore_stats::{Family, counters};

counters! {
    /// Counters of a server of applications.
    pub struct ServeCounts {
        /// Present applications.
        applications: Events gauge,
        /// Present processes of applications.
        processes: Events gauge,
        /// Present sessions.
        sessions: Events gauge,
        /// Applications whose marks are read in each round.
        awake: Events gauge,
        /// Bytes written to announce data.
        tokens: Bytes,
        /// Gates that were opened.
        gates: Events,
        /// Bytes sent that were written without the library.
        relayed: Bytes,
        /// Bytes lost that were written without the library.
        unsent: Bytes,
        /// Number of times an application woke the worker.
        woken: Events,
        /// Processes that were refused, and connections that were reset because descriptors, numbers or memory were
        /// exhausted.
        refused: Events,
        /// Sessions that were reset, and processes whose socket was closed, because of invalid data.
        misused: Events,
    }
}

/// The counters of a server of applications.
pub static TCP_SERVE: Family = Family::new(
    "tcp_serve",
    "The server of a host for applications in other processes.",
    &[&ServeCounts::COUNTERS],
);

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
