//! Epoll registrations of undecided sockets, of listeners and of datagram sockets.
//!
//! When such a socket becomes a session, another file replaces its descriptor, and epoll drops the registration.
//! Boost.Asio, Envoy, Netty and nginx add a socket before they connect it. Therefore, the library stores registrations
//! and repeats them. Only epoll limits their number, since the memory for them grows.

use core::cell::UnsafeCell;
use core::ffi::c_int;
use core::ptr;
use core::slice;

use libc::epoll_event;

use crate::kernel_listeners;
use crate::link;
use crate::real;
use crate::sys;
use crate::table::{self, Entry, SocketKind};

/// One descriptor in one epoll set.
#[derive(Clone, Copy)]
struct Registration {
    /// The epoll set, or -1 for a free place.
    epoll: c_int,
    fd: c_int,
    event: epoll_event,
    /// Place of the descriptor's next registration, or of the next free place; 0 ends the list.
    next: u32,
    /// Whether the epoll set contained the descriptor when it was replaced.
    carried: bool,
}

/// A growing array. New elements are zero.
struct Growing<T> {
    at: *mut T,
    len: usize,
}

impl<T: Copy> Growing<T> {
    const EMPTY: Self = Self { at: ptr::null_mut(), len: 0 };
    /// Number of elements in a page.
    const LEAST: usize = 4096 / size_of::<T>();

    fn elements(&mut self) -> &mut [T] {
        if self.at.is_null() {
            return &mut [];
        }
        // SAFETY: `len` elements were mapped and initialized to zero, which is a valid value of the structures of
        // integers used here. Only this value refers to them.
        unsafe { slice::from_raw_parts_mut(self.at, self.len) }
    }

    /// Makes room for an element at index `at`. Returns `false` without memory.
    fn reach(&mut self, at: usize) -> bool {
        if at < self.len {
            return true;
        }
        let len = (at + 1).next_power_of_two().max(Self::LEAST);
        let bytes = |len: usize| len * size_of::<T>();
        let mapped = match self.len {
            0 => sys::map(-1, bytes(len), true),
            old => sys::remap(self.at.cast(), bytes(old), bytes(len)),
        };
        if let Ok(mapped) = mapped {
            (self.at, self.len) = (mapped.cast(), len);
        }
        mapped.is_ok()
    }
}

/// All registrations; place 0 is unused.
struct Registrations {
    /// The first registration of each descriptor.
    first: Growing<u32>,
    list: Growing<Registration>,
    /// The first free place, and the highest place used so far.
    free: u32,
    used: u32,
}

/// The registrations, protected by the lock of the process.
struct Locked(UnsafeCell<Registrations>);

// SAFETY: `hold` is the only access, and takes the lock of the registrations.
unsafe impl Sync for Locked {}

static REGISTRATIONS: Locked =
    Locked(UnsafeCell::new(Registrations { first: Growing::EMPTY, list: Growing::EMPTY, free: 0, used: 0 }));

impl Registrations {
    /// Returns the place of a descriptor's first registration, or 0.
    fn first(&mut self, fd: c_int) -> u32 {
        self.first.elements().get(fd as usize).copied().unwrap_or(0)
    }

    fn at(&mut self, place: u32) -> Option<&mut Registration> {
        self.list.elements().get_mut(place as usize).filter(|_| place != 0)
    }

    /// Calls `each` with every registration of a descriptor.
    fn each(&mut self, fd: c_int, mut each: impl FnMut(&mut Registration)) {
        let mut place = self.first(fd);
        while let Some(known) = self.at(place) {
            each(known);
            place = known.next;
        }
    }

    /// Adds or changes a registration. Returns `false` without memory.
    fn set(&mut self, epoll: c_int, fd: c_int, event: epoll_event) -> bool {
        let mut known = false;
        self.each(fd, |registration| {
            if registration.epoll == epoll {
                (registration.event, known) = (event, true);
            }
        });
        if known {
            return true;
        }
        let free = self.free;
        let place = if free != 0 { free } else { self.used + 1 };
        if !self.first.reach(fd as usize) || !self.list.reach(place as usize) {
            return false;
        }
        let next = self.first(fd);
        let after = self.at(place).map_or(0, |free| free.next);
        match free {
            0 => self.used = place,
            _ => self.free = after,
        }
        self.list.elements()[place as usize] = Registration { epoll, fd, event, next, carried: false };
        self.first.elements()[fd as usize] = place;
        true
    }

    /// Removes the registrations of a descriptor, in one epoll set or in all.
    fn remove(&mut self, fd: c_int, epoll: Option<c_int>) {
        let (mut place, mut before) = (self.first(fd), 0);
        while let Some(&mut known) = self.at(place) {
            if epoll.is_none_or(|epoll| epoll == known.epoll) {
                match self.at(before) {
                    Some(before) => before.next = known.next,
                    None => self.first.elements()[fd as usize] = known.next,
                }
                let free = self.free;
                if let Some(known) = self.at(place) {
                    (known.next, known.epoll) = (free, -1);
                }
                self.free = place;
            } else {
                before = place;
            }
            place = known.next;
        }
    }
}

