//! The table of descriptors, with one word per descriptor.
//!
//! The table is private memory. A forked child has a copy of it, just as of the descriptors.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use offcore_session::Place;
use offcore_session::message::SessionId;

use crate::sys;

/// Limit of the descriptors that can be sessions.
pub(crate) const DESCRIPTORS: usize = 1 << 20;

/// The kind of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketKind {
    /// A stream on the stack: connected, connecting, bound or listening.
    Stream = 1,
    /// A datagram socket on the stack.
    Datagrams = 2,
    /// A stream socket of the kernel that may still become a session. All descriptors of such a socket have the same
    /// number instead of the place of a session.
    OpenStream = 3,
    /// The same for a datagram socket.
    OpenDatagrams = 4,
    /// A session of a stack that is gone.
    Dead = 5,
    /// A datagram socket of a stack that is gone: see [`crate::lost`].
    Lost = 6,
}

impl SocketKind {
    fn find(number: u64) -> Option<Self> {
        [Self::Stream, Self::Datagrams, Self::OpenStream, Self::OpenDatagrams, Self::Dead, Self::Lost]
            .into_iter()
            .find(|kind| *kind as u64 == number)
    }
}

/// A word of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: SocketKind,
    /// Whether the program's socket has the family `AF_INET6`.
    pub(crate) v6: bool,
    /// Low 24 bits of the session's generation; for an undecided socket, bits of [`open`].
    pub(crate) generation: u32,
    /// Place of the slot, or the number of an undecided socket.
    pub(crate) place: u32,
}

/// State of an undecided socket.
pub(crate) mod open {
    /// The socket has other descriptors, too.
    pub(crate) const SHARED: u32 = 1;
    /// The program has set an option.
    pub(crate) const SET: u32 = 2;
    /// The program has set `TCP_CONGESTION`.
    pub(crate) const CONGESTION: u32 = 4;
}

/// Bits of a generation in an entry.
pub(crate) const GENERATION: u32 = (1 << 24) - 1;
const V6: u64 = 1 << 7;

impl Entry {
    /// Creates the entry of a session.
    pub(crate) fn session(kind: SocketKind, v6: bool, session: SessionId) -> Self {
        Self { kind, v6, generation: session.generation & GENERATION, place: session.place }
    }

    /// Returns whether this is an undecided socket.
    pub(crate) fn is_open(self) -> bool {
        matches!(self.kind, SocketKind::OpenStream | SocketKind::OpenDatagrams)
    }

    /// Returns whether another entry belongs to the same socket.
    pub(crate) fn is_same(self, other: Self) -> bool {
        (self.kind, self.place) == (other.kind, other.place)
            && (self.is_open() || self.generation == other.generation)
    }

    /// Returns the place of the slot.
    pub(crate) fn slot(self) -> Option<Place> {
        Place::new(self.place)
    }

    /// Encodes the entry as a word of the table.
    pub(crate) fn to_word(self) -> u64 {
        let v6 = if self.v6 { V6 } else { 0 };
        (self.kind as u64 | v6) << 56 | u64::from(self.generation & GENERATION) << 32 | u64::from(self.place)
    }

    /// Decodes a word of the table.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let kind = word >> 56;
        Some(Self {
            kind: SocketKind::find(kind & !V6)?,
            v6: kind & V6 != 0,
            generation: (word >> 32) as u32 & GENERATION,
            place: word as u32,
        })
    }
}

static WORDS: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// One more than the highest descriptor that ever had an entry.
static END: AtomicUsize = AtomicUsize::new(0);
static DATAGRAMS: AtomicBool = AtomicBool::new(false);

/// Creates the table. Without it, no descriptor is a session.
pub(crate) fn make() {
    if let Ok(address) = sys::map(-1, DESCRIPTORS * size_of::<AtomicU64>(), true) {
        WORDS.store(address.cast(), Ordering::Release);
    }
}

#[inline]
fn word(fd: c_int) -> Option<&'static AtomicU64> {
    let words = WORDS.load(Ordering::Acquire);
    let at = usize::try_from(fd).ok().filter(|at| *at < DESCRIPTORS && !words.is_null())?;
    // SAFETY: the table has `DESCRIPTORS` words, which are atomics and initially zero, and is never unmapped.
    Some(unsafe { &*words.add(at) })
}

/// Returns a number for a socket of this process.
pub(crate) fn next_number() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(1);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// Returns the entry of a descriptor, or `None` if it belongs to the kernel only.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Entry> {
    match word(fd)?.load(Ordering::Acquire) {
        0 => None,
        word => Entry::from_word(word),
    }
}

/// Returns whether any descriptor has ever been a datagram socket on the stack.
#[inline]
pub(crate) fn has_datagrams() -> bool {
    DATAGRAMS.load(Ordering::Relaxed)
}

/// Sets the entry of a descriptor. Returns `false` if the table has no room for it.
pub(crate) fn set(fd: c_int, entry: Option<Entry>) -> bool {
    let word = word(fd);
    if entry.is_some_and(|entry| entry.kind == SocketKind::Datagrams) {
        DATAGRAMS.store(true, Ordering::Relaxed);
    }
    if let Some(word) = word {
        if entry.is_some() {
            END.fetch_max(fd as usize + 1, Ordering::AcqRel);
        }
        word.store(entry.map_or(0, Entry::to_word), Ordering::Release);
    }
    word.is_some()
}

/// Records that `to` is a duplicate of `from`.
pub(crate) fn duplicate(from: c_int, to: c_int) {
    let mut entry = get(from);
    if let Some(entry) = entry.as_mut().filter(|entry| entry.is_open()) {
        entry.generation |= open::SHARED;
        set(from, Some(*entry));
    }
    set(to, entry);
}

/// Returns all descriptors below `limit` that have an entry.
pub(crate) fn all(limit: usize) -> impl Iterator<Item = (c_int, Entry)> {
    (0..limit.min(END.load(Ordering::Acquire)) as c_int).filter_map(|fd| Some((fd, get(fd)?)))
}
