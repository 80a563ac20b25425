//! What an engine fails to do, the core finishes; and who fails too often is left alone for a while.
//!
//! A copy that is not answered in time is *quarantined*: its packet is neither published nor freed while the channel is
//! reset; only when the reset has proved the copy dead does the core make it.

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::health;
use super::{Mover, QueueId};
use crate::channel::{CopyOp, Failed, Failure, Reset};

/// Polls between two looks for lost copies.
pub(super) const LOST_CHECK: u32 = 256;

impl Mover {
    /// The core finishes what the channel at `index` has failed, and whoever caused it is charged.
    #[cold]
    pub(super) fn recover(&mut self, index: usize) {
        let failed: ArrayVec<Failed, 16> = self.completions.failed.take();
        for Failed { copy, failure, done } in failed {
            match failure {
                // The memory is the guest's: another guest's copies through the same channel are not to suffer.
                Failure::PageFault => self.charge_queue(&copy),
                Failure::Hardware | Failure::Refused | Failure::Aborted => self.channels.charge(index, 1),
            }
            // SAFETY: the copy was submitted through this mover, so its memory is valid until its packet is ready,
            // which it is not before `redo` completes it; the engine has reported it, so it touches it no more.
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
        // SAFETY: the caller's promise.
        unsafe { channels.redo(queue, copy, done) };
    }

    /// A queue whose oldest packet has been outstanding for too long has lost a copy. Which channel has it is not
    /// known (the queue may have been bound anew since), so every channel with work in flight is reset.
    #[cold]
    pub(super) fn look_for_lost(&mut self) {
        let now = tsc::now();
        let mut late = false;
        for queue in &mut self.queues {
            let passed = queue.ring.passed().first().copied();
            let waits = passed.is_some() || (queue.ring.in_flight() > 0 && queue.ring.ready() == 0);
            let waiting = passed.unwrap_or(queue.ring.oldest());
            queue.watched = match queue.watched {
                _ if !waits => None,
                Some((oldest, since)) if oldest == waiting => {
                    let lost = now.wrapping_sub(since) > queue.lost_after.unwrap_or(self.lost_after);
                    late |= lost;
                    // What is reset because of it has as long to answer: the other channels are not reset again meanwhile.
                    Some((oldest, if lost { now } else { since }))
                }
                _ => Some((waiting, now)),
            };
        }
        if !late {
            return;
        }
        for index in 0..self.channels.slots.len() {
            let slot = &mut self.channels.slots[index];
            if slot.channel.in_flight() > 0 && !slot.resetting {
                slot.resetting = true;
                self.channels.stats.resets += 1;
                self.go_on_resetting(index);
            }
        }
    }

    #[cold]
    pub(super) fn go_on_resetting(&mut self, index: usize) {
        let slot = &mut self.channels.slots[index];
        let state = slot.channel.reset();
        if state == Reset::Pending && self.quarantine {
            return;
        }
        slot.resetting = false;
        // What completed before the reset did is reported first, so that it is not copied again.
        while self.collect(index) > 0 {}
        // Cold: once per lost copy.
        let mut dead = Vec::new();
        self.channels.slots[index].channel.take_outstanding(&mut dead);
        if !dead.is_empty() {
            self.channels.charge(index, health::RESET);
        }
        self.channels.stats.quarantined += dead.len() as u64;
        for copy in &dead {
            // SAFETY: submitted through this mover and not reported, so its packet is not ready and its memory valid;
            // the reset has proved that the engine touches it no more.
            unsafe { self.redo(copy, 0) };
        }
    }
}
