//! What epoll sets have.

use core::ffi::c_int;

use libc::epoll_event;

use crate::decide;
use crate::polled;
use crate::real;
use crate::session::{self, Target};

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn epoll_ctl(epoll: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int {
    // SAFETY: the caller's promise.
    let result = unsafe { real::epoll_ctl(epoll, operation, fd, event) };
    if result == 0
        && let Target::Undecided(entry) = session::find(fd)
    {
        // SAFETY: the caller's promise: null, or an event.
        let event = unsafe { event.as_ref() }.copied();
        if !polled::remember(epoll, operation, fd, event) {
            // What cannot be carried over must not be needed.
            decide::leave(fd, entry);
        }
    }
    result
}
