//! What epoll sets have of sockets that are not decided yet.
//!
//! When such a socket becomes a session another file takes its descriptor's place, and epoll forgets it: nginx, for one,
//! adds a socket before it connects. So what was asked for is remembered, and asked for again.

use core::cell::UnsafeCell;
use core::ffi::c_int;

use libc::epoll_event;

use crate::link;
use crate::real;
use crate::sys;

/// Registrations that are remembered, at most.
const MOST: usize = 1024;

/// One descriptor in one epoll set.
#[derive(Clone, Copy)]
struct Registration {
    epoll: c_int,
    fd: c_int,
    event: epoll_event,
}

struct Registrations {
    list: UnsafeCell<[Registration; MOST]>,
    /// How many there are.
    len: UnsafeCell<usize>,
}

// SAFETY: the list is used by who holds the lock of the process.
unsafe impl Sync for Registrations {}

static REGISTRATIONS: Registrations = Registrations {
    list: UnsafeCell::new(
        [Registration { epoll: -1, fd: -1, event: epoll_event { events: 0, u64: 0 } }; MOST],
    ),
    len: UnsafeCell::new(0),
};

impl Registrations {
    /// What there is, for as long as `with` runs.
    fn hold<T>(&self, with: impl FnOnce(&mut [Registration; MOST], &mut usize) -> T) -> T {
        // A handler that closes a socket would wait for what it has interrupted.
        let _signals = sys::Blocked::new();
        let _lock = link::registrations();
        // SAFETY: the lock is held; without one no socket becomes a session, and nobody comes here.
        unsafe { with(&mut *self.list.get(), &mut *self.len.get()) }
    }
}

/// `epoll_ctl` has succeeded for a socket that is not decided. `false`: there is no room to remember it.
pub(crate) fn remember(epoll: c_int, operation: c_int, fd: c_int, event: Option<epoll_event>) -> bool {
    REGISTRATIONS.hold(|list, len| {
        let found = list[..*len].iter().position(|known| known.epoll == epoll && known.fd == fd);
        match (operation, event, found) {
            (libc::EPOLL_CTL_DEL, _, Some(at)) => {
                *len -= 1;
                list[at] = list[*len];
            }
            (libc::EPOLL_CTL_DEL, ..) | (_, None, _) => {}
            (_, Some(event), Some(at)) => list[at].event = event,
            (_, Some(_), None) if *len == MOST => return false,
            (_, Some(event), None) => {
                list[*len] = Registration { epoll, fd, event };
                *len += 1;
            }
        }
        true
    })
}

/// A descriptor is closed, or decided: what was remembered of it, and of an epoll set of that number, is forgotten.
pub(crate) fn forget(fd: c_int) {
    REGISTRATIONS.hold(|list, len| {
        let mut at = 0;
        while at < *len {
            if list[at].fd == fd || list[at].epoll == fd {
                *len -= 1;
                list[at] = list[*len];
            } else {
                at += 1;
            }
        }
    });
}

/// Another file takes the place of `fd`, by `replace`: epoll sets have the new one as they had the old one.
pub(crate) fn carry_over(fd: c_int, replace: impl FnOnce()) {
    let of_it = |operation: c_int| {
        REGISTRATIONS.hold(|list, len| {
            for known in list[..*len].iter_mut().filter(|known| known.fd == fd) {
                // SAFETY: an event that lives until the call returns.
                unsafe { real::epoll_ctl(known.epoll, operation, fd, &raw mut known.event) };
            }
        });
    };
    of_it(libc::EPOLL_CTL_DEL);
    replace();
    of_it(libc::EPOLL_CTL_ADD);
    forget(fd);
}
