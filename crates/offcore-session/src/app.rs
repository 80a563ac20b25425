//! The application's side of a session. It only uses the shared layout: the segments, mapped at any address, and the
//! place of the slot.
//!
//! If the stack stores nonsense, bytes are wrong or missing, but the application never accesses memory outside of the
//! mapped segments. Each direction has one reader or writer at a time. Several threads or processes must coordinate
//! among themselves.

#[cfg(feature = "stack")]
mod file;
mod turn;

pub use turn::{Claim, Turn};

use core::marker::PhantomData;
use core::ptr::NonNull;

use crate::copy::copy;
use crate::layout::{CAPACITY, Runs};
use crate::place::{Block, Place, Segments};
use crate::slot::{Half, Map, Slot};
use crate::sync::Ordering;

/// Contiguous bytes in shared memory. It provides an address instead of a slice, because a misbehaving other side may
/// write there at any time.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    address: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a ()>,
}

impl Span<'_> {
    /// Returns the address of the first byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Returns the length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `len` bytes from byte `from` on, or `None` if `len` is 0 or the span is too short.
    pub fn part(self, from: usize, len: usize) -> Option<Self> {
        let fits = len > 0 && from.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: `from + len` is at most the length of the span.
        fits.then(|| Self { address: unsafe { self.address.add(from) }, len, ..self })
    }

    /// Copies its first bytes to `to`, as many as fit. Returns their number.
    fn read(self, to: &mut [u8]) -> usize {
        let n = self.len.min(to.len());
        // SAFETY: `n` bytes of the span are mapped, and `n` bytes of `to` are valid. `to` is private memory, so they do
        // not overlap.
        unsafe { copy(self.address.as_ptr(), to.as_mut_ptr(), n) };
        n
    }

    /// Copies the first bytes of `from` into the span, as many as fit. Returns their number.
    fn write(self, from: &[u8]) -> usize {
        let n = self.len.min(from.len());
        // SAFETY: `n` bytes of `from` are valid, and `n` bytes of the span are mapped. `from` is private memory, so
        // they do not overlap.
        unsafe { copy(from.as_ptr(), self.address.as_ptr(), n) };
        n
    }
}

/// The spans of a range, in order. A range of up to 64 KiB has up to two spans, or up to four if it extends from the
/// small ring into large blocks.
#[derive(Debug)]
pub struct Spans<'a, M> {
    memory: &'a M,
    map: Map,
    runs: Runs,
}

impl<'a, M: Segments> Spans<'a, M> {
    fn new(memory: &'a M, half: &Half, position: u64, len: usize) -> Self {
        // The map is not read for an empty range, because the stack may change it while the FIFO is empty.
        let map = if len == 0 { Map::EMPTY } else { half.map() };
        Self { memory, map, runs: Runs::new(position, len, map.p0) }
    }

    fn none(memory: &'a M) -> Self {
        Self { memory, map: Map::EMPTY, runs: Runs::new(0, 0, 0) }
    }

    fn find(&mut self) -> Option<Span<'a>> {
        let run = self.runs.next()?;
        let page = match run.entry {
            None => self.map.small,
            Some(at) => self.memory.entry(Place::new(self.map.table)?, at)?.load(Ordering::Relaxed),
        };
        let address = self.memory.address(Block::new(page)?, run.offset, run.len)?;
        Some(Span { address, len: run.len, memory: PhantomData })
    }
}

impl<'a, M: Segments> Iterator for Spans<'a, M> {
    type Item = Span<'a>;

    #[inline]
    fn next(&mut self) -> Option<Span<'a>> {
        let span = self.find();
        if span.is_none() {
            // The range ends at the first missing block.
            self.runs = Runs::new(0, 0, 0);
        }
        span
    }
}

/// Returns the number of bytes between two positions, or 0 if it exceeds the capacity of a FIFO.
fn between(from: u64, to: u64) -> usize {
    usize::try_from(to.wrapping_sub(from)).ok().filter(|&len| len <= CAPACITY).unwrap_or(0)
}

/// Reads received data of a session.
#[derive(Debug)]
pub struct Reader<M> {
    memory: M,
    slot: Place,
    head: u64,
    /// The position of the urgent byte, at which reads stop.
    mark: Option<u64>,
    /// 1 if the next byte is an urgent byte that is not part of the stream, otherwise 0.
    hole: u64,
}

