//! The shared slot of a session: 512 bytes for communication between the stack and the application.
//!
//! All numbers are in the machine's byte order. Positions are offsets in a stream, starting at 0.
//!
//! | offset | bytes | written by | content |
//! |--:|--:|---|---|
//! | 0 | 4 | stack | `state`: the state of the session, as numbered by the stack |
//! | 4 | 4 | stack | `flags`: events of the session |
//! | 8 | 56 | stack | the identity of the session: see [`Identity`] |
//! | 64 | 128 | | receive direction: the stack produces, the application consumes |
//! | 192 | 128 | | transmit direction: the application produces, the stack consumes |
//! | 320 | 64 | both | waiting and wake-ups: see [`crate::wake`] |
//! | 384 | 64 | application | locks between its threads and processes, and its wishes: see [`Wishes`] |
//! | 448 | 64 | application | options that are only stored: see [`Kept`] |
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
//! | 44 | 4 | stack | `mtu`: transmit, datagrams only: see [`Slot::mtu`] |
//! | 48 | 4 | stack | `undelivered`: transmit, datagrams only: see [`Slot::undelivered`] |
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
//! needs more room stores `wanted`, increments `asks`, marks the session and waits for `answered`: see [`Slot::want`].
//!
//! The stack loads `index`, `writing`, `held_from`, `held_to`, `wanted` and `asks`. It never loads its own words.

mod kept;
#[cfg(all(loom, test))]
mod loom_model;

use core::ops::Range;

use crate::layout::NEVER;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};
use crate::wake::Wake;
pub use kept::{Kept, OPTIONS, number};

/// Length of a slot in bytes.
pub const SLOT: usize = 512;
/// `held_to` while `TCP_CORK` is set.
pub const CORKED: u64 = u64::MAX;

/// A session's slot. Every byte is part of an atomic, so a reference to it allows concurrent writes by others.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot {
    state: AtomicU32,
    flags: AtomicU32,
    pub identity: Identity,
    pub(crate) rx: Half,
    pub(crate) tx: Half,
    pub wake: Wake,
    pub wishes: Wishes,
    pub kept: Kept,
}

/// Flags of a slot, and of [`Identity::error`].
pub mod flags {
    /// The peer has ended its stream, and all of it can be read.
    pub const ENDED: u32 = 1;
    /// The session has ended: received data can still be read, then `error` is reported.
    pub const OVER: u32 = 2;
}

/// A request for room.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    number: u32,
    len: usize,
}

/// States of a session.
pub mod state {
    /// The session only has an address.
    pub const BOUND: u32 = 1;
    /// A connection was requested.
    pub const CONNECTING: u32 = 2;
    /// The connection is established.
    pub const OPEN: u32 = 3;
    /// The session accepts connections.
    pub const LISTENING: u32 = 4;
}

/// The identity of a session, written by the stack.
#[derive(Debug)]
#[repr(C)]
pub struct Identity {
    /// Its number among the application's sessions, which is used for marks.
    pub number: AtomicU32,
    /// Distinguishes it from earlier sessions at the same place. It is never 0.
    pub generation: AtomicU32,
    /// `SOCK_STREAM` or `SOCK_DGRAM`.
    pub kind: AtomicU32,
    /// The reason for its end as an `errno`, or 0 for no error. For a datagram socket: an error that no call has
    /// returned yet, see [`fail`](Self::fail).
    pub error: AtomicU32,
    /// The local port, and the peer's port in the upper half.
    pub ports: AtomicU32,
    /// 4 or 6: the IP version of both addresses.
    pub family: AtomicU32,
    /// The local address, and the peer's address, in network byte order.
    pub local: [AtomicU32; 4],
    pub remote: [AtomicU32; 4],
}

