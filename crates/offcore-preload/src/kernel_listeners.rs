//! Kernel sockets of the stack's listeners.
//!
//! Each of them stores the address, the options and the backlog of a listener, so that the listener can move to the
//! next stack.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use offcore_session::slot::Slot;

use crate::sys::{self, Errno};
use crate::table::{self, Entry, SocketKind};

/// Maximum number of listeners of an application. The stack has the same limit.
const MOST: usize = 256;

/// A listener and its kernel socket.
pub(crate) struct KernelListener {
    /// The listener's table entry as a word, or 0 if unused.
    entry: AtomicU64,
    pub(crate) kernel: AtomicI32,
    slot: AtomicPtr<Slot>,
}

static KEPT: [KernelListener; MOST] = [const {
    KernelListener {
        entry: AtomicU64::new(0),
        kernel: AtomicI32::new(-1),
        slot: AtomicPtr::new(ptr::null_mut()),
    }
}; MOST];
/// Number of places that were ever in use.
static USED: AtomicUsize = AtomicUsize::new(0);

pub(crate) fn all() -> impl Iterator<Item = &'static KernelListener> {
    let used = USED.load(Ordering::Acquire);
    KEPT[..used].iter().filter(|kept| kept.kernel.load(Ordering::Relaxed) >= 0)
}

pub(crate) fn find(entry: Entry) -> Option<&'static KernelListener> {
    all().find(|kept| kept.entry.load(Ordering::Relaxed) == entry.to_word())
}

/// Keeps the kernel socket of a new listener.
pub(crate) fn keep(entry: Entry, slot: &'static Slot, kernel: c_int) {
    // A listener may be adopted at two descriptors.
    if find(entry).is_some() {
        let _ = sys::close(kernel);
        return;
    }
    let place = KEPT.iter().position(|kept| {
        kept.kernel.compare_exchange(-1, kernel, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    });
    let Some(place) = place else {
        let _ = sys::close(kernel);
        return;
    };
    KEPT[place].store_entry(entry, slot);
    USED.fetch_max(place + 1, Ordering::AcqRel);
}

impl KernelListener {
    /// Replaces the table entry of all descriptors of a dead stack's listener, and returns the new entry.
    pub(crate) fn replace_entry(&self) -> Option<Entry> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let entry = self.entry()?;
        if entry.kind == SocketKind::Dead {
            return Some(entry);
        }
        let new = Entry { kind: SocketKind::Dead, place: NEXT.fetch_add(1, Ordering::Relaxed), ..entry };
        self.entry.store(new.to_word(), Ordering::Release);
        for (fd, _) in table::all(table::DESCRIPTORS).filter(|(_, other)| *other == entry) {
            table::set(fd, Some(new));
        }
        Some(new)
    }

    /// Stores the listener's entry and slot.
    pub(crate) fn store_entry(&self, entry: Entry, slot: &'static Slot) {
        self.slot.store(ptr::from_ref(slot).cast_mut(), Ordering::Relaxed);
        self.entry.store(entry.to_word(), Ordering::Release);
    }

    /// Returns the listener's entry.
    pub(crate) fn entry(&self) -> Option<Entry> {
        Entry::from_word(self.entry.load(Ordering::Relaxed))
    }

    /// Returns the listener's slot, which stays mapped when its stack dies.
    pub(crate) fn slot(&self) -> Option<&'static Slot> {
        // SAFETY: the pointer is null or comes from a `&'static Slot` that was passed to `know`.
        unsafe { self.slot.load(Ordering::Relaxed).as_ref() }
    }
}

/// Returns whether an entry is a listener with a kept kernel socket. Its epoll registrations are kept, too.
pub(crate) fn is_kept(entry: Entry) -> bool {
    find(entry).is_some()
}

/// Closes the kernel socket after the listener's last descriptor was closed.
pub(crate) fn close_kept(entry: Entry) {
    if let Some(kept) = find(entry)
        && !table::all(table::DESCRIPTORS).any(|(_, other)| other == entry)
    {
        kept.entry.store(0, Ordering::Relaxed);
        let _ = sys::close(kept.kernel.swap(-1, Ordering::AcqRel));
    }
}

/// Shuts down the kernel socket of a listener.
pub(crate) fn shut_down(entry: Entry) {
    if let Some(kept) = find(entry) {
        let _ = sys::shutdown(kept.kernel.load(Ordering::Relaxed), libc::SHUT_RD);
    }
}

/// Returns the kernel sockets, which are the library's own descriptors.
pub(crate) fn own_descriptors() -> impl Iterator<Item = c_int> {
    all().map(|kept| kept.kernel.load(Ordering::Relaxed))
}

/// Moves a kept socket away from a number that the program needs. Returns `None` if no kept socket has that number.
pub(crate) fn move_away(fd: c_int, to: impl FnOnce() -> Result<c_int, Errno>) -> Option<bool> {
    let kept = all().find(|kept| kept.kernel.load(Ordering::Relaxed) == fd)?;
    Some(to().is_ok_and(|moved| {
        kept.kernel.compare_exchange(fd, moved, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }))
}

/// Renames all listeners, because a new stack may use the same names for other sessions.
pub(crate) fn replace_entries() {
    for kept in all() {
        let _ = kept.replace_entry();
    }
}
