//! Backoff for a thread that is not bound to a core.

use std::hint;
use std::thread;
use std::time::Duration;

/// Empty polls before the thread yields, and before it sleeps.
const POLLS: [u32; 2] = [256, 1024];
/// Length of a sleep.
pub(crate) const NAP: Duration = Duration::from_micros(20);

/// Number of consecutive empty polls.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    polls: u32,
}

impl Idle {
    /// Waits after an empty poll: spins, then yields, then sleeps.
    #[inline]
    pub(crate) fn wait(&mut self) {
        self.polls = self.polls.saturating_add(1);
        if self.polls < POLLS[0] {
            hint::spin_loop();
        } else if self.polls < POLLS[1] {
            thread::yield_now();
        } else {
            thread::sleep(NAP);
        }
    }

    /// Resets the backoff after a poll that found something.
    #[inline]
    pub(crate) fn reset(&mut self) {
        self.polls = 0;
    }
}
