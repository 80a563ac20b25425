//! The tail loss probe (RFC 8985, section 7).

use std::ops::Range;

use offcore_stats::time::Time;

/// A position beyond all data.
const NOWHERE: u64 = u64::MAX;

/// State of the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No probe is due or in flight.
    None,
    /// The timer has requested a probe.
    Due,
    /// A retransmission of the last segment is planned as the probe.
    Planned,
    /// New data is planned as the probe.
    NewPlanned,
    /// New data was sent as the probe.
    New,
    /// The last segment was retransmitted as the probe.
    Again,
}

/// The meaning of an ACK for the probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeAck {
    Nothing,
    /// The peer received the segment twice.
    Needless,
    /// The probe repaired a loss.
    Repaired,
}

/// A probe and its timer.
#[derive(Debug)]
pub(super) struct Probe {
    state: State,
    /// TLP.end_seq.
    end: u64,
    /// Expiry time of the timer.
    pub(super) at: Time,
}

impl Probe {
    pub(super) fn new() -> Self {
        Self { state: State::None, end: NOWHERE, at: Time::NEVER }
    }

    /// Returns whether no probe is due or in flight.
    #[inline]
    pub(super) fn is_none(&self) -> bool {
        self.state == State::None
    }

    /// Returns whether the timer has requested a probe.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        self.state == State::Due
    }

    /// Returns whether the next new segment is a probe.
    #[inline]
    pub(super) fn is_next(&self) -> bool {
        matches!(self.state, State::Due | State::NewPlanned)
    }

    /// Requests a probe when the timer has expired.
    pub(super) fn expire(&mut self) {
        (self.state, self.at) = (State::Due, Time::NEVER);
    }

    /// Records the plan of new data.
    #[inline]
    pub(super) fn plan_new(&mut self) {
        if self.state == State::Due {
            self.state = State::NewPlanned;
        }
    }

    /// Records that the last new data was cancelled.
    pub(super) fn unplan_new(&mut self) {
        if self.state == State::NewPlanned {
            self.state = State::Due;
        }
    }

    /// Records the planned retransmission, or that no data can be used as a probe.
    pub(super) fn plan_again(&mut self, range: Option<&Range<u64>>) {
        self.state = if range.is_some() { State::Planned } else { State::None };
        self.end = range.map_or(NOWHERE, |range| range.end);
    }

    /// Returns whether the retransmission up to `end` was planned as the probe.
    pub(super) fn is_planned(&self, end: u64) -> bool {
        self.state == State::Planned && end == self.end
    }

    /// Records that the probe was published: a retransmission, or new data (section 7.3).
    pub(super) fn published(&mut self, published: u64, again: bool) {
        self.state = if again { State::Again } else { State::New };
        (self.end, self.at) = (published, Time::NEVER);
    }

    #[inline]
    pub(super) fn forget(&mut self) {
        *self = Self::new();
    }

    /// Evaluates an ACK (section 7.4.2). `twice_to` is the end of its DSACK. `repeats`: it is a duplicate ACK.
    pub(super) fn on_ack(&mut self, una: u64, twice_to: Option<u64>, repeats: bool) -> ProbeAck {
        if self.end == NOWHERE || una < self.end || self.state == State::Planned {
            return ProbeAck::Nothing;
        }
        let answer = if twice_to == Some(self.end) {
            ProbeAck::Needless
        } else if self.state == State::Again && una > self.end {
            ProbeAck::Repaired
        } else {
            ProbeAck::Nothing
        };
        if answer != ProbeAck::Nothing || self.state != State::Again || repeats {
            self.forget();
        }
        answer
    }
}
