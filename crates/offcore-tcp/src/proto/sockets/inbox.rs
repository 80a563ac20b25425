//! Received datagrams of a socket.

use offcore_session::datagram::{HEADER_LEN, Header, record_len};
use offcore_session::{Arena, Fifo, Misuse, Place as Slot, Rx};

use crate::proto::packet::Placed;

/// The receive FIFO, and its datagrams.
#[derive(Debug)]
pub(in crate::proto) struct Inbox {
    fifo: Fifo<Rx>,
    /// Position of the next datagram, and the application's read position.
    next: u64,
    consumed: u64,
    /// Copies to the FIFO that have not been reported.
    placing: u32,
    /// Datagrams dropped because the FIFO was full.
    lost: u32,
}

impl Inbox {
    pub(in crate::proto) fn new(slot: Slot) -> Self {
        Self { fifo: Fifo::new(slot), next: 0, consumed: 0, placing: 0, lost: 0 }
    }

    pub(in crate::proto) fn fifo(&self) -> &Fifo<Rx> {
        &self.fifo
    }

    /// Adds a datagram if there is room within `most` unread bytes, and starts the copy of its payload. Returns the
    /// positions of its payload and of the next datagram. As on Linux, an empty buffer takes any datagram.
    pub(in crate::proto) fn add(
        &mut self,
        arena: &mut Arena,
        mut header: Header,
        most: u64,
    ) -> Option<(u64, u64)> {
        let (start, whole) = (self.next, record_len(header.len));
        let end = start + whole as u64;
        let is_full = start > self.consumed && end - self.consumed > most;
        if is_full || !self.fifo.cover(arena, start, whole) {
            self.count_lost();
            return None;
        }
        header.more.lost = self.lost;
        self.fifo.put(arena, start, &header.to_bytes());
        self.next = end;
        let payload = start + HEADER_LEN as u64;
        if header.len > 0 {
            self.fifo.hold(payload, header.len.into());
            self.placing += 1;
        }
        Some((payload, end))
    }

    /// Counts a datagram that was dropped.
    pub(in crate::proto) fn count_lost(&mut self) {
        self.lost = self.lost.wrapping_add(1);
    }

    /// Returns whether copies are in flight.
    pub(in crate::proto) fn is_placing(&self) -> bool {
        self.placing > 0
    }

    /// Handles completed copies. Returns the position up to which datagrams are complete.
    pub(in crate::proto) fn placed(&mut self, arena: &mut Arena, placed: &Placed) -> u64 {
        self.placing -= placed.copies;
        self.fifo.unhold(arena, placed.pos, placed.len as usize);
        if self.placing == 0 { self.next } else { placed.commit_to }
    }

    /// Shows the application all datagrams before `upto`.
    pub(in crate::proto) fn commit(&mut self, arena: &Arena, upto: u64) {
        self.fifo.commit(arena, upto);
    }

    /// Reads how far the application has read, and frees the blocks of an empty FIFO.
    pub(in crate::proto) fn consumed(&mut self, arena: &mut Arena) -> Result<(), Misuse> {
        self.consumed = self.fifo.consumed(arena)?;
        self.trim(arena);
        Ok(())
    }

    /// Frees the blocks of an empty FIFO. Returns `false` if some are still in use.
    pub(in crate::proto) fn trim(&mut self, arena: &mut Arena) -> bool {
        self.placing == 0 && self.next == self.consumed && self.fifo.shrink(arena)
    }

    /// Frees all blocks.
    pub(in crate::proto) fn discard(&mut self, arena: &mut Arena) {
        self.fifo.discard(arena);
    }
}
