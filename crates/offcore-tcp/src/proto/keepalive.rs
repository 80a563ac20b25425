//! Keep-alive (RFC 9293, 3.8.4).

use offcore_stats::time::{Micros, Time};

/// The parameters of keep-alive probes to a silent peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// Time of silence before the first probe.
    pub idle: Micros,
    /// Time between two probes.
    pub interval: Micros,
    /// Unanswered probes after which the connection ends.
    pub probes: u8,
}

impl Default for KeepAlive {
    /// The default of RFC 9293: two hours. The other values are as on Linux.
    fn default() -> Self {
        Self { idle: Micros::from_secs(7200), interval: Micros::from_secs(75), probes: 9 }
    }
}

/// The required action for a silent peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeepaliveAction {
    /// Nothing yet.
    Wait,
    /// A probe is due.
    Ask,
    /// The peer does not answer.
    GiveUp,
}

/// Whether the peer of a connection is alive: the signs of life, and the timeouts without them.
#[derive(Debug)]
pub(crate) struct Liveness {
    /// Time of the last accepted segment.
    heard: Time,
    /// `TCP_USER_TIMEOUT`; [`Micros::MAX`] for none.
    user_timeout: Micros,
    /// State of keep-alive probes, if they are enabled.
    keeping: Option<Box<KeepaliveState>>,
}

impl Default for Liveness {
    fn default() -> Self {
        Self { heard: Time::ZERO, user_timeout: Micros::MAX, keeping: None }
    }
}

impl Liveness {
    /// Records an accepted segment.
    #[inline]
    pub(crate) fn hear(&mut self, now: Time) {
        self.heard = now;
    }

    pub(crate) fn heard(&self) -> Time {
        self.heard
    }

    #[inline]
    pub(crate) fn user_timeout(&self) -> Micros {
        self.user_timeout
    }

    /// Sets the user timeout in milliseconds. 0 means none.
    pub(crate) fn set_user_timeout(&mut self, millis: u32) {
        self.user_timeout = if millis == 0 { Micros::MAX } else { Micros::from_millis(millis.into()) };
    }

    /// Sets or disables keep-alive probes.
    pub(crate) fn keep_alive(&mut self, now: Time, wanted: Option<KeepAlive>) {
        self.keeping = wanted.map(|wanted| Box::new(KeepaliveState::new(now, wanted)));
    }

    /// Returns the time of the keep-alive timer.
    #[inline]
    pub(crate) fn keepalive_due(&self) -> Option<Time> {
        self.keeping.as_ref().map(|keeping| keeping.due)
    }

    /// Handles the keep-alive timer if it has expired. The connection is `idle` without data in flight.
    pub(super) fn expire(&mut self, now: Time, idle: bool) -> KeepaliveAction {
        let keeping = self.keeping.as_mut().filter(|keeping| keeping.due <= now);
        keeping
            .map_or(KeepaliveAction::Wait, |keeping| keeping.expire(now, self.heard, idle, self.user_timeout))
    }
}

/// The keep-alive state of a connection.
#[derive(Debug)]
struct KeepaliveState {
    wanted: KeepAlive,
    due: Time,
    /// Probes since the last segment of the peer, and the time of the last probe.
    sent: u8,
    last: Time,
}

impl KeepaliveState {
    fn new(now: Time, wanted: KeepAlive) -> Self {
        Self { wanted, due: now + wanted.idle, sent: 0, last: Time::ZERO }
    }

    /// Handles the expired timer. `heard` is the time of the last segment. Data in flight serves as a probe; the
    /// connection is then not `idle`. A `user_timeout` replaces the number of probes, as on Linux.
    fn expire(&mut self, now: Time, heard: Time, idle: bool, user_timeout: Micros) -> KeepaliveAction {
        if heard > self.last {
            self.sent = 0;
        }
        let quiet_until = heard + self.wanted.idle;
        if self.sent == 0 && quiet_until > now || !idle {
            self.due = quiet_until.max(now + self.wanted.interval.min(self.wanted.idle));
            KeepaliveAction::Wait
        } else if match user_timeout {
            Micros::MAX => self.sent >= self.wanted.probes,
            _ => self.sent > 0 && now >= heard + user_timeout,
        } {
            KeepaliveAction::GiveUp
        } else {
            self.sent = self.sent.saturating_add(1);
            (self.last, self.due) = (now, now + self.wanted.interval);
            KeepaliveAction::Ask
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Micros = Micros::from_secs(1);

    /// Returns the time after which a peer that is silent from time 0 on is given up.
    fn given_up_after(user_timeout: Micros) -> u64 {
        let wanted = KeepAlive { idle: 10 * SECOND, interval: SECOND, probes: 5 };
        let mut keeping = KeepaliveState::new(Time::ZERO, wanted);
        loop {
            let now = keeping.due;
            if keeping.expire(now, Time::ZERO, true, user_timeout) == KeepaliveAction::GiveUp {
                return now.as_secs();
            }
        }
    }

    // tcp(7): TCP_USER_TIMEOUT "will override keepalive to determine when to close a connection due to keepalive
    // failure".
    #[test]
    fn user_timeout_overrides_probe_count() {
        assert_eq!(given_up_after(Micros::MAX), 15);
        assert_eq!(given_up_after(12 * SECOND), 12);
        assert_eq!(given_up_after(30 * SECOND), 30);
        assert_eq!(given_up_after(SECOND), 11, "a probe is sent at least");
    }
}
