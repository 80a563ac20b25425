//! The receive direction: the stack covers, fills and commits; the application consumes.

use super::{Fifo, Misuse, Rx};
use crate::arena::{Arena, Share};

impl Fifo<Rx> {
    /// Makes blocks exist for the `len` bytes from `position` on, for all or for none. Bytes out of order get blocks of
    /// their own only: what lies between has none. `false`: the arena has none, the range is released or longer than
    /// [`crate::CAPACITY`] beyond what is, or it would be in a block that a copy still holds.
    #[inline]
    pub fn cover(&mut self, arena: &mut Arena, position: u64, len: usize) -> bool {
        self.make(arena, position, len, Share::Common)
    }

    /// As [`Fifo::cover`], with the arena's reserve: for the segment at the committed edge, which is always taken.
    pub fn cover_reserved(&mut self, arena: &mut Arena, position: u64, len: usize) -> bool {
        self.make(arena, position, len, Share::Reserved)
    }

    /// Shows the application all bytes below `tail`: they have blocks and are complete. `tail` never goes back.
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

    /// Reads how far the application has consumed, frees what it has, and returns it.
    ///
    /// # Errors
    /// [`Misuse::Head`] when it goes back, or beyond what is committed. Nothing has changed.
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

    /// Gives all blocks back when everything is consumed, nothing is there out of order and no copy is in flight.
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
