//! Keep-alive (RFC 9293, 3.8.4).

/// When a peer that says nothing is asked whether it is still there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Microseconds of silence.
    pub idle: u64,
    /// Microseconds between two probes.
    pub interval: u64,
    /// Probes without an answer after which the connection is over.
    pub probes: u8,
}

impl Default for KeepAlive {
    /// Two hours, as RFC 9293 wants it by default; the rest as Linux.
    fn default() -> Self {
        Self { idle: 7_200_000_000, interval: 75_000_000, probes: 9 }
    }
}

/// What is to be done about a silent peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silence {
    /// Nothing yet.
    Wait,
    /// A probe is due.
    Ask,
    /// It does not answer.
    GiveUp,
}

/// A connection's keep-alive.
#[derive(Debug)]
pub(crate) struct Keeping {
    wanted: KeepAlive,
    pub(crate) due: u64,
    /// Probes since the peer has said anything, and when the last one went out.
    sent: u8,
    last: u64,
}

impl Keeping {
    pub(crate) fn new(now: u64, wanted: KeepAlive) -> Self {
        Self { wanted, due: now + wanted.idle, sent: 0, last: 0 }
    }

    /// It is time. `heard` is when the last segment has come; data that is under way is its own probe: then the connection
    /// is not `idle`. A `user_timeout` replaces the number of probes, as on Linux.
    pub(super) fn expire(&mut self, now: u64, heard: u64, idle: bool, user_timeout: u64) -> Silence {
        if heard > self.last {
            self.sent = 0;
        }
        let quiet_until = heard + self.wanted.idle;
        if self.sent == 0 && quiet_until > now || !idle {
            self.due = quiet_until.max(now + self.wanted.interval.min(self.wanted.idle));
            Silence::Wait
        } else if match user_timeout {
            u64::MAX => self.sent >= self.wanted.probes,
            _ => self.sent > 0 && now >= heard + user_timeout,
        } {
            Silence::GiveUp
        } else {
            self.sent = self.sent.saturating_add(1);
            (self.last, self.due) = (now, now + self.wanted.interval);
            Silence::Ask
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    /// The time after which a peer that is silent from time 0 on is given up.
    fn given_up_after(user_timeout: u64) -> u64 {
        let wanted = KeepAlive { idle: 10 * SECOND, interval: SECOND, probes: 5 };
        let mut keeping = Keeping::new(0, wanted);
        loop {
            let now = keeping.due;
            if keeping.expire(now, 0, true, user_timeout) == Silence::GiveUp {
                return now / SECOND;
            }
        }
    }

    // tcp(7): TCP_USER_TIMEOUT "will override keepalive to determine when to close a connection due to keepalive failure".
    #[test]
    fn user_timeout_overrides_probe_count() {
        assert_eq!(given_up_after(u64::MAX), 15);
        assert_eq!(given_up_after(12 * SECOND), 12);
        assert_eq!(given_up_after(30 * SECOND), 30);
        assert_eq!(given_up_after(SECOND), 11, "a probe is sent at least");
    }
}
