//! One direction of a slot.
//!
//! A direction has two cache lines, each with one writer:
//!
//! | offset | bytes | written by | content |
//! |--:|--:|---|---|
//! | 0 | 8 | stack | `edge`: receive: the tail, the end of the data; transmit: the head, the end of the freed bytes |
//! | 8 | 8 | stack | `limit`: transmit: the position up to which there are blocks to write to |
//! | 16 | 8 | stack | `p0`: the first position in large blocks; [`NEVER`] without them |
//! | 24 | 4 | stack | `small`: the page of the small block, or 0 |
//! | 28 | 4 | stack | `table`: the place of the table, or 0 |
//! | 32 | 8 | stack | `buffer`: transmit: maximum of bytes that are written and not freed by the stack |
//! | 40 | 4 | stack | `answered`: transmit: the last `asks` that the stack has answered |
//! | 44 | 4 | stack | `mtu`: transmit, datagrams only: see [`Slot::mtu`](super::Slot::mtu) |
//! | 48 | 4 | stack | `undelivered`: transmit, datagrams only: see [`Slot::undelivered`](super::Slot::undelivered) |
//! | 56 | 8 | stack | `urgent`: receive: the position after the urgent byte, or 0 |
//! | 64 | 8 | application | `index`: receive: head, the end of consumed bytes; transmit: tail, of written bytes |
//! | 72 | 4 | application | `writing`: transmit: 1 while the application uses the room below `limit` |
//! | 80 | 8 | application | `claims`: transmit: writes in progress: see [`crate::app::Turn`] |
//! | 88 | 8 | application | `held_from`: transmit: from here on short segments wait for more data |
//! | 96 | 8 | application | `held_to`: transmit: short segments wait until more than this is written |
//! | 104 | 8 | application | `wanted`: transmit: the position up to which the application wants to write |
//! | 112 | 4 | application | `asks`: transmit: the number of times that `wanted` was stored |
//! | 120 | 8 | application | `urgent_end`: end of an urgent byte: transmit: newest; receive: last `MSG_OOB` read |
//!
//! **Order.** The stack stores `p0`, `small`, `table` and the table's entries, and then `edge` or `limit` with release
//! ordering. The application loads `edge` or `limit` with acquire ordering, and the others only if there are bytes.
//! Therefore it knows `p0` and the table before it sees a position beyond `p0`.
//!
//! **Taking back.** `limit` decreases in one case only: the FIFO is empty, and its blocks are needed elsewhere. The
//! application may be about to write to them, so each side stores its word, executes a full fence, and loads the
//! other's word. Either the application sees the lower limit, or the stack sees `writing` and leaves the blocks in
//! place.
//!
//! **More data to come** (`MSG_MORE`, `TCP_CORK`). The application stores `held_from` and `held_to` before the `index`
//! of these bytes. The stack loads them after `index`, so it never sends a short segment too early. A cork has no end:
//! `held_to` is [`CORKED`].
//!
//! **Requests for room.** A session has few blocks until it needs more, even with a large `buffer`. An application that
//! needs more room stores `wanted`, increments `asks`, marks the session and waits for `answered`: see
//! [`Slot::want`](super::Slot::want).
//!
//! The stack loads `index`, `writing`, `held_from`, `held_to`, `wanted` and `asks`. It never loads its own words.

#[cfg(all(loom, test))]
mod loom_model;

use core::ops::Range;

use crate::layout::NEVER;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// `held_to` while `TCP_CORK` is set.
pub const CORKED: u64 = u64::MAX;

/// One direction of a slot: a cache line for each writer.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Half {
    stack: StackLine,
    app: AppLine,
}

/// The line that the stack writes.
#[derive(Debug)]
#[repr(C, align(64))]
struct StackLine {
    edge: AtomicU64,
    limit: AtomicU64,
    p0: AtomicU64,
    small: AtomicU32,
    table: AtomicU32,
    buffer: AtomicU64,
    answered: AtomicU32,
    mtu: AtomicU32,
    undelivered: AtomicU32,
    rest: AtomicU32,
    urgent: AtomicU64,
}

/// The line that the application writes.
#[derive(Debug)]
#[repr(C, align(64))]
struct AppLine {
    index: AtomicU64,
    writing: AtomicU32,
    gap: AtomicU32,
    claims: AtomicU64,
    held_from: AtomicU64,
    held_to: AtomicU64,
    wanted: AtomicU64,
    asks: AtomicU32,
    rest: AtomicU32,
    urgent_end: AtomicU64,
}

