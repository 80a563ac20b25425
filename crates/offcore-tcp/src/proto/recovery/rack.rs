//! Loss detection by time (RFC 8985, section 6).

use offcore_stats::time::{Micros, Time};

use super::delivery::{Delivery, Newest};
use super::runs::Runs;

/// The newest delivered data, and the wait for reordered data.
#[derive(Debug)]
pub(super) struct Rack {
    /// RACK.xmit_ts and RACK.end_seq.
    newest: Newest,
    /// RACK.rtt.
    rtt: Micros,
    /// RACK.fack.
    highest: u64,
    /// Expiry time of the reordering wait.
    pub(super) at: Time,
}

impl Rack {
    pub(super) fn new() -> Self {
        Self { newest: Newest::default(), rtt: Micros::ZERO, highest: 0, at: Time::NEVER }
    }

    /// Returns the round-trip time of the newest delivered segment.
    #[inline]
    pub(super) fn rtt(&self) -> Micros {
        self.rtt
    }

    /// Returns the send time of the newest delivered segment, and its round-trip time.
    pub(super) fn sample(&self) -> (Time, Micros) {
        (self.newest.time, self.rtt)
    }

    /// Records that data up to `una`, which was sent once, is acknowledged. Its last segment was sent at `last`.
    #[inline]
    pub(super) fn advance(&mut self, una: u64, last: Time, rtt: Micros) {
        let newest = Newest { time: last, end: una };
        if newest >= self.newest {
            (self.newest, self.rtt) = (newest, rtt);
        }
        self.highest = self.highest.max(una);
    }

    /// Creates an empty delivery.
    pub(super) fn delivery(&self, now: Time, echo: Option<Time>, least: Option<Micros>) -> Delivery {
        Delivery::new(now, self.newest, self.highest, echo, least)
    }

    /// Records delivered data.
    pub(super) fn deliver(&mut self, delivery: &Delivery) {
        if let Some(rtt) = delivery.rtt {
            (self.newest, self.rtt) = (delivery.newest, rtt);
        }
        self.highest = delivery.highest;
    }

    /// Marks data lost that was sent more than a round-trip time and the reordering `window` before the newest
    /// delivered segment, and starts the wait for the rest (steps 4 and 5). Returns the number of bytes.
    pub(super) fn detect(&mut self, now: Time, window: Micros, runs: &mut Runs) -> u64 {
        let wait = self.rtt + window;
        let (lost, waiting) = runs.detect(self.newest, now.checked_sub(wait));
        self.at = waiting.map_or(Time::NEVER, |sent| (sent + wait).max(now + Micros::new(1)));
        lost
    }
}