/// An application's settings for a session, and its locks. The stack reads the settings when the session is marked, and
/// never reads a lock.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Wishes {
    /// The application's locks for reading and writing. The lower half is a [`crate::control::Owner`], with a bit for
    /// waiters as its lowest bit. The upper half is the thread.
    pub reading: AtomicU64,
    pub writing: AtomicU64,
    /// Bits of [`wish`].
    pub options: AtomicU32,
    /// Seconds and count of keep-alive probes.
    pub keep_idle: AtomicU32,
    pub keep_interval: AtomicU32,
    pub keep_count: AtomicU32,
    /// Bits for results that calls have already returned, such as [`wish::ERROR_TOLD`].
    pub told: AtomicU32,
    /// Number of bytes that were read since the session was last marked for reads.
    pub untold: AtomicU32,
    /// Maximum number of token bytes left in the pair from before a read that has left data. 0 means that there are
    /// none.
    pub leftover: AtomicU32,
    /// 1 while read data is moved to something other than memory: a signal handler must not read in between.
    pub moving: AtomicU32,
    /// Number of bytes in the pair with which the application has closed its gate. Other bytes there are data.
    pub gates: AtomicU32,
    /// Buffer sizes in bytes of payload, set by the program (`SO_SNDBUF`, `SO_RCVBUF`). 0 selects automatic sizes.
    pub send_buffer: AtomicU32,
    pub receive_buffer: AtomicU32,
    rest: [AtomicU32; 1],
}

/// Bits of [`Wishes::options`] and [`Wishes::told`].
pub mod wish {
    /// `TCP_NODELAY`.
    pub const NO_DELAY: u32 = 1;
    /// `SO_KEEPALIVE`.
    pub const KEEP_ALIVE: u32 = 2;
    /// `SO_LINGER` with a time of 0: the session ends with a reset.
    pub const RESET: u32 = 4;
    /// The stream to the peer has ended.
    pub const END: u32 = 8;
    /// Nothing more will be read.
    pub const NO_READ: u32 = 16;
    /// `TCP_CORK`, set by [`Slot::cork`](super::Slot::cork).
    pub const CORK: u32 = 32;
    /// Any data wakes the application, regardless of `SO_RCVLOWAT`, because a call waits for it.
    pub const ANY_DATA: u32 = 64;
    /// Toggled each time that `TCP_QUICKACK` is set.
    pub const QUICK_ACK: u32 = 128;
    /// In `told`: a call has returned the error.
    pub const ERROR_TOLD: u32 = 1;
    /// In `told`: a call has reported that it is connected.
    pub const OPEN_TOLD: u32 = 2;
    /// In `told`: the program has created the socket for IPv6, whatever its addresses are.
    pub const V6: u32 = 4;
    /// In `told`: a call has accepted it. Connections that were never accepted end with a reset.
    pub const ACCEPTED: u32 = 8;
    /// In `told`: the listener has timeouts for calls.
    pub const TIMED: u32 = 16;
}

impl Identity {
    /// Stores an error of a datagram socket, which one call returns. It replaces an older error that no call has
    /// returned. The session must be announced after this.
    pub fn fail(&self, error: u32) {
        self.error.store(error, Ordering::Release);
    }

    /// Returns whether there is an error that no call has returned.
    pub fn has_failed(&self) -> bool {
        self.error.load(Ordering::Relaxed) != 0
    }

    /// Takes the error of a datagram socket. If calls are concurrent, a single one gets it.
    pub fn take_failure(&self) -> Option<u32> {
        let failed = self.has_failed().then(|| self.error.swap(0, Ordering::AcqRel));
        failed.filter(|error| *error != 0)
    }

    /// Restores an error that the call which has taken it cannot return, unless there is a newer one.
    pub fn return_failure(&self, error: u32) {
        let _ = self.error.compare_exchange(0, error, Ordering::AcqRel, Ordering::Relaxed);
    }

    fn words(&self) -> impl Iterator<Item = &AtomicU32> {
        let Self { number, generation, kind, error, ports, family, local, remote } = self;
        [number, generation, kind, error, ports, family].into_iter().chain(local).chain(remote)
    }
}

impl Wishes {
    fn words(&self) -> impl Iterator<Item = &AtomicU32> {
        let Self { options, keep_idle, keep_interval, keep_count, told, untold, .. } = self;
        let numbers = [options, keep_idle, keep_interval, keep_count, told, untold];
        let sizes = [&self.send_buffer, &self.receive_buffer];
        let counts = [&self.leftover, &self.moving, &self.gates];
        numbers.into_iter().chain(counts).chain(sizes).chain(&self.rest)
    }
}

