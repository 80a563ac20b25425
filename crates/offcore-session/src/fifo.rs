//! The stack's side of one direction of a session. All its decisions are based on private memory.
//!
//! ```text
//!              released       edge            end
//!                 |   data     |  covered      |
//!   freed blocks  |            |  by blocks    |  no blocks
//!   rx:           head         committed tail  last byte that has a block, out of order ones included
//!   tx:           acknowledged tail seen       limit
//! ```
//! A FIFO is in one of three states:
//!
//! * **Empty**: no block, and nothing between `released` and `end`. It only uses this struct.
//! * **Small**: one block of 4 KiB is a ring for all positions. Its room counts from the last position that was
//!   released while no copy was in flight, because bytes that a copy reads or writes must not be reused.
//! * **Large**: from a position `p0` on, blocks of 64 KiB in a table of 256 entries are allocated where and when they
//!   are needed. Positions below `p0` are in the small ring as before. Its block is freed when `p0` is released.
//!
//! **From small to large.** A range that does not fit into the ring makes the FIFO large, with `p0 = end`. Positions
//! that already have a block keep it, so concurrent reads and writes on either side are not affected. All positions
//! that the application has seen are below `p0`. It loads `p0` and the table again before it uses a later edge or
//! limit. If the first range does not fit, an empty FIFO becomes large immediately, without a small block.
//!
//! **Back to empty**, and from there to small, only when nothing is between `released` and `end` and no copy is in
//! flight: [`Fifo::shrink`]. Then the application does not look up positions either: a reader's head equals its tail. A
//! writer may have a limit beyond its tail. The stack takes that back first, as [`crate::slot`] describes, and does not
//! shrink the FIFO while the writer uses it.

mod rx;
mod tx;

pub use tx::Asked;

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::arena::{Arena, Share};
use crate::copy::copy;
use crate::layout::{CAPACITY, NEVER, Runs, SMALL, block_number, entry};
use crate::memory::Memory;
use crate::place::{Block, Place, Segments};
use crate::slot::{Half, Map, Slot};
use crate::table::Table;

/// An invalid value that an application has stored in its slot. Its session must be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum Misuse {
    /// head {found} of the receive direction: expected {from} to {to}
    Head { found: u64, from: u64, to: u64 },
    /// tail {found} of the transmit direction: expected {from} to {to}
    Tail { found: u64, from: u64, to: u64 },
}

/// A direction of a session: [`Rx`] or [`Tx`].
pub trait Direction: sealed::Half {}

/// Receive: the stack produces, the application consumes.
#[derive(Debug)]
pub enum Rx {}

/// Transmit: the application produces, the stack consumes.
#[derive(Debug)]
pub enum Tx {}

impl Direction for Rx {}
impl Direction for Tx {}

mod sealed {
    /// Selects the half of the slot.
    pub trait Half {
        #[doc(hidden)]
        const RX: bool;
    }
    impl Half for super::Rx {
        const RX: bool = true;
    }
    impl Half for super::Tx {
        const RX: bool = false;
    }
}

/// One direction of a session, on the stack's side. Its blocks are returned to the arena by [`Fifo::shrink`] or
/// [`Fifo::discard`], not when it is dropped.
#[derive(Debug)]
pub struct Fifo<D> {
    released: u64,
    edge: u64,
    end: u64,
    p0: u64,
    /// The small ring has room up to 4096 bytes beyond this position.
    room_from: u64,
    /// `Some` exactly if `p0` is set.
    table: Option<Box<Table>>,
    small: Option<Block>,
    /// Number of bytes of copies in flight to or from the small block.
    holds: u32,
    slot: Place,
    /// The session has ended, so the slot may belong to another session.
    discarded: bool,
    direction: PhantomData<D>,
}

// Ten thousand idle sessions have two of these each.
const _: () = assert!(size_of::<Fifo<Rx>>() <= 64);

impl<D: Direction> Fifo<D> {
    /// Creates a direction of a new session whose slot is at `slot`, empty.
    pub fn new(slot: Place) -> Self {
        Self {
            released: 0,
            edge: 0,
            end: 0,
            p0: NEVER,
            room_from: 0,
            table: None,
            small: None,
            holds: 0,
            slot,
            discarded: false,
            direction: PhantomData,
        }
    }

    /// Returns whether it has no blocks.
    pub fn is_empty(&self) -> bool {
        self.small.is_none() && self.table.is_none()
    }

    /// Returns the position up to which bytes are no longer needed: consumed, or acknowledged.
    #[inline(always)]
    pub fn released(&self) -> u64 {
        self.released
    }

    /// Returns the position up to which there is data: committed, or written by the application according to the last
    /// read index.
    #[inline(always)]
    pub fn edge(&self) -> u64 {
        self.edge
    }

