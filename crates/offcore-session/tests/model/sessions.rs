//! Sessions with both their sides, and their expected contents. A byte's value follows from its session, direction and
//! position, so a byte map is a list of ranges.

use std::ptr::NonNull;
use std::sync::Arc;

use offcore_session::{Arena, Fifo, Free, Place, Reader, Rx, Tx, Writer};

/// Returns the byte at a position.
fn byte(key: u64, position: u64) -> u8 {
    let mixed = (position ^ (key << 40)).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 56) as u8
}

fn bytes(key: u64, position: u64, len: usize) -> Vec<u8> {
    (position..position + len as u64).map(|at| byte(key, at)).collect()
}

/// Addresses and lengths, as they were when a copy was planned.
type Pieces = Vec<(NonNull<u8>, usize)>;

fn fill(pieces: &Pieces, mut bytes: &[u8]) {
    for &(address, len) in pieces {
        let (piece, rest) = bytes.split_at(len);
        // SAFETY: the piece is covered and held, or granted, so it has `len` bytes that only this copy uses. The arena
        // is alive.
        unsafe { address.as_ptr().copy_from_nonoverlapping(piece.as_ptr(), len) };
        bytes = rest;
    }
    assert!(bytes.is_empty());
}

fn contents(pieces: &Pieces) -> Vec<u8> {
    let mut bytes = Vec::new();
    for &(address, len) in pieces {
        // SAFETY: the piece is held, or readable, so it has `len` bytes that are not written in the meantime.
        bytes.extend_from_slice(unsafe { std::slice::from_raw_parts(address.as_ptr(), len) });
    }
    bytes
}

struct Session {
    key: u64,
    slot: Place,
    rx: Fifo<Rx>,
    tx: Fifo<Tx>,
    reader: Option<Reader>,
    writer: Option<Writer>,
    /// Covered ranges and whether their copies are complete, sorted, without overlap.
    covered: Vec<(u64, u64, bool)>,
    read: u64,
    written: u64,
}

impl Session {
    fn new(arena: &mut Arena, key: u64) -> Self {
        let slot = arena.take_slot().unwrap();
        Self {
            key,
            slot,
            rx: Fifo::new(slot),
            tx: Fifo::new(slot),
            reader: Reader::new(Arc::clone(arena.memory()), slot),
            writer: Writer::new(Arc::clone(arena.memory()), slot),
            covered: Vec::new(),
            read: 0,
            written: 0,
        }
    }

    fn tx_key(&self) -> u64 {
        self.key + 1
    }

    /// Returns the part of a range from its first missing byte to the end of this gap.
    fn new_part(&self, from: u64, to: u64) -> (u64, u64) {
        let (mut from, mut to) = (from, to);
        for &(start, end, _) in &self.covered {
            if start <= from && from < end {
                from = end;
            } else if from < start {
                to = to.min(start);
            }
        }
        (from, to.max(from))
    }

    fn complete(&self) -> u64 {
        let mut upto = self.rx.edge();
        for &(start, end, finished) in &self.covered {
            if start <= upto && upto < end && finished {
                upto = end;
            }
        }
        upto
    }
}

/// A copy in flight.
struct Copy {
    session: usize,
    key: u64,
    receive: bool,
    position: u64,
    len: usize,
    pieces: Pieces,
}

/// The sessions of one arena.
pub(crate) struct Sessions {
    arena: Arena,
    free: Free,
    sessions: Vec<Session>,
    /// Sessions that have ended with copies in flight.
    ending: Vec<Session>,
    copies: Vec<Copy>,
    next_key: u64,
}

