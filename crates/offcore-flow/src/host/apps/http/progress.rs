//! Tracks whether a peer receives an answer. Progress is measured by acknowledgements, not by the memory that the
//! answer occupies.

use offcore_stats::time::{Micros, Time};

use super::timeouts::Timeouts;

/// The progress of a peer in receiving answers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// Number of acknowledged bytes, and the time, at the last check.
    acknowledged: u64,
    looked: Time,
    /// The delay of the peer relative to the slowest permitted peer.
    late: Micros,
}

impl Progress {
    /// Starts the measurement of an answer that begins after `acknowledged` bytes.
    pub(super) fn new(now: Time, acknowledged: u64) -> Self {
        Self { acknowledged, looked: now, late: Micros::ZERO }
    }

    /// Whether the peer receives too slowly. Must be called periodically. `unacknowledged` is the number of bytes that
    /// the peer has not acknowledged yet.
    pub(super) fn is_stalled(
        &mut self,
        now: Time,
        acknowledged: u64,
        unacknowledged: u64,
        timeouts: &Timeouts,
    ) -> bool {
        let taken = acknowledged.saturating_sub(self.acknowledged);
        let due = Micros::new(taken.saturating_mul(1_000_000) / timeouts.slowest(unacknowledged));
        self.late = (self.late + now.saturating_since(self.looked)).saturating_sub(due);
        (self.acknowledged, self.looked) = (acknowledged, now);
        self.late >= timeouts.stalled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the second in which a peer that receives `bytes` every `seconds` is given up.
    fn given_up(bytes: u64, seconds: u64) -> Option<u64> {
        let mut progress = Progress::new(Time::ZERO, 0);
        (1..1000).find(|second| {
            progress.is_stalled(Time::from_secs(*second), second / seconds * bytes, 1, &Timeouts::USUAL)
        })
    }

    #[test]
    fn stalled_reader_times_out() {
        assert_eq!(given_up(0, 1), Some(30));
        assert_eq!(given_up(1, 1), Some(31), "single bytes");
        assert_eq!(given_up(1, 29), Some(31));
        assert_eq!(given_up(400, 1), Some(150));
        assert_eq!(given_up(500, 1), None);
        assert_eq!(given_up(20_000, 29), None);
        assert_eq!(given_up(1_000_000, 31), Some(30), "what was taken long ago is no progress");
    }
}
