//! Wake-up of a worker that waits for a ring's packets: an eventfd, and a flag that says whether the worker sleeps.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// The eventfd of one ring.
#[derive(Debug)]
pub(super) struct Bell {
    asleep: AtomicBool,
    event: OwnedFd,
}

impl Bell {
    /// Creates a bell without a sleeping receiver.
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { asleep: AtomicBool::new(false), event })
    }

    /// Returns the eventfd, which is readable after the bell has rung.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Announces that the receiver is going to sleep. The receiver must check the ring once more after this.
    pub(super) fn arm(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        // Ordered before that check: either the receiver sees the packets, or the sender sees that the receiver sleeps.
        fence(Ordering::SeqCst);
    }

    /// Announces that the receiver is awake.
    pub(super) fn disarm(&self) {
        if !self.asleep.swap(false, Ordering::Relaxed) {
            // The value does not matter. If it has not been written yet, the next sleep is short.
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }

    /// Announces packets. This makes a system call only if the receiver sleeps.
    #[inline]
    pub(super) fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        if self.asleep.swap(false, Ordering::Relaxed) {
            // This can only fail if the eventfd is already readable.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}
