//! How far an operation is: the descriptor of its next piece, and what a completion record says about it.
//!
//! An operation is worked through in pieces of at most the queue's maximum transfer size. A piece that stops
//! at a page fault shortens what is left, and the next piece is its continuation; so both are the same.

use crate::completion::{Completed, Status};
use crate::descriptor::Descriptor;
use crate::wq::{WqInfo, gen_cap};

use super::encode::{self, DomainAddress, Seed};
use super::operation::{Operation, overlaps};
use super::outcome::{Delta, OpsError, Value, Why};
use super::software::delta::{ApplyError, BLOCK, DELTA, MIN_RECORD};
use super::software::dif::{DifError, FIELD, Mismatch, Tags};
use super::software::{self, Pattern};

/// How far an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Progress {
    /// Bytes done at the front.
    pub(super) start: usize,
    /// The end of what is to be done; less than all when the end is done.
    pub(super) end: usize,
    /// The CRC so far.
    pub(super) crc: u32,
    /// Bytes of the delta record so far.
    pub(super) record: usize,
    /// The next block's tags: the source's, or the destination's where there is no other.
    pub(super) tags: Tags,
    /// The next block's tags in the destination of an update.
    pub(super) destination_tags: Tags,
    /// The core made a piece complete, after a page fault at this address.
    pub(super) mended: Option<u64>,
}

/// What a completion record means for the operation.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// It is done.
    Done(Value),
    /// The next piece.
    Next,
    /// The next piece, after a page fault at this address was dealt with.
    Faulted(u64),
    /// The core has to do what is left.
    Core(Why),
    /// There is no result.
    Failed(OpsError),
}

impl Progress {
    /// Nothing is done.
    pub(super) fn new(operation: &Operation) -> Self {
        let (tags, destination_tags) = match *operation {
            Operation::DifCheck { tags, .. }
            | Operation::DifInsert { tags, .. }
            | Operation::DifStrip { tags, .. }
            | Operation::DixGenerate { tags, .. } => (tags, tags),
            Operation::DifUpdate { source, destination, .. } => (source, destination),
            _ => Default::default(),
        };
        let crc = match *operation {
            Operation::Crc { seed, .. } | Operation::CopyCrc { seed, .. } => seed,
            _ => 0,
        };
        Self { start: 0, end: operation.len(), crc, record: 0, tags, destination_tags, mended: None }
    }

    /// What is left, in bytes.
    pub(super) const fn left(&self) -> usize {
        self.end - self.start
    }

    /// The descriptor of the next piece and the piece's bytes; or why the device cannot do it.
    pub(super) fn piece(&self, operation: &Operation, wq: &WqInfo) -> Result<(Descriptor, usize), Why> {
        refuse(operation, wq)?;
        let step = operation.step();
        // A transfer size of more than 32 bits cannot be written down.
        let most = usize::try_from(wq.max_transfer_size.min(1 << 31)).unwrap_or(1 << 31);
        let len = self.left().min(most / step * step);
        if len == 0 && operation.len() != 0 {
            return Err(Why::Form("a block larger than its maximum transfer size"));
        }
        Ok((self.descriptor(operation, self.place(operation, len), len, most)?, len))
    }

    /// Where the next piece of `len` bytes begins. A copy to higher addresses of itself goes from its end.
    fn place(&self, operation: &Operation, len: usize) -> usize {
        if goes_backwards(operation) { self.end - len } else { self.start }
    }

