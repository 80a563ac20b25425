//! What epoll sets have, and what `poll` shows of datagram sockets.

use core::ffi::c_int;

use libc::{epoll_event, nfds_t, pollfd, sigset_t, size_t, timespec};

use crate::datagrams::errors;
use crate::polled;
use crate::real;
use crate::report;
use crate::session;
use crate::sys;
use crate::table;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { real::epoll_ctl(epoll, operation, fd, event) };
    let known = table::get(fd).is_some_and(polled::is_remembered);
    if result == 0 && known {
        // SAFETY: the caller's promise: null, or an event.
        let event = unsafe { event.as_ref() }.copied();
        if !polled::remember(epoll, operation, fd, event) {
            // The error of epoll without memory.
            // SAFETY: numbers.
            unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, core::ptr::null_mut()) };
            return sys::returned_int(Err(libc::ENOMEM));
        }
    }
    result
}

/// Calls `wait`, which is told whether to return at once, and shows errors of datagram sockets as Linux does: a session's descriptor
/// shows that there is something to read.
///
/// # Safety
/// `entries` are `count` ones of the program's.
unsafe fn with_errors(entries: *mut pollfd, count: nfds_t, wait: impl FnOnce(bool) -> c_int) -> c_int {
    if !table::has_datagrams() || entries.is_null() {
        return wait(false);
    }
    let datagrams = |fd| session::get(fd).filter(|session| session.is_datagrams());
    // SAFETY: the caller's promise.
    let entries = || unsafe { core::slice::from_raw_parts_mut(entries, count as usize) };
    let is_pending = |entry: &pollfd| {
        datagrams(entry.fd).is_some_and(|session| errors::pending(&session, entry.events) != 0)
    };
    let any = entries().iter().any(is_pending);
    let ready = wait(any);
    if ready < 0 || ready == 0 && !any {
        return ready;
    }
    let mut shown = 0;
    for entry in entries() {
        if let Some(session) = datagrams(entry.fd) {
            entry.revents = errors::shown(&session, entry.events, entry.revents);
        }
        shown += c_int::from(entry.revents != 0);
    }
    shown
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn poll(entries: *mut pollfd, count: nfds_t, time: c_int) -> c_int {
    let wait = |now| {
        // SAFETY: the caller's promise.
        unsafe { real::poll(entries, count, if now { 0 } else { time }) }
    };
    // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise.
        unsafe { real::ppoll(entries, count, if now { &raw const none } else { time }, mask) }
    };
    // SAFETY: the caller's promise.
    unsafe { with_errors(entries, count, wait) }
}

/// `poll` with `_FORTIFY_SOURCE`.
#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __poll_chk(entries: *mut pollfd, count: nfds_t, time: c_int, room: size_t) -> c_int {
    report::check(count as usize, room / size_of::<pollfd>());
    // SAFETY: the caller's promise.
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
    // SAFETY: the caller's promise.
    unsafe { ppoll(entries, count, time, mask) }
}
