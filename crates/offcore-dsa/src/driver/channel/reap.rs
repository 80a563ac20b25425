//! Completions: usually the oldest units in order and with success; otherwise in any order and with any status.

use offcore_dma::channel::{Completions, CopyOp, Failure};
use offcore_ring::prefetch;

use super::DsaChannel;
use super::outcome::{Outcome, failure, outcome};
use super::ring::{Ring, Unit};
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
        if self.direct { self.reap_descriptors(completions) } else { self.reap_units(completions) }
    }

    #[inline(always)]
    fn reap_descriptors(&mut self, completions: &mut Completions) -> usize {
        let Self { ring, units, portal, .. } = self;
        let from = units.oldest;
        let to = units.next.min(from + completions.tokens.remaining_capacity());
        let mut at = from;
        if at != to
            && ring.records[ring.slot(at)].is_plain_success()
            && let Some(portal) = portal
        {
            portal.prepare((to - at).min(NEXT_BURST));
        }
        while at != to {
            let slot = ring.slot(at);
            let record = &ring.records[slot];
            if !record.is_plain_success() {
                break;
            }
            // Prefetches the line once, for both reading and zeroing.
            prefetch::write(&raw const ring.records[ring.slot(at + RECORDS_AHEAD)]);
            record.clear();
            completions.tokens.push(ring.tokens[slot]);
            at += 1;
        }
        units.oldest = at;
        ring.oldest = at;
        self.used -= at - from;
        at - from
    }

    #[inline(always)]
    fn reap_units(&mut self, completions: &mut Completions) -> usize {
        let Self { ring, units, .. } = self;
        let mut reported = 0;
        while units.oldest != units.next {
            let index = units.index(units.oldest);
            if !units.records[index].is_plain_success() {
                break;
            }
            let unit = units.unit(units.oldest);
            // The next burst is expected to be about as long as the completed one.
            ring.prefetch(reported, unit.count);
            let n = unit.count.min(completions.tokens.remaining_capacity());
            report(ring, unit.first, n, completions);
            reported += n;
            ring.oldest = unit.first + n;
            if n < unit.count {
                units.take(units.oldest, n);
                break;
            }
            units.records[index].clear();
            units.oldest += 1;
            self.used -= 1;
        }
        reported
    }

    /// Looks past incomplete units, and handles failed units.
    #[inline(never)]
    pub(super) fn reap_out_of_order(&mut self, completions: &mut Completions) {
        let (mut at, mut looked) = (self.units.oldest, 0);
        while at != self.units.next && looked < LOOK_AHEAD && !completions.tokens.is_full() {
            if !self.units.is_done(at) {
                looked = if self.reap_unit(at, completions) { 0 } else { looked + 1 };
            }
            at += 1;
        }
        self.units.advance();
        let Self { ring, units, .. } = self;
        ring.oldest =
            if units.oldest == units.next { ring.submitted } else { units.unit(units.oldest).first };
    }

    /// Reports a unit if its record has been written. Returns whether it has.
    fn reap_unit(&mut self, at: usize, completions: &mut Completions) -> bool {
        let index = self.units.index(at);
        let record = if self.direct { &self.ring.records[index] } else { &self.units.records[index] };
        let Some(completed) = record.read() else { return false };
        let unit = self.units.unit(at);
        if completed.status.is_success() {
            let n = unit.count.min(completions.tokens.remaining_capacity());
            report(&self.ring, unit.first, n, completions);
            self.in_flight -= n;
            if n < unit.count {
                self.units.take(at, n);
                return true;
            }
        }
        record.clear();
        self.used -= 1;
        self.units.set_done(at);
        if completed.status.is_success() {
            return true;
        }
        self.aside += unit.count;
        if unit.batch {
            self.settle_batch(unit, &completed);
        } else {
            let copy = self.ring.copy(unit.first);
            self.settle(copy, outcome(&completed, copy.len));
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
            self.max_batch = 1;
        }
        let members = unit.first..unit.first + unit.count;
        let told = members.clone().any(|at| self.ring.records[self.ring.slot(at)].status_byte() != 0);
        let (processed, not_run) = match status {
            Status::BATCH_FAILED if !told => (0, Failure::Aborted),
            Status::BATCH_LIST_FAULT if !told && batch.result == 1 => (0, Failure::Aborted),
            Status::BATCH_FAILED | Status::BATCH_LIST_FAULT => (processed, Failure::Aborted),
            refused => (0, failure(refused)),
        };
        for at in members {
            let copy = self.ring.copy(at);
            let record = &self.ring.records[self.ring.slot(at)];
            let ended = match record.read() {
                Some(completed) => outcome(&completed, copy.len),
                None if at - unit.first < processed => Outcome::Done,
                None => Outcome::Failed(not_run),
            };
            record.clear();
            self.settle(copy, ended);
        }
    }

    /// Records the outcome of a copy in the ring. After a page fault, the rest is submitted again.
    #[cold]
    fn settle(&mut self, copy: CopyOp, outcome: Outcome) {
        match outcome {
            Outcome::Done => self.ended.done.push(copy),
            other => self.side.resume(copy, other, &mut self.ended),
        }
    }

    #[cold]
    pub(super) fn reap_side(&mut self) {
        let mut at = 0;
        while at < self.side.pieces.len() {
            let piece = self.side.pieces[at];
            match self.side.records[piece.record].read() {
                Some(completed) if piece.in_flight => {
                    self.used -= 1;
                    let piece = self.side.pieces.swap_remove(at);
                    let outcome = outcome(&completed, piece.rest.len);
                    self.side.settle(piece, outcome, &mut self.ended);
                }
                _ => at += 1,
            }
        }
    }

    /// Moves ended copies outside the ring to the list of completions, up to its capacity.
    #[cold]
    pub(super) fn report_ended(&mut self, completions: &mut Completions) {
        while let Some(copy) = self.ended.done.last()
            && completions.tokens.try_push(copy.token).is_ok()
        {
            self.ended.done.pop();
            self.left();
        }
        while let Some(&failed) = self.ended.failed.last()
            && completions.failed.try_push(failed).is_ok()
        {
            self.ended.failed.pop();
            self.ledger.fail([&failed.copy]);
            self.left();
        }
    }

    fn left(&mut self) {
        self.aside -= 1;
        self.in_flight -= 1;
    }
}

/// Adds the tokens of `n` descriptors to the list, which has room for them. They are contiguous: a unit does not wrap.
#[inline(always)]
fn report(ring: &Ring, first: usize, n: usize, completions: &mut Completions) {
    let slot = ring.slot(first);
    let _ = completions.tokens.try_extend_from_slice(&ring.tokens[slot..slot + n]);
}
