//! Recovery: the core completes copies that an engine failed, and repeatedly failing channels are not used for a while.
//!
//! A copy that does not complete in time is *quarantined*: its packet is neither published nor freed while the channel
//! is reset. The core makes the copy only after the reset has proved that the engine will not.

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::health;
use super::{Mover, QueueId};
use crate::channel::{CopyOp, Failed, Failure, Reset};
use crate::reorder::ReorderRing;

/// Number of polls between two checks for lost copies.
pub(super) const LOST_CHECK: u32 = 256;

/// The search for lost copies of a queue.
#[derive(Debug, Default)]
pub(crate) struct Watch {
    /// TSC ticks after which a copy counts as lost, if they differ from the mover's.
    pub(crate) lost_after: Option<u64>,
    /// The oldest outstanding packet at the last check, and the time since when it has been the oldest.
    oldest: Option<(u32, u64)>,
}

impl Watch {
    /// Whether the oldest outstanding packet has waited for more than `lost_after` ticks.
    fn is_late(&mut self, ring: &mut ReorderRing, now: u64, lost_after: u64) -> bool {
        let passed = ring.passed().first().copied();
        if passed.is_none() && (ring.in_flight() == 0 || ring.ready() != 0) {
            self.oldest = None;
            return false;
        }
        let waiting = passed.unwrap_or(ring.oldest());
        let since = self.oldest.filter(|&(oldest, _)| oldest == waiting).map_or(now, |(_, since)| since);
        let late = now.wrapping_sub(since) > self.lost_after.unwrap_or(lost_after);
        // The reset gets the same time to complete. Other channels are not reset again meanwhile.
        self.oldest = Some((waiting, if late { now } else { since }));
        late
    }
}

impl Mover {
    /// Completes the copies that the channel at `index` failed, and charges the channel or the queue that caused the
    /// failure.
    #[cold]
    pub(super) fn recover(&mut self, index: usize) {
        let failed: ArrayVec<Failed, 16> = self.completions.failed.take();
        for Failed { copy, failure, done } in failed {
            match failure {
                // The fault is in the guest's memory: copies of other guests through the same channel must not be
                // affected.
                Failure::PageFault => self.charge_queue(&copy),
                Failure::Hardware | Failure::Refused | Failure::Aborted => self.channels.charge(index, 1),
            }
            // SAFETY: the copy was submitted through this mover, so its memory is valid until its packet is ready,
            // which happens after `redo` completes it. The engine has reported the copy, so it does not access the
            // memory any more.
            unsafe { self.redo(&copy, if self.channels.recovery { done } else { copy.len }) };
        }
    }

    #[cold]
    fn charge_queue(&mut self, copy: &CopyOp) {
        self.channels.stats.faults += 1;
        let back_off = self.channels.back_off;
        if let Some(queue) = self.queues.get_mut(QueueId::of(copy.token)) {
            queue.faults.failed(1, tsc::now(), back_off);
        }
    }

    /// # Safety
    /// As for [`Channels::redo`](super::channels::Channels::redo).
    unsafe fn redo(&mut self, copy: &CopyOp, done: u32) {
        let Self { queues, channels, .. } = self;
        let queue = queues.get_mut(QueueId::of(copy.token));
        // SAFETY: the copy's source and destination are valid and no engine uses them, as the caller guarantees.
        unsafe { channels.redo(queue, copy, done) };
    }

    /// Checks for lost copies. A queue whose oldest packet has been outstanding for too long has lost a copy. Its
    /// channel is unknown (the binding may have changed), so every channel with copies in flight is reset.
    #[cold]
    pub(super) fn check_lost_copies(&mut self) {
        let now = tsc::now();
        let mut late = false;
        for queue in &mut self.queues {
            late |= queue.watch.is_late(&mut queue.ring, now, self.lost_after);
        }
        if !late {
            return;
        }
        for index in 0..self.channels.slots.len() {
            let slot = &mut self.channels.slots[index];
            if slot.channel.in_flight() > 0 && !slot.resetting {
                slot.resetting = true;
                self.channels.stats.resets += 1;
                self.continue_reset(index);
            }
        }
    }

    #[cold]
    pub(super) fn continue_reset(&mut self, index: usize) {
        let slot = &mut self.channels.slots[index];
        let state = slot.channel.reset();
        if state == Reset::Pending && self.quarantine {
            return;
        }
        slot.resetting = false;
        // Completions before the end of the reset are reported first, so that these copies are not repeated.
        while self.collect(index) > 0 {}
        // Cold path: once per lost copy.
        let mut dead = Vec::new();
        self.channels.slots[index].channel.take_outstanding(&mut dead);
        if !dead.is_empty() {
            self.channels.charge(index, health::RESET);
        }
        self.channels.stats.quarantined += dead.len() as u64;
        for copy in &dead {
            // SAFETY: the copy was submitted through this mover and not reported, so its packet is not ready and its
            // memory is valid. The reset has proved that the engine does not access it any more.
            unsafe { self.redo(copy, 0) };
        }
    }
}
