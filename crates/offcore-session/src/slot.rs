//! The shared slot of a session: 512 bytes that the stack and the application talk through.
//!
//! All numbers are in the machine's byte order. Positions are offsets in a stream, from 0 on.
//!
//! | offset | bytes | written by | what |
//! |--:|--:|---|---|
//! | 0 | 4 | stack | `state`: what the session is, by the stack's numbering |
//! | 4 | 4 | stack | `flags`: what has happened to it |
//! | 8 | 56 | stack | who the session is: see [`Identity`] |
//! | 64 | 128 | | receive direction: the stack produces, the application consumes |
//! | 192 | 128 | | transmit direction: the application produces, the stack consumes |
//! | 320 | 64 | both | who waits: see [`crate::wake`] |
//! | 384 | 64 | application | locks between its threads and processes, and what it wants: see [`Wishes`] |
//! | 448 | 64 | application | options that are only remembered: see [`Kept`] |
//!
//! A direction is two cache lines; each has one writer:
//!
//! | offset | bytes | written by | what |
//! |--:|--:|---|---|
//! | 0 | 8 | stack | `edge`: receive: the tail, up to which there is data; transmit: the head, up to which it is freed |
//! | 8 | 8 | stack | `limit`: transmit: the position up to which there are blocks to write to |
//! | 16 | 8 | stack | `p0`: the first position in large blocks; [`NEVER`] while there are none |
//! | 24 | 4 | stack | `small`: the page of the small block, or 0 |
//! | 28 | 4 | stack | `table`: the place of the table, or 0 |
//! | 32 | 8 | stack | `buffer`: transmit: bytes that the application may have written and the stack has not freed |
//! | 40 | 4 | stack | `answered`: transmit: the last `asks` that the stack has answered |
//! | 44 | 4 | stack | `mtu`: transmit, of datagrams: see [`Slot::mtu`] |
//! | 48 | 4 | stack | `undelivered`: transmit, of datagrams: see [`Slot::undelivered`] |
//! | 56 | 8 | stack | `urgent`: receive: the position after the urgent byte, or 0 |
//! | 64 | 8 | application | `index`: receive: the head, up to which it is consumed; transmit: the tail, up to which it is written |
//! | 72 | 4 | application | `writing`: transmit: 1 while the application uses what `limit` gave it |
//! | 80 | 8 | application | `claims`: transmit: what its calls write just now: see [`crate::app::Turn`] |
//! | 88 | 8 | application | `held_from`: transmit: from here on short segments wait for more data |
//! | 96 | 8 | application | `held_to`: transmit: short segments wait until more than this is written |
//! | 104 | 8 | application | `wanted`: transmit: the position up to which the application wants to write |
//! | 112 | 4 | application | `asks`: transmit: the number of times that `wanted` was stored |
//! | 120 | 8 | application | `urgent_end`: the position after an urgent byte: transmit: the newest; receive: the last read by `MSG_OOB` |
//!
//! **Order.** The stack stores `p0`, `small`, `table` and the table's entries, and then `edge` or `limit` with release
//! ordering. The application loads `edge` or `limit` with acquire ordering, and the others only when that shows that
//! there are bytes. So it knows `p0` and the table before it sees a position beyond `p0`.
//!
//! **Taking back.** `limit` goes back in one case only: nothing is in the FIFO, and its blocks are wanted elsewhere.
//! The application may be about to write to them, so each side stores its word, executes a full fence, and looks at the
//! other's: either the application sees the lower limit, or the stack sees `writing` and leaves the blocks where they
//! are.
//!
//! **More data to come** (`MSG_MORE`, `TCP_CORK`). The application stores `held_from` and `held_to` before the `index` of
//! these bytes. So the stack, which loads them after `index`, never sends a short segment too early. A
//! cork has no end: `held_to` is [`CORKED`].
//!
//! **Requests for room.** A session has few blocks until it needs more, even with a large `buffer`. An application that wants to
//! write more stores `wanted`, increments `asks`, marks the session and waits for `answered`: see [`Slot::want`].
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

/// Bytes of a slot.
pub const SLOT: usize = 512;
/// `held_to` while `TCP_CORK` is set.
pub const CORKED: u64 = u64::MAX;

/// A session's slot. Every byte is part of an atomic: a reference to it says nothing about who else writes to it.
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
    /// The peer has ended its stream; all of it can be read.
    pub const ENDED: u32 = 1;
    /// The session is over: what was received can still be read, and then `error` is told.
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
    /// There is an address, and nothing else.
    pub const BOUND: u32 = 1;
    /// A connection was asked for.
    pub const CONNECTING: u32 = 2;
    /// It is there.
    pub const OPEN: u32 = 3;
    /// Connections come.
    pub const LISTENING: u32 = 4;
}

