//! Writes to a stream that a signal handler of the same thread may interrupt with its own writes.
//!
//! The lock of a direction excludes other threads, but admits a handler of the thread that holds it, because the
//! handler cannot wait for the code that it has interrupted. Therefore a turn stores the index only at its end. A
//! writer first claims a part of the stream by a single word, which a handler can only advance. A handler's part lies
//! behind the parts of the calls that it has interrupted, and is complete when they continue. The outermost turn, which
//! opened the word, publishes all parts together.

use crate::app::{Spans, between};
use crate::place::{Place, Segments};
use crate::slot::{Half, Slot};
use crate::sync::Ordering;

/// Values of the claim word: no turn, a turn without claims, or `FIRST` plus the end of the last claim.
const CLOSED: u64 = 0;
const OPEN: u64 = 1;
const FIRST: u64 = 2;
/// Attempts to change the claim word. Each fails if a handler has changed it in the meantime. A hostile application can
/// change it continuously, and must not block the stack.
const ATTEMPTS: u32 = 10_000;

/// The writes of one call. All claims are published when the outermost turn is dropped.
#[derive(Debug)]
pub struct Turn<M: Segments> {
    memory: M,
    slot: Place,
    opener: bool,
}

/// A part of the stream that a turn writes.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    from: u64,
    len: usize,
}

impl Claim {
    /// Returns the first position of the claim.
    pub fn from(&self) -> u64 {
        self.from
    }

    /// Returns the length in bytes, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl<M: Segments> Turn<M> {
    /// Creates a turn of the session whose slot is at `slot`. `nested` means that the caller's own thread holds the
    /// lock, so this turn has interrupted another one. Returns `None` if the slot is not in the memory.
    pub fn new(memory: M, slot: Place, nested: bool) -> Option<Self> {
        let half = &memory.slot(slot)?.tx;
        if !nested {
            // Removes the state of a writer that has died.
            half.stop_writing();
            half.claims().store(OPEN, Ordering::Release);
        }
        let opener = !nested || swap(half, CLOSED, OPEN);
        Some(Self { memory, slot, opener })
    }

    /// Returns the slot, for its state and flags.
    pub fn slot(&self) -> Option<&Slot> {
        self.memory.slot(self.slot)
    }

    /// Returns whether it has interrupted another turn. In this case missing room may be claimed by the other turn.
    pub fn is_inner(&self) -> bool {
        !self.opener
    }

    /// Claims up to `most` bytes behind all existing claims. Returns `None` if fewer than `least` bytes, or none, can
    /// be claimed.
    pub fn claim(&self, least: usize, most: usize) -> Option<Claim> {
        let half = &self.slot()?.tx;
        for _ in 0..ATTEMPTS {
            let limit = half.start_writing();
            let claims = half.claims().load(Ordering::Relaxed);
            let from = if claims < FIRST { half.index() } else { claims - FIRST };
            let len = between(from, limit).min(most);
            if len < least.max(1) {
                return None;
            }
            // Fails if a handler has advanced the word in between.
            if swap(half, claims, end(from, len)) {
                return Some(Claim { from, len });
            }
        }
        None
    }

    /// Returns the last claim's bytes after the first `used`. Returns `false` if something was claimed behind it. Then
    /// the whole claim is published.
    pub fn cut(&self, claim: Claim, used: usize) -> bool {
        let (all, part) = (end(claim.from, claim.len), end(claim.from, used.min(claim.len)));
        self.slot().is_some_and(|slot| swap(&slot.tx, all, part))
    }

    /// Returns whether the whole claim is in mapped segments.
    pub fn is_mapped(&self, claim: Claim) -> bool {
        self.spans(claim, 0, claim.len).map(|span| span.len()).sum::<usize>() == claim.len
    }

    /// Claims as much as there is room for, and copies `bytes` there. Returns the number of copied bytes.
    pub fn write(&self, bytes: &[u8]) -> usize {
        let Some(claim) = self.claim(1, bytes.len()) else { return 0 };
        let mut rest = bytes;
        for span in self.spans(claim, 0, claim.len()) {
            rest = &rest[span.write(rest)..];
        }
        let done = bytes.len() - rest.len();
        if done < claim.len() {
            self.cut(claim, done);
        }
        done
    }

    /// Returns the spans of bytes `skip` to `skip + len` of a claim, limited to its length.
    pub fn spans(&self, claim: Claim, skip: usize, len: usize) -> Spans<'_, M> {
        let len = len.min(claim.len.saturating_sub(skip));
        match self.slot() {
            Some(slot) => Spans::new(&self.memory, &slot.tx, claim.from.wrapping_add(skip as u64), len),
            None => Spans::none(&self.memory),
        }
    }
}

