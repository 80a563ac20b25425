//! What a server of applications counts, and warnings that come once a second at most.

use offcore_stats::counters;

counters! {
    /// Counters of a server of applications. The first four are current values, the others count from its start.
    pub struct ServeCounts {
        applications,
        processes,
        sessions,
        /// Applications whose marks are read in each round.
        awake,
        /// Bytes that said that there is something to read.
        tokens,
        /// Gates that were opened.
        gates,
        /// Bytes that were written without the library and sent, and those that could not be.
        relayed,
        unsent,
        /// Times that an application woke the worker up.
        woken,
        /// Processes that were not let in, and connections that were reset for want of descriptors, numbers or memory.
        refused,
        /// Sessions that were reset, and processes whose socket was closed, for what means nothing.
        misused,
    }
}

/// Says whether a warning is due: one a second.
#[derive(Debug, Default)]
pub(super) struct Seldom {
    /// When the next one may come, in microseconds.
    next: u64,
}

impl Seldom {
    pub(super) fn may(&mut self, now: u64) -> bool {
        let may = now >= self.next;
        if may {
            self.next = now + 1_000_000;
        }
        may
    }
}
