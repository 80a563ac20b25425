//! A channel over a work queue, owned by one worker.
//!
//! Copies are written as descriptors into a ring of the channel's size. The doorbell submits as many as the work queue
//! has free entries for, and later polls submit the rest. No copy is dropped. With batches, a burst is one batch
//! descriptor with one completion record to poll. Without batches, every descriptor has its own record. The order of a
//! submission is always: zero the records (when they are read, or when they are created), fence, doorbell.

mod outcome;
mod reap;
mod reset;
mod ring;
mod side;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;

use offcore_dma::channel::{
    Capabilities, Channel, ChannelInfo, ChannelStats, Completions, CopyOp, EngineError, Ledger, Reset,
};
use offcore_stats::tsc;

use crate::completion::CompletionRecord;
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::driver::way::{Share, Way};
use crate::portal::{Portal, SubmitBy, Submitted};
use crate::wq::gen_cap;
use reset::Resetting;
use ring::{Fields, Ring, Unit, Units, address, describe};
use side::{Ended, Side};

/// Maximum number of operations of a ring.
pub(super) const MAX_RING: usize = 1 << 16;
/// Accounting of work queue entries. A descriptor holds an entry from its submission until its completion record has
/// been read or a reset has proved that the device no longer has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Number of entries that this channel may use at present.
    pub limit: usize,
    pub used: usize,
}

/// A channel to a DSA work queue.
pub struct DsaChannel {
    // Hot fields, used by copies and polls.
    ring: Ring,
    units: Units,
    portal: Option<Portal>,
    direct: bool,
    /// Maximum number of descriptors of a batch; 1 after the device has refused a batch.
    max_batch: usize,
    max_transfer: u32,
    /// Flags and opcode of a copy in the ring.
    copy_word: u32,
    /// Number of units and pieces that the device has.
    used: usize,
    limit: usize,
    in_flight: usize,
    /// Number of operations in flight that are not in the ring.
    aside: usize,
    ledger: Ledger,
    // Cold fields, used in exceptional cases.
    side: Side,
    ended: Ended,
    copy_flags: Flags,
    resetting: Resetting,
    drain_record: Box<CompletionRecord>,
    drain_limit: u64,
    can_drain: bool,
    reopen_every: u64,
    reopen_at: u64,
    info: ChannelInfo,
    way: Arc<Way>,
    share: Share,
    /// Test switch: omits fences, to show that they are needed.
    #[cfg(test)]
    fences: bool,
}

impl fmt::Debug for DsaChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DsaChannel")
            .field("info", &self.info)
            .field("in_flight", &self.in_flight)
            .field("credits", &self.credits())
            .field("portal", &self.portal)
            .finish_non_exhaustive()
    }
}

impl DsaChannel {
    pub(super) fn open(
        way: Arc<Way>,
        share: Share,
        portal: Portal,
        ring_size: usize,
    ) -> Result<Self, EngineError> {
        if !ring_size.is_power_of_two() || ring_size > MAX_RING {
            let device = way.name.clone();
            return Err(EngineError::RingSize { device, found: ring_size, min: 1, max: MAX_RING });
        }
        let (info, options) = (&way.info, &way.options);
        let max_transfer = u32::try_from(info.max_transfer_size).unwrap_or(u32::MAX).max(1);
        let max_batch = if options.batch && portal.allows_batch() { info.max_batch_size as usize } else { 1 };
        let direct = max_batch < 2;
        let mut flags = Flags::CRAV;
        if options.block_on_fault && info.block_on_fault {
            flags |= Flags::BLOCK_ON_FAULT;
        }
        if options.cache_control && info.gen_cap & gen_cap::CACHE_CONTROL_MEMORY != 0 {
            flags |= Flags::CACHE_CONTROL_1;
        }
        let in_ring = if direct { flags | Flags::RCR } else { flags };
        let capabilities = Capabilities {
            out_of_order: true,
            synchronous: false,
            simulated: portal.kind() == SubmitBy::Simulator,
        };
        Ok(Self {
            ring: Ring::new(ring_size),
            units: Units::new(ring_size, direct),
            direct,
            max_batch: max_batch.max(1),
            max_transfer,
            copy_word: Descriptor::new(Opcode::MemoryMove, in_ring).flags_opcode,
            used: 0,
            limit: share.places(),
            in_flight: 0,
            aside: 0,
            ledger: Ledger::default(),
            side: Side::new(max_transfer),
            ended: Ended::default(),
            copy_flags: flags | Flags::RCR,
            resetting: Resetting::No,
            drain_record: Box::default(),
            drain_limit: tsc::ticks(options.drain_limit),
            can_drain: info.ops.contains(Opcode::Drain),
            reopen_every: tsc::ticks(options.reopen_every),
            reopen_at: 0,
            info: ChannelInfo { name: way.name.clone(), ring_size, max_len: u32::MAX, capabilities },
            portal: Some(portal),
            way,
            share,
            #[cfg(test)]
            fences: true,
        })
    }

