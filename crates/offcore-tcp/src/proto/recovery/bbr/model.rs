//! BBR's model of the path: bandwidth, round-trip time, volume in flight, ACK aggregation.

use offcore_stats::time::{Micros, Time};

use super::rate::Sample;

/// A bound that is not set.
pub(super) const INFINITE: u64 = u64::MAX;
/// Maximum bandwidth in bytes per second. Its product with a round-trip time fits 64 bits.
const MOST_BW: u64 = 1 << 37;
/// BBR.ProbeRTTInterval and BBR.MinRTTFilterLen.
const PROBE_RTT_INTERVAL: Micros = Micros::from_secs(5);
const MIN_RTT_LASTS: Micros = Micros::from_secs(10);
/// Round trips per slot of BBR.extra_acked_filter, which has two slots.
const AGGREGATION_ROUNDS: u32 = 5;

/// BBR.max_bw_filter: the maximum delivery rates of the last and the current cycle.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MaxBw([u64; 2]);

impl MaxBw {
    pub(super) fn get(&self) -> u64 {
        self.0[0].max(self.0[1])
    }

    pub(super) fn take(&mut self, rate: u64) {
        self.0[1] = self.0[1].max(rate.min(MOST_BW));
    }

    /// Ends a cycle (section 5.5.6). A cycle without a sample does not count.
    pub(super) fn advance(&mut self) {
        if self.0[1] > 0 {
            self.0 = [self.0[1], 0];
        }
    }
}

/// Upper bounds of bandwidth and volume, set after losses.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// BBR.bw_shortterm, BBR.inflight_shortterm and BBR.inflight_longterm.
    pub(super) bw: u64,
    pub(super) short: u64,
    pub(super) long: u64,
}

impl Default for Bounds {
    fn default() -> Self {
        Self { bw: INFINITE, short: INFINITE, long: INFINITE }
    }
}

impl Bounds {
    /// InitLowerBounds and LossLowerBounds (section 5.5.10.3).
    pub(super) fn reduce(&mut self, max_bw: u64, cwnd: u64, latest: &Latest) {
        let beta = |bound: u64, usual: u64| (if bound == INFINITE { usual } else { bound }) / 10 * 7;
        self.bw = latest.bw.max(beta(self.bw, max_bw)).max(1);
        self.short = latest.inflight.max(beta(self.short, cwnd));
    }

    /// ResetShortTermModel.
    pub(super) fn reset_short_term_model(&mut self) {
        (self.bw, self.short) = (INFINITE, INFINITE);
    }

    /// Restores the bounds from before a spurious loss.
    pub(super) fn widen(&mut self, before: &Self) {
        self.bw = self.bw.max(before.bw);
        self.short = self.short.max(before.short);
        self.long = self.long.max(before.long);
    }
}

/// Delivery signals and losses of the last round (section 5.5.10.3).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Latest {
    pub(super) bw: u64,
    pub(super) inflight: u64,
    /// BBR.loss_round_delivered.
    pub(super) until: u64,
    /// BBR.loss_round_start.
    pub(super) round_start: bool,
    /// Whether data was lost in this round, and the number of detected losses.
    pub(super) lost: bool,
    pub(super) events: u8,
}

impl Latest {
    pub(super) fn update(&mut self, sample: &Sample, delivered: u64) {
        self.bw = self.bw.max(sample.rate);
        self.inflight = self.inflight.max(sample.delivered);
        self.round_start = sample.before >= self.until;
        if self.round_start {
            self.until = delivered;
        }
    }

    pub(super) fn advance(&mut self, sample: &Sample) {
        if self.round_start {
            (self.bw, self.inflight) = (sample.rate, sample.delivered);
        }
    }

    /// ResetCongestionSignals.
    pub(super) fn forget(&mut self) {
        (self.lost, self.bw, self.inflight) = (false, 0, 0);
    }
}

