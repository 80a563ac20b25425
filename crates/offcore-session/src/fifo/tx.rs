//! The transmit direction: the stack grants blocks, the application writes, and the stack sends and frees.

use std::ops::Range;

use super::{Fifo, Misuse, Tx};
use crate::arena::{Arena, Share};

/// An application's request for room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The number of requests so far.
    pub asks: u32,
    /// Requested bytes, counted from the first byte that is not freed.
    pub bytes: u64,
}

impl Fifo<Tx> {
    /// Allocates blocks up to position `upto` and lets the application write to them. Returns `false` if the arena has
    /// no blocks, or if `upto` exceeds [`crate::CAPACITY`] from the acknowledged position, or needs an entry whose
    /// block a copy still holds. Then nothing has changed.
    #[inline]
    pub fn grant(&mut self, arena: &mut Arena, upto: u64) -> bool {
        let Ok(more) = usize::try_from(upto.saturating_sub(self.end)) else { return false };
        if more == 0 {
            return true;
        }
        let made = self.make(arena, self.end, more, Share::Common);
        if made {
            self.half(arena).allow(self.end);
        }
        made
    }

    /// Stores the buffer's size in the slot. The application requests blocks up to this size.
    pub fn set_buffer(&self, arena: &Arena, bytes: u64) {
        self.half(arena).set_buffer(bytes);
    }

    /// Returns the last request of the application, unchecked.
    pub fn asked(&self, arena: &Arena) -> Asked {
        let (asks, upto) = self.half(arena).asked();
        Asked { asks, bytes: upto.saturating_sub(self.released) }
    }

    /// Marks a request as answered in the slot.
    pub fn answer(&self, arena: &Arena, asks: u32) {
        self.half(arena).answer(asks);
    }

    /// Reads the position up to which the application has written, and returns it.
    ///
    /// # Errors
    /// [`Misuse::Tail`] if it decreases, or exceeds the limit. Nothing has changed.
    #[inline]
    pub fn written(&mut self, arena: &Arena) -> Result<u64, Misuse> {
        self.written_and_held(arena).map(|(tail, _)| tail)
    }

    /// Like [`Fifo::written`], with the matching `held_from` and `held_to`: see `slot/half.rs`.
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

    /// Returns the position after the newest urgent byte, or 0 without one. The caller has called [`Fifo::written`]
    /// before.
    #[inline]
    pub fn urgent_end(&self, arena: &Arena) -> u64 {
        self.half(arena).urgent_end().min(self.edge)
    }

    /// Frees the blocks of the bytes below `upto`, which are acknowledged, and publishes the position. `upto` is at
    /// most the position that [`Fifo::written`] returned, and never decreases.
    #[inline]
    pub fn acked(&mut self, arena: &mut Arena, upto: u64) {
        self.release(arena, upto);
        self.half(arena).publish(upto);
    }

    /// Returns all blocks if everything is acknowledged and no copy is in flight, and takes granted room back, unless
    /// the application is writing. Returns whether it is empty. Then the application has no space until the next grant,
    /// so this is for sessions that have been idle for a long time.
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