/// Who a session is, written by the stack.
#[derive(Debug)]
#[repr(C)]
pub struct Identity {
    /// Its number among the application's, which it is marked by.
    pub number: AtomicU32,
    /// Tells it from earlier ones in the same place; never 0.
    pub generation: AtomicU32,
    /// `SOCK_STREAM` or `SOCK_DGRAM`.
    pub kind: AtomicU32,
    /// Why it is over, as an `errno`; 0 for no error. Of a datagram socket: an error that no call has returned yet, see
    /// [`fail`](Self::fail).
    pub error: AtomicU32,
    /// Our port, and the peer's in the upper half.
    pub ports: AtomicU32,
    /// 4 or 6: what kind both addresses are.
    pub family: AtomicU32,
    /// Our address, and the peer's, in the order of the wire.
    pub local: [AtomicU32; 4],
    pub remote: [AtomicU32; 4],
}

/// What an application wants of a session, and its locks: the stack reads what it wants when the session is marked, and
/// never a lock.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Wishes {
    /// Locks of the application's: who reads, and who writes. The lower half is a [`crate::control::Owner`], and in its lowest
    /// bit whether somebody waits; the upper half is the thread.
    pub reading: AtomicU64,
    pub writing: AtomicU64,
    /// Bits of [`wish`].
    pub options: AtomicU32,
    /// Seconds and count of keep-alive probes.
    pub keep_idle: AtomicU32,
    pub keep_interval: AtomicU32,
    pub keep_count: AtomicU32,
    /// Bits of what has been told: [`wish::ERROR_TOLD`].
    pub told: AtomicU32,
    /// Bytes that were read since the session was last marked for that.
    pub untold: AtomicU32,
    /// Bytes that the pair may have which were announced before a read that has left data; none only when it has none.
    pub leftover: AtomicU32,
    /// 1 while what was read goes elsewhere than to memory: a signal handler must not read in between.
    pub moving: AtomicU32,
    /// Bytes that the application has put into the pair to close its gate. What else is there is data.
    pub gates: AtomicU32,
    /// Buffer sizes in bytes of payload, set by the program (`SO_SNDBUF`, `SO_RCVBUF`); 0 selects automatic sizes.
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
    /// `SO_LINGER` with a time of 0: the session ends by a reset.
    pub const RESET: u32 = 4;
    /// The stream to the peer has ended.
    pub const END: u32 = 8;
    /// Nothing more is read.
    pub const NO_READ: u32 = 16;
    /// `TCP_CORK`, set by [`Slot::cork`](super::Slot::cork).
    pub const CORK: u32 = 32;
    /// Any data wakes the application, independent of `SO_RCVLOWAT`: a call waits for it.
    pub const ANY_DATA: u32 = 64;
    /// Changed each time that `TCP_QUICKACK` is set.
    pub const QUICK_ACK: u32 = 128;
    /// In `told`: the error has been returned by a call.
    pub const ERROR_TOLD: u32 = 1;
    /// In `told`: a call has returned that it is connected.
    pub const OPEN_TOLD: u32 = 2;
    /// In `told`: the program has made the socket for IPv6, whatever its addresses are.
    pub const V6: u32 = 4;
    /// In `told`: a call has accepted it. What was never accepted ends by a reset.
    pub const ACCEPTED: u32 = 8;
    /// In `told`: of a listener that has times after which calls give up.
    pub const TIMED: u32 = 16;
}

impl Identity {
    /// A datagram socket has an error, which one call returns; an older one that none has returned is forgotten. The session
    /// is to be announced after this.
    pub fn fail(&self, error: u32) {
        self.error.store(error, Ordering::Release);
    }

    /// Whether there is an error that no call has returned.
    pub fn has_failed(&self) -> bool {
        self.error.load(Ordering::Relaxed) != 0
    }

    /// Takes the error of a datagram socket: of several calls at once, one gets it.
    pub fn take_failure(&self) -> Option<u32> {
        let failed = self.has_failed().then(|| self.error.swap(0, Ordering::AcqRel));
        failed.filter(|error| *error != 0)
    }

    /// Gives an error back that the call which has taken it cannot return, unless there is another one meanwhile.
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

// Loom's atomics are larger than what they stand for.
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

/// Where the bytes of a direction are: see [`crate::layout`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Map {
    pub(crate) p0: u64,
    /// Page of the small block, or 0.
    pub(crate) small: u32,
    /// Place of the table, or 0.
    pub(crate) table: u32,
}