impl<M: Segments> Reader<M> {
    /// Creates the reader of the session whose slot is at `slot`, from the position at which the last reader stopped.
    /// Returns `None` if the slot is not in the memory.
    pub fn new(memory: M, slot: Place) -> Option<Self> {
        let head = memory.slot(slot)?.rx.index();
        Some(Self { memory, slot, head, mark: None, hole: 0 })
    }

    /// Returns the slot, for its state and flags.
    pub fn slot(&self) -> Option<&Slot> {
        self.memory.slot(self.slot)
    }

    /// Makes reads stop at the urgent byte, and skip it unless it is `inline`, as TCP sockets do.
    pub fn stop_at_urgent(&mut self, inline: bool) {
        self.mark = self.slot().and_then(Slot::urgent);
        self.hole = 0;
        if self.mark == Some(self.head) && !inline && self.available() > 0 {
            self.hole = 1;
        }
    }

    /// Returns whether reads skip an urgent byte, which even a read of no bytes consumes.
    pub fn skips_urgent(&self) -> bool {
        self.hole > 0
    }

    /// Returns the byte at a position if it has arrived.
    pub fn byte(&self, position: u64) -> Option<u8> {
        let slot = self.slot().filter(|slot| position < slot.rx.edge())?;
        let mut byte = [0];
        let read = Spans::new(&self.memory, &slot.rx, position, 1).next()?.read(&mut byte);
        (read == 1).then_some(byte[0])
    }

    /// Returns whether the next byte is the urgent one.
    pub fn is_at_mark(&self) -> bool {
        self.slot().and_then(Slot::urgent) == Some(self.head)
    }

    /// Returns the number of bytes that can be read.
    #[inline]
    pub fn available(&self) -> usize {
        let from = self.head.wrapping_add(self.hole);
        let all = self.slot().map_or(0, |slot| between(from, slot.rx.edge()));
        match self.mark {
            Some(mark) if mark > from => all.min(between(from, mark)),
            _ => all,
        }
    }

    /// Returns the spans with the readable bytes, oldest first.
    #[inline]
    pub fn spans(&self) -> Spans<'_, M> {
        let Some(slot) = self.slot() else { return Spans::none(&self.memory) };
        Spans::new(&self.memory, &slot.rx, self.head.wrapping_add(self.hole), self.available())
    }

    /// Returns the `n` oldest bytes to the stack, but not more than can be read.
    #[inline]
    pub fn consume(&mut self, n: usize) {
        // The slot may contain nonsense: arithmetic may wrap, but must not panic.
        self.head = self.head_behind(n);
        self.hole = 0;
        if let Some(slot) = self.slot() {
            slot.rx.set_index(self.head);
        }
    }

    /// Consumes `n` bytes if nothing was consumed since this reader was made. A signal handler of the thread may have
    /// read in between. Returns `false` if it has. Then nothing was consumed.
    #[inline]
    pub fn consume_alone(&mut self, n: usize) -> bool {
        let head = self.head_behind(n);
        let alone = self.slot().is_some_and(|slot| slot.rx.move_index(self.head, head));
        if alone {
            (self.head, self.hole) = (head, 0);
        }
        alone
    }

    fn head_behind(&self, n: usize) -> u64 {
        self.head.wrapping_add(self.hole).wrapping_add(n.min(self.available()) as u64)
    }

    /// Copies bytes out and consumes them. Returns their number, which is less than requested only if no more are
    /// available.
    pub fn read(&mut self, to: &mut [u8]) -> usize {
        let done = self.peek(to);
        if done > 0 || self.skips_urgent() {
            self.consume(done);
        }
        done
    }

    /// Copies bytes out without consuming them. Returns their number, which is less than requested only if no more are
    /// available.
    pub fn peek(&self, to: &mut [u8]) -> usize {
        let mut done = 0;
        for span in self.spans() {
            let n = span.read(&mut to[done..]);
            if n == 0 {
                break;
            }
            done += n;
        }
        done
    }
}

