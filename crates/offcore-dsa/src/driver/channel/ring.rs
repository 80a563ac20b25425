//! The channel's ring of descriptors, and the units in which they are handed to the device.
//!
//! ```text
//!          oldest          submitted        requested        written
//!            |  with the device | wait for room  | no doorbell  |
//!            |                  | in the queue   | yet          |
//! ```
//! Descriptors stay where they were written: the device fetches a batch from here. A *unit* is what takes one place in
//! the work queue and has one polled completion record: a batch, or a single descriptor. Units may be done in any
//! order; places of the ring are free again once everything older is done, too.

use std::cell::UnsafeCell;

use offcore_dma::channel::{CopyOp, Token};

use crate::completion::CompletionRecord;
use crate::descriptor::{Descriptor, Flags, Opcode};

/// Units of a ring with batches, at most: more than any work queue holds.
const UNITS: usize = 512;

#[derive(Debug)]
pub(super) struct Ring {
    descriptors: Box<[UnsafeCell<Descriptor>]>,
    /// One for each descriptor. In direct mode these are polled; of a batch's members they are written on failure only.
    pub(super) records: Box<[CompletionRecord]>,
    pub(super) tokens: Box<[Token]>,
    pub(super) oldest: usize,
    pub(super) submitted: usize,
    pub(super) requested: usize,
    pub(super) written: usize,
}

/// What is not the same in all descriptors of a ring.
pub(super) struct Fields {
    pub(super) flags_opcode: u32,
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) size: u32,
    pub(super) token: Token,
}

impl Ring {
    /// A ring of `size` descriptors, a power of two, whose unchanging fields are filled in.
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

    /// Writes descriptors for `ops`, from the first one on, as long as `describe` gives the fields of one; returns how many.
    /// There must be room for all.
    #[inline(always)]
    pub(super) fn write(&mut self, ops: &[CopyOp], describe: impl Fn(&CopyOp) -> Option<Fields>) -> usize {
        let (descriptors, mask) = (&*self.descriptors, self.tokens.len() - 1);
        let tokens = &mut *self.tokens;
        let mut at = self.written;
        for op in ops {
            let Some(fields) = describe(op) else { break };
            let descriptor = descriptors[at & mask].get();
            // SAFETY: the slot is free, so the device does not look at it, and `&mut self` makes this the only access here.
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

    /// A descriptor of the ring.
    #[inline(always)]
    pub(super) fn descriptor(&self, at: usize) -> Descriptor {
        // SAFETY: descriptors are written through `&mut self` only; the device reads them and never writes.
        unsafe { *self.descriptors[self.slot(at)].get() }
    }

    /// Where a descriptor stands: a batch's list begins there.
    #[inline(always)]
    pub(super) fn descriptor_address(&self, at: usize) -> u64 {
        self.descriptors[self.slot(at)].get().addr() as u64
    }

    /// Descriptors `from` to `to`, as far as they stand one after the other.
    #[inline(always)]
    pub(super) fn run(&self, from: usize, to: usize) -> &[Descriptor] {
        let slot = self.slot(from);
        let n = (to - from).min(self.size() - slot);
        let run = &self.descriptors[slot..slot + n];
        // SAFETY: UnsafeCell has the layout of what is in it, and descriptors are written through `&mut self` only.
        unsafe { std::slice::from_raw_parts(run.as_ptr().cast(), n) }
    }

    /// Asks for the lines of `n` descriptors to come, after the next `ahead`, for writing.
    #[inline(always)]
    pub(super) fn prefetch(&self, ahead: usize, n: usize) {
        let from = self.written + ahead;
        for at in from..from + n {
            offcore_ring::prefetch::write(self.descriptors[self.slot(at)].get());
        }
    }

    /// What stands at `at`, as it was asked for.
    pub(super) fn copy(&self, at: usize) -> CopyOp {
        let (descriptor, token) = (self.descriptor(at), self.tokens[self.slot(at)]);
        let dst = std::ptr::with_exposed_provenance_mut(descriptor.dst as usize);
        let src = std::ptr::with_exposed_provenance(descriptor.src as usize);
        CopyOp { src, dst, len: descriptor.size, token }
    }
}

/// A copy's descriptor.
pub(super) fn describe(copy: &CopyOp, flags: Flags) -> Descriptor {
    Descriptor {
        src: copy.src.expose_provenance() as u64,
        dst: copy.dst.expose_provenance() as u64,
        size: copy.len,
        ..Descriptor::new(Opcode::MemoryMove, flags)
    }
}

/// The address of a completion record, as a descriptor has it.
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

/// The units with the device, oldest first.
#[derive(Debug)]
pub(super) struct Units {
    /// Empty in direct mode: there unit N is descriptor N.
    table: Box<[Unit]>,
    /// Reported while an older one was not.
    done: Box<[bool]>,
    /// Polled where batches are used; in direct mode the ring's records are.
    pub(super) records: Box<[CompletionRecord]>,
    pub(super) oldest: usize,
    pub(super) next: usize,
}

impl Units {
    /// For a ring of `size` descriptors.
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

    /// A unit; what is left of it once it is reported in part.
    #[inline(always)]
    pub(super) fn unit(&self, at: usize) -> Unit {
        match self.table.get(self.index(at)) {
            Some(&unit) => unit,
            None => Unit { first: at, count: 1, batch: false },
        }
    }

    /// A new unit of a ring with batches.
    #[inline(always)]
    pub(super) fn push(&mut self, unit: Unit) {
        let index = self.index(self.next);
        self.table[index] = unit;
        self.next += 1;
    }

    /// Notes that the first `n` descriptors of a unit have been reported.
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

    /// Notes that all of a unit has been reported.
    #[inline(always)]
    pub(super) fn set_done(&mut self, at: usize) {
        let index = self.index(at);
        self.done[index] = true;
    }

    /// Lets go of the oldest units, as far as they are done.
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        while self.oldest != self.next && self.is_done(self.oldest) {
            let index = self.index(self.oldest);
            self.done[index] = false;
            self.oldest += 1;
        }
    }
}
