//! The stack's allocator for one application's memory.
//!
//! ```text
//! segment: 64 MiB, a memfd      large block: 64 KiB      small block: 4 KiB     slot: 512 B, table: 1 KiB
//! | large | large | large | ... -> | 16 small ones | ... -> | 8 slots |, or | 4 tables |
//! ```
//! A large block is cut into small ones, and a small one into slots or tables, when the block that was cut last is used
//! up. It is merged again as soon as all its parts are free. The lists are in private memory: an application cannot
//! access them, and the pages that it sees contain only its own sessions' blocks. Only these functions allocate memory:
//! [`Segment::new`], [`Arena::new`], [`Arena::grow`], and the creation of a FIFO's private table when more FIFOs are
//! large than ever before.
//!
//! **Fragmentation** is bounded: a large block with a single used part is not available as a large one, so in the worst
//! case each small block in use costs 64 KiB. A cut block is used up completely before another one is cut, and small
//! blocks are allocated and freed with sessions that become large or idle.

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

/// Name of the memfds.
const NAME: &str = "offcore-session";
/// Maximum number of bytes of an arena, because places have 32 bits.
const LARGEST: usize = 1 << 40;
/// Number of small blocks in a large one.
pub(crate) const SMALLS: u32 = (LARGE / SMALL) as u32;
/// Number of slots in a small block.
const SLOTS: u32 = (SMALL / SLOT) as u32;
/// Number of tables in a small block, and of units of 512 bytes in a table.
const TABLES: u32 = (SMALL / (TABLE * 4)) as u32;
const TABLE_UNITS: u32 = SLOTS / TABLES;

/// The free blocks that an allocation may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Share {
    /// All blocks except the reserve.
    Common,
    /// All blocks.
    Reserved,
}

/// Free memory of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Free {
    /// Number of free large blocks, including the reserve.
    pub large: usize,
    /// Number of free small blocks in large blocks that are cut.
    pub small: usize,
}

/// Memory that can be added to an arena.
#[derive(Debug)]
pub struct Segment {
    /// Number of used bytes. The mapping has whole pages.
    len: usize,
    mapping: Mapping,
    fd: OwnedFd,
}

/// Properties of the next segment of an arena.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    len: usize,
    pages_of: Hugepages,
}

impl Segment {
    /// Maps up to 64 MiB. The kernel allocates ordinary pages when they are touched, but hugepages in this function.
    /// That takes about ten milliseconds, so another thread than the arena's may call it.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(wanted: Wanted) -> Result<Self, MemoryError> {
        let (mapping, fd) = match wanted.pages_of {
            Hugepages::None => Mapping::untouched_memfd(NAME, wanted.len)?,
            pages_of => Mapping::memfd(NAME, wanted.len, pages_of)?,
        };
        Ok(Self { len: wanted.len, mapping, fd })
    }
}