    /// Returns the submission method; `None` while the queue is lost.
    pub fn submit_by(&self) -> Option<SubmitBy> {
        self.portal.as_ref().map(Portal::kind)
    }

    /// Returns the accounting of work queue entries.
    pub fn credits(&self) -> Credits {
        Credits { limit: self.share.places(), used: self.used }
    }

    // ---- submission ----

    /// Accepts a copy that is empty or longer than a descriptor allows.
    #[cold]
    fn write_odd(&mut self, copy: CopyOp) {
        if copy.len == 0 {
            self.ended.done.push(copy);
        } else {
            self.side.add_long(copy);
        }
        self.aside += 1;
    }

    #[inline(always)]
    fn fence(&mut self) {
        #[cfg(test)]
        if !self.fences {
            return;
        }
        if let Some(portal) = &mut self.portal {
            portal.fence();
        }
    }

    /// Submits the copies for which the doorbell was rung, up to the number of free entries.
    #[inline]
    fn push(&mut self) {
        self.limit = self.share.places();
        if self.used >= self.limit || self.resetting != Resetting::No {
            return;
        }
        if !self.side.is_empty() {
            self.push_side();
        }
        if self.ring.requested == self.ring.submitted {
            return;
        }
        self.fence();
        if self.direct {
            self.push_direct();
        } else {
            self.push_units();
        }
    }

    #[inline(always)]
    fn push_direct(&mut self) {
        let Self { ring, units, portal: Some(portal), .. } = self else { return };
        let wanted = (ring.requested - ring.submitted).min(self.limit - self.used);
        let (from, to) = (ring.submitted, ring.submitted + wanted);
        let run = ring.run(from, to);
        // SAFETY: the descriptors are in the ring and refer to records of this channel. Their buffers stay valid until
        // the copies are completed, as the caller of `Channel::copy` guarantees.
        let mut taken = unsafe { portal.submit_burst(run) };
        if taken == run.len() && taken < wanted {
            // SAFETY: as for the first part of the run.
            taken += unsafe { portal.submit_burst(ring.run(from + taken, to)) };
        }
        ring.submitted += taken;
        units.next += taken;
        self.used += taken;
    }

    #[inline(always)]
    fn push_units(&mut self) {
        let Self { ring, units, portal: Some(portal), .. } = self else { return };
        while ring.submitted != ring.requested && self.used < self.limit && units.room() > 0 {
            let first = ring.submitted;
            let count = (ring.requested - first).min(self.max_batch).min(ring.size() - ring.slot(first));
            let completion = address(&units.records[units.index(units.next)]);
            let batch = count > 1;
            let descriptor = if batch {
                Descriptor {
                    completion,
                    src: ring.descriptor_address(first),
                    size: count as u32,
                    ..Descriptor::new(Opcode::Batch, Flags::CRAV | Flags::RCR)
                }
            } else {
                let alone = ring.descriptor(first);
                Descriptor { completion, ..alone.with_flags(alone.flags() | Flags::RCR) }
            };
            // SAFETY: as in `push_direct`. The batch list is in the ring, and its descriptors stay there until the
            // batch is completed.
            if unsafe { portal.submit(&descriptor) } == Submitted::Retry {
                break;
            }
            units.push(Unit { first, count, batch });
            ring.submitted += count;
            self.used += 1;
        }
    }

