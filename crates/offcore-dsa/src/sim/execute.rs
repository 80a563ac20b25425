//! Execution of an operation: its effects on memory at the instant of its completion, and its record.
//!
//! Memory is accessed through [`super::memory`]. Every operation processes its data in order, so that it can stop at a
//! page fault and report its progress.

mod data;

use super::checks::{Limits, Refused};
use super::memory::Fault;
use crate::completion::{Completed, Status};
use crate::descriptor::{Descriptor, Flags, Opcode};

/// Maximum number of bytes processed at once.
pub(super) const CHUNK: usize = 64 << 10;

/// Private memory for data in transit.
#[derive(Debug)]
pub(super) struct Scratch {
    first: Vec<u8>,
    second: Vec<u8>,
}

impl Default for Scratch {
    fn default() -> Self {
        Self { first: vec![0; CHUNK], second: vec![0; CHUNK] }
    }
}

/// An injected fault of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Injected {
    #[default]
    Nothing,
    /// A page fault.
    Page {
        /// Number of bytes processed before the fault.
        after: u64,
        /// Whether a move runs from the end.
        backwards: bool,
        /// Whether the fault is on a destination page.
        write: bool,
    },
    /// A hardware error after this number of bytes.
    Hardware { after: u64 },
}

/// The page fault that stopped an operation: the bytes done before it, its address, whether it was a write, and the
/// operand.
type Stop = (Fault, Operand);

/// The operand that faulted (Table 8-13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Operand {
    Source = 1,
    Source2 = 2,
    Destination = 3,
}

/// An operation in execution, with its limit of bytes.
pub(super) struct RunningOperation<'a> {
    pub(super) descriptor: &'a Descriptor,
    pub(super) scratch: &'a mut Scratch,
    /// Number of bytes to process before an injected fault.
    budget: Option<u64>,
    /// The record to write.
    record: Completed,
}

impl RunningOperation<'_> {
    /// Returns the number of bytes of `size` to process before an injected fault or the end.
    fn bytes(&self, size: u64) -> u64 {
        self.budget.map_or(size, |budget| budget.min(size))
    }

    /// Returns the injected fault after `done` bytes, if it is before `size`.
    fn injected(&self, done: u64, size: u64, place: (u64, bool, Operand)) -> Result<(), Stop> {
        let (base, write, operand) = place;
        match self.budget {
            Some(_) if done < size => {
                let address = base.wrapping_add(done);
                Err((Fault { done: done as usize, address, write }, operand))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the record of a descriptor that a check refused.
pub(super) fn refusal(refused: &Refused) -> Completed {
    let mut record = Completed::of(refused.status);
    record.specific[0] = u64::from(refused.flags.bits());
    record
}

/// Executes the operation and returns its record.
///
/// # Safety
/// The descriptor's addresses refer to memory that a client gave the device, or to unmapped addresses.
pub(super) unsafe fn execute(
    descriptor: &Descriptor,
    limits: &Limits,
    injected: Injected,
    scratch: &mut Scratch,
) -> Completed {
    let (budget, backwards, write) = match injected {
        Injected::Nothing => (None, false, false),
        Injected::Page { after, backwards, write } => (Some(after), backwards, write),
        Injected::Hardware { after } => (Some(after), false, false),
    };
    let record = Completed::of(Status::SUCCESS);
    let mut operation = RunningOperation { descriptor, scratch, budget, record };
    // SAFETY: the descriptor's addresses are client memory or unmapped, as the caller guarantees.
    let outcome = unsafe { operation.run(backwards, write) };
    let record = operation.record;
    match (injected, outcome) {
        (Injected::Hardware { after }, _) => {
            // The count is undefined for this status, so it gets a useless value.
            Completed { completed: after as u32 ^ 0x5a, ..Completed::of(Status::HARDWARE) }
        }
        (_, Ok(())) => record,
        (_, Err((fault, operand))) => page_fault(record, fault, operand, limits, injected, descriptor),
    }
}

fn page_fault(
    mut record: Completed,
    fault: Fault,
    operand: Operand,
    limits: &Limits,
    injected: Injected,
    descriptor: &Descriptor,
) -> Completed {
    if !limits.ats && injected == Injected::Nothing {
        // Without address translation, the device does not notice write faults, and a read fails as a whole.
        return if fault.write { record } else { Completed::of(Status::HARDWARE) };
    }
    // A device that blocked on the fault has got the answer that the page does not exist.
    let blocked = descriptor.flags().contains(Flags::BLOCK_ON_FAULT);
    record.status = if blocked { Status::PAGE_REQUEST_INVALID } else { Status::PAGE_FAULT };
    record.fault_was_write = fault.write;
    record.completed = fault.done as u32;
    // The low bits may be reported as 0, so clients must not rely on them.
    record.fault_address = fault.address & !0xfff;
    if limits.second_generation() {
        record.fault_info = (operand as u8) << 1;
    }
    record
}

impl RunningOperation<'_> {
    /// # Safety
    /// As [`execute`].
    unsafe fn run(&mut self, backwards: bool, write: bool) -> Result<(), Stop> {
        // SAFETY: the addresses in the descriptor are client memory or unmapped, as the caller guarantees.
        unsafe {
            match self.descriptor.opcode() {
                Some(Opcode::MemoryMove) => self.memory_move(backwards, write),
                Some(Opcode::Fill) => self.fill(),
                Some(Opcode::Compare) => self.compare(),
                Some(Opcode::CrcGeneration) => self.crc(),
                _ => Ok(()),
            }
        }
    }
}
