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
use std::ops::Range;

use offcore_dma::channel::{Completions, CopyOp, Token};

use crate::completion::CompletionRecord;
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::portal::{Portal, SubmitResult};

/// Maximum number of units of a ring with batches; no work queue holds more.
const UNITS: usize = 512;

#[derive(Debug)]
pub(super) struct Ring {
    descriptors: Box<[UnsafeCell<Descriptor>]>,
    /// One per descriptor. In direct mode these are polled. For members of a batch, the device writes them only on
    /// failure.
    records: Box<[CompletionRecord]>,
    tokens: Box<[Token]>,
    oldest: usize,
    submitted: usize,
    requested: usize,
    written: usize,
}

/// The form of descriptors that make copies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Format {
    max_transfer: u32,
    /// Flags and opcode of a copy in the ring.
    in_ring: u32,
    /// Flags of a copy outside the ring.
    flags: Flags,
}

impl Format {
    /// Creates the form for copies of at most `max_transfer` bytes with these flags. Copies in the ring of a channel in
    /// direct mode have their own completion records.
    pub(super) fn new(max_transfer: u32, flags: Flags, direct: bool) -> Self {
        let in_ring = if direct { flags | Flags::RCR } else { flags };
        let in_ring = Descriptor::new(Opcode::MemoryMove, in_ring).flags_opcode;
        Self { max_transfer, in_ring, flags: flags | Flags::RCR }
    }

    /// Whether a copy is neither empty nor longer than the queue allows.
    #[inline(always)]
    fn fits(self, op: &CopyOp) -> bool {
        op.len.wrapping_sub(1) < self.max_transfer
    }

    /// Returns the descriptor of a copy outside the ring.
    pub(super) fn describe(self, copy: &CopyOp, record: &CompletionRecord) -> Descriptor {
        Descriptor {
            completion: address(record),
            src: copy.src.expose_provenance() as u64,
            dst: copy.dst.expose_provenance() as u64,
            size: copy.len,
            ..Descriptor::new(Opcode::MemoryMove, self.flags)
        }
    }
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

    /// Returns the number of occupied slots.
    #[inline(always)]
    pub(super) fn occupied(&self) -> usize {
        self.written - self.oldest
    }

    /// Returns the number of descriptors that wait for room in the queue.
    #[inline(always)]
    pub(super) fn waiting(&self) -> usize {
        self.requested - self.submitted
    }

    /// Returns the positions of descriptors that the device does not have.
    pub(super) fn not_submitted(&self) -> Range<usize> {
        self.submitted..self.written
    }

    /// Makes all written descriptors wait for submission.
    #[inline(always)]
    pub(super) fn ring_doorbell(&mut self) {
        self.requested = self.written;
    }

    /// Makes no descriptor wait for submission.
    pub(super) fn cancel_doorbell(&mut self) {
        self.requested = self.submitted;
    }

    /// Frees the slots before position `oldest`.
    #[inline(always)]
    pub(super) fn free_before(&mut self, oldest: usize) {
        self.oldest = oldest;
    }

    #[inline(always)]
    pub(super) fn record(&self, at: usize) -> &CompletionRecord {
        &self.records[self.slot(at)]
    }

    /// Returns the token in a slot.
    #[inline(always)]
    pub(super) fn token(&self, slot: usize) -> Token {
        self.tokens[slot]
    }

    /// Adds the tokens of `n` descriptors to the list, which has room for them. They are contiguous: a unit does not
    /// wrap.
    #[inline(always)]
    pub(super) fn report(&self, first: usize, n: usize, completions: &mut Completions) {
        let slot = self.slot(first);
        let _ = completions.tokens.try_extend_from_slice(&self.tokens[slot..slot + n]);
    }

    /// Writes descriptors for `ops`, starting with the first, until one does not fit a descriptor. Returns the number
    /// written. The ring must have room for all of them.
    #[inline(always)]
    pub(super) fn write(&mut self, ops: &[CopyOp], format: Format) -> usize {
        let (descriptors, mask) = (&*self.descriptors, self.tokens.len() - 1);
        let tokens = &mut *self.tokens;
        let mut at = self.written;
        for op in ops {
            if !format.fits(op) {
                break;
            }
            let descriptor = descriptors[at & mask].get();
            // SAFETY: the slot is free, so the device does not read it, and `&mut self` excludes other accesses by this
            // process.
            unsafe {
                (*descriptor).flags_opcode = format.in_ring;
                (*descriptor).src = op.src.expose_provenance() as u64;
                (*descriptor).dst = op.dst.expose_provenance() as u64;
                (*descriptor).size = op.len;
            }
            tokens[at & mask] = op.token;
            at += 1;
        }
        let n = at - self.written;
        self.written = at;
        n
    }

    #[inline(always)]
    fn descriptor(&self, at: usize) -> Descriptor {
        // SAFETY: descriptors are only written through `&mut self`; the device reads them and never writes them.
        unsafe { *self.descriptors[self.slot(at)].get() }
    }

