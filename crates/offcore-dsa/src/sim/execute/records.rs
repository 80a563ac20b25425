//! Operations on delta records and data integrity fields.

use super::{Operand, Operation, Stop};
use crate::completion::Status;
use crate::descriptor::{Flags, Opcode};
use crate::sim::delta::{self, Applier, BLOCK, DELTA};
use crate::sim::dif::{Dif, FIELD};
use crate::sim::memory::{self, Fault};

/// Number of bytes of both sources that are compared at once.
const COMPARED: usize = 4096;

/// Returns the same fault, after `before` bytes of the operation in total.
fn after(fault: Fault, before: u64, operand: Operand) -> Stop {
    Stop::Page(Fault { done: before as usize, ..fault }, operand)
}

impl Operation<'_> {
    /// # Safety
    /// As [`super::execute`]. The same holds for all functions of this module.
    pub(super) unsafe fn create_delta(&mut self) -> Result<(), Stop> {
        let (first, second) = (self.descriptor.src, self.descriptor.dst);
        let (target, most) = (self.descriptor.specific[0], self.descriptor.specific[1] as u32 as usize);
        let size = u64::from(self.descriptor.size);
        let bytes = self.bytes(size, BLOCK as u64);
        let mut record = vec![0; COMPARED / BLOCK * DELTA];
        let mut written = 0;
        for (start, len) in super::data::chunks(bytes, COMPARED) {
            let (a, b) = (&mut self.scratch.first[..len], &mut self.scratch.second[..len]);
            // SAFETY: both sources are client memory or unmapped, as the caller guarantees.
            let (read_a, read_b) = unsafe {
                (memory::read(first.wrapping_add(start), a), memory::read(second.wrapping_add(start), b))
            };
            let there = [&read_a, &read_b].map(|read| read.as_ref().err().map_or(len, |fault| fault.done));
            let there = there[0].min(there[1]) / BLOCK * BLOCK;
            let room = (most - written).min(record.len());
            let created = delta::create(&a[..there], &b[..there], start as usize, &mut record[..room]);
            // SAFETY: the target is client memory or unmapped, as the caller guarantees.
            let put =
                unsafe { memory::write(target.wrapping_add(written as u64), &record[..created.record]) };
            if let Err(fault) = put {
                // Complete deltas count, and so do the bytes before the first missing delta.
                let whole = fault.done / DELTA;
                let offset = u16::from_le_bytes([record[whole * DELTA], record[whole * DELTA + 1]]);
                self.delta_so_far(written + whole * DELTA);
                return Err(after(fault, u64::from(offset) * BLOCK as u64, Operand::Destination));
            }
            written += created.record;
            self.delta_so_far(written);
            if !created.complete {
                self.record.completed = (start as usize + created.compared) as u32;
                self.delta_result(2);
                return Ok(());
            }
            for (read, operand) in [(read_a, Operand::Source), (read_b, Operand::Source2)] {
                match read {
                    Err(fault) if fault.done / BLOCK * BLOCK == there => {
                        return Err(after(fault, start + there as u64, operand));
                    }
                    _ => {}
                }
            }
        }
        self.injected(bytes, size, (first, false, Operand::Source))?;
        self.delta_result(u8::from(written > 0));
        Ok(())
    }

    /// Stores the number of delta bytes in the record, if the operation stops here.
    fn delta_so_far(&mut self, written: usize) {
        self.record.result = u8::from(written > 0);
        self.record.specific[0] = written as u64;
    }

    fn delta_result(&mut self, result: u8) {
        self.record.result = result;
        let expected = self.descriptor.specific_byte(56) >> result & 1 == 1;
        if self.descriptor.flags().contains(Flags::CHECK_RESULT) && !expected {
            self.record.status = Status::FALSE_PREDICATE;
        }
    }

    /// # Safety
    /// As [`super::execute`].
    pub(super) unsafe fn apply_delta(&mut self) -> Result<(), Stop> {
        let (src, dst) = (self.descriptor.src, self.descriptor.dst);
        let size = u64::from(self.descriptor.specific[0] as u32);
        let bytes = self.bytes(size, DELTA as u64) / DELTA as u64 * DELTA as u64;
        let mut applier = Applier::new(self.descriptor.size as usize);
        let mut one = [0; DELTA];
        for start in (0..bytes).step_by(DELTA) {
            // SAFETY: the source is client memory or unmapped, as the caller guarantees.
            unsafe { memory::read(src.wrapping_add(start), &mut one) }
                .map_err(|fault| after(fault, start, Operand::Source))?;
            let (at, block) = applier.next(&one).map_err(|status| {
                self.record.completed = start as u32;
                Stop::Status(status)
            })?;
            // SAFETY: the destination is client memory or unmapped, as the caller guarantees.
            unsafe { memory::write(dst.wrapping_add(at as u64), &block) }
                .map_err(|fault| after(fault, start, Operand::Destination))?;
        }
        self.injected(bytes, size / DELTA as u64 * DELTA as u64, (src, false, Operand::Source))
    }

    /// # Safety
    /// As [`super::execute`].
    pub(super) unsafe fn dif(&mut self, op: Opcode) -> Result<(), Stop> {
        let mut dif = Dif::of(self.descriptor);
        let block = dif.flags.block();
        let with_field = block + FIELD;
        let (from, to) = match op {
            Opcode::DifCheck => (with_field, 0),
            Opcode::DifInsert => (block, with_field),
            Opcode::DifStrip => (with_field, block),
            Opcode::DifUpdate => (with_field, with_field),
            _ => (block, FIELD),
        };
        let (src, dst) = (self.descriptor.src, self.descriptor.dst);
        let size = u64::from(self.descriptor.size);
        let whole = size / from as u64 * from as u64;
        let bytes = self.bytes(whole, from as u64);
        for at in (0..bytes).step_by(from) {
            self.tags(op, &dif);
            let input = &mut self.scratch.first[..from];
            // SAFETY: the source is client memory or unmapped, as the caller guarantees.
            unsafe { memory::read(src.wrapping_add(at), input) }
                .map_err(|fault| after(fault, at, Operand::Source))?;
            if let Err(mismatch) = dif.process(input, &mut self.scratch.second[..to]) {
                self.record.result = mismatch.bits();
                self.record.completed = at as u32;
                return Err(Stop::Status(Status::DIF_ERROR));
            }
            let written = at / from as u64 * to as u64;
            // SAFETY: the destination is client memory or unmapped, as the caller guarantees.
            unsafe { memory::write(dst.wrapping_add(written), &self.scratch.second[..to]) }
                .map_err(|fault| after(fault, at, Operand::Destination))?;
        }
        self.tags(op, &dif);
        self.injected(bytes, whole, (src, false, Operand::Source))
    }

    /// Stores the tags of the next block, if the operation's record has them.
    fn tags(&mut self, op: Opcode, dif: &Dif) {
        if !matches!(op, Opcode::DifInsert | Opcode::DixGenerate) {
            self.record.specific[0] = dif.source_tags.word();
        }
        if matches!(op, Opcode::DifInsert | Opcode::DifUpdate | Opcode::DixGenerate) {
            self.record.specific[1] = dif.destination_tags.word();
        }
    }
}
