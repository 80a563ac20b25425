//! The stack's allocator over one application's memory.
//!
//! ```text
//! segment: 64 MiB, a memfd      large block: 64 KiB      small block: 4 KiB     slot: 512 B, table: 1 KiB
//! | large | large | large | ... -> | 16 small ones | ... -> | 8 slots |, or | 4 tables |
//! ```
//! A large block is cut into small ones, a small one into slots or into tables, when the last cut one is used up; it is
//! whole again as soon as all its parts are free. The lists are private memory: an application cannot reach them, nor
//! can it learn more from the pages it sees than its own sessions' blocks. Nothing here asks for memory but
//! [`Segment::new`], [`Arena::new`], [`Arena::grow`], and the private table of a FIFO when more are large than ever before.
//!
//! **Fragmentation** has one bound: a large block with a single used part is not to be had as a large one, so at worst
//! each small block in use costs 64 KiB. The cut block that is used up first is cut up completely before another one
//! is, and small blocks come and go with sessions that become large or idle.

mod budget;
mod cuts;
#[cfg(test)]
mod tests;

pub use budget::{Budget, Charge};

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use offcore_mem::mapping::MemoryError;
use offcore_mem::{Hugepages, Mapping};

use crate::layout::{LARGE, SMALL, TABLE};
use crate::memory::Memory;
use crate::place::{Block, PAGES, Place, SEGMENT, Segments};
use crate::slot::{SLOT, Slot};
use crate::sync::Ordering;
use crate::table::{Spare, Table};
use cuts::{Cuts, List};

/// What memfds are called.
const NAME: &str = "offcore-session";
/// Most bytes of an arena: places are 32 bits.
const LARGEST: usize = 1 << 40;
/// Small blocks in a large one.
pub(crate) const SMALLS: u32 = (LARGE / SMALL) as u32;
/// Slots in a small block.
const SLOTS: u32 = (SMALL / SLOT) as u32;
/// Tables in a small block, and units of 512 bytes in a table.
const TABLES: u32 = (SMALL / (TABLE * 4)) as u32;
const TABLE_UNITS: u32 = SLOTS / TABLES;

/// Whose blocks may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// All but the reserve.
    Common,
    /// All.
    Reserved,
}

/// How much of an arena is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// Large blocks, the reserve included.
    pub large: usize,
    /// Small blocks in large ones that are cut up.
    pub small: usize,
}

/// Memory that an arena can have more of.
#[derive(Debug)]
pub struct Segment {
    /// Bytes of it that are used: the mapping has whole pages.
    len: usize,
    mapping: Mapping,
    fd: OwnedFd,
}

/// What the next segment of an arena is to be like.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    len: usize,
    pages_of: Hugepages,
}

impl Segment {
    /// Maps up to 64 MiB. The kernel allocates ordinary pages when they are touched, and hugepages here: that takes some ten
    /// milliseconds, so another thread than the arena's may do it.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn new(wanted: Wanted) -> Result<Self, MemoryError> {
        let (mapping, fd) = match wanted.pages_of {
            Hugepages::None => Mapping::untouched_memfd(NAME, wanted.len)?,
            pages_of => Mapping::memfd(NAME, wanted.len, pages_of)?,
        };
        Ok(Self { len: wanted.len, mapping, fd })
    }
}

/// One application's memory, as the stack gives it out. It belongs to one worker.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Memory>,
    /// Bytes that are mapped, and that may be: whole large blocks.
    len: usize,
    limit: usize,
    pages_of: Hugepages,
    /// Numbers of the free large blocks: their first page divided by 16. The last one freed is the first one used.
    large: Vec<u32>,
    /// Blocks from this number on have never been used. They are the first ones of the list, in descending order.
    fresh: u32,
    /// What used blocks are charged to.
    charge: Arc<Charge>,
    /// Large blocks that only [`Share::Reserved`] takes: as many of the last ones that are free.
    reserve: usize,
    /// Small blocks that receive windows promise. Only [`Share::Reserved`] takes them.
    promised: usize,
    /// Large blocks that are cut into small ones, by number.
    blocks: Cuts,
    /// Small blocks that are cut into slots or tables, by page.
    pages: Cuts,
    small: List,
    slots: List,
    tables: List,
    free_small: usize,
    spare: Spare,
}

