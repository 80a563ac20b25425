//! Health of channels and queues: when repeated failures take one out of service, and when it is tried again.
//!
//! A health is kept for every channel, and for every queue whose guest's memory faults. Successful operations halve the
//! number of remembered failures, so that the failure rate decides. Time is passed in, so that tests can control it.

use super::stats::{ChannelHealth, Service};

/// Number of remembered failures that takes a channel out of service, or a queue off its channels.
pub const FAILURES: u32 = 16;
/// Number of successful operations that halves the remembered failures. A channel is taken out of service at a failure
/// rate of about one in 32 operations.
pub const FORGET_AFTER: u32 = 256;
/// Weight of a reset: a channel that loses copies twice in a row is taken out of service.
pub(super) const RESET: u32 = FAILURES / 2;

/// Waiting times before another trial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BackOff {
    /// First waiting time in TSC ticks.
    pub(super) first: u64,
    /// Maximum waiting time; the time doubles with every failed trial.
    pub(super) most: u64,
}

#[derive(Clone, Copy, Debug)]
enum State {
    In,
    /// Out of service until this TSC value.
    Out(u64),
    /// A probing burst is in flight.
    Probing,
}

/// The health of a channel or queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Health {
    state: State,
    failures: u32,
    succeeded: u32,
    pause: u64,
    pub(super) failed: u64,
    pub(super) taken_out: u64,
    pub(super) probes: u64,
}

impl Health {
    pub(super) const fn new() -> Self {
        Self { state: State::In, failures: 0, succeeded: 0, pause: 0, failed: 0, taken_out: 0, probes: 0 }
    }

    #[inline(always)]
    pub(super) fn is_in(&self) -> bool {
        matches!(self.state, State::In)
    }

    /// Whether a burst may be sent. The time is only read if it is needed.
    #[inline(always)]
    pub(super) fn admits(&self, now: impl FnOnce() -> u64) -> bool {
        match self.state {
            State::In => true,
            // The comparison wraps, like all TSC differences.
            State::Out(until) => now().wrapping_sub(until) < u64::MAX / 2,
            State::Probing => false,
        }
    }

    /// Records that a burst is sent. If out of service, the burst is a probe.
    #[inline(always)]
    pub(super) fn sent(&mut self) {
        if !self.is_in() {
            self.state = State::Probing;
            self.probes += 1;
        }
    }

    /// Records that `n` operations succeeded.
    #[inline(always)]
    pub(super) fn succeeded(&mut self, n: u32) {
        self.succeeded += n;
        if self.succeeded >= FORGET_AFTER {
            (self.succeeded, self.failures) = (0, self.failures / 2);
        }
    }

    /// Records that nothing is in flight any more: a probe that has not failed has succeeded.
    #[inline(always)]
    pub(super) fn settled(&mut self) {
        if matches!(self.state, State::Probing) {
            (self.state, self.failures) = (State::In, 0);
        }
    }

    /// Records a failure with this weight. Returns whether it took the channel or queue out of service.
    pub(super) fn failed(&mut self, weight: u32, now: u64, back_off: BackOff) -> bool {
        self.failed += 1;
        self.failures += weight;
        match self.state {
            State::Out(_) => false,
            State::Probing => {
                self.pause = self.pause.saturating_mul(2).min(back_off.most);
                self.out(now);
                false
            }
            State::In if self.failures >= FAILURES => {
                // A channel that was in service starts with the shortest pause.
                self.pause = back_off.first;
                self.taken_out += 1;
                self.out(now);
                true
            }
            State::In => false,
        }
    }

    fn out(&mut self, now: u64) {
        self.state = State::Out(now.wrapping_add(self.pause));
        (self.failures, self.succeeded) = (0, 0);
    }

    pub(super) fn report(&self) -> ChannelHealth {
        let service = match self.state {
            State::In => Service::In,
            State::Out(_) => Service::Out,
            State::Probing => Service::Probing,
        };
        ChannelHealth { service, failures: self.failed, taken_out: self.taken_out, probes: self.probes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BACK_OFF: BackOff = BackOff { first: 100, most: 300 };

    fn out(health: &mut Health, now: u64) {
        let taken = (0..FAILURES).filter(|_| health.failed(1, now, BACK_OFF)).count();
        assert_eq!((taken, health.is_in()), (1, false));
    }

    #[test]
    fn consecutive_failures_disable_channel() {
        let mut health = Health::new();
        assert!((0..FAILURES - 1).all(|_| !health.failed(1, 0, BACK_OFF)));
        assert!(health.is_in());
        assert!(health.failed(1, 0, BACK_OFF));
        assert!(!health.admits(|| 99));
    }

    #[test]
    fn one_probe_burst_reenables_channel() {
        let mut health = Health::new();
        out(&mut health, 1000);
        assert!(!health.admits(|| 1099) && health.admits(|| 1100));
        health.sent();
        assert!(!health.admits(|| 5000), "one burst only");
        health.settled();
        assert!(health.is_in());
        assert_eq!((health.taken_out, health.probes), (1, 1));
    }

    #[test]
    fn failed_probe_doubles_the_pause() {
        let mut health = Health::new();
        out(&mut health, 0);
        let mut now = 0;
        for pause in [100, 200, 300, 300] {
            assert!(!health.admits(|| now + pause - 1), "{pause}");
            now += pause;
            assert!(health.admits(|| now));
            health.sent();
            // Some operations of the burst succeed.
            health.succeeded(1000);
            health.failed(1, now, BACK_OFF);
            health.settled();
        }
        assert_eq!((health.taken_out, health.probes), (1, 4));
    }
}
