//! How a thread that is bound to no core waits for work that comes soon, or not for a while.

use std::hint;
use std::thread;
use std::time::Duration;

/// Looks that find nothing before the thread lets others run, and before it sleeps.
const LOOKS: [u32; 2] = [256, 1024];
/// How long it sleeps then.
pub(crate) const NAP: Duration = Duration::from_micros(20);

/// How many looks in a row have found nothing.
#[derive(Debug, Default)]
pub(crate) struct Idle {
    looks: u32,
}

impl Idle {
    /// A look has found nothing: waits until the next one, at first for a moment only.
    #[inline]
    pub(crate) fn wait(&mut self) {
        self.looks = self.looks.saturating_add(1);
        if self.looks < LOOKS[0] {
            hint::spin_loop();
        } else if self.looks < LOOKS[1] {
            thread::yield_now();
        } else {
            thread::sleep(NAP);
        }
    }

    /// A look has found something.
    #[inline]
    pub(crate) fn over(&mut self) {
        self.looks = 0;
    }
}
