//! What came of an operation, who did it, and why it was not the device.

use std::fmt;

use crate::completion::Status;
use crate::descriptor::Opcode;
use crate::explain::{operation_name, status_name};

use super::operation::Expected;
use super::software::delta::ApplyError;
use super::software::dif::{DifError, Tags};

/// A result, and how it came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done<T> {
    /// The result.
    pub value: T,
    /// Who computed it.
    pub done_by: DoneBy,
    /// Descriptors that the device took for it: one for every piece of at most the queue's maximum transfer
    /// size, and one for every continuation.
    pub descriptors: u32,
    /// Page faults after which the device went on.
    pub resumed: u32,
}

impl<T> Done<T> {
    /// The same with another value.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Done<U> {
        let Self { value, done_by, descriptors, resumed } = self;
        Done { value: change(value), done_by, descriptors, resumed }
    }
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

/// The result of any operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value {
    /// Done; there is nothing to say.
    Nothing,
    /// The offset of the first difference; `None`: equal.
    Difference(Option<usize>),
    /// The CRC.
    Crc(u32),
    /// The delta record.
    Delta(Delta),
    /// The tags of the block after the last.
    Tags(Tags),
    /// The source's and the destination's tags of the block after the last.
    BothTags(Tags, Tags),
}

/// A delta record that was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    /// Bytes of the record; 0: no difference.
    pub size: usize,
    /// Bytes compared before the record was full; all of them where it is complete.
    pub compared: usize,
    /// Whether it holds every difference.
    pub complete: bool,
}

/// Why there is no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpsError {
    /// The core cannot stand in.
    #[error("{} is not supported by {device}: {reason}", operation_name(*.operation))]
    NotSupported {
        /// What was asked for.
        operation: Opcode,
        /// The work queue, or that there is none.
        device: String,
        /// Why not.
        reason: Why,
    },
    /// The lengths do not fit each other or the operation.
    #[error("{}: {what} has {found} bytes, expected {expected}", operation_name(*.operation))]
    Length {
        /// What was asked for.
        operation: Opcode,
        /// Which memory.
        what: &'static str,
        /// Its bytes.
        found: usize,
        /// What it should have.
        expected: Expected,
    },
    /// Memory that is written overlaps other memory of the operation.
    #[error("{}: buffers overlap; only a plain copy may", operation_name(*.operation))]
    Overlap {
        /// What was asked for.
        operation: Opcode,
    },
    /// As many operations are in flight as the queue holds.
    #[error("{limit} operations are in flight already, all that {device} holds: poll first")]
    Full {
        /// The work queue.
        device: String,
        /// Operations that it holds.
        limit: usize,
    },
    /// The delta record is not one of this destination.
    #[error(transparent)]
    Delta(#[from] ApplyError),
    /// A data integrity field is not what it should be.
    #[error(transparent)]
    Dif(#[from] DifError),
    /// The source may have been overwritten, so nobody can finish it.
    #[error("a copy onto itself failed half way ({why}): source and destination are undefined")]
    Damaged {
        /// What happened.
        why: Why,
    },
}
