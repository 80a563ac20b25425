//! Send buffers: how much an application may write before its peer acknowledges.
//!
//! A buffer's size is a limit, not an allocation: an idle session has a small block at most. The stack grants more blocks when the
//! application has filled half of its blocks, or requests more.

use offcore_session::{Arena, Asked, Fifo, Tx};

/// Bytes that a session can write without asking: one small block.
pub(super) const FIRST_GRANT: u64 = 4096;

/// A send buffer. Sizes count bytes that are written and not freed.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The largest need so far; 0 for an empty FIFO.
    pub now: u64,
    /// Size of the buffer.
    pub most: u64,
    /// The position up to which the application may write, whatever the buffer.
    pub limit: Option<u64>,
    /// The size in the application's slot, and its last handled request.
    told: u64,
    answered: u32,
}

impl Ahead {
    /// Grants blocks up to the largest need so far, or up to twice that if half of it is filled. `buffer` computes the size of the
    /// buffer, if the need grows. `false`: the arena lacks blocks.
    #[inline]
    pub(super) fn grant(
        &mut self,
        tx: &mut Fifo<Tx>,
        arena: &mut Arena,
        buffer: impl FnOnce(&Self, &Arena) -> u64,
    ) -> bool {
        let used = tx.edge() - tx.released();
        let wanted = if used > self.now / 2 { 2 * self.now } else { self.now };
        self.extend(wanted, tx, arena, buffer)
    }

    /// As [`grant`](Self::grant), with the blocks that the application requests.
    pub(super) fn grant_asked(
        &mut self,
        tx: &mut Fifo<Tx>,
        arena: &mut Arena,
        buffer: impl FnOnce(&Self, &Arena) -> u64,
    ) -> bool {
        let Asked { asks, bytes } = tx.asked(arena);
        if self.answered == asks {
            return self.grant(tx, arena, buffer);
        }
        let has_all = self.extend(bytes.max(self.now), tx, arena, buffer);
        let upto = (tx.released() + bytes.min(self.most)).min(self.limit.unwrap_or(u64::MAX));
        if !has_all && upto > tx.end() {
            // The requested bytes alone may find blocks.
            let _ = tx.grant(arena, upto);
        }
        self.answered = asks;
        tx.answer(arena, asks);
        has_all
    }

    #[inline]
    fn extend(
        &mut self,
        wanted: u64,
        tx: &mut Fifo<Tx>,
        arena: &mut Arena,
        buffer: impl FnOnce(&Self, &Arena) -> u64,
    ) -> bool {
        if wanted > self.now || self.now == 0 {
            self.most = buffer(self, arena);
            self.now = self.now.max(wanted.max(FIRST_GRANT).min(self.most));
            if std::mem::replace(&mut self.told, self.most) != self.most {
                tx.set_buffer(arena, self.most);
            }
        }
        let upto = self.upto(tx);
        upto <= tx.end() || tx.grant(arena, upto)
    }

    /// Changes the size of the buffer. Blocks beyond it stay until they are freed.
    pub(super) fn resize(&mut self, most: u64, tx: &Fifo<Tx>, arena: &Arena) {
        self.now = self.now.min(most);
        (self.most, self.told) = (most, most);
        tx.set_buffer(arena, most);
    }

    /// Notes that the FIFO has lost its blocks.
    pub(super) fn shrink(&mut self) {
        self.now = 0;
    }

    /// Whether blocks are missing below the largest need.
    pub(super) fn is_short(&self, tx: &Fifo<Tx>) -> bool {
        tx.end() < self.upto(tx)
    }

    /// The position up to which the application is to have blocks.
    #[inline]
    fn upto(&self, tx: &Fifo<Tx>) -> u64 {
        (tx.released() + self.now).min(self.limit.unwrap_or(u64::MAX))
    }
}
