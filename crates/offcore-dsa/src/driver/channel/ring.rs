//! The channel's ring of descriptors, and the units in which they are handed to the device.
//!
//! ```text
//!          oldest          submitted        requested        written
//!            |  with the device | wait for room  | no doorbell  |
//!            |                  | in the queue   | yet          |
//! ```
//! Descriptors stay in their slots: the device fetches a batch directly from the ring. A *unit* occupies one entry of
//! the work queue and has one polled completion record. It is a batch or a single descriptor. Units may complete in any
//! order. A slot of the ring is free again after its unit and all older units are done.

use std::cell::UnsafeCell;

use offcore_dma::channel::{CopyOp, Token};

use crate::completion::CompletionRecord;
use crate::descriptor::{Descriptor, Flags, Opcode};

/// Maximum number of units of a ring with batches; no work queue holds more.
const UNITS: usize = 512;

#[derive(Debug)]
pub(super) struct Ring {
    descriptors: Box<[UnsafeCell<Descriptor>]>,
    /// One per descriptor. In direct mode these are polled. For members of a batch, the device writes them only on
    /// failure.
    pub(super) records: Box<[CompletionRecord]>,
    pub(super) tokens: Box<[Token]>,
    pub(super) oldest: usize,
    pub(super) submitted: usize,
    pub(super) requested: usize,
    pub(super) written: usize,
}

/// The fields that differ between the descriptors of a ring.
pub(super) struct Fields {
    pub(super) flags_opcode: u32,
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) size: u32,
    pub(super) token: Token,
}

impl Ring {
    /// Creates a ring of `size` descriptors, a power of two, and fills in the constant fields.
    pub(super) fn new(size: usize) -> Self {
        let records: Box<[CompletionRecord]> = (0..size).map(|_| CompletionRecord::default()).collect();
        let descriptors = records
            .iter()
            .map(|record| {
                UnsafeCell::new(Descriptor { completion: address(record), ..Descriptor::default() })
            })
            .collect();
        Self {
            descriptors,
            records,
            tokens: vec![0; size].into(),
            oldest: 0,
            submitted: 0,
            requested: 0,
            written: 0,
        }
    }

    #[inline(always)]
    pub(super) fn size(&self) -> usize {
        self.tokens.len()
    }

    #[inline(always)]
    pub(super) fn slot(&self, at: usize) -> usize {
        at & (self.tokens.len() - 1)
    }

    /// Writes descriptors for `ops`, starting with the first, until `describe` returns `None`. Returns the number
    /// written. The ring must have room for all of them.
    #[inline(always)]
    pub(super) fn write(&mut self, ops: &[CopyOp], describe: impl Fn(&CopyOp) -> Option<Fields>) -> usize {
        let (descriptors, mask) = (&*self.descriptors, self.tokens.len() - 1);
        let tokens = &mut *self.tokens;
        let mut at = self.written;
        for op in ops {
            let Some(fields) = describe(op) else { break };
            let descriptor = descriptors[at & mask].get();
            // SAFETY: the slot is free, so the device does not read it, and `&mut self` excludes other accesses by this
            // process.
            unsafe {
                (*descriptor).flags_opcode = fields.flags_opcode;
                (*descriptor).src = fields.src;
                (*descriptor).dst = fields.dst;
                (*descriptor).size = fields.size;
            }
            tokens[at & mask] = fields.token;
            at += 1;
        }
        let n = at - self.written;
        self.written = at;
        n
    }

    /// Returns a descriptor of the ring.
    #[inline(always)]
    pub(super) fn descriptor(&self, at: usize) -> Descriptor {
        // SAFETY: descriptors are only written through `&mut self`; the device reads them and never writes them.
        unsafe { *self.descriptors[self.slot(at)].get() }
    }

    /// Returns the address of a descriptor, for the list of a batch.
    #[inline(always)]
    pub(super) fn descriptor_address(&self, at: usize) -> u64 {
        self.descriptors[self.slot(at)].get().addr() as u64
    }

    /// Returns the descriptors from `from` to `to`, up to the end of the ring's memory.
    #[inline(always)]
    pub(super) fn run(&self, from: usize, to: usize) -> &[Descriptor] {
        let slot = self.slot(from);
        let n = (to - from).min(self.size() - slot);
        let run = &self.descriptors[slot..slot + n];
        // SAFETY: UnsafeCell<T> has the layout of T, and descriptors are only written through `&mut self`.
        unsafe { std::slice::from_raw_parts(run.as_ptr().cast(), n) }
    }