impl<M: Segments> Drop for Turn<M> {
    fn drop(&mut self) {
        let Some(half) = self.slot().filter(|_| self.opener).map(|slot| &slot.tx) else { return };
        for _ in 0..ATTEMPTS {
            let claims = half.claims().load(Ordering::Relaxed);
            if claims >= FIRST {
                half.set_index(claims - FIRST);
            }
            // Before the word is closed: a handler that claims more sets the flag again.
            half.stop_writing();
            if swap(half, claims, CLOSED) {
                return;
            }
        }
        half.claims().store(CLOSED, Ordering::Release);
    }
}

fn end(from: u64, len: usize) -> u64 {
    from.wrapping_add(len as u64).wrapping_add(FIRST)
}

fn swap(half: &Half, from: u64, to: u64) -> bool {
    half.claims().compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used, reason = "tests may")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{Arena, Fifo, Memory, Tx};

    struct Direction {
        arena: Arena,
        tx: Fifo<Tx>,
        slot: Place,
        seen: usize,
    }

    impl Direction {
        fn new() -> Self {
            let mut arena = Arena::new(1 << 20).unwrap();
            let slot = arena.take_slot().unwrap();
            let mut tx = Fifo::<Tx>::new(slot);
            assert!(tx.grant(&mut arena, 4096));
            Self { arena, tx, slot, seen: 0 }
        }

        fn turn(&self, nested: bool) -> Turn<Arc<Memory>> {
            Turn::new(Arc::clone(self.arena.memory()), self.slot, nested).unwrap()
        }

        /// Returns the text that was published since the last call.
        fn shown(&mut self) -> String {
            let new = self.tx.written(&self.arena).unwrap() as usize - self.seen;
            let pieces = self.tx.pieces(&self.arena, self.seen as u64, new);
            let mut text = Vec::new();
            for (address, len) in pieces {
                // SAFETY: `len` bytes of a block that belongs to the FIFO.
                text.extend((0..len).map(|at| unsafe { address.add(at).read_volatile() }));
            }
            self.seen += new;
            String::from_utf8(text).unwrap()
        }
    }

    fn put(turn: &Turn<Arc<Memory>>, claim: Claim, text: &str) {
        let mut bytes = text.bytes();
        for span in turn.spans(claim, 0, claim.len()) {
            for at in 0..span.len() {
                // SAFETY: a byte of a claimed span.
                unsafe { span.address().add(at).write_volatile(bytes.next().unwrap()) };
            }
        }
    }

    fn write(turn: &Turn<Arc<Memory>>, text: &str) {
        assert_eq!(turn.write(text.as_bytes()), text.len());
    }

    #[test]
    fn handler_write_follows_interrupted_write() {
        let mut direction = Direction::new();
        let outer = direction.turn(false);
        let claim = outer.claim(5, 5).unwrap();
        {
            // The handler runs when half of the bytes are copied.
            let handler = direction.turn(true);
            assert!(handler.is_inner() && !outer.is_inner());
            let inner = handler.claim(4, 4).unwrap();
            let second = direction.turn(true);
            write(&second, "third");
            drop(second);
            put(&handler, inner, "next");
        }
        assert_eq!(direction.shown(), "", "the interrupted call is not done");
        put(&outer, claim, "first");
        drop(outer);
        assert_eq!(direction.shown(), "firstnextthird");
    }

    #[test]
    fn handler_outside_write_publishes_itself() {
        let mut direction = Direction::new();
        for text in ["before", "after"] {
            let handler = direction.turn(true);
            assert!(!handler.is_inner());
            write(&handler, text);
            drop(handler);
            assert_eq!(direction.shown(), text);
        }
        // A handler that runs before the outer turn has claimed anything.
        let outer = direction.turn(false);
        write(&direction.turn(true), "inner");
        assert_eq!(direction.shown(), "");
        write(&outer, "outer");
        drop(outer);
        assert_eq!(direction.shown(), "innerouter");
    }

    #[test]
    fn full_and_short_claims_are_handled() {
        let mut direction = Direction::new();
        let outer = direction.turn(false);
        let claim = outer.claim(1, 4000).unwrap();
        assert_eq!(claim.len(), 4000);
        let handler = direction.turn(true);
        assert!(handler.claim(200, 200).is_none());
        drop(handler);
        assert!(outer.cut(claim, 3));
        put(&outer, Claim { len: 3, ..claim }, "few");
        drop(outer);
        assert_eq!(direction.shown(), "few");
        // A writer that dies in a turn publishes nothing.
        let dead = direction.turn(false);
        dead.claim(1, 9);
        write(&direction.turn(false), "alive");
        assert_eq!(direction.shown(), "alive");
    }
}
