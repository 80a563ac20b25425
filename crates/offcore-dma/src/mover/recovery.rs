//! What an engine fails to do, the core finishes; and who fails too often is left alone for a while.
//!
//! A copy that is not answered in time is *quarantined*: its packet is neither published nor freed while the channel is
//! reset; only when the reset has proved the copy dead does the core make it.

use arrayvec::ArrayVec;
use offcore_stats::tsc;

use super::health;
use super::{Mover, QueueId};
use crate::channel::{Failed, Failure, Operation, Reset};
use crate::cpu;

/// Polls between two looks for lost copies.
pub(super) const LOST_CHECK: u32 = 256;

impl Mover {
    /// The core finishes what the channel at `index` has failed, and whoever caused it is charged.
    #[cold]
    pub(super) fn recover(&mut self, index: usize) {
        let failed: ArrayVec<Failed, 16> = self.completions.failed.take();
        for Failed { operation, failure, done } in failed {
            match failure {
                // The memory is the guest's: another guest's copies through the same channel are not to suffer.
                Failure::PageFault => self.charge_queue(&operation),
                Failure::Hardware | Failure::Refused | Failure::Aborted => self.charge_channel(index, 1),
            }
            // SAFETY: the operation was submitted through this mover, so its memory is valid until its packet is ready,
            // which it is not before `redo` completes it; the engine has reported it, so it touches it no more.
            unsafe { self.redo(&operation, if self.recovery { done } else { operation.len() }) };
        }
    }

    #[cold]
    fn charge_queue(&mut self, operation: &Operation) {
        self.stats.faults += 1;
        let back_off = self.back_off;
        if let Some(queue) = self.queues.get_mut(QueueId::of(operation.token())).and_then(Option::as_mut) {
            queue.faults.failed(1, tsc::now(), back_off);
        }
    }

    #[cold]
    pub(super) fn charge_channel(&mut self, index: usize, weight: u32) {
        let back_off = self.back_off;
        let Some(slot) = self.channels[index].as_mut() else { return };
        if slot.health.failed(weight, tsc::now(), back_off) {
            self.stats.out_of_service += 1;
        }
    }

    /// Makes an operation from byte `done` on, and notes that it is complete.
    ///
    /// # Safety
    /// The operation's memory is valid and no engine touches it any more.
    #[cold]
    pub(super) unsafe fn redo(&mut self, operation: &Operation, done: u32) {
        match operation {
            // SAFETY: the caller's promise.
            Operation::Copy(copy) => unsafe { cpu::copy_one(copy, done) },
            // SAFETY: the caller's promise.
            Operation::Fill(fill) => unsafe { cpu::fill_one(fill, done) },
        }
        self.stats.fallbacks += 1;
        let token = operation.token();
        if let Some(queue) = self.queues.get_mut(QueueId::of(token)).and_then(Option::as_mut) {
            queue.ring.complete(token as usize & 0xffff);
            queue.outstanding = queue.outstanding.saturating_sub(1);
        }
    }

    /// A queue whose oldest packet has been outstanding for too long has lost a copy. Which channel has it is not
    /// known (the queue may have been bound anew since), so every channel with work in flight is reset.
    #[cold]
    pub(super) fn look_for_lost(&mut self) {
        let now = tsc::now();
        let mut late = false;
        for queue in self.queues.iter_mut().flatten() {
            let waits = queue.ring.in_flight() > 0 && queue.ring.ready() == 0;
            queue.watched = match queue.watched {
                _ if !waits => None,
                Some((oldest, since)) if oldest == queue.ring.oldest() => {
                    let lost = now.wrapping_sub(since) > self.lost_after;
                    late |= lost;
                    // What is reset because of it has as long to answer: the other channels are not reset again meanwhile.
                    Some((oldest, if lost { now } else { since }))
                }
                _ => Some((queue.ring.oldest(), now)),
            };
        }
        if !late {
            return;
        }
        for index in 0..self.channels.len() {
            if let Some(slot) = self.channels[index].as_mut()
                && slot.channel.in_flight() > 0
                && !slot.resetting
            {
                slot.resetting = true;
                self.stats.resets += 1;
                self.go_on_resetting(index);
            }
        }
    }

    #[cold]
    pub(super) fn go_on_resetting(&mut self, index: usize) {
        let Some(slot) = self.channels[index].as_mut() else { return };
        let state = slot.channel.reset();
        if state == Reset::Pending && self.quarantine {
            return;
        }
        slot.resetting = false;
        // What completed before the reset did is reported first, so that it is not copied again.
        while self.collect(index) > 0 {}
        let Some(slot) = self.channels[index].as_mut() else { return };
        // Cold: once per lost copy.
        let mut dead = Vec::new();
        slot.channel.take_outstanding(&mut dead);
        if !dead.is_empty() {
            self.charge_channel(index, health::RESET);
        }
        self.stats.quarantined += dead.len() as u64;
        for operation in &dead {
            // SAFETY: submitted through this mover and not reported, so its packet is not ready and its memory valid;
            // the reset has proved that the engine touches it no more.
            unsafe { self.redo(operation, 0) };
        }
    }
}