    /// Returns the position after the last byte that has had a block. It is the limit of the transmit direction.
    #[inline(always)]
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Returns the addresses and lengths of the `len` bytes from `position` on, in order. The range lies between
    /// [`Fifo::released`] and [`Fifo::end`] and has blocks. The list ends at the first missing block. 64 KiB have up to
    /// two pieces, or up to four if the range extends from the small ring into large blocks.
    #[inline]
    pub fn pieces<'a>(
        &'a self,
        arena: &'a Arena,
        position: u64,
        len: usize,
    ) -> impl Iterator<Item = (NonNull<u8>, usize)> + 'a {
        self.pieces_in(arena.memory(), position, len)
    }

    /// Like [`Fifo::pieces`], with only the arena's memory.
    #[inline]
    pub fn pieces_in<'a>(
        &'a self,
        memory: &'a Memory,
        position: u64,
        len: usize,
    ) -> impl Iterator<Item = (NonNull<u8>, usize)> + 'a {
        debug_assert!(self.has(position, len));
        Runs::new(position, len, self.p0).map_while(|run| {
            let block = match run.entry {
                None => self.small?,
                Some(at) => self.table.as_ref()?.block(at)?,
            };
            Some((memory.address(block, run.offset, run.len)?, run.len))
        })
    }

    /// Copies a few bytes, such as a header, to `position`. There must be blocks for them, which the application does
    /// not use.
    pub fn put(&self, arena: &Arena, position: u64, mut bytes: &[u8]) {
        for (address, len) in self.pieces(arena, position, bytes.len()) {
            let (here, rest) = bytes.split_at(len.min(bytes.len()));
            // SAFETY: `here.len()` is at most `len` bytes of a block of the FIFO. The slice is private memory, so they
            // do not overlap.
            unsafe { copy(here.as_ptr(), address.as_ptr(), here.len()) };
            bytes = rest;
        }
    }

    /// Copies a few bytes, such as a header, from `position`. They are copied once, so that the checked bytes are the
    /// used bytes.
    pub fn get(&self, arena: &Arena, position: u64, mut to: &mut [u8]) {
        for (address, len) in self.pieces(arena, position, to.len()) {
            let (here, rest) = to.split_at_mut(len.min(to.len()));
            // SAFETY: `here.len()` is at most `len` bytes of a block of the FIFO. The slice is private memory, so they
            // do not overlap.
            unsafe { copy(address.as_ptr(), here.as_mut_ptr(), here.len()) };
            to = rest;
        }
    }

    /// Counts a copy in flight to or from these bytes, which have blocks. The blocks stay until [`Fifo::unhold`], even
    /// if they are released.
    #[inline]
    pub fn hold(&mut self, position: u64, len: usize) {
        debug_assert!(self.has(position, len));
        for run in Runs::new(position, len, self.p0) {
            match (run.entry, &mut self.table) {
                (None, _) => self.holds += run.len as u32,
                (Some(at), Some(table)) => table.hold(at, run.len as u32),
                (Some(_), None) => debug_assert!(false, "a position from p0 on, and no table"),
            }
        }
    }

    /// Ends copies in a range of [`Fifo::hold`], or in several consecutive ones. Bytes are counted, not copies.
    #[inline]
    pub fn unhold(&mut self, arena: &mut Arena, position: u64, len: usize) {
        for run in Runs::new(position, len, self.p0) {
            match (run.entry, &mut self.table) {
                (None, _) => self.holds -= run.len as u32,
                (Some(at), Some(table)) => {
                    if let Some(block) = table.unhold(at, run.len as u32) {
                        self.free(arena, at, block);
                    }
                }
                (Some(_), None) => debug_assert!(false, "a position from p0 on, and no table"),
            }
        }
        self.settle(arena);
    }

    /// Returns all blocks after the end of the session: the application no longer uses it, or is terminated. Blocks
    /// with copies in flight are returned with the last of these copies, by [`Fifo::unhold`], when [`Fifo::is_empty`]
    /// becomes true. The slot is not written any more.
    pub fn discard(&mut self, arena: &mut Arena) {
        self.discarded = true;
        self.edge = self.end;
        self.release(arena, self.end);
        // The last block may extend beyond the end.
        self.free_blocks(arena, block_number(self.end), block_number(self.end));
        self.settle(arena);
    }

    fn half<'a>(&self, arena: &'a Arena) -> &'a Half {
        let slot: &Slot = arena.slot(self.slot);
        if D::RX { &slot.rx } else { &slot.tx }
    }

    /// Returns whether a range is covered and not released.
    fn has(&self, position: u64, len: usize) -> bool {
        position >= self.released && position.checked_add(len as u64).is_some_and(|end| end <= self.end)
    }

    fn is_held(&self) -> bool {
        self.holds > 0 || self.table.as_ref().is_some_and(|table| table.held > 0)
    }

    /// Allocates the blocks for a range, all or none.
    #[inline]
    fn make(&mut self, arena: &mut Arena, position: u64, len: usize, share: Share) -> bool {
        let Some(end) = position.checked_add(len as u64) else { return false };
        if position < self.released || end - self.released > CAPACITY as u64 || self.discarded {
            return false;
        }
        let made = if len == 0 {
            return true;
        } else if self.table.is_none() && end - self.room_from <= SMALL as u64 {
            self.make_small(arena, share)
        } else {
            self.has_large(position, end) || self.make_large(arena, position, end, share)
        };
        if made {
            self.end = self.end.max(end);
        }
        made
    }

    fn make_small(&mut self, arena: &mut Arena, share: Share) -> bool {
        if self.small.is_some() {
            return true;
        }
        self.small = arena.small_of(share);
        if self.small.is_some() {
            self.describe(arena);
        }
        self.small.is_some()
    }

    /// Returns whether a range is in existing large blocks. Usually it is in the same block as the previous range.
    #[inline]
    fn has_large(&self, position: u64, end: u64) -> bool {
        let missing = |table: &Table| table.missing(block_number(position), block_number(end - 1));
        position >= self.p0 && self.table.as_deref().and_then(missing) == Some(0)
    }

    fn make_large(&mut self, arena: &mut Arena, position: u64, end: u64, share: Share) -> bool {
        let fresh = self.table.is_none();
        let p0 = if fresh { self.end } else { self.p0 };
        if end <= p0 {
            // Below p0 everything that is not released is in the small block.
            return true;
        }
        let (first, last) = (block_number(position.max(p0)), block_number(end - 1));
        let Some(mut table) = self.table.take().or_else(|| arena.take_tables(share)) else { return false };
        let filled = fill(&mut table, arena, first, last, share);
        if fresh && !filled {
            arena.give_tables(table);
            return false;
        }
        self.table = Some(table);
        if fresh {
            self.p0 = p0;
            self.describe(arena);
        }
        filled
    }

    /// Stores the location of the bytes for the application, which loads it when it sees a later edge or limit.
    fn describe(&self, arena: &Arena) {
        self.half(arena).describe(Map {
            p0: self.p0,
            small: self.small.map_or(0, Block::page),
            table: self.table.as_ref().map_or(0, |table| table.place.number()),
        });
    }

    /// Frees the blocks that are completely below `upto`, which is at most `edge`.
    #[inline]
    fn release(&mut self, arena: &mut Arena, upto: u64) {
        debug_assert!(self.released <= upto && upto <= self.edge);
        let (first, next) = (block_number(self.released.max(self.p0)), block_number(upto));
        self.released = upto;
        if self.table.is_some() && first < next {
            self.free_blocks(arena, first, next - 1);
        }
        self.settle(arena);
    }

    /// Frees the blocks with these numbers, now or with the last copy. They are at most one table.
    fn free_blocks(&mut self, arena: &mut Arena, first: u64, last: u64) {
        for number in first..=last {
            let at = entry(number);
            if let Some(block) = self.table.as_mut().and_then(|table| table.release(at)) {
                self.free(arena, at, block);
            }
        }
    }

    fn free(&self, arena: &mut Arena, at: usize, block: Block) {
        if let Some(table) = &self.table {
            arena.show(table.place, at, None);
        }
        arena.give_large(block);
    }

    /// Performs the steps that become possible when positions are released or a copy has ended.
    #[inline]
    fn settle(&mut self, arena: &mut Arena) {
        if self.holds == 0 {
            self.room_from = self.released;
            if self.released >= self.p0 || self.discarded {
                // The slot may still name the block, because the application is beyond p0.
                self.small.take().into_iter().for_each(|block| arena.give_small(block));
            }
        }
        if self.discarded && self.table.as_ref().is_some_and(|table| table.blocks == 0) {
            self.table.take().into_iter().for_each(|table| arena.give_tables(table));
        }
    }

    /// Makes the FIFO empty: nothing is between `released` and `edge`, and nothing is held.
    fn clear(&mut self, arena: &mut Arena) {
        if self.table.is_some() {
            let first = block_number(self.released.max(self.p0));
            self.free_blocks(arena, first, block_number(self.end));
        }
        self.small.take().into_iter().for_each(|block| arena.give_small(block));
        self.table.take().into_iter().for_each(|table| arena.give_tables(table));
        self.p0 = NEVER;
        self.end = self.edge;
        self.describe(arena);
    }
}

/// Allocates blocks for the empty entries of blocks `first` to `last`, all or none.
fn fill(table: &mut Table, arena: &mut Arena, first: u64, last: u64, share: Share) -> bool {
    let Some(missing) = table.missing(first, last) else { return false };
    if missing == 0 {
        return true;
    }
    // Another thread may take from the budget at any time, so all missing blocks are paid for at once.
    if missing > arena.left(share) || !arena.pay(missing) {
        return false;
    }
    for at in (first..=last).map(entry) {
        if table.block(at).is_none()
            && let Some(block) = arena.take_paid()
        {
            table.put(at, block);
            arena.show(table.place, at, Some(block));
        }
    }
    true
}
