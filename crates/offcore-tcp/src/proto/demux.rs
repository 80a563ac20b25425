//! From a flow to its connection: a hash table of tags, which grows while it is used.
//!
//! A bucket is one cache line of eight entries, and a flow is in one of two buckets: a lookup reads two lines at most,
//! and four while the table grows. Both buckets follow from the tag alone, so that entries move (to make room, or to a
//! larger table) without their keys being read.

mod table;

use table::{MAX_BUCKETS, SLOTS, Table};

/// Buckets that each insert and each round empty into the larger table.
const MOVED: usize = 4;

/// The table has no room for this entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Values of 32 bits by hash. The keys are the caller's: it tells flows of one tag apart.
#[derive(Debug)]
pub(super) struct Demux {
    table: Table,
    growth: Option<Growth>,
    /// A table that has been emptied. To free it is work for the control thread.
    emptied: Option<Table>,
}

/// The smaller table on its way out.
#[derive(Debug)]
struct Growth {
    from: Table,
    next: usize,
}

impl Demux {
    /// A demultiplexer that begins with this table.
    pub(super) const fn new(table: Table) -> Self {
        Self { table, growth: None, emptied: None }
    }

    /// Makes a table for at least `size` entries, from 16 to 2^27, all places in use. Allocates: call it off the
    /// data path.
    pub(super) fn table(size: usize) -> Table {
        Table::new(size)
    }

    /// Entries present.
    pub(super) fn len(&self) -> usize {
        self.table.len() + self.growth.as_ref().map_or(0, |growth| growth.from.len())
    }

    /// Entries that the table has places for; the larger one's while it grows.
    pub(super) const fn capacity(&self) -> usize {
        self.table.capacity()
    }

    /// The value of the flow with this hash for which `is` says yes. It is asked about every value of the same tag:
    /// the one meant and, with n flows, n / 2^32 others on average.
    #[inline]
    pub(super) fn lookup(&self, hash: u64, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = tag(hash);
        let found = self.table.find(tag, &mut is);
        match &self.growth {
            Some(growth) if found.is_none() => growth.from.find(tag, is),
            _ => found,
        }
    }

    /// Adds a flow that is not there yet.
    ///
    /// # Errors
    /// There is no room near the flow's buckets. The tests fill tables to 90 % without it; [`Self::wants_growth`] comes
    /// long before. More than 16 flows of one tag are refused at any load.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, value: u32) -> Result<(), Full> {
        self.round();
        self.table.insert(tag(hash), value)
    }

    /// Removes the entry of this hash and value; false where there is none.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, value: u32) -> bool {
        let tag = tag(hash);
        let Self { table, growth, .. } = self;
        table.remove(tag, value) || growth.as_mut().is_some_and(|growth| growth.from.remove(tag, value))
    }

    /// Gives the entry of this hash and value another value, as a connection that enters TIME-WAIT has; false where
    /// there is no entry. It needs no room, so it cannot fail as [`Self::insert`] can.
    #[inline]
    pub(super) fn replace(&mut self, hash: u64, value: u32, new: u32) -> bool {
        let tag = tag(hash);
        let Self { table, growth, .. } = self;
        table.replace(tag, value, new)
            || growth.as_mut().is_some_and(|growth| growth.from.replace(tag, value, new))
    }

    /// Whether the control thread is to make a table of twice [`Self::capacity`] and hand it over: 70 % are in use.
    pub(super) const fn wants_growth(&self) -> bool {
        let larger = self.table.buckets() < MAX_BUCKETS;
        larger && self.growth.is_none() && self.table.len() * 10 >= self.table.capacity() * 7
    }

    /// Goes over to a larger table. Each insert and round from now on moves the entries of four buckets.
    ///
    /// # Errors
    /// The table comes back: it is not larger, it is not empty, or the table is still growing.
    pub(super) fn grow(&mut self, table: Table) -> Result<(), Table> {
        if self.growth.is_some() || table.buckets() <= self.table.buckets() || table.len() > 0 {
            return Err(table);
        }
        let from = std::mem::replace(&mut self.table, table);
        self.growth = Some(Growth { from, next: 0 });
        Ok(())
    }

    /// Moves four buckets where the table grows. To be called once a round.
    #[inline]
    pub(super) fn round(&mut self) {
        if self.growth.is_some() {
            self.move_some();
        }
    }

    /// The smaller table after growth, for the control thread to free. What nobody takes is freed by the next growth.
    pub(super) fn take_emptied(&mut self) -> Option<Table> {
        self.emptied.take()
    }

    fn move_some(&mut self) {
        let Some(growth) = &mut self.growth else { return };
        for _ in 0..MOVED {
            for slot in 0..SLOTS {
                let Some((tag, value)) = growth.from.entry(growth.next, slot) else { continue };
                // One that finds no room is found here, and tried again when the turn comes round.
                if self.table.insert(tag, value).is_ok() {
                    growth.from.clear(growth.next, slot);
                }
            }
            growth.next = (growth.next + 1) % growth.from.buckets();
        }
        if growth.from.len() == 0 {
            self.emptied = self.growth.take().map(|growth| growth.from);
        }
    }
}

/// The hash's part that the table keeps. 0 marks a free place.
#[inline]
const fn tag(hash: u64) -> u32 {
    let tag = (hash >> 32) as u32;
    if tag == 0 { 1 } else { tag }
}

#[cfg(test)]
mod tests;
