//! The receive direction: the stack covers, fills and commits, and the application consumes.

use super::{Fifo, Misuse, Rx};
use crate::arena::{Arena, SMALLS, Share};
use crate::layout::{LARGE, SMALL, block_number};

impl Fifo<Rx> {
    /// Stores the position of the newest urgent byte in the slot before the byte is committed.
    pub fn mark_urgent(&self, arena: &Arena, position: u64) {
        self.half(arena).mark_urgent(position);
    }

    /// Allocates blocks for the `len` bytes from `position` on, for all or for none. Bytes received out of order only
    /// get their own blocks, without the gap before them. Returns `false` if the arena has no blocks, or if the range
    /// is released, exceeds [`crate::CAPACITY`] from the released position, or needs an entry whose block a copy still
    /// holds.
    #[inline]
    pub fn cover(&mut self, arena: &mut Arena, position: u64, len: usize) -> bool {
        self.make(arena, position, len, Share::Common)
    }

    /// Like [`Fifo::cover`], with the arena's reserve, for the segment at the committed edge, which must always be
    /// accepted.
    #[inline]
    pub fn cover_reserved(&mut self, arena: &mut Arena, position: u64, len: usize) -> bool {
        self.make(arena, position, len, Share::Reserved)
    }

    /// Returns the number of small blocks that the arena still has to provide for a window that ends at `edge`. A large
    /// block is 16 small ones.
    #[inline]
    pub fn lacks(&self, edge: u64) -> u32 {
        let blocks = |from: u64| edge.div_ceil(LARGE as u64).saturating_sub(block_number(from)) as u32;
        match &self.table {
            Some(table) => SMALLS * blocks(self.released.max(self.p0)).saturating_sub(table.kept()),
            None => {
                let small = u32::from(self.small.is_none() && edge > self.end);
                let fits = edge <= self.room_from + SMALL as u64;
                small + if fits { 0 } else { SMALLS * blocks(self.end) + 1 }
            }
        }
    }

    /// Returns the end of a window that currently ends at `edge` and gets `more` large blocks. Without them it only
    /// uses existing blocks, and a FIFO without large blocks has a small one.
    #[inline]
    pub fn reach(&self, edge: u64, more: usize) -> u64 {
        let small = self.room_from + SMALL as u64;
        let blocks = match &self.table {
            None if edge <= small => block_number(self.end),
            _ => edge.div_ceil(LARGE as u64),
        };
        let large = (blocks + more as u64) * LARGE as u64;
        if self.table.is_none() { large.max(small) } else { large }
    }

    /// Publishes all bytes below `tail` to the application: they have blocks and are complete. `tail` never decreases.
    #[inline]
    pub fn commit(&mut self, arena: &Arena, tail: u64) {
        debug_assert!(
            self.edge <= tail && tail <= self.end,
            "commit of {tail} in {}..{}",
            self.edge,
            self.end
        );
        self.edge = tail;
        self.half(arena).publish(tail);
    }

    /// Reads the position up to which the application has consumed, frees these bytes, and returns it.
    ///
    /// # Errors
    /// [`Misuse::Head`] if it decreases, or exceeds the committed edge. Nothing has changed.
    #[inline]
    pub fn consumed(&mut self, arena: &mut Arena) -> Result<u64, Misuse> {
        let head = self.half(arena).index();
        if !(self.released..=self.edge).contains(&head) {
            return Err(Misuse::Head { found: head, from: self.released, to: self.edge });
        }
        if head != self.released {
            self.release(arena, head);
        }
        Ok(head)
    }

    /// Discards bytes behind the committed edge, which were received out of order. No copy may be in flight.
    pub fn forget(&mut self, arena: &mut Arena) {
        debug_assert!(!self.is_held());
        if self.table.is_some() {
            // The block of the last committed byte may contain unread bytes.
            let first = match self.edge.checked_sub(1).filter(|last| *last >= self.p0) {
                Some(last) => block_number(last) + 1,
                None => block_number(self.p0),
            };
            self.free_blocks(arena, first, block_number(self.end));
        }
        self.end = self.edge;
    }

