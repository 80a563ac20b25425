//! Rate limits for events.

use std::time::{Duration, Instant};

/// A rate limit with bursts (a token bucket).
#[derive(Debug)]
pub struct Pace {
    each: Duration,
    ahead: Duration,
    /// The time at which all events so far would have been due.
    due: Instant,
}

impl Pace {
    /// Creates a limit of one event per `each`, with bursts of up to `at_once` events.
    pub fn new(each: Duration, at_once: u32) -> Self {
        Self { each, ahead: each * at_once, due: Instant::now() }
    }

    /// Records an event. Returns the time until the next one is allowed.
    pub fn pause(&mut self, now: Instant) -> Duration {
        self.due = self.due.max(now) + self.each;
        self.due.saturating_duration_since(now + self.ahead)
    }

    /// Whether an event is allowed now. If so, it is recorded.
    pub fn allows(&mut self, now: Instant) -> bool {
        let due = self.due.max(now) + self.each;
        let allowed = due <= now + self.ahead;
        if allowed {
            self.due = due;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_is_kept_after_a_run() {
        let (mut pausing, mut allowing) =
            (Pace::new(Duration::from_secs(2), 5), Pace::new(Duration::from_secs(2), 5));
        let start = Instant::now();
        let pauses: Vec<u64> = (0..7).map(|_| pausing.pause(start).as_secs()).collect();
        assert!(
            pauses[..5].iter().all(|&pause| pause == 0) && pauses[5] >= 1 && pauses[6] >= 3,
            "{pauses:?}"
        );
        assert_eq!((0..100).filter(|_| allowing.allows(start)).count(), 5);
        let later = start + Duration::from_secs(7);
        assert_eq!((0..100).filter(|_| allowing.allows(later)).count(), 3);
        let much_later = start + Duration::from_secs(700);
        assert_eq!((0..100).filter(|_| allowing.allows(much_later)).count(), 5);
    }
}
