//! Chains that are an indirect table of one or two buffers: how Linux and DPDK send a packet whose headers are apart from
//! its payload.
//!
//! A table is read once, into private memory, and what is not exactly so is left to the walk, which reads it anew and
//! decides by itself. Tests compare the two.

use std::ptr::NonNull;

use offcore_mem::{GuestMemory, RegionCache};

use crate::chain::{
    Buffer, Descriptor, VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE, read_unaligned,
};
use crate::vector::{Entry, Single, Wanted, Word};

/// Bytes of a table of one buffer, and of two.
const ONE: u32 = size_of::<Descriptor>() as u32;
const TWO: u32 = 2 * ONE;

/// A chain of one or two buffers, which are each in guest memory as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Double {
    pub first: Buffer,
    /// The second, or one of length 0.
    pub second: Buffer,
    /// The chain's name: [`Chain::id`](crate::device::Chain::id).
    pub id: u16,
}

// SAFETY: a double is addresses and numbers; who uses the addresses argues for it.
unsafe impl Send for Double {}

impl Double {
    const NOWHERE: Buffer = Buffer { addr: NonNull::dangling(), len: 0 };
    /// Stands where none has been found yet.
    pub(crate) const NONE: Self = Self { first: Self::NOWHERE, second: Self::NOWHERE, id: 0 };
}

/// What tells which buffers of a table are the chain's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// NEXT and the index of the next one: split queues.
    Linked,
    /// Their place: packed queues, whose walk says which flags count there.
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
    /// Finds how many of `entries` from the first on are a double as wanted, of which length counts over both buffers, and
    /// puts those into `doubles`, and into `singles` what returns them. What comes next is anything else, or the end.
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

    /// The buffers of the table that the entry names, the second perhaps of length 0.
    #[inline(always)]
    fn read(&mut self, entry: &Entry) -> Option<(Buffer, Buffer)> {
        if !is_table(entry) {
            return None;
        }
        let at = self.memory.translate(entry.addr, entry.word.len(), self.tables)?;
        // SAFETY: translate found at least 16 bytes there, which stay mapped as long as the memory.
        let first = unsafe { read_unaligned(at) };
        let more = entry.word.len() == TWO;
        let second = if more {
            // SAFETY: there are 32 bytes.
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

    /// The descriptor's buffer, if there is one and it is in one region.
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

/// Those that mean something in a split queue's table.
#[inline(always)]
fn flags(found: Descriptor) -> u16 {
    found.flags & (VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_WRITE | VIRTQ_DESC_F_INDIRECT)
}

#[cfg(test)]
mod tests;
