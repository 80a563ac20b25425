//! Reset of a channel: a drain, or closing the portal, proves that submitted descriptors no longer access memory.
//! Afterwards the queue is reopened if necessary.
//!
//! A drain descriptor completes after all older descriptors in the queue, so a descriptor that has no record by then
//! will never run. If the drain does not complete in time, or the device is gone, the portal is closed: the kernel
//! returns from this only when the device holds no descriptors of this client. Until the queue can be reopened, the
//! channel accepts no copies. Polls and copies try to reopen it, at a bounded rate.

use std::sync::Arc;

use offcore_dma::channel::Reset;
use offcore_stats::tsc;

use super::DsaChannel;
use super::ring::address;
use crate::completion::{CompletionRecord, Status};
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::driver::way::Way;
use crate::portal::{Portal, SubmitResult};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    No,
    /// The start of the reset, and whether a drain descriptor has been submitted.
    Draining {
        since: u64,
        submitted: bool,
    },
    /// No descriptor accesses memory any more. No descriptor is submitted (for example the rest of a copy that met a
    /// page fault) until the outstanding copies have been taken out, or a new submission resumes the use of the
    /// channel.
    Done,
}

/// The state of a reset, and its drain descriptor.
#[derive(Debug)]
pub(super) struct Drain {
    state: State,
    record: Box<CompletionRecord>,
    /// Time limit in TSC ticks.
    limit: u64,
    supported: bool,
}

impl Drain {
    pub(super) fn new(way: &Way) -> Self {
        let supported = way.info.ops.contains(Opcode::Drain);
        let limit = tsc::ticks(way.options.drain_limit);
        Self { state: State::No, record: Box::default(), limit, supported }
    }

    /// Whether descriptors may be submitted.
    #[inline(always)]
    pub(super) fn allows_submission(&self) -> bool {
        self.state == State::No
    }

    /// Resumes the use of the channel after a completed reset.
    #[inline(always)]
    pub(super) fn resume_use(&mut self) {
        if self.state == State::Done {
            self.state = State::No;
        }
    }

    /// Submits the drain, if that has not succeeded yet. It uses the queue entry that the channels' shares leave free
    /// for it. Returns whether the drain has completed with success; `None` while it is in flight.
    fn advance(&mut self, portal: &mut Portal) -> Option<bool> {
        if !self.supported {
            return Some(false);
        }
        let now = tsc::now();
        let (since, submitted) = match self.state {
            State::Draining { since, submitted } => (since, submitted),
            State::No | State::Done => {
                self.record.clear();
                (now, false)
            }
        };
        let submitted = submitted || {
            let completion = address(&self.record);
            let drain = Descriptor { completion, ..Descriptor::new(Opcode::Drain, Flags::CRAV | Flags::RCR) };
            portal.fence();
            // SAFETY: a drain only writes its record, which lives as long as the channel.
            unsafe { portal.submit(&drain) == SubmitResult::Accepted }
        };
        self.state = State::Draining { since, submitted };
        match self.record.read() {
            Some(completed) => Some(completed.status == Status::SUCCESS),
            None if now.wrapping_sub(since) > self.limit => Some(false),
            None => None,
        }
    }
}

/// The attempts to reopen a lost queue.
#[derive(Debug)]
pub(super) struct Reopening {
    way: Arc<Way>,
    /// Time between two attempts, and the time of the next one, in TSC ticks.
    every: u64,
    at: u64,
}

impl Reopening {
    pub(super) fn new(way: Arc<Way>) -> Self {
        Self { every: tsc::ticks(way.options.reopen_every), way, at: 0 }
    }

    /// Whether the next attempt is due. The channel of a lost queue then reports room: copies and polls cause the
    /// attempt, and the number of accepted copies shows its result.
    #[cold]
    pub(super) fn is_due(&self) -> bool {
        tsc::now().wrapping_sub(self.at) as i64 >= 0
    }

    /// Reopens the queue if an attempt is due.
    fn attempt(&mut self) -> Option<Portal> {
        if !self.is_due() {
            return None;
        }
        self.at = tsc::now() + self.every;
        self.way.open_again().ok()
    }
}

impl DsaChannel {
    #[cold]
    pub(super) fn advance_reset(&mut self) -> Reset {
        // Descriptors that the device does not have yet are not submitted: they cannot access memory.
        self.ring.cancel_doorbell();
        // If the device is gone, the portal is closed so that the queue is reopened, even when nothing is in flight.
        if self.portal.as_ref().is_some_and(|portal| !portal.is_alive()) {
            return self.close();
        }
        // A submitted drain is waited for even if everything has completed. Otherwise it could write its record late,
        // when the record is in use for another drain.
        let draining = matches!(self.drain.state, State::Draining { submitted: true, .. });
        if (self.entries.is_empty() && !draining) || self.drain.state == State::Done {
            return self.reset_done();
        }
        let Some(portal) = &mut self.portal else { return self.close() };
        match self.drain.advance(portal) {
            Some(true) => self.reset_done(),
            Some(false) => self.close(),
            None => Reset::Pending,
        }
    }

    fn close(&mut self) -> Reset {
        self.portal = None;
        self.reopening.at = tsc::now();
        self.reset_done()
    }

    fn reset_done(&mut self) -> Reset {
        self.drain.state = State::Done;
        if self.portal.is_none() {
            self.try_reopen();
        }
        Reset::Done
    }

    /// Reopens the queue if an attempt is due. Returns whether the queue is open.
    #[cold]
    pub(super) fn try_reopen(&mut self) -> bool {
        self.portal = self.reopening.attempt();
        if self.portal.as_ref().is_some_and(|portal| !portal.allows_batch()) {
            self.units.disable_batches();
        }
        self.portal.is_some()
    }

    /// Forgets all copies in flight, which have been taken out. The entries are released, and the records are cleared.
    pub(super) fn forget(&mut self) {
        self.units.forget(&mut self.ring);
        self.side.clear();
        self.entries.release_all();
        self.in_flight = 0;
        self.drain.state = State::No;
    }
}
