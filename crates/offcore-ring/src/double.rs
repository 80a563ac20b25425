//! Chains that consist of an indirect table with one or two buffers. Linux and DPDK use them for packets whose headers
//! are stored separately from the payload.
//!
//! A table is read once, into private memory. Any other table is left to the walk, which reads it again and makes its
//! own decision. Tests compare both.

use std::ptr::NonNull;

use offcore_mem::{GuestMemory, RegionCache};

use crate::chain::{
    Buffer, Descriptor, VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE, read_unaligned,
};
use crate::vector::{Entry, Single, Wanted, Word};

/// Length in bytes of a table with one buffer and with two buffers.
const ONE: u32 = size_of::<Descriptor>() as u32;
const TWO: u32 = 2 * ONE;

/// A chain of one or two buffers. Each is completely in one region of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Double {
    pub first: Buffer,
    /// The second buffer; its length is 0 if the chain has only one.
    pub second: Buffer,
    /// The buffer ID of the chain: [`Chain::id`](crate::device::Chain::id).
    pub id: u16,
}

// SAFETY: a double contains only addresses and numbers. Code that dereferences the addresses has to justify it.
unsafe impl Send for Double {}

impl Double {
    const NOWHERE: Buffer = Buffer { addr: NonNull::dangling(), len: 0 };
    /// Placeholder for an element that was not found yet.
    pub(crate) const NONE: Self = Self { first: Self::NOWHERE, second: Self::NOWHERE, id: 0 };
}

/// Defines which buffers of a table belong to the chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Linked by NEXT and the index of the next descriptor: split queues.
    Linked,
    /// In the order of the table: packed queues. The walk defines which flags are significant.
    Placed,
}

/// Finds doubles.
pub(crate) struct Tables<'a> {
    pub(crate) order: Order,
    pub(crate) memory: &'a GuestMemory,
    pub(crate) wanted: Wanted,
    pub(crate) buffers: &'a mut RegionCache,
    pub(crate) tables: &'a mut RegionCache,
}

impl Tables<'_> {
    /// Finds doubles at the start of `entries` whose total length is as `wanted`, and stores them in `doubles`. Stores
    /// the elements for returning them in `singles`. Returns their number; the next entry is of another kind or does
    /// not exist.
    pub(crate) fn resolve(
        &mut self,
        entries: &[Entry],
        singles: &mut [Single],
        doubles: &mut [Double],
    ) -> usize {
        let mut found = 0;
        for ((entry, single), double) in entries.iter().zip(singles).zip(doubles) {
            let Some((first, second)) = self.read(entry) else { break };
            let total = u64::from(first.len) + u64::from(second.len);
            if !(u64::from(self.wanted.least)..=u64::from(self.wanted.most)).contains(&total) {
                break;
            }
            let id = entry.word.id();
            *single = Single::new(first.addr, Word::new(first.len, id, 0));
            *double = Double { first, second, id };
            found += 1;
        }
        found
    }

    /// Returns the buffers of the entry's table. The second may have length 0.
    #[inline(always)]
    fn read(&mut self, entry: &Entry) -> Option<(Buffer, Buffer)> {
        if !is_table(entry) {
            return None;
        }
        let at = self.memory.translate(entry.addr, entry.word.len(), self.tables)?;
        // SAFETY: `translate` found at least 16 bytes there, which stay mapped as long as the memory.
        let first = unsafe { read_unaligned(at) };
        let more = entry.word.len() == TWO;
        let second = if more {
            // SAFETY: the table has 32 bytes.
            unsafe { read_unaligned(at.add(ONE as usize)) }
        } else {
            Descriptor::default()
        };
        let way = self.wanted.direction.flag();
        let (goes_on, right) = match self.order {
            Order::Placed => {
                let goes = |found: Descriptor| way == 0 || found.next & VIRTQ_DESC_F_WRITE != 0;
                (more, goes(first) && (!more || goes(second)))
            }
            Order::Linked if flags(first) == way | VIRTQ_DESC_F_NEXT => {
                (true, more && first.next == 1 && flags(second) == way)
            }
            Order::Linked => (false, flags(first) == way),
        };
        if !right {
            return None;
        }
        let first = self.buffer(first)?;
        let second = if goes_on { self.buffer(second)? } else { Double::NOWHERE };
        Some((first, second))
    }

    /// Returns the descriptor's buffer, if it is not empty and is in one region.
    #[inline(always)]
    fn buffer(&mut self, found: Descriptor) -> Option<Buffer> {
        let addr = self.memory.translate(found.addr, found.len, self.buffers)?;
        (found.len > 0).then_some(Buffer { addr, len: found.len })
    }
}

#[inline(always)]
fn is_table(entry: &Entry) -> bool {
    entry.word.flags() & (VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_NEXT) == VIRTQ_DESC_F_INDIRECT
        && matches!(entry.word.len(), ONE | TWO)
}

/// The flags that are significant in the table of a split queue.
#[inline(always)]
fn flags(found: Descriptor) -> u16 {
    found.flags & (VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_WRITE | VIRTQ_DESC_F_INDIRECT)
}

#[cfg(test)]
mod tests;