impl Sessions {
    pub(crate) fn new(n: usize, limit: usize, reserve: usize) -> Self {
        let mut arena = Arena::new(limit).unwrap();
        let free = arena.free();
        let sessions = (0..n).map(|i| Session::new(&mut arena, 2 * i as u64)).collect();
        arena.reserve(reserve);
        Self { arena, free, sessions, ending: Vec::new(), copies: Vec::new(), next_key: 2 * n as u64 }
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Returns the free memory when only a page of slots is taken.
    pub(crate) fn free_without_blocks(&self) -> Free {
        Free { small: self.free.small - 1, ..self.free }
    }

    /// Returns the number of bytes that are committed and not consumed.
    pub(crate) fn received(&self, i: usize) -> usize {
        (self.sessions[i].rx.edge() - self.sessions[i].rx.released()) as usize
    }

    pub(crate) fn covers(&mut self, i: usize, ahead: usize, len: usize, reserved: bool) -> bool {
        let before = self.copies.len();
        self.receive(i, ahead, len, reserved);
        self.copies.len() > before
    }

    pub(crate) fn receive(&mut self, i: usize, ahead: usize, len: usize, reserved: bool) {
        let session = &mut self.sessions[i];
        let from = session.rx.edge() + ahead as u64;
        let (from, to) = session.new_part(from, from + len as u64);
        let len = (to - from) as usize;
        let free = self.arena.free();
        let covered = if reserved {
            session.rx.cover_reserved(&mut self.arena, from, len)
        } else {
            session.rx.cover(&mut self.arena, from, len)
        };
        if len == 0 {
            return;
        }
        if !covered {
            // A large block may have been cut, so small blocks may be free now, but nothing is lost.
            let now = self.arena.free();
            assert_eq!(now.large * 16 + now.small, free.large * 16 + free.small);
            return;
        }
        let pieces: Pieces = session.rx.pieces(&self.arena, from, len).collect();
        assert_eq!(pieces.iter().map(|piece| piece.1).sum::<usize>(), len);
        assert!(pieces.len() <= 4);
        session.rx.hold(from, len);
        session.covered.push((from, to, false));
        session.covered.sort_unstable();
        self.copies.push(Copy { session: i, key: session.key, receive: true, position: from, len, pieces });
    }

    pub(crate) fn finish(&mut self, copy: usize) {
        if self.copies.is_empty() {
            return;
        }
        let copy = self.copies.swap_remove(copy % self.copies.len());
        let key = copy.key & !1;
        let session = match self.sessions.get_mut(copy.session) {
            Some(session) if session.key == key => session,
            _ => self.ending.iter_mut().find(|session| session.key == key).unwrap(),
        };
        if copy.receive {
            fill(&copy.pieces, &bytes(copy.key, copy.position, copy.len));
            let mut end = copy.position + copy.len as u64;
            let mut finished = vec![(copy.position, end)];
            // Adjacent copies are reported with it.
            while let Some(next) = self.copies.iter().position(|next| {
                (next.session, next.key, next.receive, next.position) == (copy.session, copy.key, true, end)
            }) {
                let next = self.copies.swap_remove(next);
                fill(&next.pieces, &bytes(next.key, next.position, next.len));
                finished.push((end, end + next.len as u64));
                end += next.len as u64;
            }
            session.rx.unhold(&mut self.arena, copy.position, (end - copy.position) as usize);
            for finished in finished {
                let range = session.covered.iter_mut().find(|range| (range.0, range.1) == finished);
                range.unwrap().2 = true;
            }
        } else {
            // The contents are unchanged, whatever has been acknowledged, granted and written in the meantime.
            assert_eq!(contents(&copy.pieces), bytes(copy.key, copy.position, copy.len));
            session.tx.unhold(&mut self.arena, copy.position, copy.len);
        }
        let arena = &mut self.arena;
        self.ending.retain(|session| {
            let over = session.rx.is_empty() && session.tx.is_empty();
            if over {
                arena.give_slot(session.slot);
            }
            !over
        });
    }

    pub(crate) fn commit(&mut self, i: usize) {
        let session = &mut self.sessions[i];
        let upto = session.complete();
        session.rx.commit(&self.arena, upto);
        session.covered.retain(|range| range.1 > upto);
        let available = session.reader.as_ref().unwrap().available();
        assert_eq!(available as u64, upto - session.read);
    }

    pub(crate) fn read(&mut self, i: usize, len: usize) {
        let session = &mut self.sessions[i];
        let reader = session.reader.as_mut().unwrap();
        let mut got = vec![0; len];
        let n = reader.read(&mut got);
        assert_eq!(n as u64, (len as u64).min(session.rx.edge() - session.read));
        assert!(got[..n] == bytes(session.key, session.read, n));
        session.read += n as u64;
    }

    pub(crate) fn read_spans(&mut self, i: usize, n: usize) {
        let session = &mut self.sessions[i];
        let reader = session.reader.as_mut().unwrap();
        let got = contents(&reader.spans().map(|span| (span.address(), span.len())).collect());
        assert_eq!(got.len(), reader.available());
        assert!(got == bytes(session.key, session.read, got.len()));
        reader.consume(n);
        session.read += n.min(got.len()) as u64;
    }

    pub(crate) fn consumed(&mut self, i: usize) {
        let session = &mut self.sessions[i];
        assert_eq!(session.rx.consumed(&mut self.arena), Ok(session.read));
        assert_eq!(session.rx.released(), session.read);
    }

    pub(crate) fn shrink_rx(&mut self, i: usize) {
        let session = &mut self.sessions[i];
        let idle = session.rx.released() == session.rx.end();
        let held = self.copies.iter().any(|copy| copy.key == session.key);
        let empty = session.rx.is_empty();
        assert_eq!(session.rx.shrink(&mut self.arena), empty || (idle && !held));
        assert_eq!(session.rx.is_empty(), empty || (idle && !held));
    }

    pub(crate) fn grant(&mut self, i: usize, more: usize) {
        let session = &mut self.sessions[i];
        let before = session.tx.end();
        let granted = session.tx.grant(&mut self.arena, before + more as u64);
        assert_eq!(session.tx.end(), before + if granted { more as u64 } else { 0 });
        let space = session.writer.as_ref().unwrap().space();
        assert_eq!(space as u64, session.tx.end() - session.written);
    }

    pub(crate) fn write(&mut self, i: usize, len: usize) {
        let session = &mut self.sessions[i];
        let room = (session.tx.end() - session.written).min(len as u64) as usize;
        let bytes = bytes(session.tx_key(), session.written, len);
        let n = session.writer.as_mut().unwrap().write(&bytes);
        assert_eq!(n, room);
        session.written += n as u64;
    }

    pub(crate) fn write_spans(&mut self, i: usize, max: usize, n: usize) {
        let session = &mut self.sessions[i];
        let key = session.tx_key();
        let writer = session.writer.as_mut().unwrap();
        let space = writer.space();
        let spans: Pieces = writer.spans(max).map(|span| (span.address(), span.len())).collect();
        let given = spans.iter().map(|span| span.1).sum();
        assert_eq!((given, writer.space()), (space.min(max), space - given));
        fill(&spans, &bytes(key, session.written, given));
        if given > 0 && session.tx.released() == session.tx.edge() {
            assert!(!session.tx.shrink(&mut self.arena), "the writer is at it");
        }
        // In two parts: unpublished bytes still belong to the writer.
        writer.show(n / 2);
        if given > n / 2 {
            assert!(!session.tx.shrink(&mut self.arena), "the writer still is");
        }
        writer.commit(n - n / 2);
        session.written += n.min(given) as u64;
    }

    pub(crate) fn send(&mut self, i: usize, ahead: usize, len: usize) {
        let session = &mut self.sessions[i];
        assert_eq!(session.tx.written(&self.arena), Ok(session.written));
        let from = (session.tx.released() + ahead as u64).min(session.tx.edge());
        let len = len.min((session.tx.edge() - from) as usize);
        if len == 0 {
            return;
        }
        let pieces: Pieces = session.tx.pieces(&self.arena, from, len).collect();
        assert!(pieces.len() <= 4);
        session.tx.hold(from, len);
        let key = session.tx_key();
        self.copies.push(Copy { session: i, key, receive: false, position: from, len, pieces });
    }

    pub(crate) fn acked(&mut self, i: usize, len: usize) {
        let session = &mut self.sessions[i];
        session.tx.written(&self.arena).unwrap();
        let upto = (session.tx.released() + len as u64).min(session.tx.edge());
        session.tx.acked(&mut self.arena, upto);
        let writer = session.writer.as_ref().unwrap();
        assert_eq!(writer.unacknowledged() as u64, session.written - upto);
    }

    pub(crate) fn shrink_tx(&mut self, i: usize) {
        let session = &mut self.sessions[i];
        let drained = session.tx.released() == session.written;
        let held = self.copies.iter().any(|copy| copy.key == session.tx_key());
        let empty = session.tx.is_empty();
        assert_eq!(session.tx.shrink(&mut self.arena), empty || (drained && !held));
        assert!(!session.tx.is_empty() || session.writer.as_ref().unwrap().space() == 0);
    }

    pub(crate) fn close(&mut self, i: usize) {
        let new = self.sessions[i].slot;
        let mut old = {
            // The new slot is taken before the old one is freed, so the arena may have none.
            let Some(slot) = self.arena.take_slot() else { return };
            self.arena.give_slot(slot);
            let session = Session::new(&mut self.arena, self.next_key);
            assert_ne!(session.slot, new);
            self.next_key += 2;
            std::mem::replace(&mut self.sessions[i], session)
        };
        self.discard(&mut old);
        if old.rx.is_empty() && old.tx.is_empty() {
            self.arena.give_slot(old.slot);
        } else {
            self.ending.push(old);
        }
    }

    fn discard(&mut self, session: &mut Session) {
        (session.reader, session.writer) = (None, None);
        session.rx.discard(&mut self.arena);
        session.tx.discard(&mut self.arena);
        let held = |key| self.copies.iter().any(|copy| copy.key == key);
        assert_eq!(session.rx.is_empty(), !held(session.key));
        assert_eq!(session.tx.is_empty(), !held(session.tx_key()));
    }

    /// Ends all sessions, then completes all copies. Nothing has leaked.
    pub(crate) fn end(mut self) {
        for mut session in std::mem::take(&mut self.sessions) {
            self.discard(&mut session);
            if session.rx.is_empty() && session.tx.is_empty() {
                self.arena.give_slot(session.slot);
            } else {
                self.ending.push(session);
            }
        }
        while !self.copies.is_empty() {
            self.finish(0);
        }
        assert!(self.ending.is_empty());
        assert_eq!(self.arena.free(), self.free);
    }
}
