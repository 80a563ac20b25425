//! The error queue of a datagram socket: `MSG_ERRQUEUE`, `IP_RECVERR`, `IPV6_RECVERR` (ip(7), ipv6(7)).

use core::ffi::c_short;
use core::net::SocketAddr;
use core::sync::atomic::Ordering;

use offcore_session::message::{Call, Question};
use offcore_session::undelivered::Undelivered;

use crate::datagram_options as options;
use crate::link;
use crate::session::Session;
use crate::sys::Errno;

/// Takes the oldest error.
///
/// # Errors
/// `EAGAIN` for an empty queue: reading it never waits.
pub(crate) fn take(session: &Session) -> Result<Undelivered, Errno> {
    // A socket whose options were just cleared has no errors, either.
    let hears = options::bits(session) & (options::bit::ERRORS | options::bit::ERRORS6) != 0;
    if !hears || session.is_lost() || session.slot.undelivered().load(Ordering::Acquire) == 0 {
        return Err(libc::EAGAIN);
    }
    let (answer, received) = link::ask(&question(session, 0), &[])?;
    received.close();
    session.settle_errors();
    Undelivered::from_words(&answer.info).ok_or(libc::EIO)
}

/// With `IP_RECVERR`, adds the error of a datagram that is too long for its path to the queue.
pub(super) fn queue_length_error(session: &Session, to: SocketAddr) {
    let bit = if to.is_ipv4() { options::bit::ERRORS } else { options::bit::ERRORS6 };
    let mtu = session.slot.mtu().load(Ordering::Relaxed);
    if options::bits(session) & bit != 0 && mtu > 0 {
        let mut question = question(session, mtu);
        // As on Linux, an IPv4 error contains a port only if the socket is connected.
        let port = if to.is_ipv4() { super::peer(session).map_or(0, |peer| peer.port()) } else { to.port() };
        question.remote = Some(SocketAddr::new(to.ip(), port));
        if let Ok((_, received)) = link::ask(&question, &[]) {
            received.close();
        }
    }
}

fn question(session: &Session, value: u32) -> Question {
    Question::new(Call::Undelivered, session.slot.identity.number.load(Ordering::Relaxed), value)
}

/// Returns bits that `poll` must report for a datagram socket independently of its descriptor: an error, and `POLLOUT`
/// for a socket without a stack, since writing to it fails at once.
pub(crate) fn pending_events(session: &Session, events: c_short) -> c_short {
    match session.is_lost() {
        true => events & (libc::POLLOUT | libc::POLLWRNORM),
        false if session.slot.has_errors() => libc::POLLERR,
        false => 0,
    }
}

/// Corrects what `poll` reports for a datagram socket: as on Linux, an error is `POLLERR`, and data is `POLLIN`.
pub(crate) fn corrected_events(session: &Session, events: c_short, shown: c_short) -> c_short {
    let pending = pending_events(session, events);
    let (failed, alarmed) = (pending & libc::POLLERR != 0, shown & libc::POLLPRI != 0);
    if alarmed && !failed {
        // The error was read after the alarm was raised.
        session.settle_errors();
    }
    let hides = (failed || alarmed) && !super::has_data(session);
    let hidden = libc::POLLPRI | if hides { libc::POLLIN | libc::POLLRDNORM } else { 0 };
    shown & !hidden | pending
}
