//! The end of sessions, and its cause.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use offcore_session::slot::{flags, state, wish};

use super::Session;
use crate::link;
use crate::sys::{self, Errno};

impl Session {
    /// Returns whether the session is over. A connection is also over when its stack has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.slot.flags() & flags::OVER != 0 || self.has_lost_stack()
    }

    /// Returns whether this is a connection whose stack has ended.
    fn has_lost_stack(&self) -> bool {
        link::has_stack_ended()
            && !self.is_datagrams()
            && matches!(self.slot.state(), state::OPEN | state::CONNECTING)
    }

    /// Returns whether both sides have ended their streams.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_option_bit(wish::END) && self.slot.flags() & flags::ENDED != 0
    }

    /// Returns whether the stack has closed the other end of a socket that is not over. This happens when the stack
    /// ends.
    pub(crate) fn is_orphan(&self) -> bool {
        // The stack sets the flag before it closes the other end of a session that is over.
        let hung_up = !sys::is_sandboxed() && sys::has_hung_up(self.fd);
        hung_up && !(self.has_option_bit(wish::END) && self.has_option_bit(wish::NO_READ) || self.is_over())
    }

    /// Returns whether the stack has closed the other end of a listener's descriptor.
    pub(crate) fn is_cut_off(&self) -> bool {
        sys::has_hung_up(self.fd)
    }

    /// Takes the error that ended the session, which is reported once. A datagram socket may have other errors before.
    pub(crate) fn take_error(&self) -> Option<Errno> {
        if self.is_datagrams() {
            return self.take_failure();
        }
        if !self.is_over() {
            return None;
        }
        let error = self.cause();
        let told = self.slot.wishes.told.fetch_or(wish::ERROR_TOLD, Ordering::AcqRel);
        if told & wish::ERROR_TOLD != 0 {
            return None;
        }
        // This also clears the error that `poll` reports.
        if !sys::is_sandboxed() {
            let _ = sys::int_option(self.fd, libc::SOL_SOCKET, libc::SO_ERROR);
        }
        (error != 0).then_some(error)
    }

    /// Returns the error that ended the session, or 0. The end of the stack counts as a reset by the peer.
    fn cause(&self) -> c_int {
        let seen = self.slot.flags();
        if seen & flags::OVER != 0 {
            self.slot.identity.error.load(Ordering::Relaxed) as c_int
        } else if seen & flags::ENDED != 0 {
            // As on Linux after a reset that follows the end of the peer's stream.
            libc::EPIPE
        } else {
            libc::ECONNRESET
        }
    }

    fn take_failure(&self) -> Option<Errno> {
        let error = self.slot.identity.take_failure().filter(|_| !self.is_lost())?;
        if self.is_over() {
            let _ = sys::int_option(self.fd, libc::SOL_SOCKET, libc::SO_ERROR);
        }
        self.settle_errors();
        Some(error as Errno)
    }
}
