//! What epoll sets have.

use core::ffi::c_int;

use libc::epoll_event;

use crate::kernel_listeners;
use crate::polled;
use crate::real;
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
    let known = table::get(fd).is_some_and(|entry| entry.is_open() || kernel_listeners::is_kept(entry));
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
