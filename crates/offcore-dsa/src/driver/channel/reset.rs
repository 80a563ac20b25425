//! Reset of a channel: a drain, or closing the portal, proves that submitted descriptors no longer access memory.
//! Afterwards the queue is reopened if necessary.
//!
//! A drain descriptor completes after all older descriptors in the queue, so a descriptor that has no record by then
//! will never run. If the drain does not complete in time, or the device is gone, the portal is closed: the kernel
//! returns from this only when the device holds no descriptors of this client. Until the queue can be reopened, the
//! channel accepts no copies. Polls and copies try to reopen it, at a bounded rate.

use offcore_dma::channel::Reset;
use offcore_stats::tsc;

use super::DsaChannel;
use super::ring::address;
use crate::completion::Status;
use crate::descriptor::{Descriptor, Flags, Opcode};
use crate::portal::Submitted;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resetting {
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

impl DsaChannel {
    #[cold]
    pub(super) fn advance_reset(&mut self) -> Reset {
        // Descriptors that the device does not have yet are not submitted: they cannot access memory.
        self.ring.requested = self.ring.submitted;
        // If the device is gone, the portal is closed so that the queue is reopened, even when nothing is in flight.
        if self.portal.as_ref().is_some_and(|portal| !portal.is_alive()) {
            return self.close();
        }
        // A submitted drain is waited for even if everything has completed. Otherwise it could write its record late,
        // when the record is in use for another drain.
        let draining = matches!(self.resetting, Resetting::Draining { submitted: true, .. });
        if (self.used == 0 && !draining) || self.resetting == Resetting::Done {
            return self.reset_done();
        }
        if self.portal.is_none() || !self.can_drain {
            return self.close();
        }
        let now = tsc::now();
        let (since, submitted) = match self.resetting {
            Resetting::Draining { since, submitted } => (since, submitted),
            Resetting::No | Resetting::Done => {
                self.drain_record.clear();
                (now, false)
            }
        };
        let submitted = submitted || self.submit_drain();
        self.resetting = Resetting::Draining { since, submitted };
        match self.drain_record.read() {
            Some(completed) if completed.status == Status::SUCCESS => self.reset_done(),
            Some(_) => self.close(),
            None if now.wrapping_sub(since) > self.drain_limit => self.close(),
            None => Reset::Pending,
        }
    }

    /// Submits a drain. It uses the queue entry that the channels' shares leave free for it.
    fn submit_drain(&mut self) -> bool {
        let completion = address(&self.drain_record);
        let drain = Descriptor { completion, ..Descriptor::new(Opcode::Drain, Flags::CRAV | Flags::RCR) };
        self.fence();
        let Some(portal) = &mut self.portal else { return false };
        // SAFETY: a drain only writes its record, which lives as long as the channel.
        unsafe { portal.submit(&drain) == Submitted::Accepted }
    }

    fn close(&mut self) -> Reset {
        self.portal = None;
        self.reopen_at = tsc::now();
        self.reset_done()
    }

    fn reset_done(&mut self) -> Reset {
        self.resetting = Resetting::Done;
        if self.portal.is_none() {
            self.try_reopen();
        }
        Reset::Done
    }

    /// Whether the queue is lost and the next attempt to reopen it is due. The channel then reports room: copies and
    /// polls cause the attempt, and the number of accepted copies shows its result.
    #[cold]
    pub(super) fn is_reopening_due(&self) -> bool {
        tsc::now().wrapping_sub(self.reopen_at) as i64 >= 0
    }

    /// Reopens the queue if an attempt is due. Returns whether the queue is open.
    #[cold]
    pub(super) fn try_reopen(&mut self) -> bool {
        if !self.is_reopening_due() {
            return false;
        }
        self.reopen_at = tsc::now() + self.reopen_every;
        let Ok(portal) = self.way.open_again() else { return false };
        if !portal.allows_batch() {
            self.max_batch = 1;
        }
        self.portal = Some(portal);
        true
    }

    /// Forgets all copies in flight, which have been taken out. The entries are released, and the records are cleared.
    pub(super) fn forget(&mut self) {
        for at in self.ring.oldest..self.ring.submitted {
            self.ring.records[self.ring.slot(at)].clear();
        }
        for at in self.units.oldest..self.units.next {
            if !self.direct {
                self.units.records[self.units.index(at)].clear();
            }
            self.units.set_done(at);
        }
        self.units.advance();
        let ring = &mut self.ring;
        if self.direct {
            // Unit N is descriptor N: descriptors that were never submitted are skipped in both.
            self.units.oldest = ring.written;
            self.units.next = ring.written;
        }
        ring.oldest = ring.written;
        ring.submitted = ring.written;
        ring.requested = ring.written;
        (self.used, self.in_flight, self.aside) = (0, 0, 0);
        self.resetting = Resetting::No;
    }
}
