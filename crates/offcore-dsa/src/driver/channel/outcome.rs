//! The outcome of a copy or fill according to its completion record.

use offcore_dma::channel::Failure;

use crate::completion::{Completed, Status};

/// The outcome of a copy or fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All bytes are done.
    Done,
    /// A page fault occurred after `bytes` bytes. If the copy ran backwards, these are its last bytes.
    Partial {
        /// Less than the requested size.
        bytes: u32,
        /// Whether the last bytes were done instead of the first.
        backwards: bool,
    },
    /// No bytes can be assumed to be done.
    Failed(Failure),
}

/// Returns the outcome of a descriptor of `size` bytes.
pub(super) fn outcome(record: &Completed, size: u32) -> Outcome {
    match record.status {
        status if status.is_success() => Outcome::Done,
        Status::PAGE_FAULT | Status::PAGE_REQUEST_INVALID => {
            // A record that counts the requested size or more contradicts its own status.
            let bytes = if record.completed < size { record.completed } else { 0 };
            Outcome::Partial { bytes, backwards: record.result == 1 }
        }
        status => Outcome::Failed(failure(status)),
    }
}

/// Returns the failure that the submitter sees for a status other than success or page fault.
pub(super) fn failure(status: Status) -> Failure {
    match status {
        Status::PAGE_FAULT | Status::PAGE_REQUEST_INVALID | Status::BATCH_LIST_FAULT => Failure::PageFault,
        Status::HARDWARE | Status::HARDWARE_READBACK | Status::TRANSLATION => Failure::Hardware,
        _ => Failure::Refused,
    }
}