    /// Returns all blocks if everything is consumed, nothing was received out of order and no copy is in flight.
    /// Returns whether it is empty.
    pub fn shrink(&mut self, arena: &mut Arena) -> bool {
        if self.is_empty() {
            return true;
        }
        if self.released != self.end || self.is_held() || self.discarded {
            return false;
        }
        self.clear(arena);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Reader;

    #[test]
    fn forget_frees_out_of_order_blocks() {
        let mut arena = Arena::new(4 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let before = arena.free();
        let mut reader = Reader::new(std::sync::Arc::clone(arena.memory()), slot).unwrap();
        // Unread bytes end in the small block, at the end of a large one, and inside one.
        for unread in [100, 4096, LARGE as u64, 3 * LARGE as u64 + 5] {
            let mut fifo = Fifo::<Rx>::new(slot);
            assert!(fifo.cover(&mut arena, 0, unread as usize));
            fifo.commit(&arena, unread);
            let with_unread = arena.free();
            for block in 6..10 {
                assert!(fifo.cover(&mut arena, block * LARGE as u64 + 7, 1));
            }
            fifo.forget(&mut arena);
            assert_eq!(arena.free().large, with_unread.large, "behind {unread}");
            // The stream continues, and every block is returned.
            assert!(fifo.cover(&mut arena, unread, 2 * LARGE));
            fifo.commit(&arena, unread + 2 * LARGE as u64);
            reader.consume(reader.available());
            assert_eq!(fifo.consumed(&mut arena), Ok(unread + 2 * LARGE as u64));
            assert!(fifo.shrink(&mut arena));
            assert_eq!(arena.free(), before);
            arena.slot(slot).reset();
            reader = Reader::new(std::sync::Arc::clone(arena.memory()), slot).unwrap();
        }
    }

    #[test]
    fn joined_copies_release_their_blocks() {
        let mut arena = Arena::new(4 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let before = arena.free();
        let mut reader = Reader::new(std::sync::Arc::clone(arena.memory()), slot).unwrap();
        let mut fifo = Fifo::<Rx>::new(slot);
        // The first two copies share the small block, the others a large one.
        let copies = [0..3000, 3000..4096, 4096..70_000, 70_000..150_000];
        for copy in &copies {
            let len = (copy.end - copy.start) as usize;
            assert!(fifo.cover(&mut arena, copy.start, len));
            fifo.hold(copy.start, len);
        }
        fifo.commit(&arena, 150_000);
        reader.consume(150_000);
        assert_eq!(fifo.consumed(&mut arena), Ok(150_000));
        fifo.unhold(&mut arena, 0, 70_000);
        assert!(!fifo.shrink(&mut arena), "the last copy is in flight");
        fifo.unhold(&mut arena, 70_000, 80_000);
        assert!(fifo.shrink(&mut arena));
        assert_eq!(arena.free(), before);
    }

    #[test]
    fn lacks_counts_uncovered_blocks() {
        const L: u64 = LARGE as u64;
        let mut arena = Arena::new(4 << 20).unwrap();
        let slot = arena.take_slot().unwrap();
        let mut reader = Reader::new(std::sync::Arc::clone(arena.memory()), slot).unwrap();
        let mut fifo = Fifo::<Rx>::new(slot);
        assert_eq!((fifo.lacks(4096), fifo.reach(0, 0)), (1, 4096), "a small block");
        assert_eq!((fifo.lacks(L), fifo.reach(4096, 1)), (18, L), "the table is in a small block, too");
        assert!(fifo.cover(&mut arena, 0, 10_000));
        assert_eq!((fifo.lacks(L), fifo.lacks(3 * L)), (0, 32));
        assert!(fifo.cover(&mut arena, 2 * L, 1), "out of order");
        assert_eq!((fifo.lacks(3 * L), fifo.reach(3 * L - 5, 0), fifo.reach(3 * L, 2)), (16, 3 * L, 5 * L));
        // A released block does not count for the window, even if a copy still holds it.
        assert!(fifo.cover(&mut arena, 10_000, 2 * LARGE));
        fifo.hold(0, 100);
        fifo.commit(&arena, 2 * L);
        reader.consume(reader.available());
        assert_eq!(fifo.consumed(&mut arena), Ok(2 * L));
        assert_eq!(fifo.lacks(4 * L), 16);
        fifo.unhold(&mut arena, 0, 100);
        assert_eq!(fifo.lacks(4 * L), 16);
    }
}
