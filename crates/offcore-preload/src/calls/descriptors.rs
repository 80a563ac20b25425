//! Closing and duplicating descriptors.

use core::ffi::{c_int, c_uint};

use crate::kernel_listeners;
use crate::link;
use crate::polled;
use crate::real;
use crate::sys;
use crate::table::{self, Entry, SocketKind};

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn close(fd: c_int) -> c_int {
    if link::is_own(fd) {
        return sys::returned_int(Err(libc::EBADF));
    }
    match table::get(fd) {
        // A `vfork` child has its own descriptors, but shares this memory with its parent.
        Some(entry) if link::is_self() => {
            forget_descriptor(fd, entry);
            // SAFETY: `close` takes no addresses.
            let closed = unsafe { real::close(fd) };
            if matches!(entry.kind, SocketKind::Stream | SocketKind::Datagrams) {
                link::request_check();
            }
            closed
        }
        // SAFETY: `close` takes no addresses.
        _ => unsafe { real::close(fd) },
    }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __close(fd: c_int) -> c_int {
    // SAFETY: `close` takes no addresses.
    unsafe { close(fd) }
}

/// Cleans up for a descriptor that is about to be closed.
pub(super) fn forget_descriptor(fd: c_int, entry: Entry) {
    table::set(fd, None);
    if polled::is_remembered(entry) {
        polled::forget(fd);
    }
    kernel_listeners::close_kept(entry);
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let only_flag = flags & libc::CLOSE_RANGE_CLOEXEC as c_int != 0;
    if !only_flag && link::is_self() {
        let upto = (last as usize).saturating_add(1);
        for (fd, entry) in table::all(upto).filter(|(fd, _)| *fd as c_uint >= first) {
            forget_descriptor(fd, entry);
        }
    }
    // The library's own descriptors stay open. They are not necessarily adjacent.
    let mut from = first;
    while let Some(own) = link::next_own(from).filter(|own| *own <= last && !only_flag) {
        // SAFETY: `close_range` takes no addresses.
        if own > from && unsafe { real::close_range(from, own - 1, flags) } < 0 {
            return -1;
        }
        from = own + 1;
    }
    // SAFETY: `close_range` takes no addresses.
    let closed = if from <= last { unsafe { real::close_range(from, last, flags) } } else { 0 };
    link::request_check();
    closed
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: `close_range` takes no addresses.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: `dup` takes no addresses.
    let new = unsafe { real::dup(fd) };
    if new >= 0 && link::is_self() {
        table::duplicate(fd, new);
    }
    new
}
