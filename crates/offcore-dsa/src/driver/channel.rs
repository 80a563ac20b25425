//! A channel over a work queue, owned by one worker.
//!
//! Copies are written as descriptors into a ring of the channel's size. The doorbell submits as many as the work queue
//! has free entries for, and later polls submit the rest. No copy is dropped. With batches, a burst is one batch
//! descriptor with one completion record to poll. Without batches, every descriptor has its own record. The order of a
//! submission is always: zero the records (when they are read, or when they are created), fence, doorbell.

mod entries;
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
    Channel, ChannelCapabilities, ChannelInfo, ChannelStats, Completions, CopyOp, EngineError, Ledger, Reset,
};

use crate::descriptor::Flags;
use crate::driver::way::{Share, Way};
use crate::portal::{Portal, SubmitBy};
use crate::wq::gen_cap;
pub use entries::Credits;
use entries::Entries;
use reset::{Drain, Reopening};
use ring::{Format, Ring, Units};
use side::Side;

/// Maximum number of operations of a ring.
pub(super) const MAX_RING: usize = 1 << 16;

/// A channel to a DSA work queue.
pub struct DsaChannel {
    ring: Ring,
    units: Units,
    portal: Option<Portal>,
    format: Format,
    entries: Entries,
    in_flight: usize,
    ledger: Ledger,
    side: Side,
    drain: Drain,
    reopening: Reopening,
    info: ChannelInfo,
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
        let mut flags = Flags::CRAV;
        if options.block_on_fault && info.block_on_fault {
            flags |= Flags::BLOCK_ON_FAULT;
        }
        if options.cache_control && info.gen_cap & gen_cap::CACHE_CONTROL_MEMORY != 0 {
            flags |= Flags::CACHE_CONTROL_1;
        }
        let capabilities = ChannelCapabilities {
            out_of_order: true,
            synchronous: false,
            simulated: portal.kind() == SubmitBy::Simulator,
        };
        let (name, units) = (way.name.clone(), Units::new(ring_size, max_batch));
        Ok(Self {
            ring: Ring::new(ring_size),
            format: Format::new(max_transfer, flags, units.is_direct()),
            units,
            portal: Some(portal),
            entries: Entries::new(share),
            in_flight: 0,
            ledger: Ledger::default(),
            side: Side::new(max_transfer),
            drain: Drain::new(&way),
            reopening: Reopening::new(way),
            info: ChannelInfo { name, ring_size, max_len: u32::MAX, capabilities },
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
        self.entries.credits()
    }

    // ---- submission ----

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
        self.entries.update_limit();
        if self.entries.is_full() || !self.drain.allows_submission() {
            return;
        }
        if self.side.has_work() {
            self.push_side();
        }
        if self.ring.waiting() == 0 {
            return;
        }
        self.fence();
        let Self { ring, units, entries, portal: Some(portal), .. } = self else { return };
        // SAFETY: the buffers stay valid until the copies are completed, as the caller of `Channel::copy` guarantees.
        unsafe {
            if units.is_direct() {
                entries.take(units.submit_direct(ring, portal, entries.free()));
            } else {
                while !entries.is_full() && units.submit_unit(ring, portal) {
                    entries.take(1);
                }
            }
        }
    }

    #[cold]
    fn push_side(&mut self) {
        if !self.side.prepare() {
            return;
        }
        self.fence();
        let Self { side, entries, format, portal: Some(portal), .. } = self else { return };
        // SAFETY: the caller of `Channel::copy` keeps the buffers valid until the copies are completed.
        unsafe { side.submit(portal, entries, *format) };
    }

    /// Returns all unreported operations.
    fn outstanding(&self) -> impl Iterator<Item = CopyOp> {
        let in_ring = self.units.unreported().chain(self.ring.not_submitted());
        in_ring.map(|at| self.ring.copy(at)).chain(self.side.copies())
    }
}

impl Channel for DsaChannel {
    fn info(&self) -> &ChannelInfo {
        &self.info
    }

    #[inline]
    fn room(&self) -> usize {
        if self.portal.is_none() && !self.reopening.is_due() {
            return 0;
        }
        self.ring.size().saturating_sub(self.ring.occupied() + self.side.unreported())
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
        let mut rest = &ops[..n];
        loop {
            let written = self.ring.write(rest, self.format);
            let [odd, others @ ..] = &rest[written..] else { break };
            self.side.add(*odd);
            rest = others;
        }
        self.ledger.accept(n, ops[..n].iter().map(|op| u64::from(op.len)).sum());
        self.in_flight += n;
        n
    }

    #[inline]
    fn submit(&mut self) {
        self.ring.ring_doorbell();
        self.drain.resume_use();
        self.push();
    }

    #[inline]
    fn poll(&mut self, completions: &mut Completions) {
        if self.portal.is_none() {
            self.try_reopen();
        }
        let reported = self.reap_in_order(completions);
        self.in_flight -= reported;
        if !self.units.is_empty() {
            self.reap_out_of_order(completions);
        }
        if self.side.unreported() != 0 {
            self.side.reap(&mut self.entries);
            self.in_flight -= self.side.report(completions, &mut self.ledger);
        }
        if self.ring.waiting() != 0 || self.side.has_work() {
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
