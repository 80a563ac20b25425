//! The application's side of a session, over the shared layout alone: it needs the segments, mapped anywhere, and the
//! place of the slot.
//!
//! A stack that stores nonsense makes bytes wrong or missing here; it makes nobody read or write outside of the mapped
//! segments. Each direction has one reader or writer at a time; several threads or processes settle that among
//! themselves.

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

/// Bytes side by side in shared memory. It hands out an address, not a slice: the other side may be writing there, if it
/// does what it must not.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    address: NonNull<u8>,
    len: usize,
    memory: PhantomData<&'a ()>,
}

impl Span<'_> {
    /// First byte.
    pub fn address(&self) -> NonNull<u8> {
        self.address
    }

    /// Length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// `len` bytes of it from byte `from` on; `None` when that is nothing, or when it has not as many.
    pub fn part(self, from: usize, len: usize) -> Option<Self> {
        let fits = len > 0 && from.checked_add(len).is_some_and(|end| end <= self.len);
        // SAFETY: inside of the span.
        fits.then(|| Self { address: unsafe { self.address.add(from) }, len, ..self })
    }

    /// Copies its first bytes out, as many as `to` has room for.
    fn read(self, to: &mut [u8]) -> usize {
        let n = self.len.min(to.len());
        // SAFETY: `n` bytes of the span, which is mapped, and of the caller's slice, which is not shared memory.
        unsafe { copy(self.address.as_ptr(), to.as_mut_ptr(), n) };
        n
    }

    /// Copies the first bytes of `from` in, as many as it has room for.
    fn write(self, from: &[u8]) -> usize {
        let n = self.len.min(from.len());
        // SAFETY: as in `read`.
        unsafe { copy(from.as_ptr(), self.address.as_ptr(), n) };
        n
    }
}

/// The spans of a range, in order. A range of up to 64 KiB has two of them, or four when it goes from the small ring
/// over to large blocks.
#[derive(Debug)]
pub struct Spans<'a, M> {
    memory: &'a M,
    map: Map,
    runs: Runs,
}

impl<'a, M: Segments> Spans<'a, M> {
    fn new(memory: &'a M, half: &Half, position: u64, len: usize) -> Self {
        // An empty range is not looked up: without one the stack may be changing where the bytes are.
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
            // Where there is no block the range ends.
            self.runs = Runs::new(0, 0, 0);
        }
        span
    }
}

/// Bytes between two positions; none when there would be more than a FIFO holds.
fn between(from: u64, to: u64) -> usize {
    usize::try_from(to.wrapping_sub(from)).ok().filter(|&len| len <= CAPACITY).unwrap_or(0)
}

/// Reads what a session has received.
#[derive(Debug)]
pub struct Reader<M> {
    memory: M,
    slot: Place,
    head: u64,
    /// The urgent byte at which reads stop.
    mark: Option<u64>,
    /// 1 if the next byte is the urgent one, and is not of the stream.
    hole: u64,
}

impl<M: Segments> Reader<M> {
    /// Reader of the session whose slot is at `slot`, from where the last reader has stopped. `None` when the slot is
    /// not in the memory.
    pub fn new(memory: M, slot: Place) -> Option<Self> {
        let head = memory.slot(slot)?.rx.index();
        Some(Self { memory, slot, head, mark: None, hole: 0 })
    }

    /// The slot, for its state and flags.
    pub fn slot(&self) -> Option<&Slot> {
        self.memory.slot(self.slot)
    }

    /// Makes reads stop at the urgent byte, and skip it unless it is `inline`, as TCP sockets do.
    pub fn heed_urgent(&mut self, inline: bool) {
        self.mark = self.slot().and_then(Slot::urgent);
        self.hole = 0;
        if self.mark == Some(self.head) && !inline && self.available() > 0 {
            self.hole = 1;
        }
    }

    /// Whether reads skip an urgent byte, which even a read of no bytes consumes.
    pub fn skips_urgent(&self) -> bool {
        self.hole > 0
    }

    /// The byte at a position, if it has arrived.
    pub fn byte(&self, position: u64) -> Option<u8> {
        let slot = self.slot().filter(|slot| position < slot.rx.edge())?;
        let mut byte = [0];
        let read = Spans::new(&self.memory, &slot.rx, position, 1).next()?.read(&mut byte);
        (read == 1).then_some(byte[0])
    }

    /// Whether the next byte is the urgent one.
    pub fn is_at_mark(&self) -> bool {
        self.slot().and_then(Slot::urgent) == Some(self.head)
    }

    /// How many bytes there are to be read.
    #[inline]
    pub fn available(&self) -> usize {
        let from = self.head.wrapping_add(self.hole);
        let all = self.slot().map_or(0, |slot| between(from, slot.rx.edge()));
        match self.mark {
            Some(mark) if mark > from => all.min(between(from, mark)),
            _ => all,
        }
    }

    /// Where the bytes are that there are to be read, oldest first.
    #[inline]
    pub fn spans(&self) -> Spans<'_, M> {
        let Some(slot) = self.slot() else { return Spans::none(&self.memory) };
        Spans::new(&self.memory, &slot.rx, self.head.wrapping_add(self.hole), self.available())
    }

    /// Gives the `n` oldest bytes back to the stack, at most those that there are.
    #[inline]
    pub fn consume(&mut self, n: usize) {
        // What was stored in the slot may be nonsense: it may wrap, but not panic.
        self.head = self.head_behind(n);
        self.hole = 0;
        if let Some(slot) = self.slot() {
            slot.rx.set_index(self.head);
        }
    }

    /// The same, if nobody has since this reader was made: a signal handler of the thread may have read in between. `false`: it
    /// has, and nothing was consumed.
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

    /// Copies bytes out and consumes them. Returns how many: fewer than asked for only when there are no more.
    pub fn read(&mut self, to: &mut [u8]) -> usize {
        let done = self.peek(to);
        if done > 0 || self.skips_urgent() {
            self.consume(done);
        }
        done
    }

    /// Copies bytes out that stay unread. Returns how many: fewer than asked for only when there are no more.
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

