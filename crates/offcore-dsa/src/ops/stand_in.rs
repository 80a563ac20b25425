//! The core does what is left of an operation.

use std::arch::x86_64::{_mm_clflush, _mm_mfence};

use super::operation::{Destination, Operation, Source};
use super::outcome::{Delta, OpsError, Value};
use super::progress::Progress;
use super::software::delta::{self, ApplyError};
use super::software::dif::{self, DifError, FIELD};
use super::software::{self, Pattern};

/// Bytes of a cache line.
const LINE: usize = 64;

impl Progress {
    /// Does what is left, and returns the result. Inter-domain operations are not for the core: they have
    /// none.
    ///
    /// # Safety
    ///
    /// The operation's memory is valid and nobody else uses it, as `Engine::submit` asks; it passed
    /// [`Operation::check`]; no device works on it any more.
    pub(super) unsafe fn finish(&mut self, operation: &Operation) -> Result<Value, OpsError> {
        let (start, end) = (self.start, self.end);
        // SAFETY: in `bytes`, `bytes_mut` and the copy below, the ranges are inside of the operation's
        // memory, which is valid and ours alone. Where something is written, `Operation::check` saw that it
        // overlaps nothing else, but for the plain copy, which makes no slices.
        unsafe {
            match *operation {
                Operation::Noop | Operation::Drain => {}
                Operation::Copy { src, dst } => {
                    std::ptr::copy(src.ptr.add(start), dst.ptr.add(start), end - start);
                }
                Operation::Fill { pattern, dst } => {
                    software::fill(bytes_mut(dst, start, end), pattern, start as u64);
                }
                Operation::Compare { first, second } => {
                    let difference = software::compare(bytes(first, start, end), bytes(second, start, end));
                    return Ok(Value::Difference(difference.map(|at| start + at)));
                }
                Operation::ComparePattern { src, pattern } => {
                    let pattern = Pattern::of_8(pattern);
                    let difference = software::compare_pattern(bytes(src, start, end), pattern, start as u64);
                    return Ok(Value::Difference(difference.map(|at| start + at)));
                }
                Operation::CreateDelta { original, changed, record } => {
                    let room = bytes_mut(record, self.record, record.len);
                    let (original, changed) = (bytes(original, start, end), bytes(changed, start, end));
                    let created = delta::create(original, changed, start, room);
                    let compared = start + created.compared;
                    let size = self.record + created.record;
                    return Ok(Value::Delta(Delta { size, compared, complete: created.complete }));
                }
                Operation::ApplyDelta { record, dst } => {
                    delta::apply(bytes(record, start, end), bytes_mut(dst, 0, dst.len))
                        .map_err(|error| ApplyError { completed: start + error.completed, ..error })?;
                }
                Operation::Dualcast { src, first, second } => {
                    let (first, second) = (bytes_mut(first, start, end), bytes_mut(second, start, end));
                    software::dualcast(bytes(src, start, end), first, second);
                }
                Operation::Crc { src, crc, .. } => self.crc = crc.of(bytes(src, start, end), self.crc),
                Operation::CopyCrc { src, dst, crc, .. } => {
                    let (src, dst) = (bytes(src, start, end), bytes_mut(dst, start, end));
                    self.crc = software::copy_crc(src, dst, crc, self.crc);
                }
                Operation::CacheFlush { dst } => flush(dst, start, end),
                _ => self.finish_dif(operation)?,
            }
        }
        self.start = self.end;
        Ok(self.value(operation))
    }

    /// # Safety
    ///
    /// As [`Self::finish`].
    unsafe fn finish_dif(&mut self, operation: &Operation) -> Result<(), OpsError> {
        let (start, end) = (self.start, self.end);
        let done = start / operation.step();
        // SAFETY: as in `finish`.
        let checked = unsafe {
            match *operation {
                Operation::DifCheck { src, dif, flags, .. } => {
                    dif::check(dif, flags, &mut self.tags, bytes(src, start, end))
                }
                Operation::DifStrip { src, dst, dif, flags, .. } => {
                    let dst = bytes_mut(dst, done * dif.block(), dst.len);
                    dif::strip(dif, flags, &mut self.tags, bytes(src, start, end), dst)
                }
                Operation::DifUpdate { src, dst, update, .. } => {
                    let (src, dst) = (bytes(src, start, end), bytes_mut(dst, start, end));
                    update.run(&mut self.tags, &mut self.destination_tags, src, dst)
                }
                Operation::DifInsert { src, dst, dif, flags, .. } => {
                    let dst = bytes_mut(dst, done * (dif.block() + FIELD), dst.len);
                    dif::insert(dif, flags, &mut self.tags, bytes(src, start, end), dst);
                    Ok(())
                }
                Operation::DixGenerate { src, dst, dif, flags, .. } => {
                    let dst = bytes_mut(dst, done * FIELD, dst.len);
                    dif::generate(dif, flags, &mut self.tags, bytes(src, start, end), dst);
                    Ok(())
                }
                _ => Ok(()),
            }
        };
        checked.map_err(|error| DifError { completed: start + error.completed, ..error }.into())
    }
}

/// # Safety
///
/// `start..end` of the memory is valid, and nobody writes it while the slice lives.
unsafe fn bytes<'a>(memory: Source, start: usize, end: usize) -> &'a [u8] {
    if start == end {
        return &[];
    }
    // SAFETY: as for this function.
    unsafe { std::slice::from_raw_parts(memory.ptr.add(start), end - start) }
}

/// # Safety
///
/// `start..end` of the memory is valid, and nobody else uses it while the slice lives.
unsafe fn bytes_mut<'a>(memory: Destination, start: usize, end: usize) -> &'a mut [u8] {
    if start == end {
        return &mut [];
    }
    // SAFETY: as for this function.
    unsafe { std::slice::from_raw_parts_mut(memory.ptr.add(start), end - start) }
}

/// Flushes every line that has a byte of the range.
///
/// # Safety
///
/// `start..end` of the memory is valid.
unsafe fn flush(memory: Destination, start: usize, end: usize) {
    if start == end {
        return;
    }
    let first = memory.ptr.wrapping_add(start);
    let last = memory.ptr.wrapping_add(end - 1) as usize / LINE;
    for line in 0..=last - first as usize / LINE {
        // The first byte that the line has in the range.
        let at = if line == 0 { first } else { first.wrapping_add(line * LINE - first as usize % LINE) };
        // SAFETY: `at` is in the range, which is valid; flushing changes no memory.
        unsafe { _mm_clflush(at) };
    }
    // SAFETY: a fence needs nothing.
    unsafe { _mm_mfence() };
}
