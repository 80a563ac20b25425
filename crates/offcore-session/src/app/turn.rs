//! Writing that a signal handler of the same thread may interrupt, to write itself.
//!
//! The lock of a direction keeps other threads out, and lets in a handler of the thread that holds it: that cannot wait for
//! what it has interrupted. So a turn never stores the index before its end. Who writes first claims a part of the stream, by
//! one word that a handler can only move on; a handler's part lies behind those of the calls that it has interrupted, and is
//! complete when they go on. The outermost turn, which has opened the word, shows all parts at once.

use crate::app::{Spans, between};
use crate::place::{Place, Segments};
use crate::slot::{Half, Slot};
use crate::sync::Ordering;

/// The claim word: no turn; one without claims; or the end of the last claim, and this.
const CLOSED: u64 = 0;
const OPEN: u64 = 1;
const FIRST: u64 = 2;
/// Attempts to change the claim word. Each fails if a handler has changed it meanwhile; a hostile application can change it all the
/// time, and must not keep the stack.
const ATTEMPTS: u32 = 10_000;

/// What one call writes. All that was claimed is shown when the outermost turn is dropped.
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
    /// The first position of the turn.
    pub fn from(&self) -> u64 {
        self.from
    }

    /// Bytes of it, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl<M: Segments> Turn<M> {
    /// A turn of the session whose slot is at `slot`. `nested`: the caller has found its own thread to hold the lock, which it
    /// has interrupted. `None` when the slot is not in the memory.
    pub fn new(memory: M, slot: Place, nested: bool) -> Option<Self> {
        let half = &memory.slot(slot)?.tx;
        if !nested {
            // What somebody has left who is dead.
            half.stop_writing();
            half.claims.store(OPEN, Ordering::Release);
        }
        let opener = !nested || swap(half, CLOSED, OPEN);
        Some(Self { memory, slot, opener })
    }

    /// The slot, for its state and flags.
    pub fn slot(&self) -> Option<&Slot> {
        self.memory.slot(self.slot)
    }

    /// Whether it has interrupted another one. Then room that lacks may be what the other one has claimed.
    pub fn is_inner(&self) -> bool {
        !self.opener
    }

    /// Claims up to `most` bytes, behind all that was claimed. `None` when there is no room for `least` (or for 1).
    pub fn claim(&self, least: usize, most: usize) -> Option<Claim> {
        let half = &self.slot()?.tx;
        for _ in 0..ATTEMPTS {
            let limit = half.start_writing();
            let claims = half.claims.load(Ordering::Relaxed);
            let from = if claims < FIRST { half.index() } else { claims - FIRST };
            let len = between(from, limit).min(most);
            if len < least.max(1) {
                return None;
            }
            // A handler that has come in between has moved it.
            if swap(half, claims, end(from, len)) {
                return Some(Claim { from, len });
            }
        }
        None
    }

    /// Gives back what was claimed last beyond its first `used` bytes. `false` when something was claimed behind it: all of it is
    /// shown.
    pub fn cut(&self, claim: Claim, used: usize) -> bool {
        let (all, part) = (end(claim.from, claim.len), end(claim.from, used.min(claim.len)));
        self.slot().is_some_and(|slot| swap(&slot.tx, all, part))
    }

    /// Whether all of a claim is in mapped segments.
    pub fn is_mapped(&self, claim: Claim) -> bool {
        self.spans(claim, 0, claim.len).map(|span| span.len()).sum::<usize>() == claim.len
    }

    /// Claims as much as there is room for, and copies `bytes` there: how many.
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

    /// Where bytes `skip` to `skip + len` of a claim are, as far as it goes.
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
            let claims = half.claims.load(Ordering::Relaxed);
            if claims >= FIRST {
                half.set_index(claims - FIRST);
            }
            // Before the word is closed: a handler that claims more says anew that it writes.
            half.stop_writing();
            if swap(half, claims, CLOSED) {
                return;
            }
        }
        half.claims.store(CLOSED, Ordering::Release);
    }
}

fn end(from: u64, len: usize) -> u64 {
    from.wrapping_add(len as u64).wrapping_add(FIRST)
}

fn swap(half: &Half, from: u64, to: u64) -> bool {
    half.claims.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
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

        /// What has been shown since the last time.
        fn shown(&mut self) -> String {
            let new = self.tx.written(&self.arena).unwrap() as usize - self.seen;
            let pieces = self.tx.pieces(&self.arena, self.seen as u64, new);
            let mut text = Vec::new();
            for (address, len) in pieces {
                // SAFETY: bytes of a block that the FIFO has.
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
                // SAFETY: a byte of a span that was claimed.
                unsafe { span.address().add(at).write_volatile(bytes.next().unwrap()) };
            }
        }
    }

    fn write(turn: &Turn<Arc<Memory>>, text: &str) {
        assert_eq!(turn.write(text.as_bytes()), text.len());
    }

    #[test]
    fn what_a_handler_writes_lies_behind_what_it_interrupts() {
        let mut direction = Direction::new();
        let outer = direction.turn(false);
        let claim = outer.claim(5, 5).unwrap();
        {
            // It comes when half of the bytes are copied.
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
    fn a_handler_that_comes_before_a_turn_or_after_it_shows_what_it_writes() {
        let mut direction = Direction::new();
        for text in ["before", "after"] {
            let handler = direction.turn(true);
            assert!(!handler.is_inner());
            write(&handler, text);
            drop(handler);
            assert_eq!(direction.shown(), text);
        }
        // One that is there when the outer one has claimed nothing yet.
        let outer = direction.turn(false);
        write(&direction.turn(true), "inner");
        assert_eq!(direction.shown(), "");
        write(&outer, "outer");
        drop(outer);
        assert_eq!(direction.shown(), "innerouter");
    }

    #[test]
    fn no_room_and_less_than_was_claimed() {
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
        // A process that dies during a turn leaves nothing of it.
        let dead = direction.turn(false);
        dead.claim(1, 9);
        write(&direction.turn(false), "alive");
        assert_eq!(direction.shown(), "alive");
    }
}
