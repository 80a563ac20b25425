//! CUBIC (RFC 9438) with integer arithmetic.
//!
//! The curve's time is counted in units of 256 µs, so that its cube fits 64 bits for nine minutes. Later, the window
//! grows by half per round trip in any case, which is its limit. Windows are in bytes.

use offcore_stats::time::{Micros, Time};

/// The unit of time is 2^8 microseconds.
const UNIT: u32 = 8;
/// Maximum distance from the inflection point: 2^21 units are 537 s.
const FARTHEST: u64 = 1 << 21;
/// C = 0.4 segments per second cubed, per unit cubed, times 2^64: 0.4 × (256 / 10^6)^3 × 2^64.
const C: u64 = 123_794_004;
/// 1 / C in units cubed: (10^6 / 256)^3 / 0.4.
const INVERSE_C: u128 = 149_011_611_938;

/// The state of CUBIC.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cubic {
    /// Start of this congestion avoidance epoch; 0 before its first ACK.
    epoch: Time,
    /// Time of the last ACK.
    last: Time,
    /// The window that Reno would have, in 2^-16 bytes: W_est.
    reno: u64,
    /// The window before the last loss, reduced if it was below the one before: W_max.
    w_max: u32,
    /// The unreduced window before the last loss: cwnd_prior.
    prior: u32,
    /// The window at the inflection point: W_max, or the window at the start of the epoch.
    origin: u32,
    /// Time from the start of the epoch to the inflection point, in units: K.
    k: u32,
    /// Growth of less than a byte that is not applied yet, as a numerator over the window.
    rest: u32,
}

impl Cubic {
    /// Returns the window after `acked` more bytes in congestion avoidance (section 4.2 to 4.5).
    #[inline]
    pub(super) fn on_ack(&mut self, now: Time, cwnd: u32, acked: u32, mss: u32, srtt: Micros) -> u32 {
        self.last = now;
        let cwnd = cwnd.max(1);
        if self.epoch == Time::ZERO {
            self.begin(now, cwnd, mss);
        }
        let elapsed = now.saturating_since(self.epoch);
        // α is 3 (1 - β) / (1 + β) = 9 / 17 up to the window before the loss, and 1 beyond it.
        let gain = u64::from(acked.min(cwnd)) * u64::from(mss);
        let slow = self.reno >> 16 < u64::from(self.prior);
        let gain = if slow { gain * 9 / 17 } else { gain };
        // The product is below 2^46 for any MSS: a window is at most 2^30, an MSS 2^16.
        self.reno = self.reno.saturating_add((gain << 16) / u64::from(cwnd));
        let reno = u32::try_from(self.reno >> 16).unwrap_or(u32::MAX);
        if self.curve(elapsed, mss) < reno {
            return cwnd.max(reno);
        }
        let most = cwnd.saturating_add(cwnd / 2);
        let target = self.curve(elapsed + srtt, mss).clamp(cwnd, most);
        let growth = u64::from(target - cwnd) * u64::from(acked.min(cwnd)) + u64::from(self.rest);
        let whole = growth / u64::from(cwnd);
        self.rest = (growth % u64::from(cwnd)) as u32;
        cwnd.saturating_add(u32::try_from(whole).unwrap_or(u32::MAX))
    }

    /// Returns the slow start threshold after a loss with `flight` bytes in flight: β is 0.7 (section 4.6). A flow
    /// whose window was below the previous one gives way to newer flows (fast convergence, section 4.7).
    pub(super) fn on_loss(&mut self, cwnd: u32, flight: u32) -> u32 {
        let wide = u64::from(cwnd);
        self.w_max = if cwnd < self.w_max { (wide * 17 / 20) as u32 } else { cwnd };
        self.prior = cwnd;
        self.forget_epoch();
        (u64::from(flight) * 7 / 10) as u32
    }

    /// Makes the next ACK in congestion avoidance start a new epoch.
    pub(super) fn forget_epoch(&mut self) {
        self.epoch = Time::ZERO;
        self.rest = 0;
    }

    /// Excludes the time since the last ACK from the epoch.
    pub(super) fn pause(&mut self, now: Time) {
        if self.epoch > Time::ZERO {
            self.epoch = self.epoch.saturating_add(now.saturating_since(self.last));
        }
        self.last = now;
    }

    fn begin(&mut self, now: Time, cwnd: u32, mss: u32) {
        self.epoch = now.max(Time::from_micros(1));
        self.reno = u64::from(cwnd) << 16;
        self.origin = cwnd.max(self.w_max);
        let missing = u128::from(self.origin - cwnd);
        self.k = cube_root(missing * INVERSE_C / u128::from(mss.max(1)));
    }

    /// W_cubic, `elapsed` into the epoch.
    #[inline]
    fn curve(&self, elapsed: Micros, mss: u32) -> u32 {
        let (time, k) = (elapsed.get() >> UNIT, u64::from(self.k));
        let distance = time.abs_diff(k).min(FARTHEST);
        let cube = u128::from(distance * distance * distance);
        let bytes = (cube * u128::from(C * u64::from(mss))) >> 64;
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        if time < k { self.origin.saturating_sub(bytes) } else { self.origin.saturating_add(bytes) }
    }
}

