//! Send buffers: the amount of data that an application may write before the peer acknowledges it.
//!
//! A buffer's size is a limit, not an allocation: an idle session has at most a small block. The stack grants more
//! blocks when the application has filled half of its blocks, or requests more. While memory is scarce, the stack
//! grants only the amount that the network will carry soon.

use offcore_session::{Arena, Asked, Fifo, Tx};

use super::memory;

/// Bytes that a session can write without asking: one small block.
pub(super) const FIRST_GRANT: u64 = 4096;

/// A send buffer. Sizes count bytes that are written and not freed.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The largest need so far; 0 for an empty FIFO.
    pub now: u64,
    /// Size of the buffer.
    pub most: u64,
    /// The position up to which the application may write, independent of the buffer.
    pub limit: Option<u64>,
    /// The position up to which the last grant was limited because memory was scarce.
    thrift: Option<u64>,
    /// The size published in the application's slot, and its last handled request.
    told: u64,
    answered: u32,
}

impl Ahead {
    /// Grants blocks up to the largest need so far, or up to twice that if half of it is filled. `buffer` computes the
    /// size of the buffer, if the need grows. `thrift` computes the number of unacknowledged bytes that get blocks
    /// while memory is scarce. Returns `false` if the arena lacks blocks.
    #[inline]
    pub(super) fn grant(
        &mut self,
        tx: &mut Fifo<Tx>,
        arena: &mut Arena,
        buffer: impl FnOnce(&Self, &Arena) -> u64,
        thrift: impl FnOnce() -> u64,
    ) -> bool {
        let used = tx.edge() - tx.released();
        let wanted = if used > self.now / 2 { 2 * self.now } else { self.now };
        self.extend(wanted, tx, arena, buffer, thrift)
    }

    /// As [`grant`](Self::grant), with the blocks that the application requests.
    pub(super) fn grant_asked(
        &mut self,
        tx: &mut Fifo<Tx>,
        arena: &mut Arena,
        buffer: impl FnOnce(&Self, &Arena) -> u64,
        thrift: impl FnOnce() -> u64,
    ) -> bool {
        let Asked { asks, bytes } = tx.asked(arena);
        if self.answered == asks {
            return self.grant(tx, arena, buffer, thrift);
        }
        let has_all = self.extend(bytes.max(self.now), tx, arena, buffer, thrift);
        let upto = self.limit_when_scarce(self.limited(tx.released() + bytes.min(self.most)));
        if !has_all && upto > tx.end() {
            // There may be enough blocks for the requested bytes alone.
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
        thrift: impl FnOnce() -> u64,
    ) -> bool {
        if wanted > self.now || self.now == 0 {
            self.most = buffer(self, arena);
            self.now = self.now.max(wanted.max(FIRST_GRANT).min(self.most));
            if std::mem::replace(&mut self.told, self.most) != self.most {
                tx.set_buffer(arena, self.most);
            }
        }
        self.wanted(tx) <= tx.end() || self.add_blocks(tx, arena, thrift)
    }

    fn add_blocks(&mut self, tx: &mut Fifo<Tx>, arena: &mut Arena, thrift: impl FnOnce() -> u64) -> bool {
        self.thrift =
            memory::is_scarce(arena).then(|| tx.released().saturating_add(thrift().max(FIRST_GRANT)));
        let upto = self.limit_when_scarce(self.wanted(tx));
        upto <= tx.end() || tx.grant(arena, upto)
    }

    /// Grants blocks for a little, if the application has no room and the arena lacks blocks for more. Returns whether
    /// it has room.
    pub(super) fn grant_some(&mut self, tx: &mut Fifo<Tx>, arena: &mut Arena) -> bool {
        let upto = tx.edge() + FIRST_GRANT;
        tx.end() > tx.edge() || self.limit_when_scarce(self.limited(upto)) == upto && tx.grant(arena, upto)
    }

    /// Changes the size of the buffer. Blocks beyond it stay until they are freed.
    pub(super) fn resize(&mut self, most: u64, tx: &Fifo<Tx>, arena: &Arena) {
        self.now = self.now.min(most);
        (self.most, self.told) = (most, most);
        tx.set_buffer(arena, most);
    }

    /// Records that the FIFO has lost its blocks.
    pub(super) fn shrink(&mut self) {
        self.now = 0;
    }

    /// Returns whether blocks are missing that the arena should provide when it has some.
    pub(super) fn is_short(&self, tx: &Fifo<Tx>) -> bool {
        tx.end() < self.limit_when_scarce(self.wanted(tx))
    }

    /// Returns the position up to which the application should have blocks.
    #[inline]
    fn wanted(&self, tx: &Fifo<Tx>) -> u64 {
        self.limited(tx.released() + self.now)
    }

    #[inline]
    fn limited(&self, upto: u64) -> u64 {
        upto.min(self.limit.unwrap_or(u64::MAX))
    }

    fn limit_when_scarce(&self, upto: u64) -> u64 {
        upto.min(self.thrift.unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scarce_memory_limits_grants() {
        const WANTED: u64 = 200_000;
        let mut arena = Arena::new(4 << 20).unwrap();
        let mut tx = Fifo::new(arena.take_slot().unwrap());
        let mut ahead = Ahead { now: WANTED, most: WANTED, ..Ahead::default() };
        let mut taken = Vec::new();
        while !memory::is_scarce(&arena) {
            taken.push(arena.take_large().unwrap());
        }
        assert!(ahead.grant(&mut tx, &mut arena, |_, _| WANTED, || 10_000));
        assert!((10_000..WANTED).contains(&tx.end()), "{} bytes", tx.end());
        assert!(!ahead.is_short(&tx), "a session that has what its peer takes waits for more");
        taken.into_iter().for_each(|block| arena.give_large(block));
        assert!(ahead.grant(&mut tx, &mut arena, |_, _| WANTED, || 10_000));
        assert!(tx.end() >= WANTED, "{} bytes", tx.end());
    }
}
