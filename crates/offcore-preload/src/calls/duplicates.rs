//! Duplicating a descriptor to a given number.

use core::ffi::c_int;

use super::{descriptors, stdio};
use crate::link;
use crate::real;
use crate::sys;
use crate::table;

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: `dup2` takes no addresses.
    unsafe { duplicate(from, to, || real::dup2(from, to)) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
unsafe extern "C" fn __dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: `dup2` takes no addresses.
    unsafe { dup2(from, to) }
}

#[cfg_attr(feature = "interpose", unsafe(no_mangle))]
pub(super) unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: `dup3` takes no addresses.
    unsafe { duplicate(from, to, || real::dup3(from, to, flags)) }
}

/// Calls `duplicate`, which makes `to` a duplicate of `from`, and updates the table for both descriptors.
fn duplicate(from: c_int, to: c_int, duplicate: impl FnOnce() -> c_int) -> c_int {
    if link::is_own(to) && !link::move_away(to) {
        return sys::returned_int(Err(libc::EBADF));
    }
    let old = table::get(to);
    let duplicated = duplicate();
    if duplicated >= 0 && from != to && link::is_self() {
        if let Some(old) = old {
            descriptors::forget_descriptor(to, old);
        }
        table::duplicate(from, to);
        if old.is_some() {
            link::request_check();
        }
        if to == libc::STDIN_FILENO && table::get(to).is_some() {
            stdio::input();
        }
    }
    duplicated
}
