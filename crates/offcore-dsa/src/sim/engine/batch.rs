//! Batches: a list of descriptors in the client's memory, read when the DSA engine reaches the batch.

use std::collections::VecDeque;

use super::{Job, SimEngine};
use crate::completion::{Completed, Status};
use crate::descriptor::{Descriptor, Flags};
use crate::sim::execute::Injected;
use crate::sim::{Timing, memory};
use crate::wq::gen_cap;

/// Number of pending members among which the next one is chosen at random.
const WINDOW: usize = 4;

/// A batch in a DSA engine.
#[derive(Debug)]
pub(super) struct Batch {
    /// The batch descriptor's job.
    job: usize,
    queue: usize,
    /// Number of members in the list.
    count: u32,
    read: u32,
    /// The time at which the next members are read; `None` if all are read, or no more will be.
    read_at: Option<u64>,
    /// Members read and not begun, with their indices in the list.
    pending: VecDeque<(u32, Descriptor)>,
    begun: u32,
    completed: u32,
    failed: bool,
    /// The address at which the list could not be read, if it faulted.
    list_fault: Option<u64>,
    /// The time at which the batch's own record is written.
    record_at: Option<u64>,
}

impl Batch {
    pub(super) fn next_event(&self) -> Option<u64> {
        self.read_at.into_iter().chain(self.record_at).min()
    }

    fn is_begun(&self) -> bool {
        self.read_at.is_none() && self.pending.is_empty()
    }

    /// Returns the number of pending members that can begin now; each of them may be the next.
    fn ready(&self) -> usize {
        let fenced = |(_, descriptor): &(u32, Descriptor)| descriptor.flags().contains(Flags::FENCE);
        match self.pending.front() {
            Some(first) if fenced(first) => usize::from(self.completed == self.begun),
            _ => self.pending.iter().take(WINDOW).take_while(|member| !fenced(member)).count(),
        }
    }

    /// Discards the rest of the list.
    fn abandon(&mut self) {
        self.pending.clear();
        self.read_at = None;
    }

    /// Whether a fence stops the batch because an earlier member failed.
    fn stops_at_fence(&self) -> bool {
        let fence = self.pending.front().is_some_and(|(_, member)| member.flags().contains(Flags::FENCE));
        fence && self.failed && self.completed == self.begun
    }
}

impl SimEngine {
    pub(super) fn begin_batch(&mut self, engine: usize, job: usize) {
        let (descriptor, queue) = (self.job(job).descriptor, self.job(job).queue);
        let read_at = Some(self.after(self.timing.read_ns));
        self.engines[engine].batches.push_back(Batch {
            job,
            queue,
            count: descriptor.size,
            read: 0,
            read_at,
            pending: VecDeque::new(),
            begun: 0,
            completed: 0,
            failed: descriptor.flags().contains(Flags::OP_0),
            list_fault: None,
            record_at: None,
        });
    }

    /// Reads the parts of the lists that are due.
    pub(super) fn read_lists(&mut self, engine: usize) {
        for index in 0..self.engines[engine].batches.len() {
            if self.engines[engine].batches[index].read_at.is_some_and(|at| at <= self.now) {
                self.read_list(engine, index);
            }
        }
    }

    fn read_list(&mut self, engine: usize, index: usize) {
        let dead = self.is_dead(self.engines[engine].batches[index].job);
        let list = self.job(self.engines[engine].batches[index].job).descriptor.src;
        let next = self.after(self.timing.read_ns);
        let batch = &mut self.engines[engine].batches[index];
        self.changed = true;
        if dead {
            return batch.abandon();
        }
        let wanted = (batch.count - batch.read).min(Timing::LIST_CHUNK);
        let mut bytes = [0; 64 * Timing::LIST_CHUNK as usize];
        let from = list.wrapping_add(64 * u64::from(batch.read));
        // SAFETY: the client gave the list to the device until the batch is completed, and it has not withdrawn.
        let outcome = unsafe { memory::read(from, &mut bytes[..64 * wanted as usize]) };
        let there = outcome.as_ref().err().map_or(wanted, |fault| fault.done as u32 / 64);
        for (member, place) in bytes.as_chunks::<64>().0[..there as usize].iter().zip(batch.read..) {
            batch.pending.push_back((place, Descriptor::from_bytes(member)));
        }
        batch.read += there;
        batch.list_fault = outcome.err().map(|fault| fault.address);
        let more = batch.list_fault.is_none() && batch.read < batch.count;
        batch.read_at = more.then_some(next);
    }