impl Map {
    /// Of a FIFO that has no blocks.
    pub(crate) const EMPTY: Self = Self { p0: NEVER, small: 0, table: 0 };
}

impl Slot {
    /// The session's state, by the stack's numbering: for the application.
    pub fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    /// Shows the application another state, after all that was committed before.
    pub fn set_state(&self, state: u32) {
        self.state.store(state, Ordering::Release);
    }

    /// What has happened to the session, by the stack's numbering: for the application.
    pub fn flags(&self) -> u32 {
        self.flags.load(Ordering::Acquire)
    }

    /// Shows the application other flags, after all that was committed before.
    pub fn set_flags(&self, flags: u32) {
        self.flags.store(flags, Ordering::Release);
    }

    /// Up to which position the application has written, and up to which the peer has acknowledged: for the application.
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

    /// Makes a cork from before the connection hold all data.
    pub fn inherit_cork(&self) {
        if self.wishes.options.load(Ordering::Relaxed) & wish::CORK != 0 {
            self.tx.hold(0, CORKED);
        }
    }

    /// A call with `MSG_MORE` has written `range`. The caller stores the index afterwards.
    pub fn expect_more(&self, range: Range<u64>) {
        if self.tx.held_to.load(Ordering::Relaxed) != CORKED {
            self.tx.hold(range.start, range.end);
        }
    }

    /// Releases all data written so far from a cork (`TCP_NODELAY` was set, or the FIFO is full). The caller marks the session
    /// afterwards.
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

    /// Whether the stack has answered, or granted blocks before.
    pub fn is_answered(&self, ask: &Ask) -> bool {
        self.tx.answered.load(Ordering::Acquire) == ask.number || !self.lacks(ask.len)
    }

    /// Whether the stack has freed all written bytes.
    pub fn has_sent_all(&self) -> bool {
        self.tx.edge() == self.tx.index()
    }

    /// Whether blocks are missing for `len` more bytes that the buffer has room for.
    pub fn lacks(&self, len: usize) -> bool {
        let buffer = self.tx.edge().saturating_add(self.tx.buffer.load(Ordering::Relaxed));
        self.tx.limit() < self.tx.index().saturating_add(len as u64).min(buffer)
    }

    /// The path MTU to a datagram socket's peer, which the stack stores. Without a peer it is the largest MTU of all interfaces.
    pub fn mtu(&self) -> &AtomicU32 {
        &self.tx.mtu
    }

    /// How many errors of a datagram socket wait to be read from its error queue.
    pub fn undelivered(&self) -> &AtomicU32 {
        &self.tx.undelivered
    }

    /// Whether a datagram socket has an error that no call has returned.
    pub fn has_errors(&self) -> bool {
        self.identity.has_failed() || self.undelivered().load(Ordering::Acquire) > 0
    }

    /// The number of received bytes that the application has not read. The stack must not rely on it: the application stores the
    /// index.
    pub fn unread(&self) -> u64 {
        self.rx.edge().wrapping_sub(self.rx.index())
    }

    /// The position of the urgent byte, if there is one.
    pub fn urgent(&self) -> Option<u64> {
        self.rx.urgent.load(Ordering::Acquire).checked_sub(1)
    }

    /// The position of an urgent byte that was neither read nor passed by a read. It may still have to arrive.
    pub fn unread_urgent(&self) -> Option<u64> {
        let end = self.rx.urgent.load(Ordering::Acquire);
        let read = self.rx.urgent_end.load(Ordering::Relaxed) == end || self.rx.index() >= end;
        end.checked_sub(1).filter(|_| !read)
    }

    /// Whether such a byte has arrived.
    pub fn has_urgent(&self) -> bool {
        self.unread_urgent().is_some_and(|position| position < self.rx.edge())
    }

    /// The application has read the urgent byte with `MSG_OOB`.
    pub fn take_urgent(&self, position: u64) {
        self.rx.urgent_end.store(position.wrapping_add(1), Ordering::Relaxed);
    }

    /// The application makes the byte before `end` urgent, and stores the index afterwards.
    pub fn urge(&self, end: u64) {
        self.tx.urgent_end.store(end, Ordering::Relaxed);
    }

    /// Makes it the slot of a new session: nothing in either direction, no blocks.
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