/// One direction of a slot.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Half {
    edge: AtomicU64,
    limit: AtomicU64,
    p0: AtomicU64,
    small: AtomicU32,
    table: AtomicU32,
    buffer: AtomicU64,
    answered: AtomicU32,
    mtu: AtomicU32,
    undelivered: AtomicU32,
    stack_rest: [AtomicU32; 1],
    urgent: AtomicU64,
    index: AtomicU64,
    writing: AtomicU32,
    gap: AtomicU32,
    pub(crate) claims: AtomicU64,
    held_from: AtomicU64,
    held_to: AtomicU64,
    wanted: AtomicU64,
    asks: AtomicU32,
    app_rest: [AtomicU32; 1],
    urgent_end: AtomicU64,
}

// Loom's atomics are larger than the real ones.
#[cfg(not(all(loom, test)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Slot>() == SLOT);
    assert!(offset_of!(Slot, state) == 0 && offset_of!(Slot, flags) == 4 && offset_of!(Slot, identity) == 8);
    assert!(offset_of!(Slot, rx) == 64 && offset_of!(Slot, tx) == 192 && offset_of!(Slot, wake) == 320);
    assert!(offset_of!(Slot, wishes) == 384 && offset_of!(Slot, kept) == 448);
    assert!(size_of::<Half>() == 128);
    assert!(offset_of!(Half, edge) == 0 && offset_of!(Half, limit) == 8 && offset_of!(Half, p0) == 16);
    assert!(offset_of!(Half, small) == 24 && offset_of!(Half, table) == 28);
    assert!(offset_of!(Half, urgent) == 56);
    assert!(offset_of!(Half, index) == 64 && offset_of!(Half, writing) == 72);
    assert!(offset_of!(Half, claims) == 80);
    assert!(offset_of!(Half, held_from) == 88 && offset_of!(Half, held_to) == 96);
    assert!(offset_of!(Half, wanted) == 104 && offset_of!(Half, asks) == 112);
    assert!(offset_of!(Half, urgent_end) == 120);
    assert!(offset_of!(Half, buffer) == 32 && offset_of!(Half, answered) == 40);
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

impl Slot {
    /// Returns the session's state, as numbered by the stack, for the application.
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    /// Publishes another state to the application, after everything that was committed before.
    pub fn set_state(&self, state: u32) {
        self.state.store(state, Ordering::Release);
    }

