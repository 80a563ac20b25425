//! Shutting down sockets, and getting and setting their options and flags.

use core::ffi::{c_int, c_ulong, c_void};
use core::sync::atomic::Ordering;

use libc::socklen_t;
use offcore_session::slot::{state, wish};

use crate::address::{self, End};
use crate::decide;
use crate::kernel_listeners;
use crate::memberships::MembershipOption;
use crate::options;
use crate::real;
use crate::session::{self, Session, Target};
use crate::stream_options;
use crate::sys::{self, Errno};
use crate::table::{self, SocketKind};

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn shutdown(fd: c_int, how: c_int) -> c_int {
    match session::get(fd) {
        Some(session) => sys::returned_int(shut_session(&session, how)),
        // SAFETY: `shutdown` takes no addresses.
        None => unsafe { real::shutdown(fd, how) },
    }
}

/// Ends the receiving direction, the sending direction, or both.
fn shut_session(session: &Session, how: c_int) -> Result<usize, Errno> {
    let (read, write) = match how {
        libc::SHUT_RD => (true, false),
        libc::SHUT_WR => (false, true),
        libc::SHUT_RDWR => (true, true),
        _ => return Err(libc::EINVAL),
    };
    let connected = if session.is_datagrams() {
        crate::datagrams::peer(session).is_some()
    } else {
        matches!(session.slot.state(), state::OPEN | state::LISTENING)
    };
    // As on Linux, a call that waits for a datagram is woken up although the socket has no peer.
    if !connected && !session.is_datagrams() || session.is_over() || session.has_ended() {
        return Err(libc::ENOTCONN);
    }
    let bits = if read { wish::NO_READ } else { 0 } | if write { wish::END } else { 0 };
    session.slot.wishes.options.fetch_or(bits, Ordering::AcqRel);
    session.mark();
    if read {
        kernel_listeners::shut_down(session.entry);
    }
    // The kernel's socket determines what `poll` reports.
    let _ = sys::shutdown(session.fd, how);
    if connected { Ok(0) } else { Err(libc::ENOTCONN) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn getsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    len: *mut socklen_t,
) -> c_int {
    match session::get(fd) {
        Some(session) => {
            // SAFETY: `len` is valid and `value` has `*len` writable bytes, as `getsockopt` requires of its caller.
            sys::returned_int(unsafe { options::get(&session, level, name, value, len) }.map(|()| 0))
        }
        // SAFETY: `len` is valid and `value` has `*len` writable bytes, as `getsockopt` requires of its caller.
        None => unsafe { real::getsockopt(fd, level, name, value, len) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn setsockopt(
    fd: c_int,
    level: c_int,
    name: c_int,
    value: *const c_void,
    len: socklen_t,
) -> c_int {
    let checked = match session::find(fd) {
        Target::Session(session) => {
            // SAFETY: `value` is null or has `len` readable bytes, as `setsockopt` requires of its caller.
            return sys::returned_int(unsafe { options::set(&session, level, name, value, len) }.map(|()| 0));
        }
        Target::Undecided(entry) if entry.kind == SocketKind::OpenStream => {
            // SAFETY: `value` is null or has `len` readable bytes, as `setsockopt` requires of its caller.
            unsafe { stream_options::check(entry.v6, level, name, value, len) }.map(|()| Some(entry))
        }
        Target::Undecided(entry) if let Some(option) = MembershipOption::of(level, name, value, len) => {
            // SAFETY: `value` is null or has `len` readable bytes, as `setsockopt` requires of its caller.
            let done = sys::of_libc(unsafe { real::setsockopt(fd, level, name, value, len) } as isize);
            let done = done.map(drop);
            // SAFETY: `value` is null or has `len` readable bytes, as `setsockopt` requires of its caller.
            let done = unsafe { decide::change_membership(fd, entry, &option, done) };
            return sys::returned_int(done.map(|()| 0));
        }
        // A filter would be lost if the socket moved to the stack.
        Target::Undecided(_) if level == libc::SOL_SOCKET && FILTERS.contains(&name) => {
            Err(libc::ENOPROTOOPT)
        }
        _ => Ok(None),
    };
    match checked {
        Ok(open) => {
            // SAFETY: `value` is null or has `len` readable bytes, as `setsockopt` requires of its caller.
            let done = unsafe { real::setsockopt(fd, level, name, value, len) };
            if let Some(entry) = open.filter(|_| done == 0) {
                decide::note_options(fd, entry, (level, name));
            }
            done
        }
        Err(error) => sys::returned_int(Err(error)),
    }
}

/// Options that attach a filter program to a socket.
const FILTERS: [c_int; 4] = [
    libc::SO_ATTACH_FILTER,
    libc::SO_ATTACH_BPF,
    libc::SO_ATTACH_REUSEPORT_CBPF,
    libc::SO_ATTACH_REUSEPORT_EBPF,
];

/// A constant of `linux/sockios.h` that the crate libc lacks.
const SIOCATMARK: c_ulong = 0x8905;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: usize) -> c_int {
    let session = match request {
        libc::FIONREAD | libc::TIOCOUTQ | SIOCATMARK => session::get(fd),
        _ => None,
    };
    let Some(session) = session else {
        // SAFETY: `argument` is valid for the request, as `ioctl` requires of its caller.
        return unsafe { real::ioctl(fd, request, argument) };
    };
    let to = argument as *mut c_int;
    if to.is_null() {
        return sys::returned_int(Err(libc::EFAULT));
    }
    let value = match request {
        libc::FIONREAD if session.slot.state() == state::LISTENING => Err(libc::EINVAL),
        libc::FIONREAD if session.is_datagrams() => crate::datagrams::next_len(&session),
        libc::FIONREAD => session.reader().map(|reader| reader.available()),
        libc::TIOCOUTQ => session.unacknowledged(),
        _ if address::of(session.slot, End::Peer).port() == 0 => Err(libc::EINVAL),
        _ => Ok(usize::from(session.is_at_mark())),
    };
    // SAFETY: the requests above take the address of an `int`, which is not null, as `ioctl` requires of its caller.
    sys::returned_int(value.map(|value| unsafe { *to = value as c_int }).map(|()| 0))
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: `argument` is valid for the command, as `fcntl` requires of its caller.
    let result = unsafe { real::fcntl(fd, command, argument) };
    if result >= 0 && matches!(command, libc::F_DUPFD | libc::F_DUPFD_CLOEXEC) {
        table::duplicate(fd, result);
    }
    result
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: `argument` is valid for the command, as `fcntl` requires of its caller.
    unsafe { fcntl(fd, command, argument) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __fcntl(fd: c_int, command: c_int, argument: usize) -> c_int {
    // SAFETY: `argument` is valid for the command, as `fcntl` requires of its caller.
    unsafe { fcntl(fd, command, argument) }
}
