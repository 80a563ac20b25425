//! The stack's end of a session's socket pair. It shows the application's `poll` what the session reports.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use offcore_session::slot::Slot;
use offcore_stats::tsc;
use rustix::net::{Shutdown, shutdown};
use rustix::pipe::{PipeFlags, pipe_with};

use super::counts::ServeCounts;
use super::descriptors::DescriptorCharge;
use super::{pair, wire};

/// Number of bytes sent before the byte that carries the end of the pipe. It exceeds the number of token bytes that a
/// few calls read.
const DECOYS: usize = 512;
/// A wake-up that takes at least this number of TSC ticks is long: about 30 us.
pub(super) const LONG: u64 = 100_000;

/// The state of the stack's end after a session is over.
#[derive(Debug)]
pub(super) enum Ending {
    /// The stack's end stays open.
    Stays,
    /// The stack's end is closed. If closing it may take long, it is returned to be closed elsewhere. The caller
    /// watches the [pipe](StackEnd::pipe).
    Reset(Option<ClosingEnd>),
}

/// A descriptor that is closed outside the worker, with its charge.
#[derive(Debug)]
pub(super) struct ClosingEnd {
    fd: OwnedFd,
    #[expect(dead_code, reason = "it ends after the descriptor is closed")]
    charge: DescriptorCharge,
}

impl ClosingEnd {
    /// Wakes all waiters at both ends.
    pub(super) fn hang_up(&self) {
        let _ = shutdown(&self.fd, Shutdown::Both);
    }
}

/// The stack's end of a session.
#[derive(Debug)]
pub(super) struct StackEnd {
    /// `None` after a reset.
    socket: Option<OwnedFd>,
    charge: DescriptorCharge,
    /// After a reset, this end of a pipe hangs up when the application closes its last descriptor.
    pipe: Option<OwnedFd>,
    /// The end is shut down for writing.
    shut: bool,
    /// The stack has shut down both directions.
    hung: bool,
    /// Bytes of gates that the stack has put into the pair, minus all bytes of gates that it has taken out, including
    /// the application's.
    gates: u32,
    /// TSC ticks spent on slow wake-ups of the application since [`take_long`](Self::take_long) was last called.
    long: u64,
}

impl StackEnd {
    /// `gates` is the number of bytes of gates that are in the pair.
    pub(super) fn new(socket: OwnedFd, charge: DescriptorCharge, gates: u32) -> Self {
        Self { socket: Some(socket), charge, pipe: None, shut: false, hung: false, gates, long: 0 }
    }

    /// The socket, while it is open.
    pub(super) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    /// The end of the pipe that hangs up at the last close after a reset.
    pub(super) fn pipe(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Whether the stack has shut down the direction to the application.
    #[inline]
    pub(super) fn is_shut(&self) -> bool {
        self.shut
    }

    /// Whether the stack has shut down both directions.
    pub(super) fn is_hung(&self) -> bool {
        self.hung
    }

    /// Number of bytes of gates that may be in the pair.
    pub(super) fn gates(&self, slot: &Slot) -> u32 {
        slot.wishes.gates.load(Ordering::Acquire).wrapping_add(self.gates)
    }

    /// Subtracts `taken` bytes of gates that were read from the pair.
    pub(super) fn count_gates(&mut self, taken: u32) {
        self.gates = self.gates.wrapping_sub(taken);
    }

    /// Writes a byte to the application's end.
    #[inline]
    pub(super) fn put(&mut self, put: impl FnOnce(BorrowedFd<'_>), counts: &mut ServeCounts) {
        if let Some(socket) = self.socket().filter(|_| !self.shut) {
            let from = tsc::now();
            put(socket);
            counts.tokens += 1;
            self.woke(from);
        }
    }

    /// Records the duration of a wake-up that began at TSC value `from`, if it was slow.
    pub(super) fn woke(&mut self, from: u64) {
        let ticks = tsc::now().saturating_sub(from);
        if ticks >= LONG {
            self.long += ticks;
        }
    }

    /// Returns the ticks spent on slow wake-ups since the last call.
    #[inline]
    pub(super) fn take_long(&mut self) -> u64 {
        std::mem::take(&mut self.long)
    }

    /// Opens the gate. Returns `false` if the pair contains data among the bytes of the gate: the gate opens after that
    /// data is taken, see [`raw`](super::raw).
    pub(super) fn open_gate(&mut self, slot: &Slot, counts: &mut ServeCounts) -> bool {
        let from = tsc::now();
        let Some(socket) = self.socket() else { return true };
        let opened = pair::open_gate(socket, || self.gates(slot));
        if let Some((taken, data)) = opened {
            self.count_gates(taken);
            counts.unsent += u64::from(data);
            counts.gates += 1;
        }
        self.woke(from);
        opened.is_some()
    }

    /// Shuts down the direction to the application.
    pub(super) fn shut(&mut self) {
        if let Some(socket) = self.socket.as_ref().filter(|_| !self.shut) {
            let from = tsc::now();
            let _ = shutdown(socket, Shutdown::Write);
            self.shut = true;
            self.woke(from);
        }
    }

    /// Shuts down both directions.
    pub(super) fn hang_up(&mut self) {
        if let Some(socket) = &self.socket {
            self.hung = true;
            let from = tsc::now();
            let _ = shutdown(socket, Shutdown::Both);
            self.woke(from);
        }
    }

    /// Makes the application's end show a reset, if that is possible: the stack's end is closed over the unread byte.
    pub(super) fn reset(&mut self, slot: &Slot, counts: &mut ServeCounts) -> Ending {
        let from = tsc::now();
        if !self.prepare_reset(slot, counts) {
            return Ending::Stays;
        }
        let left = self.socket.take().and_then(|socket| {
            pair::stop_receiving(socket.as_fd());
            pair::close_plain(socket)
        });
        self.woke(from);
        Ending::Reset(left.map(|fd| ClosingEnd { fd, charge: self.charge.clone() }))
    }

    /// Prepares the pair for a reset. The other end of a new pipe is queued for the application's end, so it stays open
    /// as long as the application's end does.
    fn prepare_reset(&mut self, slot: &Slot, counts: &mut ServeCounts) -> bool {
        // Nothing can be sent after a shutdown.
        let Some(socket) = self.socket.as_ref().filter(|_| !self.shut) else { return false };
        let Ok((pipe, there)) = pipe_with(PipeFlags::CLOEXEC) else { return false };
        // A process that reads tokens now reads some of these bytes, and not the byte that carries the pipe.
        slot.wake.announce_always();
        counts.tokens += 1;
        if wire::send(socket.as_fd(), &[0; DECOYS], &[]).is_err() {
            return false;
        }
        if wire::send(socket.as_fd(), &[0], &[there.as_fd()]).is_err() {
            return false;
        }
        self.pipe = Some(pipe);
        true
    }

    /// Takes the socket, and the pipe of a session that was reset. The end has neither afterwards.
    pub(super) fn take_descriptors(&mut self) -> impl Iterator<Item = ClosingEnd> + use<> {
        let charge = self.charge.clone();
        self.socket
            .take()
            .into_iter()
            .chain(self.pipe.take())
            .map(move |fd| ClosingEnd { fd, charge: charge.clone() })
    }

    /// Closes the socket. If that may take long, it is returned to be closed elsewhere.
    pub(super) fn close(self) -> Option<ClosingEnd> {
        let left = self.socket.and_then(pair::close_plain);
        left.map(|fd| ClosingEnd { fd, charge: self.charge })
    }
}
