//! The progress of an operation: the descriptor of its next piece, the effect of a completion record, and completion by
//! the core.
//!
//! An operation is executed in pieces of at most the queue's maximum transfer size. A piece that stops at a page fault
//! shortens the rest, and the next piece is its continuation, so pieces and continuations are handled alike.

use std::slice::{from_raw_parts, from_raw_parts_mut};

use crate::completion::{Completed, Status};
use crate::compute::{compare, continued, fill};
use crate::descriptor::{Descriptor, Flags};
use crate::wq::WqInfo;

use super::operation::{Operation, Source};
use super::outcome::Why;

/// The progress of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Progress {
    /// Number of bytes done at the start.
    pub(super) start: usize,
    /// The length of the operation.
    end: usize,
    /// The CRC of the bytes done.
    pub(super) crc: u32,
    /// The first difference, if it has been found.
    pub(super) difference: Option<usize>,
}

/// The effect of a completion record on the operation.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// The operation is done.
    Done,
    /// The next piece follows.
    Next,
    /// The next piece follows, after a page fault at this address has been handled.
    Faulted(u64),
    /// The core must do the rest.
    Core(Why),
}

/// Returns the reason why the device cannot execute the operation, if any.
pub(super) fn refusal(operation: &Operation<'_>, wq: &WqInfo) -> Option<Why> {
    if !wq.ops.contains(operation.opcode()) {
        Some(Why::Unsupported)
    } else if operation.overlaps() {
        // A device that fails during such a copy may already have overwritten source bytes that the core must still
        // read.
        Some(Why::Overlap)
    } else {
        None
    }
}

impl Progress {
    /// Returns the initial state, with no bytes done.
    pub(super) fn new(operation: &Operation<'_>) -> Self {
        let crc = match *operation {
            Operation::Crc { seed, .. } => seed,
            _ => 0,
        };
        Self { start: 0, end: operation.len(), crc, difference: None }
    }

    /// Returns the number of remaining bytes.
    pub(super) const fn left(&self) -> usize {
        self.end - self.start
    }

    /// Returns the descriptor of the next piece of at most `most` bytes (sections 8.3.4 to 8.3.13), without the
    /// completion record and the flags that depend on the queue.
    pub(super) fn piece(&self, operation: &Operation<'_>, most: u64) -> Descriptor {
        // A transfer size is a 32-bit field.
        let size = (self.left() as u64).min(most.min(1 << 31)) as u32;
        let at = self.start;
        let mut descriptor = Descriptor { size, ..Descriptor::new(operation.opcode(), Flags::empty()) };
        match operation {
            Operation::Copy { src, dst } => {
                (descriptor.src, descriptor.dst) = (src.address(at), dst.address(at));
            }
            Operation::Fill { pattern, dst } => {
                (descriptor.src, descriptor.dst) = (continued(*pattern, at), dst.address(at));
            }
            Operation::Compare { first, second } => {
                (descriptor.src, descriptor.dst) = (first.address(at), second.address(at));
            }
            Operation::Crc { src, .. } => {
                (descriptor.src, descriptor.specific[0]) = (src.address(at), self.crc.into());
            }
        }
        descriptor
    }

    /// Applies the record of the piece of `len` bytes.
    pub(super) fn absorb(&mut self, operation: &Operation<'_>, len: usize, record: &Completed) -> Step {
        let done = record.completed as usize;
        match record.status {
            Status::SUCCESS if record.result == 1 && matches!(operation, Operation::Compare { .. }) => {
                self.difference = Some(self.start + done.min(len));
                Step::Done
            }
            Status::SUCCESS => {
                self.take_crc(operation, record);
                self.start += len;
                if self.left() == 0 { Step::Done } else { Step::Next }
            }
            Status::PAGE_FAULT | Status::PAGE_REQUEST_INVALID if done <= len => {
                // The device copied from the end: the core copies the piece again.
                if record.result == 1 && matches!(operation, Operation::Copy { .. }) {
                    return Step::Core(Why::PageFault { address: record.fault_address });
                }
                if done > 0 {
                    self.take_crc(operation, record);
                }
                self.start += done;
                if self.left() == 0 { Step::Done } else { Step::Faulted(record.fault_address) }
            }
            // The checks of section 5.4 failed: nothing was done.
            status if (0x10..0x1f).contains(&status.0) => Step::Core(Why::Refused(status)),
            status => Step::Core(Why::Failed(status)),
        }
    }

    fn take_crc(&mut self, operation: &Operation<'_>, record: &Completed) {
        if let Operation::Crc { .. } = operation {
            self.crc = record.specific[0] as u32;
        }
    }

    /// Lets the core do the rest.
    ///
    /// # Safety
    ///
    /// The operation's memory is valid as `Source::new` and `Destination::new` require. The operation passed
    /// [`Operation::check`]. The device does not work on it any more.
    pub(super) unsafe fn finish(&mut self, operation: &Operation<'_>) {
        let (start, len) = (self.start, self.left());
        if len == 0 {
            return;
        }
        // SAFETY: the range is within the memory, which is valid. Nothing writes it while the slice lives: compare and
        // CRC only read memory.
        let bytes = |src: &Source<'_>| unsafe { from_raw_parts(src.ptr.add(start), len) };
        match operation {
            // SAFETY: both ranges are within the operation's memory; `std::ptr::copy` allows overlap.
            Operation::Copy { src, dst } => unsafe {
                std::ptr::copy(src.ptr.add(start), dst.ptr.add(start), len);
            },
            Operation::Fill { pattern, dst } => {
                // SAFETY: the range is within the memory, which is valid and not used by anything else.
                let dst = unsafe { from_raw_parts_mut(dst.ptr.add(start), len) };
                fill(dst, continued(*pattern, start));
            }
            Operation::Compare { first, second } => {
                self.difference = compare(bytes(first), bytes(second)).map(|at| start + at);
            }
            Operation::Crc { src, .. } => self.crc = crc32c::crc32c_append(self.crc, bytes(src)),
        }
        self.start = self.end;
    }
}

#[cfg(test)]
mod tests;
