//! Time budget of a run: decides whether cells get fewer windows.

use std::time::{Duration, Instant};

/// Number of measured windows and of planned windows.
#[derive(Debug)]
pub(super) struct Pace {
    begun: Instant,
    limit: Duration,
    done: usize,
    steps: usize,
}

impl Pace {
    /// Creates a budget of `limit` for `steps` windows.
    pub(super) fn new(steps: usize, limit: Duration) -> Self {
        Self { begun: Instant::now(), limit, done: 0, steps }
    }

    /// Returns the total number of windows.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// Returns the number of measured windows.
    pub(super) fn done(&self) -> usize {
        self.done
    }

    /// Records a measured window.
    pub(super) fn step(&mut self) {
        self.done += 1;
    }

    /// Removes `steps` windows from the plan.
    pub(super) fn skip(&mut self, steps: usize) {
        self.steps -= steps;
    }

    /// Returns whether the limit will be exceeded at the current speed.
    pub(super) fn is_late(&self) -> bool {
        self.is_late_after(self.begun.elapsed())
    }

    fn is_late_after(&self, elapsed: Duration) -> bool {
        // The first few windows do not predict the others.
        elapsed * 10 > self.limit
            && elapsed.as_secs_f64() * self.steps as f64 > self.limit.as_secs_f64() * self.done as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_run_has_fewer_windows() {
        let mut pace = Pace::new(10, Duration::from_secs(10));
        (0..4).for_each(|_| pace.step());
        assert!(!pace.is_late_after(Duration::from_secs(4)));
        assert!(pace.is_late_after(Duration::from_secs(5)));
        pace.skip(2);
        assert!(!pace.is_late_after(Duration::from_secs(5)) && pace.steps() == 8);
        let mut young = Pace::new(1000, Duration::from_secs(10));
        young.step();
        assert!(!young.is_late_after(Duration::from_secs(1)));
    }
}
