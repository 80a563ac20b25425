//! Proving that what was handed over touches memory no more: by a drain, or by closing the portal; and opening it again.
//!
//! A drain descriptor completes after everything older in the queue, so whatever has no record then is dead. When it
//! does not complete in time, or the device is gone, the portal is closed: the kernel answers that only when nothing of
//! ours is left in the device. Until the queue can be opened again the channel takes nothing; polls and copies try, at a
//! bounded rate.

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
    /// Since when, and whether a drain descriptor is with the device.
    Draining {
        since: u64,
        submitted: bool,
    },
    /// Nothing touches memory any more, and nothing is handed over (the rest of a copy that met a page fault, say) until
    /// what is outstanding has been taken out, or a new submission says that the channel is to go on.
    Done,
}

impl DsaChannel {
    #[cold]
    pub(super) fn work_towards_reset(&mut self) -> Reset {
        // What the device does not have yet it does not get: it is dead already.
        self.ring.requested = self.ring.submitted;
        // A device that is gone is left, so that the queue is opened anew, even when nothing is in flight.
        if self.portal.as_ref().is_some_and(|portal| !portal.is_alive()) {
            return self.close();
        }
        // A drain that is on its way is waited for even when everything has completed: it must not write the record, late,
        // that another one is waited for with.
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

    /// The drain takes the place in the queue that the channel's share leaves free for it.
    fn submit_drain(&mut self) -> bool {
        let completion = address(&self.drain_record);
        let drain = Descriptor { completion, ..Descriptor::new(Opcode::Drain, Flags::CRAV | Flags::RCR) };
        self.fence();
        let Some(portal) = &mut self.portal else { return false };
        // SAFETY: a drain writes its record only, which lives as long as the channel.
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

    /// Whether the queue is gone and it is time to try to open it again. The channel has room then: who fills it causes
    /// the attempt, as whoever polls does, and finds out by how much is accepted.
    #[cold]
    pub(super) fn is_reopening_due(&self) -> bool {
        tsc::now().wrapping_sub(self.reopen_at) as i64 >= 0
    }

    /// Opens the queue again, if it is time to try; returns whether it is open.
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

    /// Forgets everything in flight. It has been taken out; credits come back, and records are as new.
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
            // Unit N is descriptor N: what was never submitted is skipped in both.
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
