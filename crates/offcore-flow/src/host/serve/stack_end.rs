//! The stack's end of a session's socket pair. It shows the application's `poll` what the session reports.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::LazyLock;
use std::sync::atomic::Ordering;
use std::time::Duration;

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
/// A wake-up that takes at least this time is slow.
const SLOW_WAKEUP: Duration = Duration::from_micros(30);

/// Returns the minimum duration of a slow wake-up in TSC ticks.
#[inline]
pub(super) fn slow_wakeup_ticks() -> u64 {
    static TICKS: LazyLock<u64> = LazyLock::new(|| tsc::ticks(SLOW_WAKEUP));
    *TICKS
}

/// The state of the stack's end after a session is over.
#[derive(Debug)]
pub(super) enum Ending {
    /// The stack's end stays open.
    Stays,
    /// The stack's end is closed. If closing it may take long, it is returned to be closed elsewhere. The caller
    /// watches the [pipe](StackEnd::pipe).
    Reset(Option<ClosingDescriptor>),
}

/// A descriptor that is closed outside the worker, with its charge.
#[derive(Debug)]
pub(super) struct ClosingDescriptor {
    fd: OwnedFd,
    #[expect(dead_code, reason = "it is released after the descriptor is closed")]
    charge: DescriptorCharge,
}

impl ClosingDescriptor {
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
    write_shut: bool,
    /// The stack has shut down both directions.
    shut_down: bool,
    /// Bytes of gates that the stack has put into the pair, minus all bytes of gates that it has taken out, including
    /// the application's.
    gates: u32,
    /// TSC ticks spent on slow wake-ups of the application since [`take_slow_ticks`](Self::take_slow_ticks) was last
    /// called.
    slow_ticks: u64,
}

impl StackEnd {
    /// `gates` is the number of bytes of gates that are in the pair.
    pub(super) fn new(socket: OwnedFd, charge: DescriptorCharge, gates: u32) -> Self {
        Self {
            socket: Some(socket),
            charge,
            pipe: None,
            write_shut: false,
            shut_down: false,
            gates,
            slow_ticks: 0,
        }
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
    pub(super) fn is_write_shut(&self) -> bool {
        self.write_shut
    }

    /// Whether the stack has shut down both directions.
    pub(super) fn is_shut_down(&self) -> bool {
        self.shut_down
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
        if let Some(socket) = self.socket().filter(|_| !self.write_shut) {
            let from = tsc::now();
            put(socket);
            counts.tokens += 1;
            self.record_wakeup(from);
        }
    }

    /// Records the duration of a wake-up that began at TSC value `from`, if it was slow.
    pub(super) fn record_wakeup(&mut self, from: u64) {
        let ticks = tsc::now().saturating_sub(from);
        if ticks >= slow_wakeup_ticks() {
            self.slow_ticks += ticks;
        }
    }

    /// Returns the ticks spent on slow wake-ups since the last call.
    #[inline]
    pub(super) fn take_slow_ticks(&mut self) -> u64 {
        std::mem::take(&mut self.slow_ticks)
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
        self.record_wakeup(from);
        opened.is_some()
    }

    /// Shuts down the direction to the application.
    pub(super) fn shut(&mut self) {
        if let Some(socket) = self.socket.as_ref().filter(|_| !self.write_shut) {
            let from = tsc::now();
            let _ = shutdown(socket, Shutdown::Write);
            self.write_shut = true;
            self.record_wakeup(from);
        }
    }

    /// Shuts down both directions.
    pub(super) fn hang_up(&mut self) {
        if let Some(socket) = &self.socket {
            self.shut_down = true;
            let from = tsc::now();
            let _ = shutdown(socket, Shutdown::Both);
            self.record_wakeup(from);
        }
    }

    /// Makes calls on the application's end fail with a reset, if possible: the stack closes its end while that
    /// contains an unread byte.
    pub(super) fn reset(&mut self, slot: &Slot, counts: &mut ServeCounts) -> Ending {
        let from = tsc::now();
        if !self.prepare_reset(slot, counts) {
            return Ending::Stays;
        }
        let left = self.socket.take().and_then(|socket| {
            pair::stop_receiving(socket.as_fd());
            pair::close_plain(socket)
        });
        self.record_wakeup(from);
        Ending::Reset(left.map(|fd| ClosingDescriptor { fd, charge: self.charge.clone() }))
    }

    /// Prepares the pair for a reset. The other end of a new pipe is queued for the application's end, so it stays open
    /// as long as the application's end does.
    fn prepare_reset(&mut self, slot: &Slot, counts: &mut ServeCounts) -> bool {
        // Nothing can be sent after a shutdown.
        let Some(socket) = self.socket.as_ref().filter(|_| !self.write_shut) else { return false };
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
    pub(super) fn take_descriptors(&mut self) -> impl Iterator<Item = ClosingDescriptor> + use<> {
        let charge = self.charge.clone();
        self.socket
            .take()
            .into_iter()
            .chain(self.pipe.take())
            .map(move |fd| ClosingDescriptor { fd, charge: charge.clone() })
    }

    /// Closes the socket. If that may take long, it is returned to be closed elsewhere.
    pub(super) fn close(self) -> Option<ClosingDescriptor> {
        let Self { socket, charge, pipe, .. } = self;
        let left = socket.and_then(pair::close_plain);
        // The charge covers the pipe, too.
        drop(pipe);
        left.map(|fd| ClosingDescriptor { fd, charge })
    }
}
