//! Limits on the packets per second that a port may have flooded (storm control).

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Fractional bits of a tick: the cost of a packet is rounded to 1/16 tick.
const FRACTION: u32 = 4;
/// Divisor of a second: after a pause, the packets of 1/10 s may be flooded at once.
const BURST_PART: u64 = 10;

/// The limit of one port, shared by the workers of all its queues.
///
/// The state is the time at which the packets allowed so far would all have been due at the limit's rate. A packet is
/// allowed if this time is not too far ahead of the clock.
#[derive(Debug)]
pub struct FloodLimit {
    /// Cost of a packet in 1/16 ticks.
    cost: u64,
    /// How far `due` may be ahead of the clock, in 1/16 ticks.
    ahead: u64,
    due: AtomicU64,
}

impl FloodLimit {
    /// Creates a limit of `pps` packets per second (at least 1). A tenth of a second's packets may be flooded at once.
    /// The clock has `hz` ticks per second.
    pub fn new(pps: u64, hz: u64) -> Self {
        let pps = pps.max(1);
        let cost = ((hz << FRACTION) / pps).max(1);
        Self { cost, ahead: cost.saturating_mul((pps / BURST_PART).max(1)), due: AtomicU64::new(0) }
    }

    /// Returns how many of `wanted` packets may be flooded at `now`, in ticks, and counts them as flooded.
    #[inline]
    pub fn take(&self, now: u64, wanted: u64) -> u64 {
        let now = now << FRACTION;
        let mut due = self.due.load(Relaxed);
        loop {
            let from = due.max(now);
            let allowed = ((now + self.ahead).saturating_sub(from) / self.cost).min(wanted);
            if allowed == 0 {
                return 0;
            }
            match self.due.compare_exchange_weak(due, from + allowed * self.cost, Relaxed, Relaxed) {
                Ok(_) => return allowed,
                // Another worker of the port has changed it.
                Err(other) => due = other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HZ: u64 = 2_000_000_000;

    #[test]
    fn flood_limit_is_kept() {
        for (pps, step) in [(1, 999_999), (10, 12_345_678), (1_000, 777_777), (3_000_000, 5_003)] {
            let limit = FloodLimit::new(pps, HZ);
            let start = 1 << 50;
            let allowed: u64 = (start..start + HZ).step_by(step).map(|now| limit.take(now, 64)).sum();
            let expected = pps + (pps / BURST_PART).max(1);
            assert!((expected - 1..=expected + expected / 1000).contains(&allowed), "{allowed} at {pps}/s");
        }
    }

    #[test]
    fn idle_time_allows_short_burst() {
        let limit = FloodLimit::new(1000, HZ);
        assert_eq!(limit.take(5 * HZ, 5000), 100);
        assert_eq!(limit.take(5 * HZ, 1), 0);
        assert_eq!(limit.take(5 * HZ + HZ / 1000, 5), 1);
        assert_eq!(limit.take(500 * HZ, 5000), 100);
    }

    #[test]
    fn workers_share_flood_limit() {
        let limit = FloodLimit::new(100_000, HZ);
        let allowed: u64 = std::thread::scope(|scope| {
            let workers =
                [(); 3].map(|()| scope.spawn(|| (0..10_000).map(|_| limit.take(HZ, 7)).sum::<u64>()));
            workers.into_iter().map(|worker| worker.join().unwrap()).sum()
        });
        assert_eq!(allowed, 10_000);
    }
}
