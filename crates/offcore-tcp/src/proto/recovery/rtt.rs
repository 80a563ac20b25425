//! Round-trip times and the retransmission timeout (RFC 6298).

use offcore_stats::time::{Micros, Time};

/// Minimum contribution of the variance to the timeout. RFC 6298 requires a timeout of a second. Linux
/// uses 200 ms, the longest ACK delay of common receivers, and peers are designed for Linux senders.
const LEAST: Micros = Micros::from_millis(200);
/// The timeout before the first sample (RFC 6298, section 2.1).
const INITIAL: Micros = Micros::from_secs(1);
/// The timeout before the first sample if the handshake timed out (RFC 6298, section 5.7).
const INITIAL_AFTER_LOSS: u32 = 3_000_000;
/// Maximum timeout, as in Linux (RFC 6298, section 2.5 requires at least 60 s).
const LONGEST: Micros = Micros::from_secs(120);
/// Lifetime of the minimum round-trip time, because paths change.
const MINIMUM_LASTS: Micros = Micros::from_secs(300);
/// Larger samples are reduced to this value, so that sums fit 32 bits.
const LARGEST_SAMPLE: Micros = Micros::from_secs(60);

/// The estimates and the timer, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rtt {
    /// The smoothed round-trip time times eight; 0 before the first sample.
    srtt: u32,
    /// The variation times four; before the first sample, the minimum timeout.
    variation: u32,
    /// The minimum of the last minutes; `u32::MAX` before the first sample.
    min: u32,
    /// Number of doublings of the timeout. Reset by a sample that is not from a retransmission (Karn).
    backoff: u8,
    /// Timeouts since an ACK advanced.
    expired: u8,
    min_at: Time,
    /// Expiry time of the timer.
    pub(super) at: Time,
}

impl Rtt {
    pub(super) fn new() -> Self {
        Self {
            srtt: 0,
            variation: 0,
            min: u32::MAX,
            backoff: 0,
            expired: 0,
            min_at: Time::ZERO,
            at: Time::NEVER,
        }
    }

    /// Records that the handshake timed out.
    pub(super) fn handshake_lost(&mut self) {
        if self.srtt == 0 {
            self.variation = INITIAL_AFTER_LOSS;
        }
    }

    /// Processes a sample (RFC 6298, section 2.2 and 2.3). It must not be from a retransmitted segment.
    #[inline]
    pub(super) fn sample(&mut self, sample: Micros) {
        let sample = sample.clamp(Micros::new(1), LARGEST_SAMPLE).get() as u32;
        self.backoff = 0;
        if self.srtt == 0 {
            self.srtt = sample * 8;
            self.variation = sample * 2;
            return;
        }
        let srtt = self.srtt / 8;
        // Beta is 1/4 and alpha 1/8. The variation uses the previous smoothed time.
        self.variation = self.variation - self.variation / 4 + sample.abs_diff(srtt);
        self.srtt = self.srtt - srtt + sample;
    }

    /// Updates the minimum with the round-trip time of any segment.
    #[inline]
    pub(super) fn least(&mut self, now: Time, sample: Micros) {
        let sample = sample.clamp(Micros::new(1), LARGEST_SAMPLE).get() as u32;
        if sample <= self.min || now.saturating_since(self.min_at) > MINIMUM_LASTS {
            self.min = sample;
            self.min_at = now;
        }
    }

    /// Returns the smoothed round-trip time, or zero before the first sample.
    #[inline]
    pub(super) fn srtt(&self) -> Micros {
        Micros::new((self.srtt / 8).into())
    }

    pub(super) fn variation(&self) -> Micros {
        Micros::new((self.variation / 4).into())
    }

    /// Returns the minimum round-trip time of the last five minutes, if there was a sample.
    #[inline]
    pub(super) fn min(&self) -> Option<Micros> {
        (self.min < u32::MAX).then_some(Micros::new(self.min.into()))
    }

    /// Returns the timeout without backoff.
    #[inline]
    pub(super) fn base(&self) -> Micros {
        if self.srtt == 0 {
            return INITIAL.max(Micros::new(self.variation.into()));
        }
        (self.srtt() + Micros::new(self.variation.into()).max(LEAST)).min(LONGEST)
    }

