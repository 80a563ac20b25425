//! Delivery rate samples (draft-ietf-ccwg-bbr-06, section 4.1).

use std::collections::VecDeque;

use offcore_stats::time::{Micros, Time};

/// Approximate number of states per round trip. Segments within this part of a round trip after a state share it.
const PER_ROUND: u64 = 128;
/// Lifetime of a state in round trips. Later ACKs give no sample.
const ROUNDS: u64 = 8;
/// Maximum number of states.
const MOST: usize = 2048;

/// Per-packet state: the connection's counters at the transmission.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sent {
    time: Time,
    delivered: u64,
    delivered_at: Time,
    first_sent: Time,
    /// Bytes lost before the transmission.
    pub(super) lost: u64,
    /// Bytes in flight, including the transmission.
    pub(super) inflight: u64,
    pub(super) app_limited: bool,
}

/// A rate sample.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sample {
    /// Bytes per second; 0 if the interval was too short.
    pub(super) rate: u64,
    /// RS.delivered and RS.prior_delivered.
    pub(super) delivered: u64,
    pub(super) before: u64,
    /// Bytes lost in that time.
    pub(super) lost: u64,
    /// Bytes in flight when the segment was sent.
    pub(super) inflight: u64,
    pub(super) app_limited: bool,
}

/// The estimator of a connection.
#[derive(Debug, Default)]
pub(super) struct Rate {
    sent: VecDeque<Sent>,
    /// Bytes delivered so far: C.delivered.
    pub(super) delivered: u64,
    /// C.delivered_time.
    delivered_at: Time,
    /// C.first_send_time.
    first_sent: Time,
    /// Bytes lost so far: C.lost.
    pub(super) lost: u64,
    /// Samples are application-limited until this amount is delivered: C.app_limited.
    app_limited: u64,
}

impl Rate {
    /// Records a transmission. `inflight` includes it. `idle`: nothing was in flight before.
    pub(super) fn on_sent(&mut self, now: Time, idle: bool, inflight: u64, srtt: Micros) {
        if idle {
            (self.first_sent, self.delivered_at) = (now, now);
        }
        let app_limited = self.app_limited != 0;
        if let Some(last) = self.sent.back_mut()
            && !idle
            && now.saturating_since(last.time) <= srtt / PER_ROUND
        {
            last.inflight = last.inflight.max(inflight);
            last.app_limited |= app_limited;
            return;
        }
        let old = now.saturating_sub(srtt * ROUNDS);
        while self.sent.front().is_some_and(|first| first.time < old) || self.sent.len() >= MOST {
            self.sent.pop_front();
        }
        self.sent.push_back(Sent {
            time: now,
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            first_sent: self.first_sent,
            lost: self.lost,
            inflight,
            app_limited,
        });
    }

    /// Returns the state of data that was sent at `time`, or `None` after its lifetime.
    pub(super) fn when_sent(&self, time: Time) -> Option<&Sent> {
        let next = self.sent.partition_point(|sent| sent.time <= time);
        self.sent.get(next.checked_sub(1)?)
    }

    /// Processes an ACK that delivers `bytes`. `newest`: the send time of the newest segment, or `None` if a newer one
    /// was delivered before. `least`: the minimum round-trip time.
    pub(super) fn on_ack(
        &mut self,
        now: Time,
        bytes: u64,
        newest: Option<Time>,
        least: Micros,
    ) -> Option<Sample> {
        self.delivered += bytes;
        if bytes > 0 {
            self.delivered_at = now;
        }
        if self.delivered > self.app_limited {
            self.app_limited = 0;
        }
        let time = newest?;
        let sent = *self.when_sent(time)?;
        let elapsed = time.saturating_since(sent.first_sent).max(now.saturating_since(sent.delivered_at));
        self.first_sent = time;
        let delivered = self.delivered - sent.delivered;
        let is_sound = elapsed >= least.max(Micros::new(1));
        Some(Sample {
            rate: if is_sound { delivered.saturating_mul(1_000_000) / elapsed.get() } else { 0 },
            delivered,
            before: sent.delivered,
            lost: self.lost - sent.lost,
            inflight: sent.inflight,
            app_limited: sent.app_limited,
        })
    }

