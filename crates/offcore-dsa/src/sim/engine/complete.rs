//! The end of a descriptor: the operation is executed, then its record is written.

use std::sync::atomic::Ordering;

use super::{SimEngine, blocks};
use crate::completion::{Completed, Status};
use crate::descriptor::Flags;
use crate::sim::execute::{self, Injected};
use crate::sim::{DeviceState, memory};

impl SimEngine {
    /// Executes an operation and writes its record, unless it has to wait for a page.
    pub(super) fn complete(&mut self, engine: usize, job: usize) {
        let Some(record) = self.make(engine, job) else { return };
        let status = record.status;
        self.engines[engine].in_progress -= 1;
        self.changed = true;
        self.conclude(job, &record);
        if let Some((batch, _)) = self.job(job).batch {
            self.member_completed(engine, batch, status);
            self.remove(job);
        } else {
            self.retire(job);
        }
    }

    /// Executes the operation. Returns its record, or `None` if it has to wait for a page.
    fn make(&mut self, engine: usize, job: usize) -> Option<Completed> {
        let (descriptor, queue) = (self.job(job).descriptor, self.job(job).queue);
        if self.is_dead(job) {
            return Some(Completed::of(Status::SUCCESS));
        }
        if let Some(refused) = self.job(job).refused {
            return Some(execute::refusal(&refused));
        }
        if let Some(record) = self.job_mut(job).answered.take() {
            return Some(record);
        }
        if !self.record_is_mapped(job) {
            return Some(Completed::of(Status::CR_ADDRESS_FAULT));
        }
        let injected = self.job(job).injected;
        if matches!(injected, Injected::Page { .. }) {
            self.count(|counters| &counters.injected_page_faults, 1);
            if blocks(&descriptor) {
                // The page is found, and the operation continues.
                self.job_mut(job).injected = Injected::Nothing;
                self.wait_for_page(engine, job);
                return None;
            }
        }
        let limits = &self.shared.layout.queues[queue].limits;
        // SAFETY: the client gave the descriptor's memory to the device until completion, and has not withdrawn: a
        // withdrawing client waits until the engine has acknowledged it, between two operations.
        let record = unsafe { execute::execute(&descriptor, limits, injected, &mut self.scratch) };
        match (record.status, injected) {
            (Status::HARDWARE, Injected::Hardware { .. }) => {
                self.count(|counters| &counters.injected_hardware_errors, 1);
            }
            (status, Injected::Nothing) if status.is_page_fault() => {
                self.count(|counters| &counters.real_page_faults, 1);
            }
            (status, _) if status.is_success() => {
                self.count(|counters| &counters.bytes, u64::from(descriptor.size));
            }
            _ => {}
        }
        if record.status == Status::PAGE_REQUEST_INVALID {
            self.job_mut(job).answered = Some(record);
            self.wait_for_page(engine, job);
            return None;
        }
        Some(record)
    }

    /// Makes the DSA engine wait for the answer to a page request. Later descriptors wait, too.
    fn wait_for_page(&mut self, engine: usize, job: usize) {
        let at = self.after(self.timing.page_fault_ns);
        let dsa = &mut self.engines[engine];
        dsa.last_done = dsa.last_done.max(at);
        dsa.completing.push_front((at, job));
    }

    /// Looks up the page of the record first. If it is missing, the descriptor is aborted.
    fn record_is_mapped(&mut self, job: usize) -> bool {
        let descriptor = self.job(job).descriptor;
        let mut byte = [0];
        // SAFETY: the client gave the record to the device until the operation is completed.
        !descriptor.flags().contains(Flags::CRAV)
            || unsafe { memory::read(descriptor.completion, &mut byte) }.is_ok()
    }

    /// Counts a descriptor, and writes its record if it has a usable one.
    pub(super) fn conclude(&mut self, job: usize, record: &Completed) {
        if self.is_dead(job) {
            return;
        }
        self.count(|counters| &counters.completed, 1);
        self.completed += 1;
        let status = record.status;
        if !status.is_success() {
            self.count(|counters| &counters.failed, 1);
        }
        let (descriptor, lost, late_store) = {
            let job = self.job(job);
            (job.descriptor, job.lost, job.late_store)
        };
        let flags = descriptor.flags();
        let no_record = self.job(job).refused.is_some_and(|refused| refused.no_record);
        let usual = status.is_success() || status == Status::BATCH_FAILED;
        let unusable = no_record || status == Status::CR_ADDRESS_FAULT;
        if !unusable && flags.contains(Flags::CRAV) && (flags.contains(Flags::RCR) || !usual) {
            if lost {
                self.count(|counters| &counters.injected_lost, 1);
            } else {
                self.write_record(descriptor.completion, record, late_store);
            }
        }
        self.count_towards_halt();
    }

    fn write_record(&mut self, place: u64, record: &Completed, late_store: bool) {
        // SAFETY: the client gave the record to the device until the operation is completed; its alignment is checked.
        let written = unsafe { memory::write_record(place, record) };
        if written.is_ok() && late_store {
            self.count(|counters| &counters.injected_overwritten, 1);
            // SAFETY: the client gave the record to the device until the operation is completed. A fault would already
            // have occurred.
            let _ = unsafe { memory::write(place, &[0]) };
        }
    }

    /// Removes a completed descriptor from the device.
    pub(super) fn retire(&mut self, job: usize) {
        let queue = self.job(job).queue;
        self.queues[queue].outstanding -= 1;
        self.remove(job);
    }

    fn count_towards_halt(&mut self) {
        let Some(left) = &mut self.until_halt else { return };
        *left -= 1;
        if *left == 0 {
            self.until_halt = None;
            self.shared.counters.halts.fetch_add(1, Ordering::Relaxed);
            self.shared.set_state(DeviceState::Halted);
        }
    }
}