    /// Returns the timeout including backoff.
    #[inline]
    pub(super) fn rto(&self) -> Micros {
        (self.base() << self.backoff).min(LONGEST)
    }

    /// Doubles the timeout (RFC 6298, section 5.5).
    pub(super) fn back_off(&mut self) {
        self.expired = self.expired.saturating_add(1);
        if self.rto() < LONGEST {
            self.backoff += 1;
        }
    }

    /// Starts the timer again (RFC 6298, section 5.3).
    #[inline]
    pub(super) fn restart(&mut self, now: Time) {
        self.at = now + self.rto();
    }

    /// Starts the timer if it is not running (RFC 6298, section 5.1).
    #[inline]
    pub(super) fn start(&mut self, now: Time) {
        if self.at == Time::NEVER {
            self.restart(now);
        }
    }

    /// Records that an ACK has advanced.
    #[inline]
    pub(super) fn advanced(&mut self) {
        self.expired = 0;
    }

    /// Returns the number of timeouts since an ACK advanced.
    pub(super) fn expired(&self) -> u8 {
        self.expired
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(millis: u64) -> Micros {
        Micros::from_millis(millis)
    }

    // RFC 6298, section 2.1 to 2.3.
    #[test]
    fn rtt_samples_are_smoothed() {
        let mut rtt = Rtt::new();
        assert_eq!((rtt.srtt(), rtt.rto()), (Micros::ZERO, Micros::from_secs(1)));
        rtt.sample(Micros::from_millis(400));
        assert_eq!((rtt.srtt(), rtt.variation(), rtt.rto()), (ms(400), ms(200), ms(1200)));
        rtt.sample(Micros::from_millis(480));
        assert_eq!((rtt.srtt(), rtt.variation()), (ms(410), ms(170)));
        assert_eq!(rtt.rto(), ms(410) + 4 * ms(170));
    }

    // RFC 6298, section 5.7.
    #[test]
    fn lost_syn_sets_three_second_rto() {
        let mut rtt = Rtt::new();
        rtt.handshake_lost();
        assert_eq!(rtt.rto(), Micros::from_secs(3));
        rtt.sample(Micros::from_millis(400));
        assert_eq!((rtt.variation(), rtt.rto()), (ms(200), ms(1200)));
    }

    #[test]
    fn steady_path_rto_adds_200_ms() {
        let mut rtt = Rtt::new();
        for _ in 0..200 {
            rtt.sample(Micros::from_millis(30));
        }
        assert_eq!(rtt.rto(), Micros::from_millis(230));
    }

    // RFC 6298, section 5.5 and 5.7; Karn.
    #[test]
    fn rto_backoff_ends_with_sample() {
        let mut rtt = Rtt::new();
        rtt.sample(Micros::from_millis(30));
        let base = rtt.rto();
        for doubled in 1..=3 {
            rtt.back_off();
            assert_eq!(rtt.rto(), base << doubled);
        }
        (0..100).for_each(|_| rtt.back_off());
        assert_eq!(rtt.rto(), LONGEST);
        rtt.sample(Micros::from_millis(30));
        assert!(rtt.rto() <= base);
    }

    #[test]
    fn min_rtt_expires() {
        let mut rtt = Rtt::new();
        assert_eq!(rtt.min(), None);
        rtt.least(Time::ZERO, Micros::new(100));
        rtt.least(Time::from_micros(1), Micros::new(200));
        assert_eq!(rtt.min(), Some(Micros::new(100)));
        rtt.least(Time::from_micros(1) + MINIMUM_LASTS, Micros::new(200));
        assert_eq!(rtt.min(), Some(Micros::new(200)));
    }

    #[test]
    fn rtt_samples_do_not_overflow() {
        let mut rtt = Rtt::new();
        for sample in [0, u64::MAX, 1, u64::MAX, u64::MAX, 0] {
            rtt.sample(Micros::new(sample));
            rtt.least(Time::from_micros(sample), Micros::new(sample));
            rtt.back_off();
            assert!(rtt.rto() <= LONGEST);
        }
    }
}
