//! The client's side of a simulated work queue.
//!
//! A submission writes a 64-byte slot of a ring to the device and publishes it at once. The ring is as large as the
//! queue, so a client that counts its descriptors always finds a free slot.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offcore_ring::spsc::Producer;
use offcore_stats::SplitMix;

use super::shared::{Occupancy, PortalCell, lock};
use super::{Faults, SimDevice};
use crate::descriptor::{Descriptor, Flags, SubmitResult};

/// Number of slots to prefetch ahead of the current one, in steps of [`PREPARED_EVERY`].
const PREPARED: usize = 32;
/// Number of submissions between two prefetches.
const PREPARED_EVERY: usize = 16;

/// An open work queue of a simulated device. Dropping it closes the queue: descriptors that this client still has in it
/// are aborted, and when the drop returns, none of them accesses memory any more.
pub struct SimPortal {
    ring: Producer<Descriptor>,
    cell: Arc<PortalCell>,
    occupancy: Arc<Occupancy>,
    /// Number of entries that a shared queue accepts from this client.
    threshold: u32,
    queue: usize,
    epoch: u64,
    device: SimDevice,
    orders: Orders,
}

/// The state for injected submission faults.
struct Orders {
    fences: u64,
    /// For each completion record, the number of fences before its latest submission.
    records: HashMap<u64, u64>,
    /// Number of Retry answers left in the present sequence.
    storm: u32,
    random: SplitMix,
}

impl fmt::Debug for SimPortal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimPortal")
            .field("device", &self.device.name())
            .field("queue", &self.queue)
            .field("submitted", &self.ring.written())
            .finish_non_exhaustive()
    }
}

impl SimPortal {
    pub(super) fn new(
        device: SimDevice,
        ring: Producer<Descriptor>,
        cell: Arc<PortalCell>,
        occupancy: Arc<Occupancy>,
        queue: usize,
        epoch: u64,
    ) -> Self {
        let info = &device.shared().layout.queues[queue].info;
        let threshold = info.threshold;
        let orders = Orders {
            fences: 0,
            records: HashMap::new(),
            storm: 0,
            random: SplitMix::new(device.inner.seed ^ (queue as u64 + 1) << 32),
        };
        Self { ring, cell, occupancy, threshold, queue, epoch, device, orders }
    }

    /// Submits a descriptor: a 64-byte store to the portal (dedicated), or ENQCMD (shared). Steps of the device execute
    /// it.
    ///
    /// # Safety
    /// The memory that the descriptor names is valid for its operation until the device has completed it. Until then,
    /// nothing else uses that memory, except to read what the operation only reads. This includes the completion
    /// record, and the descriptors of a batch with their memory.
    #[inline(always)]
    pub unsafe fn submit(&mut self, descriptor: &Descriptor) -> SubmitResult {
        if self.cell.special.load(Ordering::Relaxed) {
            return self.submit_special(descriptor);
        }
        if self.ring.written().is_multiple_of(PREPARED_EVERY) {
            self.ring.prefetch(PREPARED);
        }
        if self.ring.push(*descriptor).is_err() {
            self.overflow();
        }
        SubmitResult::Accepted
    }

    /// Submits to a shared queue, or to a device with injected submission faults.
    #[inline(never)]
    fn submit_special(&mut self, descriptor: &Descriptor) -> SubmitResult {
        let faults = *lock(&self.device.shared().faults);
        if self.cell.shared && !self.admitted(&faults) {
            return SubmitResult::Retry;
        }
        if faults.weak_ordering {
            self.order(descriptor);
        }
        if self.ring.push(*descriptor).is_err() {
            if self.cell.shared {
                self.cell.free_entry(&self.occupancy);
                return SubmitResult::Retry;
            }
            self.overflow();
        }
        SubmitResult::Accepted
    }

    /// Returns the answer of ENQCMD.
    fn admitted(&mut self, faults: &Faults) -> bool {
        let counters = &self.device.shared().counters;
        if self.orders.storm == 0 && self.orders.random.happens(faults.retry) {
            self.orders.storm = faults.retry_storm;
        }
        if self.orders.storm > 0 {
            self.orders.storm -= 1;
            counters.injected_retries.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let room = |entries: u32| (entries < self.threshold).then_some(entries + 1);
        let admitted = self.device.shared().is_alive(self.epoch)
            && self.occupancy.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).is_ok();
        if admitted {
            self.cell.entries.fetch_add(1, Ordering::Relaxed);
        } else {
            counters.retried.fetch_add(1, Ordering::Relaxed);
        }
        admitted
    }

    /// Records a late store: without a fence since the last submission of the record, the store that zeroed the record
    /// may be executed after this submission and even after its completion.
    fn order(&mut self, descriptor: &Descriptor) {
        if !descriptor.flags().contains(Flags::CRAV) {
            return;
        }
        let before = self.orders.records.insert(descriptor.completion, self.orders.fences);
        if before == Some(self.orders.fences) {
            lock(&self.cell.late_stores).push(self.ring.written());
        }
    }

    /// Handles a full queue: a posted store has no answer.
    #[cold]
    fn overflow(&self) {
        let shared = self.device.shared();
        if shared.is_alive(self.epoch) {
            shared.counters.overflowed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records that earlier stores of this thread are ordered before later submissions, as SFENCE does.
    #[inline(always)]
    pub fn fence(&mut self) {
        self.orders.fences += 1;
    }

    /// Prefetches, for writing, the slots of the next `n` submissions. Call it after a burst, with the expected size of
    /// the next one. Otherwise the portal prefetches while it submits.
    #[inline(always)]
    pub fn prepare(&self, n: usize) {
        self.ring.prefetch(n);
    }

    /// Whether the device has neither halted nor been reset since the queue was opened.
    pub fn is_alive(&self) -> bool {
        self.device.shared().is_alive(self.epoch)
    }
}

impl Drop for SimPortal {
    fn drop(&mut self) {
        self.cell.withdrawn.store(true, Ordering::SeqCst);
        let shared = self.device.shared();
        shared.notify_and_wait();
        // The engine may not have released the entries yet.
        self.cell.free_entries(&self.occupancy);
        let mut opened = lock(&shared.opened);
        opened.cells.retain(|cell| !Arc::ptr_eq(cell, &self.cell));
        if opened.epoch == self.epoch {
            opened.portals[self.queue] -= 1;
        }
    }
}