/// Calls `with` under the lock.
fn with_lock<T>(with: impl FnOnce(&mut Registrations) -> T) -> T {
    // A signal handler that closes a socket would deadlock on this lock.
    let _signals = sys::Blocked::new();
    let _lock = link::registrations();
    // SAFETY: the lock is held. Without a lock, no socket is undecided, and nothing is registered.
    with(unsafe { &mut *REGISTRATIONS.0.get() })
}

/// Stores a successful `epoll_ctl` of an undecided socket. Returns `false` without memory.
pub(crate) fn remember(epoll: c_int, operation: c_int, fd: c_int, event: Option<epoll_event>) -> bool {
    with_lock(|registrations| match event {
        _ if operation == libc::EPOLL_CTL_DEL => {
            registrations.remove(fd, Some(epoll));
            true
        }
        Some(event) => registrations.set(epoll, fd, event),
        None => true,
    })
}

/// Returns the event that is registered for an event of the program. It also reports errors of datagram sockets, unless
/// the registration is exclusive, which does not permit that.
pub(crate) fn event_with_errors(entry: Option<Entry>, mut event: epoll_event) -> epoll_event {
    let exclusive = event.events & libc::EPOLLEXCLUSIVE as u32 != 0;
    if entry.is_some_and(|entry| entry.kind == SocketKind::Datagrams) && !exclusive {
        event.events |= libc::EPOLLPRI as u32;
    }
    event
}

/// Returns a descriptor that is registered with `data` in an epoll set and for which `fits` returns true.
pub(crate) fn find(epoll: c_int, data: u64, fits: impl Fn(c_int) -> bool) -> Option<c_int> {
    with_lock(|registrations| {
        let used = registrations.used as usize + 1;
        let mut all = registrations.list.elements().iter().take(used);
        all.find(|known| known.epoll == epoll && { known.event.u64 } == data && fits(known.fd))
            .map(|known| known.fd)
    })
}

/// Returns whether the registrations of a descriptor are stored, because another file may replace it.
pub(crate) fn is_remembered(entry: Entry) -> bool {
    entry.is_open()
        || matches!(entry.kind, SocketKind::Datagrams | SocketKind::Lost)
        || kernel_listeners::is_kept(entry)
}

/// Removes the registrations of a closed or decided descriptor.
pub(crate) fn forget(fd: c_int) {
    with_lock(|registrations| registrations.remove(fd, None));
}

/// Adds a descriptor to an epoll set, or removes it. Returns `false` on failure.
fn control(epoll: c_int, operation: c_int, fd: c_int, event: epoll_event) -> bool {
    let mut event = event_with_errors(table::get(fd), event);
    // SAFETY: `event` lives until the call returns.
    unsafe { real::epoll_ctl(epoll, operation, fd, &raw mut event) == 0 }
}

/// Replaces the file at `fd` by calling `replace`, and registers the new file in the epoll sets of the old one.
/// `again`: the new file may be replaced, too.
pub(crate) fn carry_over(fd: c_int, again: bool, replace: impl FnOnce()) {
    let control = |known: &Registration, operation| control(known.epoll, operation, fd, known.event);
    // A new epoll set may have the number of a closed one. It does not contain the socket.
    with_lock(|registrations| {
        registrations.each(fd, |known| known.carried = control(known, libc::EPOLL_CTL_DEL));
    });
    replace();
    with_lock(|registrations| {
        registrations.each(fd, |known| {
            if known.carried {
                control(known, libc::EPOLL_CTL_ADD);
            }
        });
        if !again {
            registrations.remove(fd, None);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(data: u64) -> epoll_event {
        epoll_event { events: 1, u64: data }
    }

    fn empty() -> Registrations {
        Registrations { first: Growing::EMPTY, list: Growing::EMPTY, free: 0, used: 0 }
    }

    fn sets(registrations: &mut Registrations, fd: c_int) -> Vec<(c_int, u64)> {
        let mut found = Vec::new();
        registrations.each(fd, |known| found.push((known.epoll, known.event.u64)));
        found.sort_unstable();
        found
    }

    #[test]
    fn registrations_have_no_fixed_limit() {
        let mut all = empty();
        for fd in 5..50_000 {
            assert!(all.set(3, fd, event(fd as u64)));
        }
        assert!((5..50_000).all(|fd| sets(&mut all, fd) == [(3, fd as u64)]));
        (5..50_000).for_each(|fd| all.remove(fd, None));
        assert!((5..50_000).all(|fd| sets(&mut all, fd).is_empty()));
        // The memory is reused.
        assert!(all.set(3, 5, event(1)) && all.used == 49_995);
    }

    #[test]
    fn socket_in_several_sets() {
        let mut all = empty();
        for (epoll, data) in [(3, 1), (4, 2), (5, 3), (4, 9)] {
            assert!(all.set(epoll, 7, event(data)));
        }
        assert_eq!(sets(&mut all, 7), [(3, 1), (4, 9), (5, 3)]);
        all.remove(7, Some(4));
        assert_eq!(sets(&mut all, 7), [(3, 1), (5, 3)]);
        all.remove(7, Some(5));
        all.remove(8, Some(3));
        assert!(all.set(6, 8, event(4)));
        assert_eq!((sets(&mut all, 7), sets(&mut all, 8)), (vec![(3, 1)], vec![(6, 4)]));
    }
}