// Loom's atomics are larger than the real ones.
#[cfg(not(all(loom, test)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Half>() == 128 && size_of::<StackLine>() == 64 && size_of::<AppLine>() == 64);
    assert!(offset_of!(Half, stack.edge) == 0 && offset_of!(Half, stack.limit) == 8);
    assert!(offset_of!(Half, stack.p0) == 16 && offset_of!(Half, stack.small) == 24);
    assert!(offset_of!(Half, stack.table) == 28 && offset_of!(Half, stack.buffer) == 32);
    assert!(offset_of!(Half, stack.answered) == 40 && offset_of!(Half, stack.mtu) == 44);
    assert!(offset_of!(Half, stack.undelivered) == 48 && offset_of!(Half, stack.urgent) == 56);
    assert!(offset_of!(Half, app.index) == 64 && offset_of!(Half, app.writing) == 72);
    assert!(offset_of!(Half, app.claims) == 80 && offset_of!(Half, app.held_from) == 88);
    assert!(offset_of!(Half, app.held_to) == 96 && offset_of!(Half, app.wanted) == 104);
    assert!(offset_of!(Half, app.asks) == 112 && offset_of!(Half, app.urgent_end) == 120);
};

/// The location of a direction's bytes: see [`crate::layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) p0: u64,
    /// Page of the small block, or 0.
    pub(crate) small: u32,
    /// Place of the table, or 0.
    pub(crate) table: u32,
}

impl Map {
    /// The map of a FIFO without blocks.
    pub(crate) const EMPTY: Self = Self { p0: NEVER, small: 0, table: 0 };
}

/// A request for room.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    number: u32,
    len: usize,
}

impl Half {
    /// Initialises both lines: no bytes, no blocks.
    pub(super) fn reset(&self) {
        self.stack.reset();
        self.app.reset();
        self.describe(Map::EMPTY);
    }

    /// Stores the location of the bytes, for the stack. The application loads it after the next [`Half::publish`] or
    /// [`Half::allow`].
    #[inline]
    pub(crate) fn describe(&self, map: Map) {
        self.stack.p0.store(map.p0, Ordering::Relaxed);
        self.stack.small.store(map.small, Ordering::Relaxed);
        self.stack.table.store(map.table, Ordering::Relaxed);
    }

    /// Publishes the stack's edge, and everything that it stored before.
    #[inline(always)]
    pub(crate) fn publish(&self, edge: u64) {
        self.stack.edge.store(edge, Ordering::Release);
    }

    /// Lets the application write up to `limit`.
    #[inline(always)]
    pub(crate) fn allow(&self, limit: u64) {
        self.stack.limit.store(limit, Ordering::Release);
    }

    /// Stores the size of the buffer, for the stack.
    pub(crate) fn set_buffer(&self, bytes: u64) {
        self.stack.buffer.store(bytes, Ordering::Relaxed);
    }

    /// Returns the number of the application's requests, and the requested position, unchecked.
    pub(crate) fn asked(&self) -> (u32, u64) {
        (self.app.asks.load(Ordering::Acquire), self.app.wanted.load(Ordering::Relaxed))
    }

    /// Stores the number of the answered request, for the stack.
    pub(crate) fn answer(&self, asks: u32) {
        self.stack.answered.store(asks, Ordering::Release);
    }

    /// Returns the application's current index, unchecked.
    #[inline(always)]
    pub(crate) fn index(&self) -> u64 {
        self.app.index.load(Ordering::Acquire)
    }

    /// Requests blocks for `len` more bytes, if [`Half::lacks`] returns `true`.
    pub(super) fn want(&self, len: usize) -> Option<Ask> {
        self.lacks(len).then(|| {
            self.app.wanted.store(self.index().saturating_add(len as u64), Ordering::Relaxed);
            Ask { number: self.app.asks.fetch_add(1, Ordering::Release).wrapping_add(1), len }
        })
    }

    /// Returns whether the stack has answered, or has already granted blocks.
    pub(super) fn is_answered(&self, ask: &Ask) -> bool {
        self.stack.answered.load(Ordering::Acquire) == ask.number || !self.lacks(ask.len)
    }

    /// Returns whether blocks are missing for `len` more bytes for which the buffer has room.
    pub(super) fn lacks(&self, len: usize) -> bool {
        let buffer = self.edge().saturating_add(self.stack.buffer.load(Ordering::Relaxed));
        self.limit() < self.index().saturating_add(len as u64).min(buffer)
    }

    /// Returns the word with the path MTU: see [`Slot::mtu`](super::Slot::mtu).
    pub(super) fn mtu(&self) -> &AtomicU32 {
        &self.stack.mtu
    }

    /// Returns the word with the number of errors: see [`Slot::undelivered`](super::Slot::undelivered).
    pub(super) fn undelivered(&self) -> &AtomicU32 {
        &self.stack.undelivered
    }

    /// Returns the word of the writes in progress: see [`crate::app::Turn`].
    pub(crate) fn claims(&self) -> &AtomicU64 {
        &self.app.claims
    }

    /// Lets short segments no longer wait.
    pub(super) fn uncork(&self) {
        self.app.held_to.store(0, Ordering::Release);
    }

    /// Returns whether `TCP_CORK` holds all further data.
    pub(super) fn is_corked(&self) -> bool {
        self.app.held_to.load(Ordering::Relaxed) == CORKED
    }