/// One application's memory, as the stack allocates it. It belongs to one worker.
#[derive(Debug)]
pub struct Arena {
    memory: Arc<Memory>,
    /// Number of mapped bytes, and its maximum. Both are multiples of a large block.
    len: usize,
    limit: usize,
    pages_of: Hugepages,
    /// Numbers of the free large blocks: their first page divided by 16. The block that was freed last is used first.
    large: Vec<u32>,
    /// Blocks from this number on have never been used. They are the first ones of the list, in descending order.
    fresh: u32,
    /// The account for used blocks.
    charge: Arc<Charge>,
    /// Number of free large blocks that only [`Share::Reserved`] may take.
    reserve: usize,
    /// Number of small blocks that receive windows promise. Only [`Share::Reserved`] may take them.
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
    /// Creates an arena of up to `limit` bytes, in whole large blocks (at least one, at most 1 TiB), with its first
    /// segment.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn new(limit: usize) -> Result<Self, MemoryError> {
        Self::on(Hugepages::Auto, limit, Arc::default())
    }

    /// Creates an arena for another process, on ordinary pages. That process can punch holes into the segments, which
    /// are only sealed against changes of their length. An ordinary page is then allocated again when it is touched,
    /// but a hugepage may not be available any more. A page is allocated with the first block that uses it, and stays
    /// allocated. The block that was freed last is used first. Blocks are charged to `charge` when they are used for
    /// the first time. When its budget is used up, no new blocks are available.
    ///
    /// # Errors
    /// As [`Arena::new`], and if the budget is used up.
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
        let used_up = || {
            let (what, source) = ("memory beyond the user's budget", rustix::io::Errno::NOMEM);
            MemoryError::System { what, len: LARGE, source }
        };
        let first = Segment::new(arena.wanted().ok_or_else(used_up)?)?;
        // Page 0 is never handed out, because 0 means "no block". The rest of its block stays cut into small blocks.
        if arena.add(first).is_err() || arena.take_free().is_none() {
            return Err(used_up());
        }
        arena.blocks.cut(&mut arena.small, 0, 1);
        arena.free_small += SMALLS as usize - 1;
        Ok(arena)
    }

    /// Adds a segment. It maps up to 64 MiB, so it must not be called on the data path. Returns `false` if the limit is
    /// reached.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn grow(&mut self) -> Result<bool, MemoryError> {
        let Some(wanted) = self.wanted() else { return Ok(false) };
        Ok(self.add(Segment::new(wanted)?).is_ok())
    }

    /// Returns the properties of its next segment, or `None` if the limit is reached or the budget is used up.
    pub fn wanted(&self) -> Option<Wanted> {
        let len = SEGMENT.min(self.limit - self.len);
        let left = self.charge.left().saturating_sub(self.unused());
        (len > 0 && left > private_blocks(len)).then_some(Wanted { len, pages_of: self.pages_of })
    }

    /// Adds a segment that was created with the [wanted](Self::wanted) properties. Its lists in private memory are
    /// charged immediately.
    ///
    /// # Errors
    /// The segment, if it has another length, or if the budget is used up.
    pub fn add(&mut self, segment: Segment) -> Result<(), Segment> {
        let is_wanted = self.wanted().is_some_and(|wanted| wanted.len == segment.len);
        if !is_wanted || !self.charge.take(private_blocks(segment.len)) {
            return Err(segment);
        }
        let Segment { len, mapping, fd } = segment;
        self.memory.add(self.len / SEGMENT, mapping, fd);
        let (first, n) = (self.len / LARGE, len / LARGE);
        self.blocks.add(n);
        self.pages.add(len / SMALL);
        // There is always room for all blocks, so that freeing one never allocates memory.
        self.large.reserve_exact(first + n - self.large.len());
        // Blocks that were in use before are used first.
        self.large.splice(0..0, (first..first + n).rev().map(|number| number as u32));
        self.len += len;
        Ok(())
    }

    /// Keeps `blocks` large blocks for receive windows and for covering from the reserve, from now on: the
    /// last free ones, and the first ones that are freed.
    pub fn reserve(&mut self, blocks: usize) {
        self.reserve = blocks;
    }

    /// Replaces the promise of a receive window, `before`, by `now` small blocks. Other allocations do not get promised
    /// blocks.
    #[inline]
    pub fn promise(&mut self, before: u32, now: u32) {
        self.promised = (self.promised + now as usize).saturating_sub(before as usize);
    }

    /// Returns the number of promised large blocks.
    #[inline]
    pub fn promised(&self) -> usize {
        self.promised.div_ceil(SMALLS as usize)
    }

    /// Returns the number of large blocks that are free, and neither promised nor part of the reserve.
    #[inline]
    pub fn spare(&self) -> usize {
        self.left(Share::Common)
    }

    /// Returns the free memory that the budget has room for.
    #[inline]
    pub fn free(&self) -> Free {
        Free { large: self.large.len() - self.beyond_budget(), small: self.free_small }
    }

    /// Returns the number of mapped bytes and its maximum. Bytes that the budget has no room for do not count.
    #[inline]
    pub fn len_and_limit(&self) -> (usize, usize) {
        let len = self.len - self.beyond_budget() * LARGE;
        (len, len + self.room())
    }

    /// Returns the number of bytes that can still be mapped and used.
    #[inline]
    fn room(&self) -> usize {
        let unmapped = self.limit - self.len;
        if unmapped == 0 {
            return 0;
        }
        unmapped.min(self.charge.left().saturating_sub(self.unused()).saturating_mul(LARGE))
    }

    /// Returns the segments, which stay mapped while a reference exists.
    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    /// Returns the first byte of `block`, aligned to its length.
    ///
    /// # Panics
    /// If the block belongs to another arena and is outside of this one.
    #[inline(always)]
    pub fn address(&self, block: Block) -> NonNull<u8> {
        let address = self.memory.address(block, 0, SMALL);
        address.unwrap_or_else(|| panic!("page {} is not of this arena", block.page()))
    }

    /// Returns the slot at `place`.
    ///
    /// # Panics
    /// If the place belongs to another arena and is outside of this one.
    #[inline(always)]
    pub fn slot(&self, place: Place) -> &Slot {
        let slot = self.memory.slot(place);
        slot.unwrap_or_else(|| panic!("place {} is not of this arena", place.number()))
    }

    /// Takes a small block: 4 KiB, uninitialised.
    #[cfg(test)]
    pub(crate) fn take_small(&mut self) -> Option<Block> {
        self.small_of(Share::Common)
    }

    /// Takes a large block: 64 KiB, uninitialised.
    #[inline]
    pub fn take_large(&mut self) -> Option<Block> {
        self.large_of(Share::Common)
    }

    /// Takes a large block, from the reserve if no others are free.
    #[cfg(test)]
    pub(crate) fn take_reserved(&mut self) -> Option<Block> {
        self.large_of(Share::Reserved)
    }

    /// Frees a small block.
    pub fn give_small(&mut self, block: Block) {
        let (number, part) = (block.page() / SMALLS, block.page() % SMALLS);
        self.free_small += 1;
        if self.blocks.give(&mut self.small, number, part) {
            self.free_small -= SMALLS as usize;
            self.large.push(number);
        }
    }

    /// Frees a large block.
    pub fn give_large(&mut self, block: Block) {
        debug_assert_eq!(block.page() % SMALLS, 0);
        self.large.push(block.page() / SMALLS);
    }

    /// Takes a session's slot, empty in both directions. It may come from the reserve.
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

    /// Frees a slot. The application no longer uses it, or is terminated.
    pub fn give_slot(&mut self, place: Place) {
        let (page, part) = (place.number() / SLOTS, place.number() % SLOTS);
        if self.pages.give(&mut self.slots, page, part) {
            self.give_page(page);
        }
    }

    /// Takes a table of 256 page numbers, all 0.
    pub fn take_table(&mut self) -> Option<Place> {
        self.table_of(Share::Common)
    }

    /// Frees a table.
    pub fn give_table(&mut self, place: Place) {
        let (page, part) = (place.number() / SLOTS, place.number() % SLOTS / TABLE_UNITS);
        if self.pages.give(&mut self.tables, page, part) {
            self.give_page(page);
        }
    }

    /// Returns the number of large blocks that can be taken.
    #[inline(always)]
    pub(crate) fn left(&self, share: Share) -> usize {
        self.large.len().saturating_sub(self.beyond_budget() + self.kept(share))
    }

    /// Returns the number of free blocks that have never been used and do not fit into the budget.
    #[inline(always)]
    fn beyond_budget(&self) -> usize {
        self.unused().saturating_sub(self.charge.left())
    }

    /// Takes the free block that was used last.
    #[inline]
    fn take_free(&mut self) -> Option<u32> {
        if self.large.is_empty() || !self.pay(1) {
            return None;
        }
        self.large.pop()
    }

    /// Charges for the next `blocks` free blocks. Blocks that were used before are free of charge. The caller makes
    /// sure that enough blocks are free. Returns `false`, and charges nothing, if the budget does not suffice.
    #[inline]
    pub(crate) fn pay(&mut self, blocks: usize) -> bool {
        let used = self.large.len() - self.unused();
        let first_uses = blocks.saturating_sub(used);
        let paid = first_uses == 0 || self.charge.take(first_uses);
        if paid {
            self.fresh += first_uses as u32;
        }
        paid
    }

    /// Takes a large block that was [paid](Self::pay) for, from the reserve if necessary.
    pub(crate) fn take_paid(&mut self) -> Option<Block> {
        Block::new(self.large.pop()? * SMALLS)
    }

    /// Returns the number of blocks that have never been used. All of them are free.
    #[inline(always)]
    fn unused(&self) -> usize {
        self.len / LARGE - self.fresh as usize
    }

    /// Takes a large block from a share, as [`Arena::take_large`].
    #[inline]
    pub(crate) fn large_of(&mut self, share: Share) -> Option<Block> {
        if self.left(share) == 0 {
            return None;
        }
        Block::new(self.take_free()? * SMALLS)
    }

    /// Takes a small block, 4 KiB, uninitialised, from a share.
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

    /// Takes both tables of a FIFO: the private one, which contains the place of the shared one.
    pub(crate) fn take_tables(&mut self, share: Share) -> Option<Box<Table>> {
        let place = self.table_of(share)?;
        Some(self.spare.take(place))
    }

    /// Frees both tables, which are empty.
    pub(crate) fn give_tables(&mut self, table: Box<Table>) {
        self.give_table(table.place);
        self.spare.give(table);
    }

    /// Publishes a table's entry to the application: a block, or none.
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

/// Returns the size, in large blocks, of the lists in private memory for a segment of `len` bytes.
fn private_blocks(len: usize) -> usize {
    len / SMALL * Cuts::PER_UNIT / LARGE
}

// Page numbers of whole large blocks, and places, fit into 32 bits.
const _: () = assert!(LARGEST / SLOT <= u32::MAX as usize && SEGMENT / SMALL == PAGES);
