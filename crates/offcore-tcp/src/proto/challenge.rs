//! Limit of challenge ACKs (RFC 5961, 7).

use offcore_stats::time::{Micros, Time};

/// Minimum interval of challenge ACKs (as Linux).
const INTERVAL: Micros = Micros::from_millis(500);

/// The time of the last challenge ACK of a connection.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChallengeLimit(Option<Time>);

impl ChallengeLimit {
    /// Returns whether a challenge ACK may be sent now, and counts it.
    pub(crate) fn allows(&mut self, now: Time) -> bool {
        let allows = self.0.is_none_or(|last| now - last >= INTERVAL);
        if allows {
            self.0 = Some(now);
        }
        allows
    }
}