    /// Dispatches a batch member to the DSA engine.
    pub(super) fn dispatch_member(&mut self, engine: usize) -> bool {
        if self.engines[engine].batches.is_empty() || !self.engines[engine].has_place(&self.timing) {
            return false;
        }
        let Some(index) = self.next_batch(engine) else { return false };
        let window = self.engines[engine].batches[index].ready();
        let pick = if window > 1 { self.random.below(window as u64) as usize } else { 0 };
        let batch = &mut self.engines[engine].batches[index];
        let Some((place, descriptor)) = batch.pending.remove(pick) else { return false };
        batch.begun += 1;
        let (job, queue) = (batch.job, batch.queue);
        let client = self.job(job).client;
        let member = self.add(Job {
            descriptor,
            client,
            queue,
            batch: Some((job, place)),
            refused: None,
            injected: Injected::Nothing,
            answered: None,
            late_store: false,
            lost: false,
        });
        self.judge(member);
        self.enter(engine, member);
        true
    }

    /// Returns the batch with the next member. Batches take turns. If the group has a single DSA engine, however, the
    /// batches of a work queue run one after the other.
    fn next_batch(&mut self, engine: usize) -> Option<usize> {
        let dsa = &mut self.engines[engine];
        let n = dsa.batches.len();
        let ordered = dsa.group_size == 1;
        for offset in 0..n {
            let index = (dsa.next_batch + offset) % n;
            let batch = &dsa.batches[index];
            let earlier = dsa.batches.iter().take(index);
            let held =
                ordered && earlier.clone().any(|other| other.queue == batch.queue && !other.is_begun());
            if !held && !batch.stops_at_fence() && batch.ready() > 0 {
                dsa.next_batch = index + 1;
                return Some(index);
            }
        }
        None
    }

    /// Records that a member has completed.
    pub(super) fn member_completed(&mut self, engine: usize, batch: usize, status: Status) {
        let batches = &mut self.engines[engine].batches;
        let Some(batch) = batches.iter_mut().find(|other| other.job == batch) else { return };
        batch.completed += 1;
        batch.failed |= status != Status::SUCCESS;
    }

    /// Writes the records of batches that have ended.
    pub(super) fn finish_batches(&mut self, engine: usize) {
        let mut index = 0;
        while index < self.engines[engine].batches.len() {
            let now = self.now;
            let batch = &mut self.engines[engine].batches[index];
            if batch.stops_at_fence() {
                batch.abandon();
            }
            let done = batch.is_begun() && batch.completed == batch.begun;
            match batch.record_at {
                None if done => {
                    let at = self.after(self.timing.record_ns).saturating_add(self.lateness());
                    let dsa = &mut self.engines[engine];
                    // Batches of a work queue complete in order, so their records are written in order, too.
                    let latest = dsa.batches.iter().take(index).filter_map(|batch| batch.record_at).max();
                    dsa.batches[index].record_at = Some(latest.map_or(at, |latest| latest.max(at)));
                    index += 1;
                }
                Some(at) if at <= now => {
                    if let Some(batch) = self.engines[engine].batches.remove(index) {
                        self.changed = true;
                        self.finish_batch(&batch);
                    }
                    if self.shared.state() == crate::sim::DeviceState::Halted {
                        return;
                    }
                }
                _ => index += 1,
            }
        }
    }

    fn finish_batch(&mut self, batch: &Batch) {
        let status = match (batch.list_fault, batch.failed) {
            (Some(_), _) => Status::BATCH_LIST_FAULT,
            (None, true) => Status::BATCH_FAILED,
            (None, false) => Status::SUCCESS,
        };
        let continues = self.shared.layout.capabilities.gen_cap & gen_cap::BATCH_CONTINUATION != 0;
        let record = Completed {
            completed: batch.completed,
            result: u8::from(continues && batch.failed),
            fault_address: batch.list_fault.map_or(0, |address| address & !0xfff),
            ..Completed::of(status)
        };
        self.count(|counters| &counters.batches, 1);
        self.conclude(batch.job, &record);
        self.retire(batch.job);
    }
}
