//! Slots of datagram sockets whose stack has ended. They stay mapped.
//!
//! A slot stores the addresses and options of its socket, so that the socket can move to the next stack.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use offcore_session::control::SESSIONS;
use offcore_session::slot::{Slot, wish};

use crate::sys;
use crate::table::{self, Entry, GENERATION, SocketKind};

/// A slot, and the application instance that owned it.
struct Place {
    slot: AtomicPtr<Slot>,
    instance: AtomicU64,
}

/// Places, indexed by the number of the session.
static PLACES: AtomicPtr<Place> = AtomicPtr::new(ptr::null_mut());

fn place(number: u32) -> Option<&'static Place> {
    let places = PLACES.load(Ordering::Acquire);
    // SAFETY: the mapping has `SESSIONS` places, for which zeros are valid, and is never unmapped.
    (!places.is_null()).then(|| unsafe { &*places.add(number as usize % SESSIONS) })
}

/// Maps the places. If several threads do this at once, the extra mappings stay unused.
fn map() {
    if PLACES.load(Ordering::Relaxed).is_null()
        && let Ok(mapped) = sys::map(-1, SESSIONS * size_of::<Place>(), true)
    {
        PLACES.store(mapped.cast(), Ordering::Release);
    }
}

/// Stores the slot of a socket, and gives its descriptors (`fd` and its duplicates) a new entry.
pub(crate) fn store_slot(fd: c_int, entry: Entry, slot: &'static Slot, instance: u64) -> Entry {
    map();
    let number = slot.identity.number.load(Ordering::Relaxed);
    let Some(place) = place(number) else { return entry };
    let new =
        Entry { kind: SocketKind::Lost, generation: instance as u32 & GENERATION, place: number, ..entry };
    if place.instance.swap(instance, Ordering::Relaxed) != instance {
        store_timeouts(fd, slot);
    }
    place.slot.store(ptr::from_ref(slot).cast_mut(), Ordering::Release);
    for (fd, _) in table::all(table::DESCRIPTORS).filter(|(_, other)| *other == entry) {
        table::set(fd, Some(new));
    }
    new
}

/// Returns the slot of a socket.
pub(crate) fn slot(entry: Entry) -> Option<&'static Slot> {
    let place = place(entry.place)?;
    let is_its = place.instance.load(Ordering::Relaxed) as u32 & GENERATION == entry.generation;
    // SAFETY: the pointer is null or comes from a `&'static Slot` that was passed to `keep`.
    unsafe { place.slot.load(Ordering::Acquire).as_ref() }.filter(|_| is_its)
}

const TIMES: [c_int; 2] = [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO];

/// Stores the timeouts of a socket, which only the kernel has, in two words of the slot that are not used for anything
/// else any more.
fn store_timeouts(fd: c_int, slot: &Slot) {
    for (name, word) in TIMES.into_iter().zip([&slot.wishes.leftover, &slot.wishes.moving]) {
        let zero = libc::timeval { tv_sec: 0, tv_usec: 0 };
        let time = match slot.wishes.told.load(Ordering::Relaxed) & wish::TIMED {
            0 => None,
            _ => sys::socket_option(fd, libc::SOL_SOCKET, name, zero),
        };
        let milliseconds = time.map_or(0, |time| time.tv_sec * 1000 + (time.tv_usec + 999) / 1000);
        word.store(milliseconds.clamp(0, u32::MAX.into()) as u32, Ordering::Relaxed);
    }
}

/// Sets the stored timeouts on the new end of a socket.
pub(crate) fn restore_timeouts(slot: &Slot, end: c_int) {
    for (name, word) in TIMES.into_iter().zip([&slot.wishes.leftover, &slot.wishes.moving]) {
        let milliseconds = i64::from(word.load(Ordering::Relaxed));
        let time = libc::timeval { tv_sec: milliseconds / 1000, tv_usec: milliseconds % 1000 * 1000 };
        if milliseconds > 0 {
            let (at, len) = ((&raw const time).cast(), size_of::<libc::timeval>());
            // SAFETY: `time` lives until the call returns, and `len` is its size.
            let _ = unsafe { sys::setsockopt(end, libc::SOL_SOCKET, name, at, len) };
        }
    }
}
