//! What a completion record says about a copy or fill.

use offcore_dma::channel::Failure;

use crate::completion::{Completed, Status};

/// How a copy or fill ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// All of it is done.
    Done,
    /// A page fault after `bytes` bytes; of a copy that ran backwards those at the end.
    Partial {
        /// Less than were asked for.
        bytes: u32,
        /// Whether the last bytes were done instead of the first.
        backwards: bool,
    },
    /// Nothing that can be relied on is done.
    Failed(Failure),
}

/// The outcome of a descriptor of `size` bytes.
pub(super) fn outcome(record: &Completed, size: u32) -> Outcome {
    match record.status {
        status if status.is_success() => Outcome::Done,
        Status::PAGE_FAULT | Status::PAGE_REQUEST_INVALID => {
            // A record that counts as many bytes as were asked for, or more, contradicts itself.
            let bytes = if record.completed < size { record.completed } else { 0 };
            Outcome::Partial { bytes, backwards: record.result == 1 }
        }
        status => Outcome::Failed(failure(status)),
    }
}

/// What a status other than success or page fault means to who asked for the copy.
pub(super) fn failure(status: Status) -> Failure {
    match status {
        Status::PAGE_FAULT | Status::PAGE_REQUEST_INVALID | Status::BATCH_LIST_FAULT => Failure::PageFault,
        Status::HARDWARE | Status::HARDWARE_READBACK | Status::TRANSLATION => Failure::Hardware,
        _ => Failure::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_an_outcome() {
        let of = |status| outcome(&Completed::of(status), 100);
        assert_eq!(of(Status::SUCCESS), Outcome::Done);
        assert_eq!(of(Status::PAGE_FAULT), Outcome::Partial { bytes: 0, backwards: false });
        for status in [Status::HARDWARE, Status::HARDWARE_READBACK, Status::TRANSLATION] {
            assert_eq!(of(status), Outcome::Failed(Failure::Hardware));
        }
        for code in 0x10..=0x1e {
            assert_eq!(of(Status(code)), Outcome::Failed(Failure::Refused), "{code:#x}");
        }
    }

    #[test]
    fn partial_completion_counts_fewer_bytes() {
        let record = Completed { completed: 40, result: 1, ..Completed::of(Status::PAGE_FAULT) };
        assert_eq!(outcome(&record, 100), Outcome::Partial { bytes: 40, backwards: true });
        assert_eq!(outcome(&record, 40), Outcome::Partial { bytes: 0, backwards: true });
    }
}