    fn descriptor(
        &self,
        operation: &Operation,
        at: usize,
        len: usize,
        most: usize,
    ) -> Result<Descriptor, Why> {
        // `most` is at most 2^31, and so is `len`.
        let size = len as u32;
        let seed = Seed::Value(self.crc);
        let tags = self.tags;
        Ok(match *operation {
            Operation::Noop => encode::noop(),
            Operation::Drain => encode::drain(),
            Operation::Copy { src, dst } => encode::copy(src.address(at), dst.address(at), size),
            Operation::Fill { pattern, dst } => {
                encode::fill(device_pattern(pattern, at), dst.address(at), size)
            }
            Operation::Compare { first, second } => {
                encode::compare(first.address(at), second.address(at), size, None)
            }
            Operation::ComparePattern { src, pattern } => {
                encode::compare_pattern(src.address(at), rotated(pattern, at), size, None)
            }
            Operation::CreateDelta { original, changed, record } => {
                let room = (record.len - self.record).min(most) / DELTA * DELTA;
                if room < MIN_RECORD {
                    return Err(Why::Form("a delta record of less than 80 bytes"));
                }
                let record = (record.address(self.record), room as u32);
                encode::create_delta(original.address(at), changed.address(at), size, record, None)
            }
            Operation::ApplyDelta { record, dst } => {
                encode::apply_delta(record.address(at), size, dst.address(0), dst.len as u32)
            }
            Operation::Dualcast { src, first, second } => {
                encode::dualcast(src.address(at), first.address(at), second.address(at), size)
            }
            Operation::Crc { src, crc, .. } => encode::crc(src.address(at), size, crc, seed),
            Operation::CopyCrc { src, dst, crc, .. } => {
                encode::copy_crc(src.address(at), dst.address(at), size, crc, seed)
            }
            Operation::DifCheck { src, dif, flags, .. } => {
                encode::dif_check(src.address(at), size, dif, flags, tags)
            }
            Operation::DifInsert { src, dst, dif, flags, .. } => {
                let to = at / dif.block() * (dif.block() + FIELD);
                encode::dif_insert(src.address(at), dst.address(to), size, dif, flags, tags)
            }
            Operation::DifStrip { src, dst, dif, flags, .. } => {
                let to = at / (dif.block() + FIELD) * dif.block();
                encode::dif_strip(src.address(at), dst.address(to), size, dif, flags, tags)
            }
            Operation::DifUpdate { src, dst, update, .. } => encode::dif_update(
                src.address(at),
                dst.address(at),
                size,
                update,
                tags,
                self.destination_tags,
            ),
            Operation::DixGenerate { src, dst, dif, flags, .. } => {
                let to = at / dif.block() * FIELD;
                encode::dix_generate(src.address(at), dst.address(to), size, dif, flags, tags)
            }
            Operation::CacheFlush { dst } => encode::cache_flush(dst.address(at), size),
            Operation::InterDomainCopy { src, dst, .. } => {
                encode::inter_domain_copy(moved(src, at), moved(dst, at), size)
            }
            Operation::InterDomainFill { pattern, dst, handle, .. } => {
                let dst = dst.wrapping_add(at as u64);
                encode::inter_domain_fill(device_pattern(pattern, at), dst, handle, size)
            }
            Operation::InterDomainCompare { first, second, .. } => {
                encode::inter_domain_compare(moved(first, at), moved(second, at), size, None)
            }
            Operation::InterDomainComparePattern { src, handle, pattern, .. } => {
                let src = src.wrapping_add(at as u64);
                encode::inter_domain_compare_pattern(src, handle, rotated(pattern, at), size, None)
            }
            Operation::UpdateWindow { handle, window, suppress_drain } => {
                encode::update_window(handle, window, suppress_drain)
            }
        })
    }

    /// Takes in the record of the piece of `len` bytes.
    ///
    /// # Safety
    ///
    /// The operation's memory is valid and nobody else uses it, as `Engine::submit` asks; the device has
    /// finished with the piece.
    pub(super) unsafe fn absorb(&mut self, operation: &Operation, len: usize, record: &Completed) -> Step {
        let done = record.completed as usize;
        match record.status {
            Status::SUCCESS | Status::FALSE_PREDICATE => {
                // SAFETY: as for this function.
                unsafe { self.succeeded(operation, len, record) }
            }
            Status::PAGE_FAULT | Status::PAGE_REQUEST_INVALID => {
                if done > len || !done.is_multiple_of(operation.step()) {
                    return self.failed(operation, record.status);
                }
                // SAFETY: as for this function.
                unsafe { self.partly(operation, len, done, record) }
            }
            Status::DELTA_OFFSET | Status::DELTA_OFFSET_ORDER => {
                Step::Failed(ApplyError { status: record.status, completed: self.start + done }.into())
            }
            Status::DIF_ERROR => {
                let mismatch = Mismatch::from_bits_retain(record.result);
                Step::Failed(DifError { mismatch, completed: self.start + done }.into())
            }
            // The checks of section 5.4: nothing was done.
            status if (0x10..0x1f).contains(&status.0) => Step::Core(Why::Refused(status)),
            status => self.failed(operation, status),
        }
    }

    fn failed(&self, operation: &Operation, status: Status) -> Step {
        let why = Why::Failed(status);
        if onto_itself(operation) { Step::Failed(OpsError::Damaged { why }) } else { Step::Core(why) }
    }

    /// Whether a device that stopped anywhere in a piece may have overwritten what is still to be read.
    pub(super) fn may_be_damaged(&self, operation: &Operation) -> bool {
        onto_itself(operation)
    }

