//! The operations on bytes: move, fill, compare, CRC.

use super::{CHUNK, Operand, RunningOperation, Stop};
use crate::completion::Status;
use crate::compute;
use crate::descriptor::Flags;
use crate::sim::memory::{self, Fault};

/// Returns the same fault, after `before` more bytes of the operation.
fn at(fault: Fault, before: u64, operand: Operand) -> Stop {
    (Fault { done: fault.done + before as usize, ..fault }, operand)
}

/// Returns the faulting operand of an access that reads the source and writes the destination.
fn side(fault: &Fault) -> Operand {
    if fault.write { Operand::Destination } else { Operand::Source }
}

/// Splits `bytes` into pieces of at most `most` bytes: offset and length.
fn chunks(bytes: u64, most: usize) -> impl Iterator<Item = (u64, usize)> {
    (0..bytes).step_by(most).map(move |start| (start, (bytes - start).min(most as u64) as usize))
}

impl RunningOperation<'_> {
    /// # Safety
    /// As [`super::execute`]. The same holds for all functions of this module.
    pub(super) unsafe fn memory_move(&mut self, backwards: bool, write: bool) -> Result<(), Stop> {
        let (src, dst) = (self.descriptor.src, self.descriptor.dst);
        let size = u64::from(self.descriptor.size);
        let bytes = self.bytes(size);
        let overlaps_above = dst > src && dst - src < size;
        if overlaps_above || (backwards && bytes < size) {
            self.record.result = 1;
            let skip = size - bytes;
            // SAFETY: both ranges are client memory or unmapped, as the caller guarantees.
            unsafe { memory::copy_backwards(dst + skip, src + skip, bytes as usize) }
                .map_err(|fault| at(fault, 0, side(&fault)))?;
            if self.budget.is_some() && bytes < size {
                let base = if write { dst } else { src };
                let fault = Fault { done: bytes as usize, address: base + skip - 1, write };
                return Err((fault, side(&fault)));
            }
            // Only a partial completion reports a direction.
            self.record.result = 0;
            return Ok(());
        }
        // SAFETY: both ranges are client memory or unmapped, as the caller guarantees.
        unsafe { memory::copy(dst, src, bytes as usize) }.map_err(|fault| at(fault, 0, side(&fault)))?;
        let (base, operand) = if write { (dst, Operand::Destination) } else { (src, Operand::Source) };
        self.injected(bytes, size, (base, write, operand))
    }

    /// # Safety
    /// As [`super::execute`].
    pub(super) unsafe fn fill(&mut self) -> Result<(), Stop> {
        let dst = self.descriptor.dst;
        let size = u64::from(self.descriptor.size);
        let bytes = self.bytes(size);
        // The chunk size is a multiple of the pattern size, so every piece begins with the start of the pattern.
        let piece = (bytes as usize).min(CHUNK);
        compute::fill(&mut self.scratch.first[..piece], self.descriptor.src);
        for (start, len) in chunks(bytes, CHUNK) {
            // SAFETY: the destination is client memory or unmapped, as the caller guarantees.
            unsafe { memory::write(dst.wrapping_add(start), &self.scratch.first[..len]) }
                .map_err(|fault| at(fault, start, Operand::Destination))?;
        }
        self.injected(bytes, size, (dst, true, Operand::Destination))
    }

    /// # Safety
    /// As [`super::execute`].
    pub(super) unsafe fn compare(&mut self) -> Result<(), Stop> {
        let (first, second) = (self.descriptor.src, self.descriptor.dst);
        let size = u64::from(self.descriptor.size);
        let bytes = self.bytes(size);
        for (start, len) in chunks(bytes, CHUNK) {
            let (a, b) = (&mut self.scratch.first[..len], &mut self.scratch.second[..len]);
            // SAFETY: both sources are client memory or unmapped, as the caller guarantees.
            let (read_a, read_b) = unsafe {
                (memory::read(first.wrapping_add(start), a), memory::read(second.wrapping_add(start), b))
            };
            let there = [&read_a, &read_b].map(|read| read.as_ref().err().map_or(len, |fault| fault.done));
            let there = there[0].min(there[1]);
            // A difference before the fault is reported instead of the fault.
            if let Some(different) = compute::compare(&a[..there], &b[..there]) {
                return self.compared(Some(start + different as u64));
            }
            for (read, operand) in [(read_a, Operand::Source), (read_b, Operand::Source2)] {
                match read {
                    Err(fault) if fault.done == there => return Err(at(fault, start, operand)),
                    _ => {}
                }
            }
        }
        self.injected(bytes, size, (first, false, Operand::Source))?;
        self.compared(None)
    }

    /// Records the result of a comparison (Table 8-17).
    fn compared(&mut self, different: Option<u64>) -> Result<(), Stop> {
        self.record.result = u8::from(different.is_some());
        self.record.completed = different.unwrap_or(0) as u32;
        let expected = self.descriptor.specific_byte(40) & 1;
        let checked = self.descriptor.flags().contains(Flags::CHECK_RESULT);
        if checked && self.record.result != expected {
            self.record.status = Status::FALSE_PREDICATE;
        }
        Ok(())
    }

    /// # Safety
    /// As [`super::execute`].
    pub(super) unsafe fn crc(&mut self) -> Result<(), Stop> {
        let src = self.descriptor.src;
        let mut value = self.descriptor.specific[0] as u32;
        let size = u64::from(self.descriptor.size);
        let bytes = self.bytes(size);
        for (start, len) in chunks(bytes, CHUNK) {
            let data = &mut self.scratch.first[..len];
            // SAFETY: the source is client memory or unmapped, as the caller guarantees.
            let read = unsafe { memory::read(src.wrapping_add(start), data) };
            let there = read.as_ref().err().map_or(len, |fault| fault.done);
            value = crc32c::crc32c_append(value, &data[..there]);
            self.record.specific[0] = u64::from(value);
            read.map_err(|fault| at(fault, start, Operand::Source))?;
        }
        self.record.specific[0] = u64::from(value);
        self.injected(bytes, size, (src, false, Operand::Source))
    }
}
