//! The transmit direction: the stack grants blocks, the application writes, the stack sends and frees.

use std::ops::Range;

use super::{Fifo, Misuse, Tx};
use crate::arena::{Arena, Share};

/// A request of an application for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The number of requests so far.
    pub asks: u32,
    /// Requested bytes, counted from the first byte that is not freed.
    pub bytes: u64,
}

impl Fifo<Tx> {
    /// Makes blocks exist up to position `upto` and lets the application write to them. `false`, and nothing has
    /// changed: the arena has none, `upto` is more than [`crate::CAPACITY`] beyond what is acknowledged, or it would be
    /// in a block that a copy still holds.
    #[inline]
    pub fn grant(&mut self, arena: &mut Arena, upto: u64) -> bool {
        self.grant_of(arena, upto, Share::Common)
    }

    /// As [`Fifo::grant`], with the arena's reserve.
    pub fn grant_reserved(&mut self, arena: &mut Arena, upto: u64) -> bool {
        self.grant_of(arena, upto, Share::Reserved)
    }

    fn grant_of(&mut self, arena: &mut Arena, upto: u64, share: Share) -> bool {
        let Ok(more) = usize::try_from(upto.saturating_sub(self.end)) else { return false };
        if more == 0 {
            return true;
        }
        let made = self.make(arena, self.end, more, share);
        if made {
            self.half(arena).allow(self.end);
        }
        made
    }

    /// Stores the buffer's size in the slot. The application requests blocks up to that.
    pub fn set_buffer(&self, arena: &Arena, bytes: u64) {
        self.half(arena).set_buffer(bytes);
    }

    /// The last request of the application. It is not checked.
    pub fn asked(&self, arena: &Arena) -> Asked {
        let (asks, upto) = self.half(arena).asked();
        Asked { asks, bytes: upto.saturating_sub(self.released) }
    }

    /// Marks a request as answered in the slot.
    pub fn answer(&self, arena: &Arena, asks: u32) {
        self.half(arena).answer(asks);
    }

    /// Reads how far the application has written, and returns it.
    ///
    /// # Errors
    /// [`Misuse::Tail`] when it goes back, or beyond the limit. Nothing has changed.
    #[inline]
    pub fn written(&mut self, arena: &Arena) -> Result<u64, Misuse> {
        self.written_and_held(arena).map(|(tail, _)| tail)
    }

    /// As [`Fifo::written`], with the matching `held_from` and `held_to`: see [`crate::slot`].
    ///
    /// # Errors
    /// As [`Fifo::written`].
    #[inline]
    pub fn written_and_held(&mut self, arena: &Arena) -> Result<(u64, Range<u64>), Misuse> {
        let (tail, held) = self.half(arena).written();
        if !(self.edge..=self.end).contains(&tail) {
            return Err(Misuse::Tail { found: tail, from: self.edge, to: self.end });
        }
        self.edge = tail;
        Ok((tail, held))
    }

    /// The position after the newest urgent byte; 0 without one. The caller has read [`Fifo::written`] before.
    #[inline]
    pub fn urgent_end(&self, arena: &Arena) -> u64 {
        self.half(arena).urgent_end().min(self.edge)
    }

    /// The bytes below `upto` are acknowledged and no longer needed: frees their blocks and shows it. `upto` is at most
    /// what [`Fifo::written`] returned, and never goes back.
    #[inline]
    pub fn acked(&mut self, arena: &mut Arena, upto: u64) {
        self.release(arena, upto);
        self.half(arena).publish(upto);
    }

    /// Gives all blocks back when everything is acknowledged and no copy is in flight, and takes back what was granted,
    /// unless the application is writing. Returns whether it is empty. Then the application has no space until the next
    /// grant, so this is for sessions that have been idle for long.
    pub fn shrink(&mut self, arena: &mut Arena) -> bool {
        if self.is_empty() {
            return true;
        }
        if self.released != self.edge || self.is_held() || self.discarded {
            return false;
        }
        if self.edge != self.end && !self.half(arena).revoke(self.edge, self.end) {
            return false;
        }
        self.clear(arena);
        true
    }
}