    #[cold]
    fn push_side(&mut self) {
        self.side.issue();
        if self.side.pieces.iter().all(|piece| piece.in_flight) {
            return;
        }
        self.fence();
        let Self { side, portal: Some(portal), .. } = self else { return };
        for piece in side.pieces.iter_mut().filter(|piece| !piece.in_flight) {
            let descriptor = Descriptor {
                completion: address(&side.records[piece.record]),
                ..describe(&piece.rest, self.copy_flags)
            };
            // SAFETY: as in `push_direct`: a piece is the rest of a copy in the ring.
            if self.used == self.limit || unsafe { portal.submit(&descriptor) } == Submitted::Retry {
                break;
            }
            piece.in_flight = true;
            self.used += 1;
        }
    }

    // ---- accounting ----

    /// Returns the unreported operations in the ring.
    fn in_ring(&self) -> impl Iterator<Item = usize> {
        let Self { ring, units, .. } = self;
        let with_device = (units.oldest..units.next).filter(|&at| !units.is_done(at)).flat_map(|at| {
            let unit = units.unit(at);
            unit.first..unit.first + unit.count
        });
        with_device.chain(ring.submitted..ring.written)
    }

    /// Returns all unreported operations.
    fn outstanding(&self) -> impl Iterator<Item = CopyOp> {
        let Self { side, ended, .. } = self;
        let in_ring = self.in_ring().map(|at| self.ring.copy(at));
        let failed = ended.failed.iter().map(|failed| failed.copy);
        in_ring.chain(side.copies()).chain(ended.done.iter().copied()).chain(failed)
    }
}

impl Channel for DsaChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    #[inline]
    fn room(&self) -> usize {
        if self.portal.is_none() && !self.is_reopening_due() {
            return 0;
        }
        self.ring.size().saturating_sub(self.ring.written - self.ring.oldest + self.aside)
    }

    #[inline]
    fn in_flight(&self) -> usize {
        self.in_flight
    }

    unsafe fn copy(&mut self, ops: &[CopyOp]) -> usize {
        if self.portal.is_none() && !self.try_reopen() {
            return 0;
        }
        let n = ops.len().min(self.room());
        let (max, flags_opcode) = (self.max_transfer, self.copy_word);
        let fields = |op: &CopyOp| Fields {
            flags_opcode,
            src: op.src.expose_provenance() as u64,
            dst: op.dst.expose_provenance() as u64,
            size: op.len,
            token: op.token,
        };
        // Whether the copy is neither empty nor longer than the queue allows.
        let is_plain = |op: &CopyOp| op.len.wrapping_sub(1) < max;
        let mut rest = &ops[..n];
        loop {
            let written = self.ring.write(rest, |op| is_plain(op).then(|| fields(op)));
            let [odd, others @ ..] = &rest[written..] else { break };
            self.write_odd(*odd);
            rest = others;
        }
        self.ledger.accept(n, ops[..n].iter().map(|op| u64::from(op.len)).sum());
        self.in_flight += n;
        n
    }

    #[inline]
    fn submit(&mut self) {
        self.ring.requested = self.ring.written;
        if self.resetting == Resetting::Done {
            self.resetting = Resetting::No;
        }
        self.push();
    }

    #[inline]
    fn poll(&mut self, completions: &mut Completions) {
        if self.portal.is_none() {
            self.try_reopen();
        }
        let reported = self.reap_in_order(completions);
        self.in_flight -= reported;
        if self.units.oldest != self.units.next {
            self.reap_out_of_order(completions);
        }
        if self.aside != 0 {
            self.reap_side();
            self.report_ended(completions);
        }
        if self.ring.requested != self.ring.submitted || !self.side.is_empty() {
            self.push();
        }
    }

    fn reset(&mut self) -> Reset {
        self.advance_reset()
    }

    fn take_outstanding(&mut self, outstanding: &mut Vec<CopyOp>) {
        let first = outstanding.len();
        outstanding.extend(self.outstanding());
        self.ledger.fail(&outstanding[first..]);
        self.side.clear();
        self.ended = Ended::default();
        self.forget();
    }

    fn stats(&self) -> ChannelStats {
        self.ledger.stats(self.outstanding())
    }
}

impl Drop for DsaChannel {
    /// Closes the portal before the ring is freed. After that, the device accesses neither the ring nor the buffers of
    /// copies.
    fn drop(&mut self) {
        self.portal = None;
    }
}