/// Writes data to be sent on a session.
#[derive(Debug)]
pub struct Writer<M: Segments> {
    memory: M,
    slot: Place,
    tail: u64,
    /// Number of bytes that [`Writer::spans`] has given out. While it is not 0 the stack does not take them back.
    given: usize,
}

impl<M: Segments> Writer<M> {
    /// Creates the writer of the session whose slot is at `slot`, from the position at which the last writer stopped.
    /// Returns `None` if the slot is not in the memory.
    pub fn new(memory: M, slot: Place) -> Option<Self> {
        let half = &memory.slot(slot)?.tx;
        half.stop_writing();
        let tail = half.index();
        Some(Self { memory, slot, tail, given: 0 })
    }

    /// Returns the slot, for its state and flags.
    pub fn slot(&self) -> Option<&Slot> {
        self.memory.slot(self.slot)
    }

    /// Returns the number of bytes that can be written now, in addition to the bytes that [`Writer::spans`] has given
    /// out. The stack may take them back from a session that has been idle for a long time.
    #[inline]
    pub fn space(&self) -> usize {
        self.slot().map_or(0, |slot| between(self.position(), slot.tx.limit()))
    }

    /// Returns the position in the stream of the first byte that [`Writer::spans`] gives out next.
    #[inline]
    pub fn position(&self) -> u64 {
        self.tail.wrapping_add(self.given as u64)
    }

    /// Returns the position up to which the peer has acknowledged everything.
    pub fn acknowledged(&self) -> u64 {
        self.tail.wrapping_sub(self.unacknowledged() as u64)
    }

    /// Returns the number of written bytes that the stack has not yet freed.
    pub fn unacknowledged(&self) -> usize {
        self.slot().map_or(0, |slot| between(slot.tx.edge(), self.tail))
    }

    /// Returns up to `max` bytes for writing, in order, behind the bytes from earlier calls. They belong to the
    /// application until it calls [`Writer::show`] or [`Writer::commit`], which it must do, possibly with 0.
    pub fn spans(&mut self, max: usize) -> Spans<'_, M> {
        let position = self.position();
        let Some(slot) = self.memory.slot(self.slot) else { return Spans::none(&self.memory) };
        let limit = slot.tx.start_writing();
        let len = between(position, limit).min(max);
        self.given += len;
        if self.given == 0 {
            slot.tx.stop_writing();
        }
        Spans::new(&self.memory, &slot.tx, position, len)
    }

    /// Passes the first `n` bytes from [`Writer::spans`] to the stack, but not more than were given out. The remaining
    /// bytes still belong to the application, for copies that complete later.
    #[inline]
    pub fn show(&mut self, n: usize) {
        let n = n.min(self.given);
        self.tail = self.tail.wrapping_add(n as u64);
        self.given -= n;
        if let Some(slot) = self.slot() {
            slot.tx.set_index(self.tail);
            if self.given == 0 {
                slot.tx.stop_writing();
            }
        }
    }

    /// Passes the first `n` bytes to the stack and returns the remaining ones.
    #[inline]
    pub fn commit(&mut self, n: usize) {
        self.given = self.given.min(n);
        self.show(n);
    }

    /// Copies bytes in and commits them. Returns their number, which is less than given only if no more space is
    /// available.
    pub fn write(&mut self, from: &[u8]) -> usize {
        let mut done = 0;
        for span in self.spans(from.len()) {
            done += span.write(&from[done..]);
        }
        self.commit(done);
        self.want(from.len() - done);
        done
    }

    /// Requests blocks if some are missing. The stack grants them after a write, or when the application waits for
    /// room.
    fn want(&self, len: usize) {
        let _ = self.slot().filter(|_| len > 0).and_then(|slot| slot.want(len));
    }

    /// Copies all `parts` in, one after the other, and commits them together. Returns `false` if there is not enough
    /// space for all of them. Then nothing has changed.
    pub fn write_all(&mut self, parts: &[&[u8]]) -> bool {
        let total = parts.iter().map(|part| part.len()).sum();
        if self.space() < total {
            self.want(total);
            return false;
        }
        let (mut parts, mut part, mut done) = (parts.iter(), &[][..], 0);
        for span in self.spans(total) {
            let mut left = Some(span);
            while let Some(span) = left {
                if part.is_empty() {
                    let Some(next) = parts.next() else { break };
                    part = next;
                    continue;
                }
                let n = span.write(part);
                part = &part[n..];
                done += n;
                left = span.part(n, span.len - n);
            }
        }
        self.commit(if done == total { total } else { 0 });
        done == total
    }
}

