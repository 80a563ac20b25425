//! Making an operation: what happens in memory at the instant of its completion, and what its record says.
//!
//! Bytes are read and written through [`super::memory`]; every operation goes through its data in order, so that it can
//! stop at a page fault and say how far it came.

mod data;
mod records;

use super::checks::{Limits, Refused};
use super::memory::{self, Fault};
use crate::completion::{Completed, Status};
use crate::descriptor::{Descriptor, Flags, Opcode};

/// Bytes that are looked at in one piece.
pub(super) const CHUNK: usize = 64 << 10;

/// Private memory that data passes through.
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

/// What goes wrong with an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Injected {
    #[default]
    Nothing,
    /// A page fault after that many bytes.
    Page {
        /// Bytes that are processed before.
        after: u64,
        /// A move runs from its end.
        backwards: bool,
        /// It is the destination's page.
        write: bool,
    },
    /// A hardware error after that many bytes.
    Hardware { after: u64 },
}

/// How an operation stopped before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// At a page: bytes of the operation done before, address, and whether it was to be written; and which operand.
    Page(Fault, Operand),
    /// For another reason, with this status.
    Status(Status),
}

/// Which operand faulted (Table 8-13).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Operand {
    Source = 1,
    Source2 = 2,
    Destination = 3,
    Destination2 = 4,
}

/// An operation on its way: what is asked for, and how far the model lets it go.
pub(super) struct Operation<'a> {
    pub(super) descriptor: &'a Descriptor,
    pub(super) scratch: &'a mut Scratch,
    /// Bytes that it may process before an injected fault.
    budget: Option<u64>,
    /// What the record will say.
    record: Completed,
}

impl Operation<'_> {
    /// Bytes of `size` to be processed, in units of `unit`, before an injected fault or the end.
    fn bytes(&self, size: u64, unit: u64) -> u64 {
        self.budget.map_or(size, |budget| budget.min(size) / unit * unit)
    }

    /// The injected fault after `done` bytes, when there is one before `size`.
    fn injected(&self, done: u64, size: u64, place: (u64, bool, Operand)) -> Result<(), Stop> {
        let (base, write, operand) = place;
        match self.budget {
            Some(_) if done < size => {
                let address = base.wrapping_add(done);
                Err(Stop::Page(Fault { done: done as usize, address, write }, operand))
            }
            _ => Ok(()),
        }
    }
}

/// The record of a descriptor that a check refused.
pub(super) fn refusal(refused: &Refused) -> Completed {
    let mut record = Completed::of(refused.status);
    record.specific[0] = u64::from(refused.flags.bits());
    record
}

/// Makes the operation and returns its record.
///
/// # Safety
/// What the descriptor points to is memory that a client gave the device, or not mapped.
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
    let mut operation = Operation { descriptor, scratch, budget, record };
    // SAFETY: as the caller promises.
    let outcome = unsafe { operation.run(backwards, write) };
    let mut record = operation.record;
    match (injected, outcome) {
        (Injected::Hardware { after }, Ok(()) | Err(Stop::Page(..))) => {
            // Undefined for this status: nobody may make anything of it.
            Completed { completed: after as u32 ^ 0x5a, ..Completed::of(Status::HARDWARE) }
        }
        (_, Ok(())) => record,
        (_, Err(Stop::Status(status))) => {
            record.status = status;
            record
        }
        (_, Err(Stop::Page(fault, operand))) => {
            page_fault(record, fault, operand, limits, injected, descriptor)
        }
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
        // Without address translation, the device is not told of write faults, and a read just fails.
        return if fault.write { record } else { Completed::of(Status::HARDWARE) };
    }
    // A device that blocked on the fault was told that there is no page.
    let blocked = descriptor.flags().contains(Flags::BLOCK_ON_FAULT);
    record.status = if blocked { Status::PAGE_REQUEST_INVALID } else { Status::PAGE_FAULT };
    record.fault_was_write = fault.write;
    record.completed = fault.done as u32;
    // The low bits may be reported as 0, so nobody may rely on them.
    record.fault_address = fault.address & !0xfff;
    if limits.second_generation() {
        record.fault_info = (operand as u8) << 1;
    }
    record
}

impl Operation<'_> {
    /// # Safety
    /// As [`execute`].
    unsafe fn run(&mut self, backwards: bool, write: bool) -> Result<(), Stop> {
        // SAFETY: as the caller promises, for every operation.
        unsafe {
            match self.descriptor.opcode() {
                Some(Opcode::MemoryMove) => self.memory_move(backwards, write),
                Some(Opcode::Fill) => self.fill(),
                Some(Opcode::Compare) => self.compare(),
                Some(Opcode::ComparePattern) => self.compare_pattern(),
                Some(Opcode::Dualcast) => self.dualcast(write),
                Some(Opcode::CrcGeneration) => self.crc(None),
                Some(Opcode::CopyCrc) => self.crc(Some(self.descriptor.dst)),
                Some(Opcode::CreateDelta) => self.create_delta(),
                Some(Opcode::ApplyDelta) => self.apply_delta(),
                Some(
                    op @ (Opcode::DifCheck
                    | Opcode::DifInsert
                    | Opcode::DifStrip
                    | Opcode::DifUpdate
                    | Opcode::DixGenerate),
                ) => self.dif(op),
                Some(Opcode::CacheFlush) => self.translate(self.descriptor.dst, 4096, Operand::Destination),
                Some(Opcode::TranslationFetch) => {
                    let strided = self.descriptor.flags().contains(Flags::OP_0);
                    let stride = if strided { self.descriptor.specific[1] as u32 } else { 4096 };
                    self.translate(self.descriptor.src, u64::from(stride), Operand::Source)
                }
                Some(Opcode::Drain) => self.readback(),
                _ => Ok(()),
            }
        }
    }

    /// Looks up the page at every `stride` bytes of the range.
    ///
    /// # Safety
    /// As [`execute`].
    unsafe fn translate(&mut self, base: u64, stride: u64, operand: Operand) -> Result<(), Stop> {
        let size = u64::from(self.descriptor.size);
        let bytes = self.bytes(size, 1);
        let mut at = 0;
        while at < bytes {
            // SAFETY: as the caller promises.
            unsafe { memory::read(base.wrapping_add(at), &mut self.scratch.first[..1]) }
                .map_err(|fault| Stop::Page(Fault { done: at as usize, ..fault }, operand))?;
            // The next page, or the next stride.
            at += stride - if stride == 4096 { base.wrapping_add(at) % 4096 } else { 0 };
        }
        self.injected(bytes, size, (base, false, operand))
    }

    /// Reads the readback addresses of a drain.
    ///
    /// # Safety
    /// As [`execute`].
    unsafe fn readback(&mut self) -> Result<(), Stop> {
        let flags = self.descriptor.flags();
        let addresses = [(Flags::OP_0, self.descriptor.src), (Flags::OP_1, self.descriptor.dst)];
        for (_, address) in addresses.into_iter().filter(|(valid, _)| flags.contains(*valid)) {
            // SAFETY: as the caller promises.
            if let Err(fault) = unsafe { memory::read(address, &mut self.scratch.first[..1]) } {
                self.record.fault_address = fault.address & !0xfff;
                return Err(Stop::Status(Status::DRAIN_READBACK));
            }
        }
        Ok(())
    }
}
