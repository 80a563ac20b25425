//! Receive windows promise memory of their application.
//!
//! An advertised window cannot shrink. A connection therefore reserves the blocks that its window needs. Without free
//! blocks the window stops moving, and the connection waits for its turn in the application's
//! [`MemoryWaiters`](super::shortage::MemoryWaiters). A connection without unread data always gets a window of one
//! small block. A connection that was quiet for a second reserves nothing, because a server has more idle connections
//! than memory.

use offcore_session::Arena;
use offcore_session::layout::{LARGE, SMALL};

use super::conns::Conn;
use super::handshake::LocalParameters;
use super::receive::LEAST;
use super::tcb::State;

/// Number of small blocks per large block.
const SMALLS: usize = LARGE / SMALL;
/// One part in this many of the memory is not promised by windows, but reserved for data that applications write.
const UNPROMISED: usize = 16;
/// All windows together promise one part in `ALL` of the free memory. Windows of connections without received data
/// promise up to one part in `FRESH`.
const ALL: usize = 2;
const FRESH: usize = 4;
/// One window takes one part in this many of the rest in its turn, and less if others wait.
const ONE: usize = 4;

/// Returns how many more large blocks windows may promise, if together they promise `1 / part` of the free memory.
fn spare(arena: &Arena, part: usize) -> usize {
    let (len, limit) = arena.len_and_limit();
    let all = (arena.free().large + (limit - len) / LARGE) / part;
    let mapped = arena.spare().saturating_sub(len / LARGE / UNPROMISED);
    all.saturating_sub(arena.promised()).min(mapped)
}

/// Returns whether windows can promise more blocks.
pub(super) fn has_spare(arena: &Arena) -> bool {
    spare(arena, ALL) > 0
}

/// Returns the window of a SYN when `others` connections of the application are half open. It needs a large block,
/// unless it is the minimum window. With `is_limited`, the window is the minimum, because the user has more than its
/// share of a busy worker.
pub(super) fn of_syn(wishes: LocalParameters, arena: &Arena, others: usize, is_limited: bool) -> u16 {
    let most = if spare(arena, FRESH) > others && !is_limited { u16::MAX } else { LEAST };
    wishes.syn_window().min(most)
}

impl Conn {
    /// Raises the limit of the window by memory to the end of the receive buffer, if memory is free. New blocks are
    /// taken only in the connection's turn: `turn` is the number of connections that wait behind it.
    #[inline]
    pub(super) fn fund(&mut self, arena: &mut Arena, turn: Option<usize>) {
        self.funded = self.tcb.receiver.next();
        if self.has_receive_ended() {
            return self.promise(0, arena);
        }
        let receiver = &self.tcb.receiver;
        if receiver.wanted() > receiver.granted() {
            self.extend_window(arena, turn);
        }
        // A connection that was quiet promises its window again only if memory is free for it.
        let mut lacks = self.rx.lacks(self.tcb.receiver.granted());
        if lacks > self.promised {
            let more = SMALLS * spare(arena, ALL);
            lacks = lacks.min(self.promised.saturating_add(more.try_into().unwrap_or(u32::MAX)));
        }
        self.promise(lacks, arena);
    }

    /// Raises the limit by whole blocks.
    #[cold]
    fn extend_window(&mut self, arena: &mut Arena, turn: Option<usize>) {
        let receiver = &self.tcb.receiver;
        let (wanted, granted, next) = (receiver.wanted(), receiver.granted(), receiver.next());
        let spare = spare(arena, if next == 0 { FRESH } else { ALL });
        let more = turn.map_or(0, |behind| (spare / (ONE + behind)).max(1).min(spare));
        if more == 0 && granted < next + u64::from(LEAST) && !self.tcb.delivery.is_placing() {
            // A FIFO without unread data needs no large block.
            self.rx.shrink(arena);
        }
        let has = self.rx.reach(granted, 0);
        let lacks = wanted.saturating_sub(has).div_ceil(LARGE as u64) as usize;
        self.tcb.receiver.grant(self.rx.reach(granted, more.min(lacks)));
    }

    /// Returns whether lack of memory keeps the peer from sending a segment.
    #[inline]
    pub(super) fn lacks_window(&self) -> bool {
        let receiver = &self.tcb.receiver;
        let enough = receiver.next() + u64::from(receiver.ack.peer_mss().max(LEAST));
        receiver.granted() < receiver.wanted().min(enough) && !self.has_receive_ended()
    }

    /// Returns whether no more data can arrive: the peer's stream has ended, or the connection is closed here.
    #[inline]
    fn has_receive_ended(&self) -> bool {
        self.tcb.close_timer.is_orphan()
            || self.tcb.state == State::Closed
            || self.tcb.receiver.end().is_some()
    }

    /// Replaces the number of small blocks that the window promises.
    #[inline]
    pub(super) fn promise(&mut self, promised: u32, arena: &mut Arena) {
        let before = std::mem::replace(&mut self.promised, promised);
        if before != promised {
            arena.promise(before, promised);
        }
    }
}
