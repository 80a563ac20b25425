//! The door through which descriptors reach a work queue.

/// What became of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The descriptor is with the device; on a dedicated queue that has no room it is silently dropped.
    Accepted,
    /// A shared queue had no room: try again later.
    Retry,
}

/// A work queue's portal.
#[derive(Debug)]
pub struct Portal {}