/// Returns the integer cube root of a number below 2^72.
fn cube_root(of: u128) -> u32 {
    let mut root = 0_u128;
    for bit in (0..24).rev() {
        let next = root | 1 << bit;
        if next * next * next <= of {
            root = next;
        }
    }
    root as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSS: u32 = 1448;

    /// RFC 9438, figure 1 and 2, in floating point: segments, seconds.
    fn oracle(w_max: f64, begin: f64, t: f64) -> f64 {
        let k = ((w_max - begin) / 0.4).cbrt();
        0.4 * (t - k).powi(3) + w_max
    }

    #[test]
    fn w_cubic_matches_figure_1() {
        for (w_max, mss) in [(100_u32, 1448), (10_000, 1448), (5000, 9000), (50, 536)] {
            let mut cubic = Cubic::default();
            assert_eq!(cubic.on_loss(w_max * mss, w_max * mss), (u64::from(w_max * mss) * 7 / 10) as u32);
            let begin = w_max * mss / 10 * 7;
            cubic.begin(Time::from_micros(1), begin, mss);
            for ms in (0..60_000_u64).step_by(250) {
                let got = f64::from(cubic.curve(Micros::from_millis(ms), mss)) / f64::from(mss);
                let want = oracle(f64::from(w_max), f64::from(begin) / f64::from(mss), ms as f64 / 1000.0);
                assert!((got - want).abs() < 0.5 + want * 0.005, "{w_max} at {ms} ms: {got}, not {want}");
            }
        }
    }

    // RFC 9438, section 4.2: with ACKs for every segment the window follows W_cubic.
    #[test]
    fn cwnd_follows_w_cubic() {
        let (w_max, srtt) = (2000 * MSS, Micros::from_millis(100));
        let mut cubic = Cubic::default();
        let mut cwnd = cubic.on_loss(w_max, w_max);
        let begin = f64::from(cwnd) / f64::from(MSS);
        let mut now = Time::from_secs(1);
        let start = now;
        while now < start + Micros::from_secs(20) {
            let acks = u64::from(cwnd / (2 * MSS)).max(1);
            for i in 0..acks {
                cwnd = cubic.on_ack(now + srtt * i / acks, cwnd, 2 * MSS, MSS, srtt);
            }
            now += srtt;
            let want = oracle(2000.0, begin, (now - start).get() as f64 / 1e6);
            let got = f64::from(cwnd) / f64::from(MSS);
            assert!((got / want - 1.0).abs() < 0.03, "{got}, not {want}, after {:?}", now - start);
        }
    }

    // RFC 9438, section 4.3: if the curve is slower than Reno, Reno's growth is used.
    #[test]
    fn reno_friendly_region_grows_as_reno() {
        let srtt = Micros::from_millis(1);
        let mut cubic = Cubic::default();
        let mut cwnd = cubic.on_loss(20 * MSS, 20 * MSS);
        let (begin, mut now) = (cwnd, Time::from_micros(1));
        for _ in 0..10 {
            for _ in 0..cwnd / MSS {
                cwnd = cubic.on_ack(now, cwnd, MSS, MSS, srtt);
            }
            now += srtt;
        }
        let grown = f64::from(cwnd - begin) / f64::from(MSS);
        assert!((4.5..6.0).contains(&grown), "9/17 of a segment per round trip: {grown}");
    }

    // RFC 9438, section 4.7.
    #[test]
    fn fast_convergence_lowers_w_max() {
        let mut cubic = Cubic::default();
        cubic.on_loss(100 * MSS, 100 * MSS);
        assert_eq!(cubic.w_max, 100 * MSS);
        cubic.on_loss(90 * MSS, 90 * MSS);
        assert_eq!(cubic.w_max, (f64::from(90 * MSS) * 0.85) as u32);
        assert_eq!(cubic.prior, 90 * MSS);
    }

    // RFC 9438, section 5.8.
    #[test]
    fn idle_time_does_not_grow_cwnd() {
        let (at, srtt) = (Time::from_micros, Micros::from_millis(10));
        let grown = |idle: bool| {
            let mut cubic = Cubic::default();
            let mut cwnd = cubic.on_loss(1000 * MSS, 1000 * MSS);
            cwnd = cubic.on_ack(at(1000), cwnd, MSS, MSS, srtt);
            if idle {
                cubic.pause(at(60_001_000));
                return cubic.on_ack(at(60_001_000), cwnd, cwnd, MSS, srtt) - cwnd;
            }
            cubic.on_ack(at(1000), cwnd, cwnd, MSS, srtt) - cwnd
        };
        assert_eq!(grown(true), grown(false));
    }

    #[test]
    fn cube_root_rounds_down() {
        for root in [0_u128, 1, 2, 3, 255, 4096, 1 << 20, (1 << 24) - 1] {
            assert_eq!(u128::from(cube_root(root * root * root)), root);
            assert_eq!(u128::from(cube_root(root * root * root + 1)), root.max(1));
        }
    }

    #[test]
    fn extreme_values_do_not_overflow() {
        let mut cubic = Cubic::default();
        let mut now = 0_u64;
        let mut cwnd = 1;
        for step in 0..2000_u32 {
            cwnd = cubic
                .on_ack(Time::from_micros(now), cwnd, u32::MAX, 65_535, Micros::from_secs(60))
                .min(1 << 30);
            now = now.wrapping_mul(3).wrapping_add(1) % (1 << 50);
            if step % 97 == 0 {
                cubic.on_loss(cwnd, u32::MAX);
            }
        }
    }
}
