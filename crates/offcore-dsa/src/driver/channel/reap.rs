//! Completions: usually the oldest units in order and with success; otherwise in any order and with any status.

use offcore_dma::channel::{Completions, Failure};
use offcore_ring::prefetch;

use super::DsaChannel;
use super::outcome::{Outcome, failure, outcome};
use super::ring::Unit;
use crate::completion::{Completed, Status};

/// Number of incomplete units to look at after the last one found complete.
const LOOK_AHEAD: usize = 32;
/// Number of records to prefetch ahead of the current one.
const RECORDS_AHEAD: usize = 12;
/// Upper limit of the expected size of the next burst.
const NEXT_BURST: usize = 32;

impl DsaChannel {
    /// Reports the oldest units while they are plain successes. This is the usual case.
    #[inline(always)]
    pub(super) fn reap_in_order(&mut self, completions: &mut Completions) -> usize {
        if self.units.is_direct() { self.reap_descriptors(completions) } else { self.reap_units(completions) }
    }

    #[inline(always)]
    fn reap_descriptors(&mut self, completions: &mut Completions) -> usize {
        let Self { ring, units, portal, .. } = self;
        let from = units.oldest();
        let to = units.next().min(from + completions.tokens.remaining_capacity());
        let mut at = from;
        if at != to
            && ring.record(at).is_plain_success()
            && let Some(portal) = portal
        {
            portal.prepare((to - at).min(NEXT_BURST));
        }
        while at != to {
            let slot = ring.slot(at);
            let record = ring.record(slot);
            if !record.is_plain_success() {
                break;
            }
            // Prefetches the line once, for both reading and zeroing.
            prefetch::write(ring.record(at + RECORDS_AHEAD));
            record.clear();
            completions.tokens.push(ring.token(slot));
            at += 1;
        }
        units.remove_before(at);
        ring.free_before(at);
        self.entries.release(at - from);
        at - from
    }

    #[inline(always)]
    fn reap_units(&mut self, completions: &mut Completions) -> usize {
        let Self { ring, units, entries, .. } = self;
        let mut reported = 0;
        while !units.is_empty() {
            let at = units.oldest();
            if !units.batch_record(at).is_plain_success() {
                break;
            }
            let unit = units.unit(at);
            // The next burst is expected to be about as long as the completed one.
            ring.prefetch(reported, unit.count);
            let n = unit.count.min(completions.tokens.remaining_capacity());
            ring.report(unit.first, n, completions);
            reported += n;
            ring.free_before(unit.first + n);
            if n < unit.count {
                units.take(at, n);
                break;
            }
            units.batch_record(at).clear();
            units.remove_before(at + 1);
            entries.release(1);
        }
        reported
    }

    /// Looks past incomplete units, and handles failed units.
    #[inline(never)]
    pub(super) fn reap_out_of_order(&mut self, completions: &mut Completions) {
        let (mut at, mut looked) = (self.units.oldest(), 0);
        while at != self.units.next() && looked < LOOK_AHEAD && !completions.tokens.is_full() {
            if !self.units.is_done(at) {
                looked = if self.reap_unit(at, completions) { 0 } else { looked + 1 };
            }
            at += 1;
        }
        self.units.advance();
        let Self { ring, units, .. } = self;
        let oldest =
            if units.is_empty() { ring.not_submitted().start } else { units.unit(units.oldest()).first };
        ring.free_before(oldest);
    }

    /// Reports a unit if its record has been written. Returns whether it has.
    fn reap_unit(&mut self, at: usize, completions: &mut Completions) -> bool {
        let record = self.units.record(at, &self.ring);
        let Some(completed) = record.read() else { return false };
        let unit = self.units.unit(at);
        if completed.status.is_success() {
            let n = unit.count.min(completions.tokens.remaining_capacity());
            self.ring.report(unit.first, n, completions);
            self.in_flight -= n;
            if n < unit.count {
                self.units.take(at, n);
                return true;
            }
        }
        record.clear();
        self.entries.release(1);
        self.units.set_done(at);
        if completed.status.is_success() {
            return true;
        }
        if unit.batch {
            self.settle_batch(unit, &completed);
        } else {
            let copy = self.ring.copy(unit.first);
            self.side.take_over(copy, outcome(&completed, copy.len));
        }
        true
    }

    /// Settles the members of a batch that did not succeed.
    ///
    /// If the device processed a member that has no record, the member succeeded: the device writes member records only
    /// for failures, and before the batch's record. This inference requires that a failure record exists. If the batch
    /// reports a failure but no member has a record, the device could not write that record, and any member may have
    /// failed.
    #[cold]
    fn settle_batch(&mut self, unit: Unit, batch: &Completed) {
        let (status, processed) = (batch.status, batch.completed as usize);
        if matches!(status, Status::BAD_OPCODE | Status::BAD_DESCRIPTOR_COUNT) {
            // The device supports no batches, or not of this size: submit single descriptors from now on.
            self.units.disable_batches();
        }
        let members = unit.first..unit.first + unit.count;
        let told = members.clone().any(|at| self.ring.record(at).status_byte() != 0);
        let (processed, not_run) = match status {
            Status::BATCH_FAILED if !told => (0, Failure::Aborted),
            Status::BATCH_LIST_FAULT if !told && batch.result == 1 => (0, Failure::Aborted),
            Status::BATCH_FAILED | Status::BATCH_LIST_FAULT => (processed, Failure::Aborted),
            refused => (0, failure(refused)),
        };
        for at in members {
            let copy = self.ring.copy(at);
            let record = self.ring.record(at);
            let ended = match record.read() {
                Some(completed) => outcome(&completed, copy.len),
                None if at - unit.first < processed => Outcome::Done,
                None => Outcome::Failed(not_run),
            };
            record.clear();
            self.side.take_over(copy, ended);
        }
    }
}
