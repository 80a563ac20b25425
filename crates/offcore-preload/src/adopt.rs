//! Descriptors that came from elsewhere: passed by another process, or had before this program was executed.

use core::ffi::c_int;

use offcore_session::message::{Call, NONE, Question};

use crate::environment;
use crate::kernel_listeners;
use crate::link;
use crate::session::{self, Session};
use crate::sys;
use crate::table::{self, Entry, Kind};

/// A descriptor that came from somewhere: it may be an end of one of the application's sessions.
pub(crate) fn adopt(fd: c_int) {
    let option = |name| sys::int_option(fd, libc::SOL_SOCKET, name);
    let may_be = option(libc::SO_DOMAIN) == libc::AF_UNIX && option(libc::SO_TYPE) == libc::SOCK_STREAM;
    if !may_be || link::is_own(fd) || link::ensure().is_err() || !link::is_stacks(fd) {
        return;
    }
    if let Ok((answer, received)) = link::ask(&Question::new(Call::Adopt, NONE, 0), &[fd]) {
        let entry = Entry::session(Kind::Stream, false, answer.session);
        table::set(fd, Some(entry));
        // Which of both kinds, and what its program calls its addresses, lies in the slot.
        if let Some(session) = session::get(fd) {
            let session = Session { entry: session.as_it_is(), ..session };
            table::set(fd, Some(session.entry));
            if let [kernel] = *received.as_slice()
                && let Ok(kernel) = link::far(kernel)
            {
                kernel_listeners::keep(session.entry, session.slot, kernel);
            }
        }
        received.close();
    }
}

/// A program that has just been executed may have sessions of the one before it.
pub(crate) fn inherit() {
    if !environment::was_linked() {
        return;
    }
    sys::each_descriptor(adopt);
}
