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
    /// is not `idle`.
    pub(super) fn expire(&mut self, now: u64, heard: u64, idle: bool) -> Silence {
        if heard > self.last {
            self.sent = 0;
        }
        let quiet_until = heard + self.wanted.idle;
        if self.sent == 0 && quiet_until > now || !idle {
            self.due = quiet_until.max(now + self.wanted.interval.min(self.wanted.idle));
            Silence::Wait
        } else if self.sent >= self.wanted.probes {
            Silence::GiveUp
        } else {
            self.sent += 1;
            (self.last, self.due) = (now, now + self.wanted.interval);
            Silence::Ask
        }
    }
}
