//! HyStart++ (RFC 9406): slow start ends when round-trip times rise, before the bottleneck's queue overflows.
//!
//! A rise begins conservative slow start (CSS), in which the window grows at a quarter of the speed. If the times fall
//! again, slow start resumes. After five rounds of CSS, congestion avoidance begins. Linux ends slow start at the first
//! rise.

use offcore_stats::time::Micros;

/// MIN_RTT_THRESH, MAX_RTT_THRESH and MIN_RTT_DIVISOR.
const LEAST_RISE: u32 = 4000;
const MOST_RISE: u32 = 16_000;
const RISE_DIVISOR: u32 = 8;
/// N_RTT_SAMPLE.
const SAMPLES: u8 = 8;
/// CSS_GROWTH_DIVISOR and CSS_ROUNDS.
const DIVISOR: u32 = 4;
const ROUNDS: u8 = 5;
/// A round without a sample.
const INFINITE: u32 = u32::MAX;

/// The ACK for which the window grows.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::proto) struct Progress {
    /// The first unacknowledged byte.
    pub(in crate::proto) una: u64,
    /// SND.NXT.
    pub(in crate::proto) sent: u64,
    /// The round-trip time of the newest delivered segment.
    pub(in crate::proto) rtt: Micros,
}

/// Slow start of a connection without losses.
#[derive(Clone, Copy, Debug)]
pub(super) struct HyStart {
    /// windowEnd: an ACK for it ends the round.
    end: u64,
    /// Minimum round-trip times of the last and the current round: lastRoundMinRTT, currentRoundMinRTT.
    last: u32,
    now: u32,
    /// Minimum round-trip time at the start of CSS: cssBaselineMinRtt.
    baseline: u32,
    /// Samples in this round: rttSampleCount.
    samples: u8,
    /// The round of CSS; 0 in slow start.
    css: u8,
}

impl Default for HyStart {
    fn default() -> Self {
        Self { end: 0, last: INFINITE, now: INFINITE, baseline: INFINITE, samples: 0, css: 0 }
    }
}

impl HyStart {
    /// Returns the growth of the window in bytes when `acked` bytes are acknowledged.
    pub(super) fn on_ack(&mut self, acked: u32, progress: &Progress) -> u32 {
        self.now = self.now.min(u32::try_from(progress.rtt.get()).unwrap_or(INFINITE));
        self.samples = self.samples.saturating_add(1);
        if self.samples >= SAMPLES {
            let rise = (self.last / RISE_DIVISOR).clamp(LEAST_RISE, MOST_RISE);
            if self.css == 0 && self.last < INFINITE && self.now >= self.last.saturating_add(rise) {
                (self.css, self.baseline) = (1, self.now);
            } else if self.css > 0 && self.now < self.baseline {
                (self.css, self.baseline) = (0, INFINITE);
            }
        }
        let growth = if self.css > 0 { acked / DIVISOR } else { acked };
        if progress.una >= self.end {
            self.end = progress.sent;
            (self.last, self.now, self.samples) = (self.now, INFINITE, 0);
            self.css += u8::from(self.css > 0);
        }
        growth
    }

    /// Returns whether congestion avoidance begins.
    pub(super) fn is_over(&self) -> bool {
        self.css > ROUNDS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ACKs for 1000 bytes each, with `window` segments in flight. The second ACK begins a round.
    struct Acks {
        start: HyStart,
        una: u64,
        window: u64,
    }

    impl Acks {
        fn new(window: u64) -> Self {
            let mut acks = Self { start: HyStart::default(), una: 0, window };
            acks.take(1, 20_000);
            acks
        }

        /// Returns the growth for `acks` ACKs with this round-trip time.
        fn take(&mut self, acks: u64, micros: u64) -> u32 {
            let rtt = Micros::new(micros);
            let growth = |_| {
                self.una += 1000;
                self.start.on_ack(1000, &Progress { una: self.una, sent: self.una + self.window * 1000, rtt })
            };
            (0..acks).map(growth).sum()
        }
    }

    // RFC 9406, section 4.2.
    #[test]
    fn rising_rtt_enters_css() {
        let mut acks = Acks::new(16);
        assert_eq!(acks.take(16, 20_000), 16_000);
        assert_eq!(acks.take(16, 23_000), 16_000, "3 ms are less than 4");
        assert_eq!(acks.take(16, 27_000), 7 * 1000 + 9 * 250, "from the eighth sample on");
        for _ in 0..4 {
            assert!(!acks.start.is_over());
            assert_eq!(acks.take(16, 27_000), 16 * 250);
        }
        assert!(acks.start.is_over());
    }

    // RFC 9406, section 4.2: a temporary rise was jitter.
    #[test]
    fn falling_rtt_resumes_slow_start() {
        let mut acks = Acks::new(16);
        acks.take(16, 20_000);
        acks.take(16, 30_000);
        assert_eq!(acks.take(16, 20_000), 7 * 250 + 9 * 1000);
        assert_eq!(acks.take(16, 20_000), 16_000);
    }

    // A peer that acknowledges whole vectors gives few samples: slow start continues to the first loss, as without
    // HyStart++.
    #[test]
    fn few_rtt_samples_are_ignored() {
        let mut acks = Acks::new(6);
        for rtt in [20_000, 40_000, 80_000] {
            assert_eq!(acks.take(6, rtt), 6000);
        }
    }
}
