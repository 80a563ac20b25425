//! Wakes the stack for one application.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use offcore_session::control::Control;
use offcore_stats::time::{Micros, Time};

/// Time without work after which an application may fall asleep.
const IDLE: Micros = Micros::from_millis(10);

/// The eventfd with which an application wakes the stack, and whether the application must use it. An application is
/// awake while the stack reads its marks in each round, and asleep while it must write to the eventfd. Its processes
/// run in both states.
#[derive(Debug)]
pub(super) struct Doorbell {
    /// It is never read: each write is an event.
    event: OwnedFd,
    /// The marks are read in each round, so the application does not ring.
    awake: bool,
    /// When the application last had work.
    worked: Time,
}

impl Doorbell {
    /// The doorbell of an application that is awake.
    pub(super) fn new(event: OwnedFd) -> Self {
        Self { event, awake: true, worked: Time::ZERO }
    }

    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// The application has work at the time `now`.
    #[inline]
    pub(super) fn record_work(&mut self, now: Time) {
        self.worked = now;
    }

    /// Whether the application had no work for long enough to fall asleep.
    pub(super) fn is_idle(&self, now: Time) -> bool {
        now >= self.worked + IDLE
    }

    /// Wakes the application. Returns whether it was asleep: marks that it has set must then be read.
    #[inline]
    pub(super) fn wake(&mut self, control: &Control) -> bool {
        let slept = !std::mem::replace(&mut self.awake, true);
        if slept {
            control.disarm();
        }
        slept
    }

    /// Puts the application to sleep, unless it has just asked for something. Returns whether it is asleep.
    pub(super) fn fall_asleep(&mut self, control: &Control) -> bool {
        self.awake = control.arm();
        if self.awake {
            control.disarm();
        }
        !self.awake
    }
}