    /// The stack says where the bytes are; the application looks after the next [`Half::publish`] or [`Half::allow`].
    #[inline]
    pub(crate) fn describe(&self, map: Map) {
        self.p0.store(map.p0, Ordering::Relaxed);
        self.small.store(map.small, Ordering::Relaxed);
        self.table.store(map.table, Ordering::Relaxed);
    }

    /// The stack publishes its edge, and with it all that it stored before.
    #[inline(always)]
    pub(crate) fn publish(&self, edge: u64) {
        self.edge.store(edge, Ordering::Release);
    }

    /// The stack lets the application write up to `limit`.
    #[inline(always)]
    pub(crate) fn allow(&self, limit: u64) {
        self.limit.store(limit, Ordering::Release);
    }

    /// The stack stores the size of the buffer.
    pub(crate) fn set_buffer(&self, bytes: u64) {
        self.buffer.store(bytes, Ordering::Relaxed);
    }

    /// The number of the application's requests, and the requested position: not checked.
    pub(crate) fn asked(&self) -> (u32, u64) {
        (self.asks.load(Ordering::Acquire), self.wanted.load(Ordering::Relaxed))
    }

    /// The stack stores the number of the answered request.
    pub(crate) fn answer(&self, asks: u32) {
        self.answered.store(asks, Ordering::Release);
    }

    /// The application's index, as it is now: not checked.
    #[inline(always)]
    pub(crate) fn index(&self) -> u64 {
        self.index.load(Ordering::Acquire)
    }

    /// From `from` on, or from the start of an earlier held part that ends there, short segments wait until more than `to` is
    /// written.
    fn hold(&self, from: u64, to: u64) {
        if self.held_to.load(Ordering::Relaxed) != from {
            self.held_from.store(from, Ordering::Relaxed);
        }
        self.held_to.store(to, Ordering::Release);
    }

    /// The position after the newest urgent byte that the application has written: not checked.
    #[inline]
    pub(crate) fn urgent_end(&self) -> u64 {
        self.urgent_end.load(Ordering::Relaxed)
    }

    /// The stack stores the position of an urgent byte, and commits the byte afterwards.
    pub(crate) fn mark_urgent(&self, position: u64) {
        self.urgent.store(position.wrapping_add(1), Ordering::Release);
    }

    /// The application's index, with the matching `held_from` and `held_to`: not checked.
    #[inline]
    pub(crate) fn written(&self) -> (u64, Range<u64>) {
        let mut index = self.index();
        // The stack does not wait for an application that writes all the time: then a segment may be short.
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

    /// The stack takes back what lies between `tail`, as far as it has seen data, and `limit`. `false`: the application
    /// is writing or has written, and keeps it.
    pub(crate) fn revoke(&self, tail: u64, limit: u64) -> bool {
        self.limit.store(tail, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        // Loaded before the tail: who has stopped writing has stored the tail before.
        let writing = self.writing.load(Ordering::Acquire) != 0;
        if writing || self.index.load(Ordering::Acquire) != tail {
            self.limit.store(limit, Ordering::Release);
            return false;
        }
        true
    }

    /// The stack's edge, for the application, and with it all that the stack stored before.
    #[inline(always)]
    pub(crate) fn edge(&self) -> u64 {
        self.edge.load(Ordering::Acquire)
    }

    /// The limit, for the application. Between this and its use the stack may take it back, unless it lies between
    /// [`Half::start_writing`] and [`Half::stop_writing`].
    #[inline(always)]
    pub(crate) fn limit(&self) -> u64 {
        self.limit.load(Ordering::Acquire)
    }

    /// Where the bytes are, for the application: not checked.
    #[inline(always)]
    pub(crate) fn map(&self) -> Map {
        Map {
            p0: self.p0.load(Ordering::Relaxed),
            small: self.small.load(Ordering::Relaxed),
            table: self.table.load(Ordering::Relaxed),
        }
    }

    /// The application publishes its index, after its reads or writes below it.
    #[inline(always)]
    pub(crate) fn set_index(&self, index: u64) {
        self.index.store(index, Ordering::Release);
    }

    /// The application publishes its index, if that still is `from`.
    #[inline(always)]
    pub(crate) fn move_index(&self, from: u64, to: u64) -> bool {
        self.index.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// The application begins to use what the limit gives it, until [`Half::stop_writing`]. Returns the limit.
    #[inline(always)]
    pub(crate) fn start_writing(&self) -> u64 {
        self.writing.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.limit()
    }

    /// The application no longer uses what the limit gave it; it has published its index before.
    #[inline(always)]
    pub(crate) fn stop_writing(&self) {
        self.writing.store(0, Ordering::Release);
    }
}
