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
//! A direction has a cache line for each writer: see `slot/half.rs`.

mod half;
mod kept;

use core::ops::Range;

use crate::sync::{AtomicU32, AtomicU64, Ordering};
use crate::wake::Wake;
pub use half::{Ask, CORKED};
pub(crate) use half::{Half, Map};
pub use kept::{Kept, OPTIONS, number};

/// Length of a slot in bytes.
pub const SLOT: usize = 512;

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

// Loom's atomics are larger than the real ones.
#[cfg(not(all(loom, test)))]
const _: () = {
    use core::mem::offset_of;
    assert!(size_of::<Slot>() == SLOT);
    assert!(offset_of!(Slot, state) == 0 && offset_of!(Slot, flags) == 4 && offset_of!(Slot, identity) == 8);
    assert!(offset_of!(Slot, rx) == 64 && offset_of!(Slot, tx) == 192 && offset_of!(Slot, wake) == 320);
    assert!(offset_of!(Slot, wishes) == 384 && offset_of!(Slot, kept) == 448);
};

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
            self.tx.uncork();
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
        if !self.tx.is_corked() {
            self.tx.hold(range.start, range.end);
        }
    }

    /// Releases all data written so far from a cork (`TCP_NODELAY` was set, or the FIFO is full). The caller marks the
    /// session afterwards.
    pub fn push(&self) {
        self.tx.push();
    }

    /// Requests blocks for `len` more bytes, if the buffer has room for some of them and blocks are missing. The
    /// application marks the session afterwards; [`Slot::is_answered`] shows the answer.
    pub fn want(&self, len: usize) -> Option<Ask> {
        self.tx.want(len)
    }

    /// Returns whether the stack has answered, or has already granted blocks.
    pub fn is_answered(&self, ask: &Ask) -> bool {
        self.tx.is_answered(ask)
    }

    /// Returns whether the stack has freed all written bytes.
    pub fn has_sent_all(&self) -> bool {
        self.tx.edge() == self.tx.index()
    }

    /// Returns whether blocks are missing for `len` more bytes for which the buffer has room.
    pub fn lacks(&self, len: usize) -> bool {
        self.tx.lacks(len)
    }

    /// Returns the path MTU to a datagram socket's peer, which the stack stores. Without a peer it is the largest MTU
    /// of all interfaces.
    pub fn mtu(&self) -> &AtomicU32 {
        self.tx.mtu()
    }

    /// Returns the number of errors in a datagram socket's error queue.
    pub fn undelivered(&self) -> &AtomicU32 {
        self.tx.undelivered()
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
        self.rx.urgent().checked_sub(1)
    }

    /// Returns the position of an urgent byte that was neither read nor passed by a read. It may not have arrived yet.
    pub fn unread_urgent(&self) -> Option<u64> {
        let end = self.rx.urgent();
        let read = self.rx.urgent_end() == end || self.rx.index() >= end;
        end.checked_sub(1).filter(|_| !read)
    }

    /// Returns whether such a byte has arrived.
    pub fn has_urgent(&self) -> bool {
        self.unread_urgent().is_some_and(|position| position < self.rx.edge())
    }

    /// Records that the application has read the urgent byte with `MSG_OOB`.
    pub fn take_urgent(&self, position: u64) {
        self.rx.set_urgent_end(position.wrapping_add(1));
    }

    /// Makes the byte before `end` urgent, for the application, which stores the index afterwards.
    pub fn urge(&self, end: u64) {
        self.tx.set_urgent_end(end);
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