    /// Returns the session's flags, as numbered by the stack, for the application.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Acquire)
    }

    /// Publishes other flags to the application, after everything that was committed before.
    pub fn set_flags(&self, flags: u32) {
        self.flags.store(flags, Ordering::Release);
    }

    /// Returns the positions up to which the application has written and the peer has acknowledged, for the
    /// application.
    pub fn sent(&self) -> (u64, u64) {
        (self.tx.index(), self.tx.edge())
    }

    /// Sets or clears `TCP_CORK`: while set, a short last segment waits. The caller marks the session afterwards.
    pub fn cork(&self, on: bool) {
        if !on {
            self.tx.held_to.store(0, Ordering::Release);
            self.wishes.options.fetch_and(!wish::CORK, Ordering::AcqRel);
        } else if self.wishes.options.fetch_or(wish::CORK, Ordering::AcqRel) & wish::CORK == 0 {
            self.tx.hold(self.tx.index(), CORKED);
        }
    }

    /// Extends a cork from before the connection to all data.
    pub fn inherit_cork(&self) {
        if self.wishes.options.load(Ordering::Relaxed) & wish::CORK != 0 {
            self.tx.hold(0, CORKED);
        }
    }

    /// Holds `range`, which a call with `MSG_MORE` has written. The caller stores the index afterwards.
    pub fn expect_more(&self, range: Range<u64>) {
        if self.tx.held_to.load(Ordering::Relaxed) != CORKED {
            self.tx.hold(range.start, range.end);
        }
    }

    /// Releases all data written so far from a cork (`TCP_NODELAY` was set, or the FIFO is full). The caller marks the
    /// session afterwards.
    pub fn push(&self) {
        self.tx.held_from.store(self.tx.index(), Ordering::Release);
    }

    /// Requests blocks for `len` more bytes, if the buffer has room for some of them and blocks are missing. The
    /// application marks the session afterwards; [`Slot::is_answered`] shows the answer.
    pub fn want(&self, len: usize) -> Option<Ask> {
        self.lacks(len).then(|| {
            self.tx.wanted.store(self.tx.index().saturating_add(len as u64), Ordering::Relaxed);
            Ask { number: self.tx.asks.fetch_add(1, Ordering::Release).wrapping_add(1), len }
        })
    }

    /// Returns whether the stack has answered, or has already granted blocks.
    pub fn is_answered(&self, ask: &Ask) -> bool {
        self.tx.answered.load(Ordering::Acquire) == ask.number || !self.lacks(ask.len)
    }

    /// Returns whether the stack has freed all written bytes.
    pub fn has_sent_all(&self) -> bool {
        self.tx.edge() == self.tx.index()
    }

    /// Returns whether blocks are missing for `len` more bytes for which the buffer has room.
    pub fn lacks(&self, len: usize) -> bool {
        let buffer = self.tx.edge().saturating_add(self.tx.buffer.load(Ordering::Relaxed));
        self.tx.limit() < self.tx.index().saturating_add(len as u64).min(buffer)
    }

    /// Returns the path MTU to a datagram socket's peer, which the stack stores. Without a peer it is the largest MTU
    /// of all interfaces.
    pub fn mtu(&self) -> &AtomicU32 {
        &self.tx.mtu
    }

    /// Returns the number of errors in a datagram socket's error queue.
    pub fn undelivered(&self) -> &AtomicU32 {
        &self.tx.undelivered
    }

    /// Returns whether a datagram socket has an error that no call has returned.
    pub fn has_errors(&self) -> bool {
        self.identity.has_failed() || self.undelivered().load(Ordering::Acquire) > 0
    }

    /// Returns the number of received bytes that the application has not read. The stack must not rely on it, because
    /// the application stores the index.
    pub fn unread(&self) -> u64 {
        self.rx.edge().wrapping_sub(self.rx.index())
    }

    /// Returns the position of the urgent byte, if there is one.
    pub fn urgent(&self) -> Option<u64> {
        self.rx.urgent.load(Ordering::Acquire).checked_sub(1)
    }

    /// Returns the position of an urgent byte that was neither read nor passed by a read. It may not have arrived yet.
    pub fn unread_urgent(&self) -> Option<u64> {
        let end = self.rx.urgent.load(Ordering::Acquire);
        let read = self.rx.urgent_end.load(Ordering::Relaxed) == end || self.rx.index() >= end;
        end.checked_sub(1).filter(|_| !read)
    }

    /// Returns whether such a byte has arrived.
    pub fn has_urgent(&self) -> bool {
        self.unread_urgent().is_some_and(|position| position < self.rx.edge())
    }

    /// Records that the application has read the urgent byte with `MSG_OOB`.
    pub fn take_urgent(&self, position: u64) {
        self.rx.urgent_end.store(position.wrapping_add(1), Ordering::Relaxed);
    }

    /// Makes the byte before `end` urgent, for the application, which stores the index afterwards.
    pub fn urge(&self, end: u64) {
        self.tx.urgent_end.store(end, Ordering::Relaxed);
    }

    /// Initialises the slot for a new session: nothing in either direction, no blocks.
    pub(crate) fn reset(&self) {
        self.kept.inherit(&Kept::default());
        let words = [&self.state, &self.flags].into_iter();
        for word in words.chain(self.identity.words()).chain(self.wishes.words()) {
            word.store(0, Ordering::Relaxed);
        }
        self.wishes.reading.store(0, Ordering::Relaxed);
        self.wishes.writing.store(0, Ordering::Relaxed);
        self.wake.reset();
        self.rx.reset();
        self.tx.reset();
    }
}

impl Half {
    fn reset(&self) {
        let words = [&self.edge, &self.limit, &self.buffer, &self.index, &self.claims, &self.wanted];
        for word in words.into_iter().chain([&self.held_from, &self.held_to, &self.urgent, &self.urgent_end])
        {
            word.store(0, Ordering::Relaxed);
        }
        let words = [&self.answered, &self.mtu, &self.undelivered, &self.writing, &self.gap, &self.asks];
        for word in words.into_iter().chain(&self.stack_rest).chain(&self.app_rest) {
            word.store(0, Ordering::Relaxed);
        }
        self.describe(Map::EMPTY);
    }

    /// Stores the location of the bytes, for the stack. The application loads it after the next [`Half::publish`] or
    /// [`Half::allow`].
    #[inline]
    pub(crate) fn describe(&self, map: Map) {
        self.p0.store(map.p0, Ordering::Relaxed);
        self.small.store(map.small, Ordering::Relaxed);
        self.table.store(map.table, Ordering::Relaxed);
    }

