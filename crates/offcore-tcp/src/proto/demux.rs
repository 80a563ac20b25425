//! The demultiplexer from flows to connections: a hash table of tags that grows while it is in use.
//!
//! A bucket is one cache line with eight entries, and each flow is in either of two buckets. A lookup reads at most two
//! lines, and four while the table grows. Both buckets follow from the tag alone, so entries can be moved (to make
//! room, or to a larger table) without reading their keys.

mod table;

use table::{MAX_BUCKETS, SLOTS, Table};

/// Buckets that each insert and each round move to the larger table.
const MOVED: usize = 4;

/// The table has no room for this entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// A map from hashes to values of 32 bits. The caller stores the keys and distinguishes flows with the same tag.
#[derive(Debug)]
pub(super) struct Demux {
    table: Table,
    growth: Option<Growth>,
    /// A table that has been emptied. The control thread frees it.
    emptied: Option<Table>,
}

/// The smaller table during growth.
#[derive(Debug)]
struct Growth {
    from: Table,
    next: usize,
}

impl Demux {
    /// Creates a demultiplexer with this table.
    pub(super) const fn new(table: Table) -> Self {
        Self { table, growth: None, emptied: None }
    }

    /// Allocates a table for at least `size` entries, from 16 to 2^27, with all places in use. Must not be called on
    /// the data path.
    pub(super) fn table(size: usize) -> Table {
        Table::new(size)
    }

    /// Returns the number of entries.
    pub(super) fn len(&self) -> usize {
        self.table.len() + self.growth.as_ref().map_or(0, |growth| growth.from.len())
    }

    /// Returns the number of places in the table, or in the larger one during growth.
    pub(super) const fn capacity(&self) -> usize {
        self.table.capacity()
    }

    /// Returns the value of the flow with this hash for which `is` returns true. `is` is called for every value with
    /// the same tag: the matching one and, with n flows, n / 2^32 others on average.
    #[inline]
    pub(super) fn lookup(&self, hash: u64, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let tag = tag(hash);
        let found = self.table.find(tag, &mut is);
        match &self.growth {
            Some(growth) if found.is_none() => growth.from.find(tag, is),
            _ => found,
        }
    }

    /// Adds a new flow.
    ///
    /// # Errors
    /// Fails if all places near the flow's buckets are taken. In the tests this does not occur up to 90 % load, and
    /// [`Self::wants_growth`] returns true long before. More than 16 flows with one tag are refused at any load.
    #[inline]
    pub(super) fn insert(&mut self, hash: u64, value: u32) -> Result<(), Full> {
        self.round();
        self.table.insert(tag(hash), value)
    }

    /// Removes the entry with this hash and value. Returns `false` if no entry matches.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, value: u32) -> bool {
        let tag = tag(hash);
        let Self { table, growth, .. } = self;
        table.remove(tag, value) || growth.as_mut().is_some_and(|growth| growth.from.remove(tag, value))
    }

    /// Replaces the value of the entry with this hash and value, for example when a connection enters TIME-WAIT.
    /// Returns `false` if no entry matches. It needs no room, so unlike [`Self::insert`] it cannot fail.
    #[inline]
    pub(super) fn replace(&mut self, hash: u64, value: u32, new: u32) -> bool {
        let tag = tag(hash);
        let Self { table, growth, .. } = self;
        table.replace(tag, value, new)
            || growth.as_mut().is_some_and(|growth| growth.from.replace(tag, value, new))
    }

    /// Returns whether the control thread should allocate a table of twice [`Self::capacity`]: 70 % are in use.
    pub(super) const fn wants_growth(&self) -> bool {
        let larger = self.table.buckets() < MAX_BUCKETS;
        larger && self.growth.is_none() && self.table.len() * 10 >= self.table.capacity() * 7
    }

    /// Switches to a larger table. From now on, each insert and each round moves the entries of four buckets.
    ///
    /// # Errors
    /// Returns the table if it is not larger, not empty, or if growth is already in progress.
    pub(super) fn grow(&mut self, table: Table) -> Result<(), Table> {
        if self.growth.is_some() || table.buckets() <= self.table.buckets() || table.len() > 0 {
            return Err(table);
        }
        let from = std::mem::replace(&mut self.table, table);
        self.growth = Some(Growth { from, next: 0 });
        Ok(())
    }

    /// Moves four buckets during growth. Must be called once per round.
    #[inline]
    pub(super) fn round(&mut self) {
        if self.growth.is_some() {
            self.move_some();
        }
    }

    /// Returns the smaller table after growth, for the control thread to free. Otherwise the next growth frees it.
    pub(super) fn take_emptied(&mut self) -> Option<Table> {
        self.emptied.take()
    }

    fn move_some(&mut self) {
        let Some(growth) = &mut self.growth else { return };
        for _ in 0..MOVED {
            for slot in 0..SLOTS {
                let Some((tag, value)) = growth.from.entry(growth.next, slot) else { continue };
                // An entry without room stays here and is tried again in the next pass.
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

/// Returns the part of the hash that the table stores. 0 marks a free place.
#[inline]
const fn tag(hash: u64) -> u32 {
    let tag = (hash >> 32) as u32;
    if tag == 0 { 1 } else { tag }
}

#[cfg(test)]
mod tests;