    /// Returns the descriptors from `from` to `to`, up to the end of the ring's memory.
    #[inline(always)]
    fn run(&self, from: usize, to: usize) -> &[Descriptor] {
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
    /// Whether every descriptor is a unit.
    direct: bool,
    /// Maximum number of descriptors of a batch; 1 after the device has refused a batch.
    max_batch: usize,
    /// Empty in direct mode, where unit N is descriptor N.
    table: Box<[Unit]>,
    /// Whether a unit was reported before an older one.
    done: Box<[bool]>,
    /// Polled records if batches are used. In direct mode the ring's records are polled.
    records: Box<[CompletionRecord]>,
    oldest: usize,
    next: usize,
}

impl Units {
    /// Creates the units for a ring of `size` descriptors, with batches of at most `max_batch`.
    pub(super) fn new(size: usize, max_batch: usize) -> Self {
        let direct = max_batch < 2;
        let (units, batches) = if direct { (size, 0) } else { (size.min(UNITS), size.min(UNITS)) };
        Self {
            direct,
            max_batch: max_batch.max(1),
            table: vec![Unit::default(); batches].into(),
            done: vec![false; units].into(),
            records: (0..batches).map(|_| CompletionRecord::default()).collect(),
            oldest: 0,
            next: 0,
        }
    }

    #[inline(always)]
    pub(super) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Submits single descriptors from now on.
    pub(super) fn disable_batches(&mut self) {
        self.max_batch = 1;
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.oldest == self.next
    }

    #[inline(always)]
    pub(super) fn oldest(&self) -> usize {
        self.oldest
    }

    #[inline(always)]
    pub(super) fn next(&self) -> usize {
        self.next
    }

    #[inline(always)]
    fn index(&self, at: usize) -> usize {
        at & (self.done.len() - 1)
    }

    /// Returns the polled record of a unit.
    #[inline(always)]
    pub(super) fn record<'a>(&'a self, at: usize, ring: &'a Ring) -> &'a CompletionRecord {
        if self.direct { ring.record(at) } else { self.batch_record(at) }
    }

    /// As `record`, for a channel with batches.
    #[inline(always)]
    pub(super) fn batch_record(&self, at: usize) -> &CompletionRecord {
        &self.records[self.index(at)]
    }

    #[inline(always)]
    fn room(&self) -> usize {
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

    /// Submits waiting descriptors of a channel in direct mode. Returns the number of entries used, at most `free`.
    ///
    /// # Safety
    /// The buffers of the descriptors stay valid until the copies are completed.
    #[inline(always)]
    pub(super) unsafe fn submit_direct(
        &mut self,
        ring: &mut Ring,
        portal: &mut Portal,
        free: usize,
    ) -> usize {
        let wanted = ring.waiting().min(free);
        let (from, to) = (ring.submitted, ring.submitted + wanted);
        let run = ring.run(from, to);
        // SAFETY: the descriptors are in the ring and refer to records of the channel. The caller keeps their buffers
        // valid until the copies are completed.
        let mut taken = unsafe { portal.submit_burst(run) };
        if taken == run.len() && taken < wanted {
            // SAFETY: the rest of the descriptors is in the ring and refers to records of the channel. The caller keeps
            // their buffers valid until the copies are completed.
            taken += unsafe { portal.submit_burst(ring.run(from + taken, to)) };
        }
        ring.submitted += taken;
        self.next += taken;
        taken
    }

    /// Submits a unit of waiting descriptors of a channel with batches. Returns whether it was accepted; `false` also
    /// if no descriptor waits.
    ///
    /// # Safety
    /// As [`Self::submit_direct`].
    #[inline(always)]
    pub(super) unsafe fn submit_unit(&mut self, ring: &mut Ring, portal: &mut Portal) -> bool {
        let first = ring.submitted;
        if first == ring.requested || self.room() == 0 {
            return false;
        }
        let count = ring.waiting().min(self.max_batch).min(ring.size() - ring.slot(first));
        let index = self.index(self.next);
        let completion = address(&self.records[index]);
        let batch = count > 1;
        let descriptor = if batch {
            Descriptor {
                completion,
                src: ring.descriptors[ring.slot(first)].get().addr() as u64,
                size: count as u32,
                ..Descriptor::new(Opcode::Batch, Flags::CRAV | Flags::RCR)
            }
        } else {
            let alone = ring.descriptor(first);
            Descriptor { completion, ..alone.with_flags(alone.flags() | Flags::RCR) }
        };
        // SAFETY: the caller keeps the buffers of the descriptors valid until the copies are completed. The batch list
        // is in the ring, and its descriptors stay there until the batch is completed.
        if unsafe { portal.submit(&descriptor) } == SubmitResult::Retry {
            return false;
        }
        self.table[index] = Unit { first, count, batch };
        self.next += 1;
        ring.submitted += count;
        true
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

    /// Removes the units before position `oldest`. They were not recorded as done.
    #[inline(always)]
    pub(super) fn remove_before(&mut self, oldest: usize) {
        self.oldest = oldest;
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

    /// Returns the positions of unreported descriptors that the device has.
    pub(super) fn unreported(&self) -> impl Iterator<Item = usize> {
        (self.oldest..self.next).filter(|&at| !self.is_done(at)).flat_map(|at| {
            let unit = self.unit(at);
            unit.first..unit.first + unit.count
        })
    }

    /// Forgets all units and the descriptors in the ring, and clears their records.
    pub(super) fn forget(&mut self, ring: &mut Ring) {
        (ring.oldest..ring.submitted).for_each(|at| ring.record(at).clear());
        for at in self.oldest..self.next {
            self.record(at, ring).clear();
            self.set_done(at);
        }
        self.advance();
        if self.direct {
            // Unit N is descriptor N: descriptors that were never submitted are skipped in both.
            (self.oldest, self.next) = (ring.written, ring.written);
        }
        (ring.oldest, ring.submitted, ring.requested) = (ring.written, ring.written, ring.written);
    }
}
