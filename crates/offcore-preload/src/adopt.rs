//! Adopts descriptors that another process passed, or that a previous program left open before `execve`.

use core::ffi::c_int;

use offcore_session::message::{Call, NONE, Question};

use crate::environment;
use crate::kernel_listeners;
use crate::link;
use crate::session::{self, Session};
use crate::sys;
use crate::table::{self, Entry, SocketKind};

/// Adopts a descriptor of unknown origin if it is the end of a session of this application.
pub(crate) fn adopt(fd: c_int) {
    let option = |name| sys::int_option(fd, libc::SOL_SOCKET, name);
    let may_be = option(libc::SO_DOMAIN) == libc::AF_UNIX && option(libc::SO_TYPE) == libc::SOCK_STREAM;
    if !may_be || link::is_own(fd) || link::ensure_linked().is_err() || !link::is_stack_peer(fd) {
        return;
    }
    if let Ok((answer, received)) = link::ask(&Question::new(Call::Adopt, NONE, 0), &[fd]) {
        let entry = Entry::session(SocketKind::Stream, false, answer.session);
        table::set(fd, Some(entry));
        // The slot has the kind of the session and the address family of its socket.
        if let Some(session) = session::get(fd) {
            let session = Session { entry: session.entry_from_slot(), ..session };
            table::set(fd, Some(session.entry));
            if let [kernel] = *received.as_slice()
                && let Ok(kernel) = link::duplicate_high(kernel)
            {
                kernel_listeners::keep(session.entry, session.slot, kernel);
            }
        }
        received.close();
    }
}

/// Adopts sessions that the previous program of this process left open.
pub(crate) fn inherit() {
    if !environment::was_linked() {
        return;
    }
    sys::each_descriptor(adopt);
}
