//! Which descriptors are sessions: one word for each descriptor.
//!
//! The table is private memory, which a forked child has a copy of, as it has of descriptors.

use core::ffi::c_int;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use offcore_session::Place;
use offcore_session::message::Session;

use crate::sys;

/// Descriptors that can be sessions: those below this number.
pub(crate) const DESCRIPTORS: usize = 1 << 20;

/// What a descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A stream on the stack, or one that is to be: bound, or listening.
    Stream = 1,
    /// A datagram socket on the stack.
    Datagrams = 2,
    /// A stream socket of the kernel's of which it is not decided yet whether it becomes a session. All descriptors of one
    /// such socket have the same number in place of a session's place.
    OpenStream = 3,
    /// The same of datagrams.
    OpenDatagrams = 4,
    /// A session of a stack that is gone.
    Dead = 5,
    /// A datagram socket of a stack that is gone: see [`crate::lost`].
    Lost = 6,
}

impl Kind {
    fn find(number: u64) -> Option<Self> {
        [Self::Stream, Self::Datagrams, Self::OpenStream, Self::OpenDatagrams, Self::Dead, Self::Lost]
            .into_iter()
            .find(|kind| *kind as u64 == number)
    }
}

/// A word of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    /// The program's socket is of `AF_INET6`.
    pub(crate) v6: bool,
    /// Low 24 bits of the session's generation; for an undecided socket, bits of [`open`].
    pub(crate) generation: u32,
    /// Place of the slot, or the number of a socket that is not decided.
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

/// Bits of a generation that an entry has.
pub(crate) const GENERATION: u32 = (1 << 24) - 1;
const V6: u64 = 1 << 7;

impl Entry {
    /// That of a session.
    pub(crate) fn session(kind: Kind, v6: bool, session: Session) -> Self {
        Self { kind, v6, generation: session.generation & GENERATION, place: session.place }
    }

    /// Whether this is an undecided socket.
    pub(crate) fn is_open(self) -> bool {
        matches!(self.kind, Kind::OpenStream | Kind::OpenDatagrams)
    }

    /// Whether another entry belongs to the same socket.
    pub(crate) fn is_same(self, other: Self) -> bool {
        (self.kind, self.place) == (other.kind, other.place)
            && (self.is_open() || self.generation == other.generation)
    }

    /// Place of the slot.
    pub(crate) fn slot(self) -> Option<Place> {
        Place::new(self.place)
    }

    /// Encodes it as a word of the table.
    pub(crate) fn to_word(self) -> u64 {
        let v6 = if self.v6 { V6 } else { 0 };
        (self.kind as u64 | v6) << 56 | u64::from(self.generation & GENERATION) << 32 | u64::from(self.place)
    }

    /// Decodes a word of the table.
    pub(crate) fn from_word(word: u64) -> Option<Self> {
        let kind = word >> 56;
        Some(Self {
            kind: Kind::find(kind & !V6)?,
            v6: kind & V6 != 0,
            generation: (word >> 32) as u32 & GENERATION,
            place: word as u32,
        })
    }
}

static WORDS: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// One more than the highest descriptor that has ever been something.
static END: AtomicUsize = AtomicUsize::new(0);
static DATAGRAMS: AtomicBool = AtomicBool::new(false);

/// Makes the table. Without it no descriptor is a session.
pub(crate) fn make() {
    if let Ok(address) = sys::map(-1, DESCRIPTORS * size_of::<AtomicU64>(), true) {
        WORDS.store(address.cast(), Ordering::Release);
    }
}

#[inline]
fn word(fd: c_int) -> Option<&'static AtomicU64> {
    let words = WORDS.load(Ordering::Acquire);
    let at = usize::try_from(fd).ok().filter(|at| *at < DESCRIPTORS && !words.is_null())?;
    // SAFETY: the table has so many words, is never unmapped, and its words are atomics, all zeros at first.
    Some(unsafe { &*words.add(at) })
}

/// A number for a socket of this process.
pub(crate) fn next_number() -> u32 {
    static NUMBER: AtomicU32 = AtomicU32::new(1);
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// What a descriptor is; `None` when the kernel has it alone.
#[inline]
pub(crate) fn get(fd: c_int) -> Option<Entry> {
    match word(fd)?.load(Ordering::Acquire) {
        0 => None,
        word => Entry::from_word(word),
    }
}

/// Whether a descriptor was a datagram socket on the stack at any time.
#[inline]
pub(crate) fn has_datagrams() -> bool {
    DATAGRAMS.load(Ordering::Relaxed)
}

/// Says what a descriptor is. `false`: there is no room in the table for it.
pub(crate) fn set(fd: c_int, entry: Option<Entry>) -> bool {
    let word = word(fd);
    if entry.is_some_and(|entry| entry.kind == Kind::Datagrams) {
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

/// Notes that `to` is a duplicate of `from`.
pub(crate) fn duplicate(from: c_int, to: c_int) {
    let mut entry = get(from);
    if let Some(entry) = entry.as_mut().filter(|entry| entry.is_open()) {
        entry.generation |= open::SHARED;
        set(from, Some(*entry));
    }
    set(to, entry);
}

/// All descriptors that are something, up to the last one that there may be.
pub(crate) fn all(limit: usize) -> impl Iterator<Item = (c_int, Entry)> {
    (0..limit.min(END.load(Ordering::Acquire)) as c_int).filter_map(|fd| Some((fd, get(fd)?)))
}