    /// Prefetches, for writing, the cache lines of the `n` descriptors that follow the next `ahead` ones.
    #[inline(always)]
    pub(super) fn prefetch(&self, ahead: usize, n: usize) {
        let from = self.written + ahead;
        for at in from..from + n {
            offcore_ring::prefetch::write(self.descriptors[self.slot(at)].get());
        }
    }

    /// Returns the copy at position `at`, as it was submitted.
    pub(super) fn copy(&self, at: usize) -> CopyOp {
        let (descriptor, token) = (self.descriptor(at), self.tokens[self.slot(at)]);
        let dst = std::ptr::with_exposed_provenance_mut(descriptor.dst as usize);
        let src = std::ptr::with_exposed_provenance(descriptor.src as usize);
        CopyOp { src, dst, len: descriptor.size, token }
    }
}

/// Returns the descriptor of a copy.
pub(super) fn describe(copy: &CopyOp, flags: Flags) -> Descriptor {
    Descriptor {
        src: copy.src.expose_provenance() as u64,
        dst: copy.dst.expose_provenance() as u64,
        size: copy.len,
        ..Descriptor::new(Opcode::MemoryMove, flags)
    }
}

/// Returns the address of a completion record for use in a descriptor.
pub(super) fn address(record: &CompletionRecord) -> u64 {
    std::ptr::from_ref(record).expose_provenance() as u64
}

/// A batch or a single descriptor.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unit {
    /// The first descriptor that is not yet reported.
    pub(super) first: usize,
    /// Descriptors not yet reported.
    pub(super) count: usize,
    pub(super) batch: bool,
}

/// The units that the device has, oldest first.
#[derive(Debug)]
pub(super) struct Units {
    /// Empty in direct mode, where unit N is descriptor N.
    table: Box<[Unit]>,
    /// Whether a unit was reported before an older one.
    done: Box<[bool]>,
    /// Polled records if batches are used. In direct mode the ring's records are polled.
    pub(super) records: Box<[CompletionRecord]>,
    pub(super) oldest: usize,
    pub(super) next: usize,
}

impl Units {
    /// Creates the units for a ring of `size` descriptors.
    pub(super) fn new(size: usize, direct: bool) -> Self {
        let (units, batches) = if direct { (size, 0) } else { (size.min(UNITS), size.min(UNITS)) };
        Self {
            table: vec![Unit::default(); batches].into(),
            done: vec![false; units].into(),
            records: (0..batches).map(|_| CompletionRecord::default()).collect(),
            oldest: 0,
            next: 0,
        }
    }

    #[inline(always)]
    pub(super) fn index(&self, at: usize) -> usize {
        at & (self.done.len() - 1)
    }

    #[inline(always)]
    pub(super) fn room(&self) -> usize {
        self.done.len() - (self.next - self.oldest)
    }

    /// Returns a unit; if it was reported in part, the unreported rest.
    #[inline(always)]
    pub(super) fn unit(&self, at: usize) -> Unit {
        match self.table.get(self.index(at)) {
            Some(&unit) => unit,
            None => Unit { first: at, count: 1, batch: false },
        }
    }

    /// Adds a unit to a ring with batches.
    #[inline(always)]
    pub(super) fn push(&mut self, unit: Unit) {
        let index = self.index(self.next);
        self.table[index] = unit;
        self.next += 1;
    }

    /// Records that the first `n` descriptors of a unit have been reported.
    #[inline(always)]
    pub(super) fn take(&mut self, at: usize, n: usize) {
        let index = self.index(at);
        if let Some(unit) = self.table.get_mut(index) {
            unit.first += n;
            unit.count -= n;
        }
    }

    #[inline(always)]
    pub(super) fn is_done(&self, at: usize) -> bool {
        self.done[self.index(at)]
    }

    /// Records that all descriptors of a unit have been reported.
    #[inline(always)]
    pub(super) fn set_done(&mut self, at: usize) {
        let index = self.index(at);
        self.done[index] = true;
    }

    /// Removes the oldest units up to the first incomplete one.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        while self.oldest != self.next && self.is_done(self.oldest) {
            let index = self.index(self.oldest);
            self.done[index] = false;
            self.oldest += 1;
        }
    }
}
