//! Submission of descriptors to a work queue.
//!
//! There are four ways to submit. The choice is made when the queue is opened ([`SubmitBy`]). The choice costs one
//! predictable branch per doorbell.

mod instructions;
mod ways;

use std::path::PathBuf;

use crate::descriptor::Descriptor;
pub use crate::descriptor::SubmitResult;
use crate::sim::SimPortal;

pub use instructions::Instructions;
pub(crate) use ways::{Page, Writer};

/// Number of ENQCMD attempts before a descriptor is reported as not accepted.
const ENQCMD_TRIES: u32 = 4;

/// How descriptors get to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display)]
pub enum SubmitBy {
    /// A posted 64-byte store to a mapped dedicated queue.
    #[displaydoc("MOVDIR64B")]
    Movdir64b,
    /// A 64-byte store to a mapped shared queue that answers whether there was room.
    #[displaydoc("ENQCMD")]
    Enqcmd,
    /// A system call, which the kernel turns into one of the two: where mapping is not permitted.
    #[displaydoc("write()")]
    Write,
    /// The simulator.
    #[displaydoc("simulator")]
    Simulator,
}

/// A work queue's portal. Dropping it closes the queue: the kernel (or the simulator) aborts the descriptors that this
/// client still has in it, and none of them accesses memory afterwards.
#[derive(Debug)]
pub struct Portal {
    door: Door,
    batches: bool,
    /// The sysfs attribute with the queue's state; `None` for the simulator, which is asked directly.
    state: Option<PathBuf>,
}

#[derive(Debug)]
enum Door {
    Movdir64b(Page),
    Enqcmd(Page),
    Write(Writer),
    Sim(SimPortal),
}

impl From<SimPortal> for Portal {
    fn from(portal: SimPortal) -> Self {
        Self { door: Door::Sim(portal), batches: true, state: None }
    }
}

impl Portal {
    /// Returns the portal of a mapped dedicated queue. The CPU must have MOVDIR64B: see [`Instructions`].
    pub(crate) fn movdir64b(page: Page, state: PathBuf) -> Self {
        debug_assert!(Instructions::detect().movdir64b);
        Self { door: Door::Movdir64b(page), batches: true, state: Some(state) }
    }

    /// Returns the portal of a mapped shared queue. The CPU must have ENQCMD: see [`Instructions`].
    pub(crate) fn enqcmd(page: Page, state: PathBuf) -> Self {
        debug_assert!(Instructions::detect().enqcmd);
        Self { door: Door::Enqcmd(page), batches: true, state: Some(state) }
    }

    /// Returns the portal of a queue that is used by write(). The kernel refuses batches on devices of version 1.
    pub(crate) fn write(writer: Writer, batches: bool, state: PathBuf) -> Self {
        Self { door: Door::Write(writer), batches, state: Some(state) }
    }

    /// Submits one descriptor to the device.
    ///
    /// # Safety
    /// The memory that the descriptor names is valid for its operation until the device has completed it. Until then,
    /// nothing else uses that memory, except to read what the operation only reads. This includes the completion
    /// record, and the descriptors of a batch with their memory.
    #[inline(always)]
    pub unsafe fn submit(&mut self, descriptor: &Descriptor) -> SubmitResult {
        match &mut self.door {
            Door::Movdir64b(page) => {
                // SAFETY: this variant is only created if the CPU has the instruction; the page is a mapped portal.
                unsafe { instructions::movdir64b(page.next(), descriptor) };
                SubmitResult::Accepted
            }
            Door::Enqcmd(page) => enqcmd(page, descriptor),
            Door::Write(writer) => match writer.write(std::slice::from_ref(descriptor)) {
                0 => SubmitResult::Retry,
                _ => SubmitResult::Accepted,
            },
            // SAFETY: the memory that the descriptor names stays valid and unused until completion, as the caller
            // guarantees.
            Door::Sim(portal) => unsafe { portal.submit(descriptor) },
        }
    }

    /// Submits descriptors to the device, in order, until one is not accepted. Returns the number of accepted
    /// descriptors.
    ///
    /// # Safety
    /// As [`Portal::submit`], for each descriptor.
    #[inline(always)]
    pub unsafe fn submit_burst(&mut self, descriptors: &[Descriptor]) -> usize {
        if let Door::Write(writer) = &mut self.door {
            // A single system call submits all descriptors.
            return writer.write(descriptors);
        }
        // SAFETY: the caller keeps the memory of each descriptor valid and unused until its completion.
        let submit = |descriptor| unsafe { self.submit(descriptor) };
        let taken = descriptors.iter().map(submit).position(|submitted| submitted == SubmitResult::Retry);
        taken.unwrap_or(descriptors.len())
    }

    /// Orders memory: the device sees stores before this call before it sees descriptors that are submitted after it.
    #[inline(always)]
    pub fn fence(&mut self) {
        instructions::sfence();
        if let Door::Sim(portal) = &mut self.door {
            portal.fence();
        }
    }

    /// Prepares for about `n` submissions. Call it after a burst, with the expected size of the next one.
    #[inline(always)]
    pub fn prepare(&self, n: usize) {
        if let Door::Sim(portal) = &self.door {
            portal.prepare(n);
        }
    }

    /// Returns the way in which this portal submits.
    pub fn kind(&self) -> SubmitBy {
        match &self.door {
            Door::Movdir64b(_) => SubmitBy::Movdir64b,
            Door::Enqcmd(_) => SubmitBy::Enqcmd,
            Door::Write(_) => SubmitBy::Write,
            Door::Sim(_) => SubmitBy::Simulator,
        }
    }

    /// Whether batch descriptors may be submitted through this portal.
    pub fn allows_batch(&self) -> bool {
        self.batches
    }

    /// Whether the queue still works. On hardware this is a system call, so do not call it for every burst.
    pub fn is_alive(&self) -> bool {
        match &self.door {
            Door::Sim(portal) => return portal.is_alive(),
            Door::Write(writer) if writer.is_broken() => return false,
            _ => {}
        }
        let state = self.state.as_ref().map(std::fs::read_to_string);
        matches!(state, Some(Ok(text)) if text.trim() == "enabled")
    }
}

#[inline(always)]
fn enqcmd(page: &mut Page, descriptor: &Descriptor) -> SubmitResult {
    for _ in 0..ENQCMD_TRIES {
        // SAFETY: this variant is only created if the CPU has the instruction; the page is a mapped portal.
        if unsafe { instructions::enqcmd(page.next(), descriptor) } == SubmitResult::Accepted {
            return SubmitResult::Accepted;
        }
        std::hint::spin_loop();
    }
    SubmitResult::Retry
}