    /// Publishes the stack's edge, and everything that it stored before.
    #[inline(always)]
    pub(crate) fn publish(&self, edge: u64) {
        self.edge.store(edge, Ordering::Release);
    }

    /// Lets the application write up to `limit`.
    #[inline(always)]
    pub(crate) fn allow(&self, limit: u64) {
        self.limit.store(limit, Ordering::Release);
    }

    /// Stores the size of the buffer, for the stack.
    pub(crate) fn set_buffer(&self, bytes: u64) {
        self.buffer.store(bytes, Ordering::Relaxed);
    }

    /// Returns the number of the application's requests, and the requested position, unchecked.
    pub(crate) fn asked(&self) -> (u32, u64) {
        (self.asks.load(Ordering::Acquire), self.wanted.load(Ordering::Relaxed))
    }

    /// Stores the number of the answered request, for the stack.
    pub(crate) fn answer(&self, asks: u32) {
        self.answered.store(asks, Ordering::Release);
    }

    /// Returns the application's current index, unchecked.
    #[inline(always)]
    pub(crate) fn index(&self) -> u64 {
        self.index.load(Ordering::Acquire)
    }

    /// Makes short segments wait from `from` on, or from the start of an adjacent held part, until more than `to` is
    /// written.
    fn hold(&self, from: u64, to: u64) {
        if self.held_to.load(Ordering::Relaxed) != from {
            self.held_from.store(from, Ordering::Relaxed);
        }
        self.held_to.store(to, Ordering::Release);
    }

    /// Returns the position after the newest urgent byte that the application has written, unchecked.
    #[inline]
    pub(crate) fn urgent_end(&self) -> u64 {
        self.urgent_end.load(Ordering::Relaxed)
    }

    /// Stores the position of an urgent byte, for the stack, which commits the byte afterwards.
    pub(crate) fn mark_urgent(&self, position: u64) {
        self.urgent.store(position.wrapping_add(1), Ordering::Release);
    }

    /// Returns the application's index, with the matching `held_from` and `held_to`, unchecked.
    #[inline]
    pub(crate) fn written(&self) -> (u64, Range<u64>) {
        let mut index = self.index();
        // The stack does not wait for an application that writes continuously. In this case a segment may be short.
        for _ in 0..2 {
            let to = self.held_to.load(Ordering::Acquire);
            let held = self.held_from.load(Ordering::Acquire)..to;
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
        self.limit.store(tail, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Loaded before the tail, because a writer stores the tail before it clears `writing`.
        let writing = self.writing.load(Ordering::Acquire) != 0;
        if writing || self.index.load(Ordering::Acquire) != tail {
            self.limit.store(limit, Ordering::Release);
            return false;
        }
        true
    }

    /// Returns the stack's edge, for the application, and makes everything visible that the stack stored before.
    #[inline(always)]
    pub(crate) fn edge(&self) -> u64 {
        self.edge.load(Ordering::Acquire)
    }

    /// Returns the limit, for the application. The stack may take it back before its use, unless both are between
    /// [`Half::start_writing`] and [`Half::stop_writing`].
    #[inline(always)]
    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    /// Returns the location of the bytes, for the application, unchecked.
    #[inline(always)]
    pub(crate) fn map(&self) -> Map {
        Map {
            p0: self.p0.load(Ordering::Relaxed),
            small: self.small.load(Ordering::Relaxed),
            table: self.table.load(Ordering::Relaxed),
        }
    }

    /// Publishes the application's index, after its reads or writes below it.
    #[inline(always)]
    pub(crate) fn set_index(&self, index: u64) {
        self.index.store(index, Ordering::Release);
    }

    /// Publishes the application's index if it still is `from`.
    #[inline(always)]
    pub(crate) fn move_index(&self, from: u64, to: u64) -> bool {
        self.index.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Announces that the application uses the room below the limit, until [`Half::stop_writing`]. Returns the limit.
    #[inline(always)]
    pub(crate) fn start_writing(&self) -> u64 {
        self.writing.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.limit()
    }

    /// Announces that the application no longer uses the room below the limit. It has published its index before.
    #[inline(always)]
    pub(crate) fn stop_writing(&self) {
        self.writing.store(0, Ordering::Release);
    }
}