    /// Releases all written data from [`Half::hold`].
    pub(super) fn push(&self) {
        self.app.held_from.store(self.index(), Ordering::Release);
    }

    /// Returns the position after the urgent byte, for the application, or 0.
    pub(super) fn urgent(&self) -> u64 {
        self.stack.urgent.load(Ordering::Acquire)
    }

    /// Stores the end of an urgent byte, for the application: the newest written one, or the last one read.
    pub(super) fn set_urgent_end(&self, end: u64) {
        self.app.urgent_end.store(end, Ordering::Relaxed);
    }

    /// Makes short segments wait from `from` on, or from the start of an adjacent held part, until more than `to` is
    /// written.
    pub(super) fn hold(&self, from: u64, to: u64) {
        if self.app.held_to.load(Ordering::Relaxed) != from {
            self.app.held_from.store(from, Ordering::Relaxed);
        }
        self.app.held_to.store(to, Ordering::Release);
    }

    /// Returns the end that the application has stored with [`Half::set_urgent_end`], unchecked.
    #[inline]
    pub(crate) fn urgent_end(&self) -> u64 {
        self.app.urgent_end.load(Ordering::Relaxed)
    }

    /// Stores the position of an urgent byte, for the stack, which commits the byte afterwards.
    pub(crate) fn mark_urgent(&self, position: u64) {
        self.stack.urgent.store(position.wrapping_add(1), Ordering::Release);
    }

    /// Returns the application's index, with the matching `held_from` and `held_to`, unchecked.
    #[inline]
    pub(crate) fn written(&self) -> (u64, Range<u64>) {
        let mut index = self.index();
        // The stack does not wait for an application that writes continuously. In this case a segment may be short.
        for _ in 0..2 {
            let to = self.app.held_to.load(Ordering::Acquire);
            let held = self.app.held_from.load(Ordering::Acquire)..to;
            let now = self.index();
            if now == index {
                return (index, held);
            }
            index = now;
        }
        (index, 0..0)
    }

    /// Takes back the room between `tail`, the last data that the stack has seen, and `limit`. Returns `false` if the
    /// application is writing or has written, and keeps the room.
    pub(crate) fn revoke(&self, tail: u64, limit: u64) -> bool {
        self.stack.limit.store(tail, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Loaded before the tail, because a writer stores the tail before it clears `writing`.
        let writing = self.app.writing.load(Ordering::Acquire) != 0;
        if writing || self.app.index.load(Ordering::Acquire) != tail {
            self.stack.limit.store(limit, Ordering::Release);
            return false;
        }
        true
    }

    /// Returns the stack's edge, for the application, and makes everything visible that the stack stored before.
    #[inline(always)]
    pub(crate) fn edge(&self) -> u64 {
        self.stack.edge.load(Ordering::Acquire)
    }

    /// Returns the limit, for the application. The stack may take it back before its use, unless both are between
    /// [`Half::start_writing`] and [`Half::stop_writing`].
    #[inline(always)]
    pub(crate) fn limit(&self) -> u64 {
        self.stack.limit.load(Ordering::Acquire)
    }

    /// Returns the location of the bytes, for the application, unchecked.
    #[inline(always)]
    pub(crate) fn map(&self) -> Map {
        Map {
            p0: self.stack.p0.load(Ordering::Relaxed),
            small: self.stack.small.load(Ordering::Relaxed),
            table: self.stack.table.load(Ordering::Relaxed),
        }
    }

    /// Publishes the application's index, after its reads or writes below it.
    #[inline(always)]
    pub(crate) fn set_index(&self, index: u64) {
        self.app.index.store(index, Ordering::Release);
    }

    /// Publishes the application's index if it still is `from`.
    #[inline(always)]
    pub(crate) fn move_index(&self, from: u64, to: u64) -> bool {
        self.app.index.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Announces that the application uses the room below the limit, until [`Half::stop_writing`]. Returns the limit.
    #[inline(always)]
    pub(crate) fn start_writing(&self) -> u64 {
        self.app.writing.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.limit()
    }

    /// Announces that the application no longer uses the room below the limit. It has published its index before.
    #[inline(always)]
    pub(crate) fn stop_writing(&self) {
        self.app.writing.store(0, Ordering::Release);
    }
}

impl StackLine {
    fn reset(&self) {
        for word in [&self.edge, &self.limit, &self.buffer, &self.urgent] {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.answered, &self.mtu, &self.undelivered, &self.rest] {
            word.store(0, Ordering::Relaxed);
        }
    }
}

impl AppLine {
    fn reset(&self) {
        let positions = [&self.index, &self.held_from, &self.held_to, &self.wanted, &self.urgent_end];
        for word in positions.into_iter().chain([&self.claims]) {
            word.store(0, Ordering::Relaxed);
        }
        for word in [&self.writing, &self.gap, &self.asks, &self.rest] {
            word.store(0, Ordering::Relaxed);
        }
    }
}