    /// # Safety
    ///
    /// As [`Self::absorb`].
    unsafe fn succeeded(&mut self, operation: &Operation, len: usize, record: &Completed) -> Step {
        let at = self.start + (record.completed as usize).min(len);
        match *operation {
            Operation::Compare { .. } | Operation::InterDomainCompare { .. } if record.result == 1 => {
                return Step::Done(Value::Difference(Some(at)));
            }
            Operation::InterDomainComparePattern { .. } if record.result == 1 => {
                return Step::Done(Value::Difference(Some(at)));
            }
            Operation::ComparePattern { src, pattern } if record.result == 1 => {
                // SAFETY: the memory is valid and nobody writes it; `at` is inside.
                let rest = unsafe { std::slice::from_raw_parts(src.ptr.add(at), self.start + len - at) };
                // The device's offset may be before the first difference.
                let exact = software::compare_pattern(rest, Pattern::of_8(pattern), at as u64);
                return Step::Done(Value::Difference(Some(at + exact.unwrap_or(0))));
            }
            Operation::CreateDelta { .. } => {
                // SAFETY: as for this function.
                if !unsafe { self.take_record(operation, record) } {
                    return self.failed(operation, Status::HARDWARE);
                }
                if record.result == 2 {
                    return self.record_is_full(operation, at - self.start, record);
                }
            }
            _ => self.take_values(operation, record),
        }
        self.advance(operation, len);
        if self.left() == 0 { Step::Done(self.value(operation)) } else { Step::Next }
    }

    /// A piece of the record is full: what the device was given, which may be less than there is.
    fn record_is_full(&mut self, operation: &Operation, compared: usize, record: &Completed) -> Step {
        let Operation::CreateDelta { record: memory, .. } = *operation else { return Step::Next };
        if !compared.is_multiple_of(BLOCK) || (compared == 0 && record.specific[0] as u32 == 0) {
            return self.failed(operation, record.status);
        }
        self.advance(operation, compared);
        if memory.len - self.record >= DELTA {
            return Step::Next;
        }
        Step::Done(Value::Delta(Delta { size: self.record, compared: self.start, complete: false }))
    }

    /// # Safety
    ///
    /// As [`Self::absorb`].
    unsafe fn partly(&mut self, operation: &Operation, len: usize, done: usize, record: &Completed) -> Step {
        if done > 0 {
            self.take_values(operation, record);
        }
        if matches!(operation, Operation::CreateDelta { .. }) {
            // SAFETY: as for this function.
            let taken = unsafe { self.take_record(operation, record) };
            if !taken {
                return self.failed(operation, Status::HARDWARE);
            }
        }
        let at = self.place(operation, len);
        match *operation {
            Operation::Copy { src, dst } if (record.result == 1) != goes_backwards(operation) => {
                // What is left of the piece lies inside of what is left of the whole, or is followed by it:
                // the core makes the piece complete. What the device has not copied yet, it has not
                // overwritten either.
                let rest = if record.result == 1 { at..at + len - done } else { at + done..at + len };
                if onto_itself(operation) || at + len < self.end {
                    // SAFETY: both ranges are inside of the operation's memory; the copy may overlap.
                    unsafe { std::ptr::copy(src.ptr.add(rest.start), dst.ptr.add(rest.start), rest.len()) };
                    self.mended = Some(record.fault_address);
                    self.advance(operation, len);
                } else {
                    self.end -= done;
                }
            }
            _ => self.advance(operation, done),
        }
        if self.left() == 0 && operation.len() > 0 {
            return Step::Done(self.value(operation));
        }
        Step::Faulted(record.fault_address)
    }

    fn advance(&mut self, operation: &Operation, len: usize) {
        if goes_backwards(operation) {
            self.end -= len;
        } else {
            self.start += len;
        }
    }

    fn take_values(&mut self, operation: &Operation, record: &Completed) {
        let [lower, upper] = record.specific;
        match operation {
            Operation::Crc { .. } | Operation::CopyCrc { .. } => self.crc = lower as u32,
            Operation::DifCheck { .. } | Operation::DifStrip { .. } => self.tags = Tags::from_word(lower),
            Operation::DifInsert { .. } | Operation::DixGenerate { .. } => self.tags = Tags::from_word(upper),
            Operation::DifUpdate { .. } => {
                (self.tags, self.destination_tags) = (Tags::from_word(lower), Tags::from_word(upper));
            }
            _ => {}
        }
    }

