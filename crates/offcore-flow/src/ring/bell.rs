//! How a worker that sleeps learns that a ring has packets: an event, and a flag that says whether anybody waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

use rustix::event::{EventfdFlags, eventfd};

/// The event of one ring.
#[derive(Debug)]
pub(super) struct Bell {
    asleep: AtomicBool,
    event: OwnedFd,
}

impl Bell {
    /// One that nobody waits for.
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { asleep: AtomicBool::new(false), event })
    }

    /// What is readable when it has rung.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// The receiver is going to sleep. It has to look once more whether there is something, after this.
    pub(super) fn arm(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        // Before it looks: either it sees what has been sent, or the sender sees that it sleeps.
        fence(Ordering::SeqCst);
    }

    /// The receiver is awake.
    pub(super) fn disarm(&self) {
        if !self.asleep.swap(false, Ordering::Relaxed) {
            // What was written says only that there was something. When it is not there yet the next sleep is short.
            let _ = rustix::io::read(&self.event, &mut [0; 8]);
        }
    }

    /// The sender has sent something. A system call only when the receiver sleeps.
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
            // It can only fail where the receiver is told already.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}
