//! Sessions in epoll sets, and the events of datagram sockets with errors.
//!
//! The descriptor of a session reports an error as `EPOLLPRI` to each epoll set that contains it. Events with this bit
//! are replaced with the events that Linux reports.

use core::ffi::{c_int, c_short};

use libc::{epoll_event, sigset_t, timespec};

use crate::datagrams::errors;
use crate::polled;
use crate::real;
use crate::session::{self, Session};
use crate::sys;
use crate::table;

const PRIORITY: u32 = libc::EPOLLPRI as u32;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let entry = table::get(fd);
    // SAFETY: `event` is null or points to an event, as `epoll_ctl` requires of its caller.
    let event = unsafe { event.as_ref() }.copied();
    let mut shown = event.map(|event| polled::event_with_errors(entry, event));
    let to = shown.as_mut().map_or(core::ptr::null_mut(), core::ptr::from_mut);
    // SAFETY: `to` is null or points to `shown`, which lives until the call returns.
    let result = unsafe { real::epoll_ctl(epoll, operation, fd, to) };
    if result == 0
        && entry.is_some_and(polled::is_remembered)
        && !polled::remember(epoll, operation, fd, event)
    {
        // This is the error of epoll if it has no memory.
        // SAFETY: the kernel checks the descriptors, and `EPOLL_CTL_DEL` accepts a null pointer.
        unsafe { real::epoll_ctl(epoll, libc::EPOLL_CTL_DEL, fd, core::ptr::null_mut()) };
        return sys::returned_int(Err(libc::ENOMEM));
    }
    result
}

/// Corrects `count` events for errors of datagram sockets, and returns `count`.
///
/// # Safety
/// `events` points to `count` events, unless `count` is not positive.
unsafe fn with_errors(epoll: c_int, events: *mut epoll_event, count: c_int) -> c_int {
    if count <= 0 || !table::has_datagrams() {
        return count;
    }
    // SAFETY: `count` is positive, so `events` points to `count` events, as the caller guarantees.
    for event in unsafe { core::slice::from_raw_parts_mut(events, count as usize) } {
        if event.events & PRIORITY != 0 {
            *event = corrected(epoll, *event);
        }
    }
    count
}

/// Returns the event that Linux reports instead of an event with `EPOLLPRI`.
fn corrected(epoll: c_int, mut event: epoll_event) -> epoll_event {
    let datagrams = |fd| session::get(fd).filter(Session::is_datagrams);
    // Several registrations may have the same data.
    let failed = |fd| datagrams(fd).is_some_and(|session| session.slot.has_errors());
    let alarmed = |fd| datagrams(fd).is_some_and(|session| session.slot.wake.is_alarmed());
    let found = polled::find(epoll, event.u64, failed).or_else(|| polled::find(epoll, event.u64, alarmed));
    if let Some(session) = found.and_then(datagrams) {
        let shown = errors::corrected_events(&session, 0, event.events as c_short);
        event.events = event.events & !0xffff | u32::from(shown.cast_unsigned());
    }
    event
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    time: c_int,
) -> c_int {
    // SAFETY: `events` has room for `most` events, as the function requires of its caller; the kernel has filled as
    // many as it returns. Other pointers are passed on unchanged.
    unsafe { with_errors(epoll, events, real::epoll_wait(epoll, events, most, time)) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    time: c_int,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: `events` has room for `most` events, as the function requires of its caller; the kernel has filled as
    // many as it returns. Other pointers are passed on unchanged.
    unsafe { with_errors(epoll, events, real::epoll_pwait(epoll, events, most, time, mask)) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn epoll_pwait2(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    time: *const timespec,
    mask: *const sigset_t,
) -> c_int {
    // SAFETY: `events` has room for `most` events, as the function requires of its caller; the kernel has filled as
    // many as it returns. Other pointers are passed on unchanged.
    unsafe { with_errors(epoll, events, real::epoll_pwait2(epoll, events, most, time, mask)) }
}
