//! The stack's table of a FIFO's large blocks, and a pool of unused tables.

use crate::layout::{TABLE, entry};
use crate::place::{Block, Place};

/// One entry: a block, and the bytes of copies in flight to or from it.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    block: Option<Block>,
    /// Number of bytes of copies in flight. The top bit says that the block has been released and will be freed with
    /// the last copy.
    holds: u32,
}

const DYING: u32 = 1 << 31;

/// The large blocks of one FIFO. The application has a copy of the pages at `place`, which the stack never reads.
#[derive(Debug)]
pub(crate) struct Table {
    /// The location of the application's copy.
    pub(crate) place: Place,
    /// Number of entries with a block.
    pub(crate) blocks: u32,
    /// Number of blocks that are released and held.
    dying: u32,
    /// Number of bytes of copies in flight, over all blocks.
    pub(crate) held: u32,
    entries: [Entry; TABLE],
}

impl Table {
    /// Returns the number of missing blocks from `first` to `last`, or `None` if an entry still has a block of an
    /// earlier lap, which copies in flight hold.
    #[inline]
    pub(crate) fn missing(&self, first: u64, last: u64) -> Option<usize> {
        let mut missing = 0;
        for number in first..=last {
            let entry = self.entries[entry(number)];
            if entry.holds & DYING != 0 {
                return None;
            }
            missing += usize::from(entry.block.is_none());
        }
        Some(missing)
    }

    /// Returns the block in entry `at`.
    #[inline(always)]
    pub(crate) fn block(&self, at: usize) -> Option<Block> {
        self.entries[at].block
    }

    /// Returns the number of blocks that are not released.
    #[inline(always)]
    pub(crate) fn kept(&self) -> u32 {
        self.blocks - self.dying
    }

    /// Stores a block in the empty entry `at`.
    pub(crate) fn put(&mut self, at: usize, block: Block) {
        debug_assert!(self.entries[at].block.is_none());
        self.entries[at] = Entry { block: Some(block), holds: 0 };
        self.blocks += 1;
    }

    /// Counts `bytes` that are copied to or from the block of entry `at`.
    #[inline(always)]
    pub(crate) fn hold(&mut self, at: usize, bytes: u32) {
        debug_assert!(self.entries[at].block.is_some());
        self.entries[at].holds += bytes;
        self.held += bytes;
    }

    /// Ends copies of `bytes`. Returns the block if it was released in the meantime. The caller frees it.
    #[inline(always)]
    pub(crate) fn unhold(&mut self, at: usize, bytes: u32) -> Option<Block> {
        let entry = &mut self.entries[at];
        debug_assert!(entry.holds & !DYING >= bytes, "entry {at} is not held");
        entry.holds -= bytes;
        self.held -= bytes;
        if entry.holds != DYING {
            return None;
        }
        self.dying -= 1;
        self.remove(at)
    }

    /// Releases the block of entry `at`. Returns it if it must be freed now, and not with its last copy.
    pub(crate) fn release(&mut self, at: usize) -> Option<Block> {
        let entry = &mut self.entries[at];
        entry.block?;
        if entry.holds == 0 {
            return self.remove(at);
        }
        if entry.holds & DYING == 0 {
            entry.holds |= DYING;
            self.dying += 1;
        }
        None
    }

    fn remove(&mut self, at: usize) -> Option<Block> {
        self.blocks -= 1;
        std::mem::take(&mut self.entries[at]).block
    }
}

/// Unused tables for reuse. Memory is allocated only if more FIFOs are large than ever before.
#[derive(Debug, Default)]
pub(crate) struct Spare {
    #[allow(clippy::vec_box, reason = "a FIFO has one word for its table")]
    tables: Vec<Box<Table>>,
}

impl Spare {
    /// Returns an empty table, whose copy is at `place`.
    pub(crate) fn take(&mut self, place: Place) -> Box<Table> {
        match self.tables.pop() {
            Some(mut table) => {
                table.place = place;
                table
            }
            None => {
                Box::new(Table { place, blocks: 0, dying: 0, held: 0, entries: [Entry::default(); TABLE] })
            }
        }
    }

    /// Keeps an empty table for reuse.
    pub(crate) fn give(&mut self, table: Box<Table>) {
        debug_assert!(table.blocks == 0 && table.held == 0);
        self.tables.push(table);
    }
}