impl<M: Segments> Drop for Writer<M> {
    fn drop(&mut self) {
        if self.given > 0 {
            self.commit(0);
        }
    }
}

#[cfg(all(test, feature = "stack"))]
#[cfg(not(loom))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Arena, Fifo, Rx};

    /// Returns the results of three reads from a stream whose fourth byte is urgent.
    fn reads(inline: bool) -> Vec<Vec<u8>> {
        let mut arena = Arena::new(1 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let mut rx = Fifo::<Rx>::new(slot);
        assert!(rx.cover(&mut arena, 0, 7));
        rx.mark_urgent(&arena, 3);
        for (address, len) in rx.pieces(&arena, 0, 7) {
            // SAFETY: the piece has `len` bytes, which are covered and not committed, so nothing else accesses them.
            unsafe { address.as_ptr().copy_from_nonoverlapping(b"abc!def".as_ptr(), len) };
        }
        rx.commit(&arena, 7);
        let mut all = Vec::new();
        for _ in 0..3 {
            let mut reader = Reader::new(Arc::clone(arena.memory()), slot).unwrap();
            assert_eq!(reader.is_at_mark(), all.len() == 1);
            reader.stop_at_urgent(inline);
            let mut bytes = [0; 16];
            let read = reader.read(&mut bytes);
            all.push(bytes[..read].to_vec());
        }
        all
    }

    #[test]
    fn urgent_byte_is_read_out_of_band_once() {
        let mut arena = Arena::new(1 << 20).unwrap();
        let place = arena.take_slot().unwrap();
        let mut rx = Fifo::<Rx>::new(place);
        assert!(rx.cover(&mut arena, 0, 2));
        rx.mark_urgent(&arena, 1);
        for (address, len) in rx.pieces(&arena, 0, 2) {
            // SAFETY: the piece has `len` bytes, which are covered and not committed, so nothing else accesses them.
            unsafe { address.as_ptr().copy_from_nonoverlapping(b"a!".as_ptr(), len) };
        }
        rx.commit(&arena, 1);
        let memory = Arc::clone(arena.memory());
        let slot = memory.slot(place).unwrap();
        let mut reader = Reader::new(&*memory, place).unwrap();
        assert_eq!((slot.unread_urgent(), slot.has_urgent(), reader.byte(1)), (Some(1), false, None));
        rx.commit(&arena, 2);
        assert_eq!((slot.has_urgent(), reader.byte(1)), (true, Some(b'!')));
        reader.stop_at_urgent(false);
        assert_eq!(reader.read(&mut [0; 9]), 1);
        assert!(slot.has_urgent() && reader.is_at_mark());
        slot.take_urgent(1);
        assert!(!slot.has_urgent() && reader.is_at_mark());
        // A peek does not pass the mark, but a read does.
        reader.stop_at_urgent(false);
        assert_eq!(reader.peek(&mut [0; 9]), 0);
        assert!(reader.is_at_mark());
        assert_eq!(reader.read(&mut [0; 9]), 0);
        assert!(!reader.is_at_mark());
    }

    #[test]
    fn reads_stop_at_urgent_byte() {
        assert_eq!(reads(false), [b"abc".to_vec(), b"def".to_vec(), vec![]]);
        assert_eq!(reads(true), [b"abc".to_vec(), b"!def".to_vec(), vec![]]);
    }

    /// Applications may store any index. The distance of two indices never exceeds the capacity of a FIFO.
    #[test]
    fn index_distance_is_bounded() {
        let most = CAPACITY as u64;
        for from in [0, 1, most, u64::MAX - most, u64::MAX - 1, u64::MAX] {
            for distance in [0, 1, most - 1, most, most + 1, 1 << 32, 1 << 63, u64::MAX - 1, u64::MAX] {
                let expected = if distance <= most { distance as usize } else { 0 };
                assert_eq!(between(from, from.wrapping_add(distance)), expected, "{distance} from {from}");
            }
        }
    }
}
