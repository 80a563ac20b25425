//! Round-trip times and the retransmission timeout (RFC 6298).

use super::NEVER;

/// Minimum contribution of the variance to the timeout in microseconds. RFC 6298 requires a timeout of a second. Linux
/// uses 200 ms, the longest ACK delay of common receivers, and peers are designed for Linux senders.
const LEAST: u64 = 200_000;
/// The timeout before the first sample (RFC 6298, section 2.1).
const INITIAL: u64 = 1_000_000;
/// The timeout before the first sample if the handshake timed out (RFC 6298, section 5.7).
const INITIAL_AFTER_LOSS: u32 = 3_000_000;
/// Maximum timeout, as in Linux (RFC 6298, section 2.5 requires at least 60 s).
const LONGEST: u64 = 120_000_000;
/// Lifetime of the minimum round-trip time, because paths change.
const MINIMUM_LASTS: u64 = 300_000_000;
/// Larger samples are reduced to this value, so that sums fit 32 bits.
const LARGEST_SAMPLE: u64 = 60_000_000;

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
    min_at: u64,
    /// Expiry time of the timer.
    pub(super) at: u64,
}

impl Rtt {
    pub(super) fn new() -> Self {
        Self { srtt: 0, variation: 0, min: u32::MAX, backoff: 0, expired: 0, min_at: 0, at: NEVER }
    }

    /// Records that the handshake timed out.
    pub(super) fn handshake_lost(&mut self) {
        if self.srtt == 0 {
            self.variation = INITIAL_AFTER_LOSS;
        }
    }

    /// Processes a sample (RFC 6298, section 2.2 and 2.3). It must not be from a retransmitted segment.
    #[inline]
    pub(super) fn sample(&mut self, sample: u64) {
        let sample = sample.clamp(1, LARGEST_SAMPLE) as u32;
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
    pub(super) fn least(&mut self, now: u64, sample: u64) {
        let sample = sample.clamp(1, LARGEST_SAMPLE) as u32;
        if sample <= self.min || now.saturating_sub(self.min_at) > MINIMUM_LASTS {
            self.min = sample;
            self.min_at = now;
        }
    }

    /// Returns the smoothed round-trip time, or 0 before the first sample.
    #[inline]
    pub(super) fn srtt(&self) -> u64 {
        u64::from(self.srtt / 8)
    }

    pub(super) fn variation(&self) -> u64 {
        u64::from(self.variation / 4)
    }

    /// Returns the minimum round-trip time of the last five minutes, if there was a sample.
    #[inline]
    pub(super) fn min(&self) -> Option<u64> {
        (self.min < u32::MAX).then_some(u64::from(self.min))
    }

    /// Returns the timeout without backoff.
    #[inline]
    pub(super) fn base(&self) -> u64 {
        if self.srtt == 0 {
            return INITIAL.max(self.variation.into());
        }
        (self.srtt() + u64::from(self.variation).max(LEAST)).min(LONGEST)
    }

    /// Returns the timeout including backoff.
    #[inline]
    pub(super) fn rto(&self) -> u64 {
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
    pub(super) fn restart(&mut self, now: u64) {
        self.at = now + self.rto();
    }

    /// Starts the timer if it is not running (RFC 6298, section 5.1).
    #[inline]
    pub(super) fn start(&mut self, now: u64) {
        if self.at == NEVER {
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

    // RFC 6298, section 2.1 to 2.3.
    #[test]
    fn rtt_samples_are_smoothed() {
        let mut rtt = Rtt::new();
        assert_eq!((rtt.srtt(), rtt.rto()), (0, 1_000_000));
        rtt.sample(400_000);
        assert_eq!((rtt.srtt(), rtt.variation(), rtt.rto()), (400_000, 200_000, 1_200_000));
        rtt.sample(480_000);
        assert_eq!((rtt.srtt(), rtt.variation()), (410_000, 170_000));
        assert_eq!(rtt.rto(), 410_000 + 4 * 170_000);
    }

    // RFC 6298, section 5.7.
    #[test]
    fn lost_syn_sets_three_second_rto() {
        let mut rtt = Rtt::new();
        rtt.handshake_lost();
        assert_eq!(rtt.rto(), 3_000_000);
        rtt.sample(400_000);
        assert_eq!((rtt.variation(), rtt.rto()), (200_000, 1_200_000));
    }

    #[test]
    fn steady_path_rto_adds_200_ms() {
        let mut rtt = Rtt::new();
        for _ in 0..200 {
            rtt.sample(30_000);
        }
        assert_eq!(rtt.rto(), 230_000);
    }

    // RFC 6298, section 5.5 and 5.7; Karn.
    #[test]
    fn rto_backoff_ends_with_sample() {
        let mut rtt = Rtt::new();
        rtt.sample(30_000);
        let base = rtt.rto();
        for doubled in 1..=3 {
            rtt.back_off();
            assert_eq!(rtt.rto(), base << doubled);
        }
        (0..100).for_each(|_| rtt.back_off());
        assert_eq!(rtt.rto(), LONGEST);
        rtt.sample(30_000);
        assert!(rtt.rto() <= base);
    }

    #[test]
    fn min_rtt_expires() {
        let mut rtt = Rtt::new();
        assert_eq!(rtt.min(), None);
        rtt.least(0, 100);
        rtt.least(1, 200);
        assert_eq!(rtt.min(), Some(100));
        rtt.least(MINIMUM_LASTS + 1, 200);
        assert_eq!(rtt.min(), Some(200));
    }

    #[test]
    fn rtt_samples_do_not_overflow() {
        let mut rtt = Rtt::new();
        for sample in [0, u64::MAX, 1, u64::MAX, u64::MAX, 0] {
            rtt.sample(sample);
            rtt.least(sample, sample);
            rtt.back_off();
            assert!(rtt.rto() <= LONGEST);
        }
    }
}