    /// Takes in the deltas that a piece has written: their offsets count from the piece. Says whether they
    /// fit.
    ///
    /// # Safety
    ///
    /// As [`Self::absorb`].
    unsafe fn take_record(&mut self, operation: &Operation, record: &Completed) -> bool {
        let Operation::CreateDelta { record: memory, .. } = *operation else { return false };
        let size = record.specific[0] as u32 as usize;
        if !size.is_multiple_of(DELTA) || size > memory.len - self.record {
            return false;
        }
        if self.start > 0 {
            // SAFETY: the range is inside of the record's memory, which is ours while the operation is not
            // done.
            let deltas = unsafe { std::slice::from_raw_parts_mut(memory.ptr.add(self.record), size) };
            for delta in deltas.as_chunks_mut::<DELTA>().0 {
                let offset =
                    u16::from_le_bytes([delta[0], delta[1]]).wrapping_add((self.start / BLOCK) as u16);
                [delta[0], delta[1]] = offset.to_le_bytes();
            }
        }
        self.record += size;
        true
    }

    /// The result of an operation that is done.
    pub(super) fn value(&self, operation: &Operation) -> Value {
        match operation {
            Operation::Compare { .. }
            | Operation::ComparePattern { .. }
            | Operation::InterDomainCompare { .. }
            | Operation::InterDomainComparePattern { .. } => Value::Difference(None),
            Operation::CreateDelta { .. } => {
                Value::Delta(Delta { size: self.record, compared: operation.len(), complete: true })
            }
            Operation::Crc { .. } | Operation::CopyCrc { .. } => Value::Crc(self.crc),
            Operation::DifCheck { .. }
            | Operation::DifInsert { .. }
            | Operation::DifStrip { .. }
            | Operation::DixGenerate { .. } => Value::Tags(self.tags),
            Operation::DifUpdate { .. } => Value::BothTags(self.tags, self.destination_tags),
            _ => Value::Nothing,
        }
    }
}

fn moved(address: DomainAddress, at: usize) -> DomainAddress {
    DomainAddress { address: address.address.wrapping_add(at as u64), ..address }
}

fn rotated(pattern: u64, at: usize) -> u64 {
    Pattern::of_8(pattern).from_offset(at as u64).words().0
}

/// The pattern from there on; as 8 bytes if they are enough, because not every device takes 16.
fn device_pattern(pattern: Pattern, at: usize) -> Pattern {
    let (lower, upper) = pattern.words();
    let pattern = if lower == upper { Pattern::of_8(lower) } else { pattern };
    pattern.from_offset(at as u64)
}

fn onto_itself(operation: &Operation) -> bool {
    matches!(*operation, Operation::Copy { src, dst }
        if overlaps((src.ptr as usize, src.len), (dst.ptr as usize, dst.len)))
}

fn goes_backwards(operation: &Operation) -> bool {
    matches!(*operation, Operation::Copy { src, dst } if dst.ptr.cast_const() > src.ptr)
        && onto_itself(operation)
}

/// Why the device cannot do the operation.
fn refuse(operation: &Operation, wq: &WqInfo) -> Result<(), Why> {
    let lacks = |capability| wq.gen_cap & capability == 0;
    let form = |refused: bool, what| if refused { Err(Why::Form(what)) } else { Ok(()) };
    if !wq.ops.contains(operation.opcode()) {
        return Err(Why::Unsupported);
    }
    let aligned = |addresses: &[u64]| addresses.iter().all(|address| address.is_multiple_of(8));
    match *operation {
        Operation::Copy { .. } => {
            form(onto_itself(operation) && lacks(gen_cap::OVERLAP), "a copy onto itself")
        }
        Operation::Fill { pattern, .. } | Operation::InterDomainFill { pattern, .. } => {
            form(device_pattern(pattern, 0).size() == 16 && lacks(FILL_16), "a pattern of 16 bytes")
        }
        Operation::Dualcast { first, second, .. } => {
            let differ = (first.address(0) ^ second.address(0)) & 0xfff != 0;
            form(differ, "destinations whose addresses differ in bits 11:0")
        }
        Operation::CreateDelta { original, changed, .. } => {
            form(!aligned(&[original.address(0), changed.address(0)]), "sources that are not 8-byte aligned")
        }
        Operation::ApplyDelta { dst, .. } => {
            form(!aligned(&[dst.address(0)]), "a destination that is not 8-byte aligned")?;
            form(dst.len as u64 > wq.max_transfer_size, "a destination larger than its maximum transfer size")
        }
        Operation::DixGenerate { dst, .. } => {
            form(!aligned(&[dst.address(0)]), "a destination that is not 8-byte aligned")
        }
        _ => Ok(()),
    }
}

/// GENCAP bit 10: fill takes patterns of 16 bytes.
const FILL_16: u64 = 1 << 10;

#[cfg(test)]
mod tests;
