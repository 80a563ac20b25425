//! Corrects what `poll` and `select` report about datagram sockets.

use core::ffi::{c_int, c_short};

use libc::{fd_set, nfds_t, pollfd, sigset_t, size_t, timespec, timeval};

use crate::datagrams::errors;
use crate::real;
use crate::report;
use crate::session::{self, Session};
use crate::table;

/// Calls `wait` and corrects the reported errors of datagram sockets: a session's descriptor reports them as `POLLPRI`.
/// The argument of `wait` says whether it must return at once.
///
/// # Safety
/// `entries` is null, or points to `count` entries, which no other code uses during the call.
unsafe fn with_errors(entries: *mut pollfd, count: nfds_t, wait: impl Fn(bool) -> c_int) -> c_int {
    if !table::has_datagrams() || entries.is_null() {
        return wait(false);
    }
    // SAFETY: `entries` is not null, so it points to `count` entries, as the caller guarantees.
    let entries = || unsafe { core::slice::from_raw_parts_mut(entries, count as usize) };
    loop {
        let mut any = false;
        for entry in entries() {
            if let Some(session) = datagrams(entry.fd) {
                any |= errors::pending_events(&session, entry.events) != 0;
                entry.events |= if entry.events & ADDED == 0 { ADDED } else { 0 };
            }
        }
        let ready = wait(any);
        let mut shown = 0;
        for entry in entries() {
            if let Some(session) = datagrams(entry.fd) {
                entry.events &= if entry.events & ADDED == ADDED { !ADDED } else { !0 };
                if ready >= 0 {
                    entry.revents = errors::corrected_events(&session, entry.events, entry.revents);
                }
            }
            shown += c_int::from(ready >= 0 && entry.revents != 0);
        }
        // If another thread has read the error in the meantime, the wait is repeated.
        if shown > 0 || ready <= 0 {
            return if ready < 0 { ready } else { shown };
        }
    }
}

/// Returns the session of a datagram socket.
fn datagrams(fd: c_int) -> Option<Session> {
    session::get(fd).filter(Session::is_datagrams)
}

/// Requests the alarm. `POLLMSG` marks entries for which the program did not request it. No descriptor reports
/// `POLLMSG`.
const ADDED: c_short = libc::POLLPRI | POLLMSG;
/// A constant of `asm-generic/poll.h` that the crate libc lacks.
const POLLMSG: c_short = 0x400;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn poll(entries: *mut pollfd, count: nfds_t, time: c_int) -> c_int {
    let wait = |now| {
        // SAFETY: `entries` points to `count` entries, as `poll` requires of its caller.
        unsafe { real::poll(entries, count, if now { 0 } else { time }) }
    };
    // SAFETY: `entries` points to `count` entries, as `poll` requires of its caller.
    unsafe { with_errors(entries, count, wait) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn ppoll(
    entries: *mut pollfd,
    count: nfds_t,
    time: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    let none = timespec { tv_sec: 0, tv_nsec: 0 };
    let wait = |now| {
        // SAFETY: `entries` points to `count` entries, and the other pointers are null or valid, as `ppoll` requires of
        // its caller.
        unsafe { real::ppoll(entries, count, if now { &raw const none } else { time }, mask) }
    };
    // SAFETY: `entries` points to `count` entries, and the other pointers are null or valid, as `ppoll` requires of its
    // caller.
    unsafe { with_errors(entries, count, wait) }
}

/// `poll` with `_FORTIFY_SOURCE`.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __poll_chk(entries: *mut pollfd, count: nfds_t, time: c_int, room: size_t) -> c_int {
    report::check(count as usize, room / size_of::<pollfd>());
    // SAFETY: `entries` points to `count` entries, as `poll` requires of its caller.
    unsafe { poll(entries, count, time) }
}

/// `ppoll` with `_FORTIFY_SOURCE`.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __ppoll_chk(
    entries: *mut pollfd,
    count: nfds_t,
    time: *const timespec,
    mask: *const sigset_t,
    room: size_t,
) -> c_int {
    report::check(count as usize, room / size_of::<pollfd>());
    // SAFETY: `entries` points to `count` entries, and the other pointers are null or valid, as `ppoll` requires of its
    // caller.
    unsafe { ppoll(entries, count, time, mask) }
}

/// Calls `wait` with a set of exceptions without datagram sockets, because on Linux their errors are not exceptions. A
/// set that is larger than `FD_SETSIZE` is passed on unchanged.
///
/// # Safety
/// `exceptions` is null, or points to a descriptor set.
unsafe fn without_errors(
    count: c_int,
    exceptions: *mut fd_set,
    wait: impl FnOnce(*mut fd_set) -> c_int,
) -> c_int {
    if !table::has_datagrams() || exceptions.is_null() || count as usize > libc::FD_SETSIZE {
        return wait(exceptions);
    }
    // SAFETY: `exceptions` is not null, so it points to a set, as the caller guarantees. All descriptors are below
    // `FD_SETSIZE`.
    unsafe {
        let mut others = *exceptions;
        for fd in 0..count {
            if libc::FD_ISSET(fd, &raw const others) && datagrams(fd).is_some() {
                libc::FD_CLR(fd, &raw mut others);
            }
        }
        let ready = wait(&raw mut others);
        if ready >= 0 {
            *exceptions = others;
        }
        ready
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn select(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    exceptions: *mut fd_set,
    time: *mut timeval,
) -> c_int {
    // SAFETY: all sets and times are null or valid, as the function requires of its caller.
    unsafe {
        without_errors(count, exceptions, |exceptions| real::select(count, read, write, exceptions, time))
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut fd_set,
    write: *mut fd_set,
    exceptions: *mut fd_set,
    time: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: all sets and times are null or valid, as the function requires of its caller.
    unsafe {
        without_errors(count, exceptions, |exceptions| {
            real::pselect(count, read, write, exceptions, time, mask)
        })
    }
}
