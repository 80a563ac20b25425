//! Datagrams that the application of a socket has written.

use std::collections::VecDeque;
use std::net::SocketAddr;

use offcore_session::datagram::{HEADER_LEN, Header, More, PathMtu, record_len};
use offcore_session::{Arena, Fifo, Misuse, Place as Slot, Tx};

use super::Route;
use crate::proto::ahead::Ahead;
use crate::proto::memory;

/// A datagram that is being copied to a packet.
#[derive(Debug)]
pub(in crate::proto) struct Outgoing {
    /// Positions of its header and of its payload.
    start: u64,
    payload: u64,
    pub peer: SocketAddr,
    pub route: Route,
    pub more: More,
}

/// A datagram that is sent in segments.
#[derive(Debug, Clone, Copy)]
pub(in crate::proto) struct Record {
    pub header: Header,
    pub route: Route,
    pub planned: usize,
}

/// The send FIFO, and its datagrams.
#[derive(Debug)]
pub(in crate::proto) struct Outbox {
    fifo: Fifo<Tx>,
    ahead: Ahead,
    /// The application's write position, and the position up to which datagrams are planned.
    written: u64,
    planned: u64,
    /// The datagram at `planned`, while some of its segments are not planned yet.
    record: Option<Record>,
    /// The mode of the last datagram.
    path_mtu: PathMtu,
    in_flight: VecDeque<Outgoing>,
    /// The application waits for room.
    pub wants_room: bool,
    /// The socket waits for memory, see [`MemoryWaiters`](crate::proto::shortage::MemoryWaiters).
    pub waits: bool,
}

impl Outbox {
    pub(in crate::proto) fn new(slot: Slot) -> Self {
        Self {
            fifo: Fifo::new(slot),
            ahead: Ahead::default(),
            written: 0,
            planned: 0,
            record: None,
            path_mtu: PathMtu::Ignore,
            in_flight: VecDeque::new(),
            wants_room: false,
            waits: false,
        }
    }

    pub(in crate::proto) fn fifo(&self) -> &Fifo<Tx> {
        &self.fifo
    }

    /// Returns whether it lacks memory to which its application is entitled.
    pub(in crate::proto) fn is_short(&self) -> bool {
        self.ahead.is_short(&self.fifo)
    }

    /// Frees sent datagrams, and grants blocks to write to, up to `buffer` bytes. Returns `false` if the arena lacks
    /// blocks.
    pub(in crate::proto) fn release(&mut self, arena: &mut Arena, buffer: u64) -> bool {
        self.free_sent(arena);
        self.ahead.grant(&mut self.fifo, arena, |_, _| buffer, || u64::MAX)
    }

    /// As [`release`](Self::release), with the blocks that the application requests.
    pub(in crate::proto) fn release_asked(&mut self, arena: &mut Arena, buffer: u64) -> bool {
        self.free_sent(arena);
        self.ahead.grant_asked(&mut self.fifo, arena, |_, _| buffer, || u64::MAX)
    }

    fn free_sent(&mut self, arena: &mut Arena) {
        let upto = self.in_flight.front().map_or(self.planned, |oldest| oldest.start);
        if upto > self.fifo.released() {
            self.fifo.acked(arena, upto);
        }
    }

    /// Sets the size of the buffer.
    pub(in crate::proto) fn resize(&mut self, arena: &mut Arena, buffer: u64) {
        self.ahead.resize(buffer, &self.fifo, arena);
        self.release(arena, buffer);
    }

    /// Frees the blocks of an idle socket, except a small one to write to, up to `buffer` bytes. Returns `false` if
    /// blocks are still in use.
    pub(in crate::proto) fn trim(&mut self, arena: &mut Arena, buffer: u64) -> bool {
        let sent = self.is_done() && self.fifo.shrink(arena);
        if sent {
            self.ahead.shrink();
            if memory::allows_speculative_use(arena) {
                self.release(arena, buffer);
            }
        }
        sent
    }

    /// Returns whether all datagrams are sent.
    pub(in crate::proto) fn is_done(&self) -> bool {
        self.in_flight.is_empty() && !self.has_unplanned()
    }

    /// Returns whether datagrams wait to be planned.
    pub(in crate::proto) fn has_unplanned(&self) -> bool {
        self.planned < self.written
    }

    /// Returns whether a datagram was planned before.
    pub(in crate::proto) fn has_planned(&self) -> bool {
        self.planned > 0
    }

    /// Returns whether the last datagram may be fragmented.
    pub(in crate::proto) fn ignores_path_mtu(&self) -> bool {
        self.path_mtu == PathMtu::Ignore
    }

    /// Reads how far the application has written. Returns whether it has written more.
    pub(in crate::proto) fn written(&mut self, arena: &Arena) -> Result<bool, Misuse> {
        let written = self.fifo.written(arena)?;
        let more = written > self.written;
        self.written = self.written.max(written);
        Ok(more)
    }

    /// Ignores datagrams that are not planned, because their headers are invalid.
    pub(in crate::proto) fn forget_unplanned(&mut self) {
        (self.written, self.record) = (self.planned, None);
    }

    /// Returns whether the next datagram may be planned: it exists, and at most `most` bytes are being copied.
    pub(in crate::proto) fn may_plan(&self, most: u64) -> bool {
        self.has_unplanned() && self.planned - self.fifo.released() < most
    }

    /// Takes the datagram whose segments are not all planned.
    pub(in crate::proto) fn take_record(&mut self) -> Option<Record> {
        self.record.take()
    }

    /// Keeps a datagram whose segments are not all planned.
    pub(in crate::proto) fn keep_record(&mut self, record: Record) {
        self.record = Some(record);
    }

    /// Reads the header of the next datagram. Returns `None` if it is invalid.
    pub(in crate::proto) fn read(&mut self, arena: &Arena) -> Option<Header> {
        let left = self.written - self.planned;
        let mut bytes = [0; HEADER_LEN];
        if left < HEADER_LEN as u64 {
            return None;
        }
        self.fifo.get(arena, self.planned, &mut bytes);
        let header = Header::from_bytes(&bytes).filter(|header| record_len(header.len) as u64 <= left)?;
        self.path_mtu = header.more.path_mtu();
        Some(header)
    }

    /// Skips the next datagram of `whole` bytes.
    pub(in crate::proto) fn skip(&mut self, whole: usize) {
        self.planned += whole as u64;
    }

    /// Plans the next `bytes` bytes of payload of `record`. Returns their position.
    pub(in crate::proto) fn plan(&mut self, mut record: Record, bytes: usize) -> u64 {
        let Record { header: Header { len, peer, more, .. }, route, planned } = record;
        let start = self.planned;
        let payload = start + (HEADER_LEN + planned) as u64;
        self.fifo.hold(payload, bytes);
        self.in_flight.push_back(Outgoing { start, payload, peer, route, more });
        record.planned += bytes;
        match record.planned < usize::from(len) {
            true => self.keep_record(record),
            false => self.skip(record_len(len)),
        }
        payload
    }

    /// Removes the planned datagram or segment whose `len` bytes of payload are at `pos`.
    pub(in crate::proto) fn take_outgoing(
        &mut self,
        arena: &mut Arena,
        pos: u64,
        len: usize,
    ) -> Option<Outgoing> {
        self.fifo.unhold(arena, pos, len);
        let at = self.in_flight.iter().position(|outgoing| outgoing.payload == pos)?;
        self.in_flight.remove(at)
    }

    /// Frees all blocks.
    pub(in crate::proto) fn discard(&mut self, arena: &mut Arena) {
        self.fifo.discard(arena);
    }
}
