//! Limit of challenge ACKs (RFC 5961, 7).

/// Minimum interval of challenge ACKs in microseconds (as Linux).
const INTERVAL: u64 = 500_000;

/// The time of the last challenge ACK of a connection.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChallengeLimit(Option<u64>);

impl ChallengeLimit {
    /// Returns whether a challenge ACK may be sent now, and counts it.
    pub(crate) fn allows(&mut self, now: u64) -> bool {
        let allows = self.0.is_none_or(|last| now - last >= INTERVAL);
        if allows {
            self.0 = Some(now);
        }
        allows
    }
}
