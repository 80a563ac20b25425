//! The door through which descriptors reach a work queue.
//!
//! Behind it is one of four ways, chosen when the queue is opened ([`SubmitBy`]). The choice costs one predictable
//! branch per doorbell.

mod instructions;
mod ways;

use std::path::PathBuf;

use crate::descriptor::Descriptor;
pub use crate::descriptor::Submitted;
use crate::sim::SimPortal;
use crate::sim::Stepper;

pub use instructions::Instructions;
pub(crate) use ways::{Page, Writer};

/// ENQCMD is tried so often before the descriptor is said to have found no room.
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

/// A work queue's portal. Dropping it closes the queue: the kernel (or the simulator) aborts what this client still has
/// in it, and nothing of it touches memory afterwards.
#[derive(Debug)]
pub struct Portal {
    door: Door,
    batches: bool,
    /// Where the kernel tells the queue's state; the simulator is asked itself.
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
    /// A mapped dedicated queue. The CPU has MOVDIR64B: see [`Instructions`].
    pub(crate) fn movdir64b(page: Page, state: PathBuf) -> Self {
        debug_assert!(Instructions::detect().movdir64b);
        Self { door: Door::Movdir64b(page), batches: true, state: Some(state) }
    }

    /// A mapped shared queue. The CPU has ENQCMD: see [`Instructions`].
    pub(crate) fn enqcmd(page: Page, state: PathBuf) -> Self {
        debug_assert!(Instructions::detect().enqcmd);
        Self { door: Door::Enqcmd(page), batches: true, state: Some(state) }
    }

    /// A queue by write(). The kernel refuses batches on devices of version 1.
    pub(crate) fn write(writer: Writer, batches: bool, state: PathBuf) -> Self {
        Self { door: Door::Write(writer), batches, state: Some(state) }
    }

    /// Hands one descriptor to the device.
    ///
    /// # Safety
    /// The memory that the descriptor names is valid for its operation until the device has completed it, and nothing else uses it
    /// meanwhile but for reads of what the operation reads. This includes the completion record, and the descriptors of a batch
    /// with their memory.
    #[inline(always)]
    pub unsafe fn submit(&mut self, descriptor: &Descriptor) -> Submitted {
        match &mut self.door {
            Door::Movdir64b(page) => {
                // SAFETY: this door is only made where the CPU has the instruction; the page is a mapped portal.
                unsafe { instructions::movdir64b(page.next(), descriptor) };
                Submitted::Accepted
            }
            Door::Enqcmd(page) => enqcmd(page, descriptor),
            Door::Write(writer) => match writer.write(std::slice::from_ref(descriptor)) {
                0 => Submitted::Retry,
                _ => Submitted::Accepted,
            },
            // SAFETY: the caller's promise.
            Door::Sim(portal) => unsafe { portal.submit(descriptor) },
        }
    }

    /// Hands descriptors to the device, in order, until one finds no room; returns how many it has.
    ///
    /// # Safety
    /// As [`Portal::submit`], for each of them.
    #[inline(always)]
    pub unsafe fn submit_burst(&mut self, descriptors: &[Descriptor]) -> usize {
        if let Door::Write(writer) = &mut self.door {
            // One system call for all.
            return writer.write(descriptors);
        }
        // SAFETY: the caller's promise.
        let submit = |descriptor| unsafe { self.submit(descriptor) };
        let taken = descriptors.iter().map(submit).position(|submitted| submitted == Submitted::Retry);
        taken.unwrap_or(descriptors.len())
    }

    /// Stores to memory before it are seen by the device before descriptors that are submitted after it.
    #[inline(always)]
    pub fn fence(&mut self) {
        instructions::sfence();
        if let Door::Sim(portal) = &mut self.door {
            portal.fence();
        }
    }

    /// Gets ready for about `n` submissions: after a burst, for the one to come.
    #[inline(always)]
    pub fn prepare(&self, n: usize) {
        if let Door::Sim(portal) = &self.door {
            portal.prepare(n);
        }
    }

    /// The thread that steps a simulated device. Hardware needs no steps.
    pub(crate) fn stepper(&self) -> Stepper {
        match &self.door {
            Door::Sim(portal) => portal.stepper(),
            _ => Stepper::Other,
        }
    }

    /// The way that was chosen.
    pub fn kind(&self) -> SubmitBy {
        match &self.door {
            Door::Movdir64b(_) => SubmitBy::Movdir64b,
            Door::Enqcmd(_) => SubmitBy::Enqcmd,
            Door::Write(_) => SubmitBy::Write,
            Door::Sim(_) => SubmitBy::Simulator,
        }
    }

    /// Whether batch descriptors may be submitted this way.
    pub fn allows_batch(&self) -> bool {
        self.batches
    }

    /// Whether the queue still works: a system call on hardware, so not for every burst.
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
fn enqcmd(page: &mut Page, descriptor: &Descriptor) -> Submitted {
    for _ in 0..ENQCMD_TRIES {
        // SAFETY: this door is only made where the CPU has the instruction; the page is a mapped portal.
        if unsafe { instructions::enqcmd(page.next(), descriptor) } == Submitted::Accepted {
            return Submitted::Accepted;
        }
        std::hint::spin_loop();
    }
    Submitted::Retry
}
