//! The result of an operation, its executor, and the reason if the executor was not the device.

use crate::completion::Status;
use crate::descriptor::Opcode;

/// The result of an operation and how it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Compare: the offset of the first difference; `None` if the memory is equal.
    pub difference: Option<usize>,
    /// CRC32C: the CRC; 0 for other operations.
    pub crc: u32,
    pub done_by: DoneBy,
    /// Number of descriptors that the device accepted for the operation: one per piece of at most the queue's maximum
    /// transfer size, and one per continuation.
    pub descriptors: u32,
    /// Number of page faults after which the device continued.
    pub resumed: u32,
}

/// Who did an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display)]
pub enum DoneBy {
    /// device
    Device,
    /// core: {0}
    Core(Why),
    /// device, finished by the core: {0}
    Both(Why),
}

/// Why the core did it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, displaydoc::Display)]
pub enum Why {
    /// no bytes
    Nothing,
    /// no device
    NoDevice,
    /// the work queue does not have the operation
    Unsupported,
    /// source and destination overlap
    Overlap,
    /// the shared work queue stayed full
    QueueFull,
    // The address is the address of the last fault.
    /// page faults at {address:#x}
    PageFault { address: u64 },
    /// the device refused it: {0}
    Refused(Status),
    /// the device failed: {0}
    Failed(Status),
    // The device was too slow, or it is halted.
    /// the device did not answer; its queue was closed
    Lost,
}

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum OpsError {
    /// {operation}: {what} has {found} bytes, expected {expected}
    Length { operation: Opcode, what: &'static str, found: usize, expected: usize },
    /// {limit} operations are in flight already, all that work queue {wq} holds: poll first
    Full { wq: String, limit: usize },
    /// work queue {wq} is of a simulated device that only the calling thread steps, so nothing would complete while it waits:
    /// submit, step the device and poll, or step it in another thread
    Stepped { wq: String },
}