    /// MarkConnectionAppLimited.
    pub(super) fn limit_by_app(&mut self, inflight: u64) {
        self.app_limited = (self.delivered + inflight).max(1);
    }

    pub(super) fn is_app_limited(&self) -> bool {
        self.app_limited != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTT: Micros = Micros::from_millis(20);

    fn at(micros: u64) -> Time {
        Time::from_micros(micros)
    }

    /// Sends 1000 bytes every `every` microseconds. Each segment is acknowledged at least one round trip after its
    /// transmission, and at least `ack_every` after the previous ACK. Returns the last sample.
    fn sample(every: u64, ack_every: u64) -> Sample {
        let mut rate = Rate::default();
        let mut events: Vec<_> = (0..4000).map(|n| (n * every, 0, n * every)).collect();
        let mut last = 0;
        for n in 0..4000 {
            last = (n * every + RTT.get()).max(last + ack_every);
            events.push((last, 1, n * every));
        }
        events.sort_unstable();
        let (mut sample, mut inflight) = (None, 0);
        for (now, kind, time) in events {
            if kind == 0 {
                inflight += 1000;
                rate.on_sent(at(now + 1), inflight == 1000, inflight, RTT);
            } else {
                inflight -= 1000;
                sample = rate.on_ack(at(now + 1), 1000, Some(at(time + 1)), RTT).or(sample);
            }
        }
        sample.unwrap()
    }

    // Section 4.1.1.2: the sample is the smaller of send rate and ACK rate.
    #[test]
    fn delivery_rate_uses_slower_side() {
        let near = |rate: u64, want: u64| rate.abs_diff(want) < want / 20;
        assert!(near(sample(200, 100).rate, 5_000_000), "{:?}", sample(200, 100));
        assert!(near(sample(100, 200).rate, 5_000_000), "{:?}", sample(100, 200));
        assert!(near(sample(200, 200).rate, 5_000_000), "{:?}", sample(200, 200));
    }

    // Section 4.1.2.3: compressed ACKs do not increase the estimated bandwidth.
    #[test]
    fn ack_compression_adds_no_bandwidth() {
        let mut rate = Rate::default();
        for n in 0..20_u64 {
            rate.on_sent(at(1 + n * 1000), n == 0, (n + 1) * 1000, RTT);
        }
        let mut best = 0;
        for n in 0..20_u64 {
            let sample = rate.on_ack(at(40_000 + n), 1000, Some(at(1 + n * 1000)), RTT).unwrap();
            best = best.max(sample.rate);
        }
        assert!(best <= 1_050_000, "{best}");
    }

    // Section 4.1.2.4.
    #[test]
    fn app_limited_phase_ends_with_bubble() {
        let mut rate = Rate::default();
        rate.on_sent(at(1), true, 1000, RTT);
        rate.limit_by_app(1000);
        rate.on_sent(at(5000), false, 2000, RTT);
        assert!(!rate.on_ack(at(1) + RTT, 1000, Some(at(1)), RTT).unwrap().app_limited);
        assert!(rate.is_app_limited());
        assert!(rate.on_ack(at(5000) + RTT, 1000, Some(at(5000)), RTT).unwrap().app_limited);
        assert!(!rate.is_app_limited());
    }

    #[test]
    fn send_states_are_bounded() {
        let mut rate = Rate::default();
        for now in 1..1_000_000 {
            rate.on_sent(at(now), false, 1000, Micros::from_millis(10));
            assert!(rate.sent.len() <= 1200);
        }
        assert!(rate.when_sent(at(999_000)).is_some() && rate.when_sent(at(100)).is_none());
    }
}