/// Writes what a session is to send.
#[derive(Debug)]
pub struct Writer<M: Segments> {
    memory: M,
    slot: Place,
    tail: u64,
    /// Bytes that [`Writer::spans`] gave out; while there are any the stack does not take them back.
    given: usize,
}

impl<M: Segments> Writer<M> {
    /// Writer of the session whose slot is at `slot`, from where the last writer has stopped. `None` when the slot is
    /// not in the memory.
    pub fn new(memory: M, slot: Place) -> Option<Self> {
        let half = &memory.slot(slot)?.tx;
        half.stop_writing();
        let tail = half.index();
        Some(Self { memory, slot, tail, given: 0 })
    }

    /// The slot, for its state and flags.
    pub fn slot(&self) -> Option<&Slot> {
        self.memory.slot(self.slot)
    }

    /// How many bytes can be written now, beside those that [`Writer::spans`] gave out. The stack may take them back from a
    /// session that has been idle for long.
    #[inline]
    pub fn space(&self) -> usize {
        self.slot().map_or(0, |slot| between(self.position(), slot.tx.limit()))
    }

    /// Position in the stream of the first byte that [`Writer::spans`] gives out next.
    #[inline]
    pub fn position(&self) -> u64 {
        self.tail.wrapping_add(self.given as u64)
    }

    /// Position up to which the peer has acknowledged all.
    pub fn acknowledged(&self) -> u64 {
        self.tail.wrapping_sub(self.unacknowledged() as u64)
    }

    /// How many written bytes the stack has not yet freed.
    pub fn unacknowledged(&self) -> usize {
        self.slot().map_or(0, |slot| between(slot.tx.edge(), self.tail))
    }

    /// Where up to `max` bytes can be written, in order, behind those that earlier calls gave out. They are the
    /// application's until [`Writer::show`] or [`Writer::commit`], which must follow, be it with 0.
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

    /// Shows the stack the first `n` bytes that [`Writer::spans`] gave out, at most all of them. The others stay the
    /// application's, for copies that complete later.
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

    /// The same, and gives the others back.
    #[inline]
    pub fn commit(&mut self, n: usize) {
        self.given = self.given.min(n);
        self.show(n);
    }

    /// Copies bytes in and commits them. Returns how many: fewer than given only when there is no more space.
    pub fn write(&mut self, from: &[u8]) -> usize {
        let mut done = 0;
        for span in self.spans(from.len()) {
            done += span.write(&from[done..]);
        }
        self.commit(done);
        self.want(from.len() - done);
        done
    }

    /// Requests blocks, if some are missing. The stack grants them after a write, or when the application waits for room.
    fn want(&self, len: usize) {
        let _ = self.slot().filter(|_| len > 0).and_then(|slot| slot.want(len));
    }

    /// Copies all of `parts` in, one behind the other, and commits them at once; `false`, and nothing has changed, when there
    /// is no space for all.
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

    /// Results of three reads from a stream whose fourth byte is urgent.
    fn reads(inline: bool) -> Vec<Vec<u8>> {
        let mut arena = Arena::new(1 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let mut rx = Fifo::<Rx>::new(slot);
        assert!(rx.cover(&mut arena, 0, 7));
        rx.mark_urgent(&arena, 3);
        for (address, len) in rx.pieces(&arena, 0, 7) {
            // SAFETY: the piece is covered and not committed.
            unsafe { address.as_ptr().copy_from_nonoverlapping(b"abc!def".as_ptr(), len) };
        }
        rx.commit(&arena, 7);
        let mut all = Vec::new();
        for _ in 0..3 {
            let mut reader = Reader::new(Arc::clone(arena.memory()), slot).unwrap();
            assert_eq!(reader.is_at_mark(), all.len() == 1);
            reader.heed_urgent(inline);
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
            // SAFETY: the piece is covered and not committed.
            unsafe { address.as_ptr().copy_from_nonoverlapping(b"a!".as_ptr(), len) };
        }
        rx.commit(&arena, 1);
        let memory = Arc::clone(arena.memory());
        let slot = memory.slot(place).unwrap();
        let mut reader = Reader::new(&*memory, place).unwrap();
        assert_eq!((slot.unread_urgent(), slot.has_urgent(), reader.byte(1)), (Some(1), false, None));
        rx.commit(&arena, 2);
        assert_eq!((slot.has_urgent(), reader.byte(1)), (true, Some(b'!')));
        reader.heed_urgent(false);
        assert_eq!(reader.read(&mut [0; 9]), 1);
        assert!(slot.has_urgent() && reader.is_at_mark());
        slot.take_urgent(1);
        assert!(!slot.has_urgent() && reader.is_at_mark());
        // A peek leaves the mark, and a read passes it.
        reader.heed_urgent(false);
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

    /// Applications store any index. The distance of two is never more than a FIFO holds.
    #[test]
    fn every_distance_between_indices() {
        let most = CAPACITY as u64;
        for from in [0, 1, most, u64::MAX - most, u64::MAX - 1, u64::MAX] {
            for distance in [0, 1, most - 1, most, most + 1, 1 << 32, 1 << 63, u64::MAX - 1, u64::MAX] {
                let expected = if distance <= most { distance as usize } else { 0 };
                assert_eq!(between(from, from.wrapping_add(distance)), expected, "{distance} from {from}");
            }
        }
    }
}