impl Arena {
    /// An arena of at most `limit` bytes, in whole large blocks (at least one, at most 1 TiB), with its first segment.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn new(limit: usize) -> Result<Self, MemoryError> {
        Self::on(Hugepages::Auto, limit, Arc::default())
    }

    /// The same for another process, on ordinary pages: it can punch holes into the segments, which are sealed against nothing
    /// but other lengths. An ordinary page is allocated again when it is touched; for a hugepage there may be none left by then.
    /// A page is allocated with the first block that uses it, and stays: the last block that was freed is the first one used.
    /// Blocks are charged to `charge` when they are used for the first time; beyond its budget there are none.
    ///
    /// # Errors
    /// As [`Arena::new`], or when the budget is used up.
    pub fn shared(limit: usize, charge: Arc<Charge>) -> Result<Self, MemoryError> {
        Self::on(Hugepages::None, limit, charge)
    }

    fn on(pages_of: Hugepages, limit: usize, charge: Arc<Charge>) -> Result<Self, MemoryError> {
        let limit = limit.clamp(LARGE, LARGEST) / LARGE * LARGE;
        let mut arena = Self {
            memory: Arc::new(Memory::new(limit.div_ceil(SEGMENT))),
            len: 0,
            limit,
            pages_of,
            large: Vec::new(),
            fresh: 0,
            charge,
            reserve: 0,
            promised: 0,
            blocks: Cuts::default(),
            pages: Cuts::default(),
            small: List::new(SMALLS),
            slots: List::new(SLOTS),
            tables: List::new(TABLES),
            free_small: 0,
            spare: Spare::default(),
        };
        let added = arena.wanted().map(Segment::new).transpose()?.map(|segment| arena.add(segment));
        debug_assert!(matches!(added, Some(Ok(()))), "the first segment is wanted");
        // Page 0 stays behind: 0 is no block. Its neighbours are small ones for ever.
        if arena.take_free().is_none() {
            let (what, source) = ("memory beyond the user's budget", rustix::io::Errno::NOMEM);
            return Err(MemoryError::System { what, len: LARGE, source });
        }
        arena.blocks.cut(&mut arena.small, 0, 1);
        arena.free_small += SMALLS as usize - 1;
        Ok(arena)
    }

    /// Adds a segment. Maps up to 64 MiB, so it is not for the data path. `false`: the limit is reached.
    ///
    /// # Errors
    /// When there is not as much memory.
    pub fn grow(&mut self) -> Result<bool, MemoryError> {
        let Some(wanted) = self.wanted() else { return Ok(false) };
        Ok(self.add(Segment::new(wanted)?).is_ok())
    }

    /// What its next segment is to be like; `None`: the limit is reached.
    pub fn wanted(&self) -> Option<Wanted> {
        let len = SEGMENT.min(self.limit - self.len);
        (len > 0).then_some(Wanted { len, pages_of: self.pages_of })
    }

    /// Adds a segment that was made as it is [wanted](Self::wanted).
    ///
    /// # Errors
    /// The segment, when it has another length.
    pub fn add(&mut self, segment: Segment) -> Result<(), Segment> {
        if self.wanted().is_none_or(|wanted| wanted.len != segment.len) {
            return Err(segment);
        }
        let Segment { len, mapping, fd } = segment;
        self.memory.add(self.len / SEGMENT, mapping, fd);
        let (first, n) = (self.len / LARGE, len / LARGE);
        self.blocks.add(n);
        self.pages.add(len / SMALL);
        // All blocks fit at any time, so that giving one back never asks for memory.
        self.large.reserve_exact(first + n - self.large.len());
        // Blocks that were in use before are used first.
        self.large.splice(0..0, (first..first + n).rev().map(|number| number as u32));
        self.len += len;
        Ok(())
    }

    /// Keeps `blocks` large blocks for [`Arena::take_reserved`] and what covers by reserve, from now on: the last ones
    /// that are free, and the first ones that are given back.
    pub fn reserve(&mut self, blocks: usize) {
        self.reserve = blocks;
    }

    /// Replaces the promise of a receive window, `before`, by `now` small blocks. Others do not get promised blocks.
    #[inline]
    pub fn promise(&mut self, before: u32, now: u32) {
        self.promised = (self.promised + now as usize).saturating_sub(before as usize);
    }

    /// Large blocks that are promised.
    #[inline]
    pub fn promised(&self) -> usize {
        self.promised.div_ceil(SMALLS as usize)
    }

    /// Large blocks that are free, and neither promised nor of the reserve.
    #[inline]
    pub fn spare(&self) -> usize {
        self.left(Share::Common)
    }

    /// How much is free.
    pub fn free(&self) -> Free {
        Free { large: self.large.len(), small: self.free_small }
    }

    /// Bytes that are mapped, and how many there may be.
    pub fn len_and_limit(&self) -> (usize, usize) {
        (self.len, self.limit)
    }

    /// The segments, mapped for as long as anybody keeps this.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// First byte of `block`, aligned to its length.
    ///
    /// # Panics
    /// When the block is of another arena, and outside of this one.
    #[inline(always)]
    pub fn address(&self, block: Block) -> NonNull<u8> {
        let address = self.memory.address(block, 0, SMALL);
        address.unwrap_or_else(|| panic!("page {} is not of this arena", block.page()))
    }

    /// The slot at `place`.
    ///
    /// # Panics
    /// When the place is of another arena, and outside of this one.
    #[inline(always)]
    pub fn slot(&self, place: Place) -> &Slot {
        let slot = self.memory.slot(place);
        slot.unwrap_or_else(|| panic!("place {} is not of this arena", place.number()))
    }

    /// A small block: 4 KiB, whose bytes are whatever they were.
    #[inline]
    pub fn take_small(&mut self) -> Option<Block> {
        self.small_of(Share::Common)
    }

    /// A large block: 64 KiB, whose bytes are whatever they were.
    #[inline]
    pub fn take_large(&mut self) -> Option<Block> {
        self.large_of(Share::Common)
    }

    /// A large block, of the reserve when there are no others.
    #[inline]
    pub fn take_reserved(&mut self) -> Option<Block> {
        self.large_of(Share::Reserved)
    }

    /// Takes a small block back.
    pub fn give_small(&mut self, block: Block) {
        let (number, part) = (block.page() / SMALLS, block.page() % SMALLS);
        self.free_small += 1;
        if self.blocks.give(&mut self.small, number, part) {
            self.free_small -= SMALLS as usize;
            self.large.push(number);
        }
    }

    /// Takes a large block back.
    pub fn give_large(&mut self, block: Block) {
        debug_assert_eq!(block.page() % SMALLS, 0);
        self.large.push(block.page() / SMALLS);
    }

    /// A session's slot: nothing in either direction. It may be of the reserve.
    pub fn take_slot(&mut self) -> Option<Place> {
        if self.slots.is_empty() {
            let block = self.small_of(Share::Reserved)?;
            self.pages.cut(&mut self.slots, block.page(), 0);
        }
        let (page, part) = self.pages.take(&mut self.slots)?;
        let place = Place::new(page * SLOTS + part)?;
        self.slot(place).reset();
        Some(place)
    }

    /// Takes a slot back. The application no longer looks at it, or is not to be considered.
    pub fn give_slot(&mut self, place: Place) {
        let (page, part) = (place.number() / SLOTS, place.number() % SLOTS);
        if self.pages.give(&mut self.slots, page, part) {
            self.give_page(page);
        }
    }

    /// A table of 256 page numbers, all 0.
    pub fn take_table(&mut self) -> Option<Place> {
        self.table_of(Share::Common)
    }

    /// Takes a table back.
    pub fn give_table(&mut self, place: Place) {
        let (page, part) = (place.number() / SLOTS, place.number() % SLOTS / TABLE_UNITS);
        if self.pages.give(&mut self.tables, page, part) {
            self.give_page(page);
        }
    }

    /// How many large blocks there are to be taken.
    #[inline(always)]
    pub(crate) fn left(&self, share: Share) -> usize {
        self.large.len().saturating_sub(self.beyond_budget() + self.kept(share))
    }

    /// How many free blocks have never been used, and the budget has no room for.
    #[inline(always)]
    fn beyond_budget(&self) -> usize {
        (self.len / LARGE - self.fresh as usize).saturating_sub(self.charge.left())
    }

    /// The free block that was used last.
    #[inline]
    fn take_free(&mut self) -> Option<u32> {
        let number = *self.large.last()?;
        if number >= self.fresh {
            if !self.charge.take() {
                return None;
            }
            self.fresh = number + 1;
        }
        self.large.pop()
    }

    /// As [`Arena::take_large`].
    #[inline]
    pub(crate) fn large_of(&mut self, share: Share) -> Option<Block> {
        if self.left(share) == 0 {
            return None;
        }
        Block::new(self.take_free()? * SMALLS)
    }

    /// As [`Arena::take_small`].
    #[inline]
    pub(crate) fn small_of(&mut self, share: Share) -> Option<Block> {
        if self.small.is_empty() {
            let block = self.large_of(share)?;
            self.blocks.cut(&mut self.small, block.page() / SMALLS, 0);
            self.free_small += SMALLS as usize;
        }
        let (number, part) = self.blocks.take(&mut self.small)?;
        self.free_small -= 1;
        Block::new(number * SMALLS + part)
    }

    /// Both tables of a FIFO: the private one, and in it the place of the shared one.
    pub(crate) fn take_tables(&mut self, share: Share) -> Option<Box<Table>> {
        let place = self.table_of(share)?;
        Some(self.spare.take(place))
    }

    /// Takes both tables back; they are empty.
    pub(crate) fn give_tables(&mut self, table: Box<Table>) {
        self.give_table(table.place);
        self.spare.give(table);
    }

    /// Shows the application what is in a table's entry: a block, or none.
    #[inline]
    pub(crate) fn show(&self, table: Place, entry: usize, block: Option<Block>) {
        if let Some(word) = self.memory.entry(table, entry) {
            word.store(block.map_or(0, Block::page), Ordering::Relaxed);
        }
    }

    fn kept(&self, share: Share) -> usize {
        match share {
            Share::Common => self.reserve + self.promised(),
            Share::Reserved => 0,
        }
    }

    fn table_of(&mut self, share: Share) -> Option<Place> {
        if self.tables.is_empty() {
            let block = self.small_of(share)?;
            self.pages.cut(&mut self.tables, block.page(), 0);
        }
        let (page, part) = self.pages.take(&mut self.tables)?;
        let place = Place::new(page * SLOTS + part * TABLE_UNITS)?;
        (0..TABLE).for_each(|entry| self.show(place, entry, None));
        Some(place)
    }

    fn give_page(&mut self, page: u32) {
        if let Some(block) = Block::new(page) {
            self.give_small(block);
        }
    }
}

// Page numbers of whole large blocks, and places, fit into 32 bits.
const _: () = assert!(LARGEST / SLOT <= u32::MAX as usize && SEGMENT / SMALL == PAGES);