/// Packet-timed round trips (section 5.5.1).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rounds {
    next: u64,
    pub(super) count: u64,
    pub(super) start: bool,
}

impl Rounds {
    pub(super) fn update(&mut self, before: u64, delivered: u64) {
        self.start = before >= self.next;
        if self.start {
            self.begin(delivered);
            self.count += 1;
        }
    }

    pub(super) fn begin(&mut self, delivered: u64) {
        self.next = delivered;
    }
}

/// The full pipe estimator (section 5.3.1.2).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FullPipe {
    pub(super) bw: u64,
    count: u8,
    pub(super) now: bool,
    /// BBR.full_bw_reached.
    pub(super) reached: bool,
}

impl FullPipe {
    /// ResetFullBW, with a baseline.
    pub(super) fn reset(&mut self, bw: u64) {
        (self.bw, self.count, self.now) = (bw, 0, false);
    }

    /// CheckFullBWReached, at the start of a round.
    pub(super) fn check(&mut self, sample: &Sample) {
        if self.now || sample.app_limited || sample.rate == 0 {
            return;
        }
        if sample.rate >= self.bw.saturating_add(self.bw / 4) {
            return self.reset(sample.rate);
        }
        self.count += 1;
        self.now = self.count >= 3;
        self.reached |= self.now;
    }
}

/// The minimum round-trip time (section 5.3.4.3).
#[derive(Clone, Copy, Debug)]
pub(super) struct MinRtt {
    /// BBR.min_rtt; infinite before the first sample.
    pub(super) min: Micros,
    stamp: Time,
    probe_min: Micros,
    pub(super) probe_stamp: Time,
    /// BBR.probe_rtt_expired.
    pub(super) expired: bool,
}

impl MinRtt {
    pub(super) fn new(now: Time) -> Self {
        Self { min: Micros::MAX, stamp: now, probe_min: Micros::MAX, probe_stamp: now, expired: false }
    }

    pub(super) fn update(&mut self, now: Time, rtt: Option<Micros>) {
        self.expired = now > self.probe_stamp + PROBE_RTT_INTERVAL;
        if let Some(rtt) = rtt.filter(|rtt| *rtt < self.probe_min || self.expired) {
            (self.probe_min, self.probe_stamp) = (rtt.max(Micros::new(1)), now);
        }
        if self.probe_min < self.min || now > self.stamp + MIN_RTT_LASTS {
            (self.min, self.stamp) = (self.probe_min, self.probe_stamp);
        }
    }
}

/// BBR.extra_acked: the degree of ACK aggregation (section 5.5.9).
#[derive(Clone, Copy, Debug)]
pub(super) struct Aggregation {
    pub(super) since: Time,
    acked: u64,
    most: [u64; 2],
    rounds: u32,
}

impl Aggregation {
    pub(super) fn new(now: Time) -> Self {
        Self { since: now, acked: 0, most: [0; 2], rounds: 0 }
    }

    pub(super) fn update(&mut self, now: Time, bw: u64, acked: u64, cwnd: u64) {
        let expected = bytes_in(bw, now.saturating_since(self.since));
        let expected = if self.acked <= expected {
            (self.acked, self.since) = (0, now);
            0
        } else {
            expected
        };
        self.acked += acked;
        self.most[1] = self.most[1].max((self.acked - expected).min(cwnd));
    }

    /// Counts a round trip. In Startup the filter covers one round trip.
    pub(super) fn end_round(&mut self, in_startup: bool) {
        self.rounds += 1;
        if in_startup || self.rounds >= AGGREGATION_ROUNDS {
            self.most = [self.most[1], 0];
            self.rounds = 0;
        }
    }

    pub(super) fn most(&self) -> u64 {
        self.most[0].max(self.most[1])
    }
}

/// Returns the volume that a bandwidth delivers in `time`.
pub(super) fn bytes_in(bw: u64, time: Micros) -> u64 {
    bw.saturating_mul(time.get()) / 1_000_000
}
