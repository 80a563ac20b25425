//! The steps of linking a process to the stack, and how each fails.

use crate::sys::Errno;

/// A step of linking a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Mapping a page that is zero in a forked child.
    Page,
    /// Creating a Unix socket.
    Socket,
    /// Connecting it to the stack's path.
    Connect,
    /// Sending and receiving messages with descriptors.
    Message,
    /// Being admitted by the stack.
    Welcome,
}

impl Step {
    pub(crate) fn failed(self, error: Errno) -> Failed {
        Failed { step: self, error }
    }
}

/// The reason why a process is not linked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failed {
    pub(crate) step: Step,
    pub(crate) error: Errno,
}

impl Failed {
    /// Returns whether the stack is busy with other programs.
    pub(crate) fn is_busy(self) -> bool {
        match self.step {
            Step::Message => matches!(self.error, libc::ECONNRESET | libc::EPIPE),
            Step::Welcome => self.error == libc::EAGAIN,
            _ => false,
        }
    }

    /// Returns whether the socket's access rights refuse this user. They also do so for a moment when the stack must
    /// close many files of the user.
    pub(crate) fn is_refused(self) -> bool {
        self.step == Step::Connect && self.error == libc::EACCES
    }
}
