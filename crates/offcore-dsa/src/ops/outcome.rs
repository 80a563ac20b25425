//! What came of an operation, who did it, and why it was not the device.

use std::fmt;

use crate::completion::Status;
use crate::descriptor::Opcode;
use crate::explain::status_name;

/// A result, and how it came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Compare: the offset of the first difference; `None`: equal.
    pub difference: Option<usize>,
    /// CRC32C and copy with it: the CRC; 0 for the others.
    pub crc: u32,
    pub done_by: DoneBy,
    /// Descriptors that the device took for it: one for every piece of at most the queue's maximum transfer
    /// size, and one for every continuation.
    pub descriptors: u32,
    /// Page faults after which the device went on.
    pub resumed: u32,
}

/// Who did an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoneBy {
    /// The device.
    Device,
    /// The core, all of it.
    Core(Why),
    /// The device began, the core finished from where it was.
    Both(Why),
}

impl fmt::Display for DoneBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device => f.write_str("device"),
            Self::Core(why) => write!(f, "core: {why}"),
            Self::Both(why) => write!(f, "device, finished by the core: {why}"),
        }
    }
}

/// Why the core did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// There is nothing to do for a device: no bytes.
    Nothing,
    /// There is no device.
    NoDevice,
    /// The work queue does not have the operation.
    Unsupported,
    /// The device has the operation, but not this form of it.
    Form(&'static str),
    /// The shared queue had no room for a long time.
    QueueFull,
    /// It kept faulting.
    PageFault {
        /// The address of the last fault.
        address: u64,
    },
    /// The device refused the descriptor.
    Refused(Status),
    /// The device failed.
    Failed(Status),
    /// The device did not answer in time, or is halted; its queue was closed.
    Lost,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("no bytes"),
            Self::NoDevice => f.write_str("no device"),
            Self::Unsupported => f.write_str("the work queue does not have the operation"),
            Self::Form(what) => write!(f, "the device does not take {what}"),
            Self::QueueFull => f.write_str("the shared work queue stayed full"),
            Self::PageFault { address } => write!(f, "page faults at {address:#x}"),
            Self::Refused(status) => write!(f, "the device refused it: {}", status_name(*status)),
            Self::Failed(status) => write!(f, "the device failed: {}", status_name(*status)),
            Self::Lost => f.write_str("the device did not answer; its queue was closed"),
        }
    }
}

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum OpsError {
    /// {operation}: {what} has {found} bytes, expected {expected}
    Length { operation: Opcode, what: &'static str, found: usize, expected: usize },
    /// {operation}: buffers overlap; only a plain copy may
    Overlap { operation: Opcode },
    /// {limit} operations are in flight already, all that work queue {wq} holds: poll first
    Full { wq: String, limit: usize },
    /// a copy onto itself failed half way ({why}): source and destination are undefined
    Damaged { why: Why },
}
