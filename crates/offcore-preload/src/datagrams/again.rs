//! Datagram sockets that outlive their stack.
//!
//! After the stack's death, each call looks for a stack at the same path, and requests a socket with the same
//! addresses, peer and options. Until a stack is available, a timer replaces the descriptor, as in
//! [`crate::listeners`], so that a program that polls calls again. Datagrams that were not yet received or sent are
//! lost.
//!
//! Each process that shares a socket gets its own socket on the same port.

use core::ffi::c_int;
use core::sync::atomic::Ordering;

use offcore_session::message::{Call, NONE, ONLY_V6, Question, SHARE_ADDRESS, SHARE_PORT};
use offcore_session::slot::Slot;

use super::peer;
use crate::address::{self, End};
use crate::datagram_options::kept_name;
use crate::decide::{self, NewSession};
use crate::link;
use crate::listeners::{self, LOOK};
use crate::lost;
use crate::memberships;
use crate::session::{self, Session};
use crate::step::Step;
use crate::sys::{self, Errno};
use crate::table::{Entry, SocketKind};

/// Internal error: the stack of a socket has ended. Calls do not return it.
pub(super) const GONE: Errno = libc::EOWNERDEAD;

/// Waits for a stack, and moves the socket to it.
///
/// # Errors
/// `EAGAIN` if the call does not wait, and `EINTR` after a signal.
pub(super) fn wait_for_stack(fd: c_int, waits: bool) -> Result<Session, Errno> {
    loop {
        if let Some(session) = move_to_stack(fd)? {
            return Ok(session);
        }
        if !waits || sys::fcntl(fd, libc::F_GETFL, 0)? & libc::O_NONBLOCK as usize != 0 {
            return Err(libc::EAGAIN);
        }
        sys::wait_for_signal(LOOK)?;
    }
}

/// Moves the socket to the present stack.
///
/// # Errors
/// `ENETDOWN` without a stack.
pub(super) fn move_now(fd: c_int) -> Result<Session, Errno> {
    move_to_stack(fd)?.ok_or(libc::ENETDOWN)
}

/// Moves the socket to the present stack. Returns `None` without a stack.
fn move_to_stack(fd: c_int) -> Result<Option<Session>, Errno> {
    let _signals = sys::Blocked::new();
    let _lock = link::listeners();
    let there = link::renew();
    let session = session::get(fd).filter(|session| session.is_datagrams()).ok_or(libc::EBADF)?;
    if there.is_ok() && !session.is_lost() && !sys::has_hung_up(fd) {
        // Another thread has moved it.
        return Ok(Some(session));
    }
    let slot = session.slot;
    let entry = if session.is_lost() { session.entry } else { link::mark_lost(fd, session.entry, slot) };
    // If requested, a server exits when its stack ends. A client tries again.
    let serves = peer(&session).is_none();
    if serves {
        listeners::exit_on_loss();
    }
    let made = match there {
        Ok(()) => request_socket(fd, entry, slot),
        Err((Step::Connect | Step::Welcome, error @ (libc::EACCES | libc::EPROTO))) => Err(error),
        Err(_) => Err(libc::ENETDOWN),
    };
    match made {
        Ok(session) => Ok(Some(session)),
        Err(error @ (libc::EADDRINUSE | libc::EADDRNOTAVAIL | libc::EACCES | libc::EPROTO)) if serves => {
            listeners::give_up(error, address::of(slot, End::Ours).port())
        }
        Err(_) => {
            listeners::wait_by_timer(fd, entry);
            Ok(None)
        }
    }
}

/// Requests the socket from the stack.
fn request_socket(fd: c_int, entry: Entry, slot: &'static Slot) -> Result<Session, Errno> {
    let (local, remote) = (address::of(slot, End::Ours), address::of(slot, End::Peer));
    let has = |level, name| slot.kept.get(kept_name(level, name)).is_some_and(|value| value != 0);
    let bit = |bit, is_set| if is_set { bit } else { 0 };
    let value = libc::SOCK_DGRAM as u32
        | SHARE_PORT
        | bit(SHARE_ADDRESS, has(libc::SOL_SOCKET, libc::SO_REUSEADDR))
        | bit(ONLY_V6, has(libc::IPPROTO_IPV6, libc::IPV6_V6ONLY));
    let remote = (remote.port() != 0).then_some(remote);
    let call = if remote.is_some() { Call::Connect } else { Call::Bind };
    let mut question = Question::new(call, NONE, value);
    (question.local, question.remote) = (Some(local), remote);
    let NewSession { place, fd: end } = decide::ask_session(fd, &question, &[])?;
    lost::restore_timeouts(slot, end);
    let new = Entry::session(SocketKind::Datagrams, entry.v6, place);
    let session = listeners::replace(fd, entry, end, new).ok_or(libc::EIO)?;
    decide::copy_options(&session, slot);
    memberships::rejoin_groups(&session);
    // The word now counts bytes in the pair of this session.
    session.slot.wishes.leftover.store(0, Ordering::Relaxed);
    Ok(session)
}
