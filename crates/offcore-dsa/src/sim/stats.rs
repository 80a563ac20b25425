//! The counters of a simulated device, and errors that cannot be reported in a completion record.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::completion::Status;

/// An error that no completion record contains (sections 5.4 and 5.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftwareError {
    /// The error; `None` for a descriptor that was dropped because the dedicated queue was full.
    pub status: Option<Status>,
    pub wq: u32,
    pub opcode: u8,
    pub batch_member: Option<u32>,
    pub address: u64,
}

/// SWERROR and, if the device has one, the event log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SoftwareErrors {
    /// SWERROR: the first error since the device was reset or the register cleared.
    pub first: Option<SoftwareError>,
    /// SWERROR's overflow bit: further errors occurred.
    pub overflow: bool,
    /// The event log, oldest first; empty if the device has none.
    pub log: Vec<SoftwareError>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The statistics of a simulated device.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct SimStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters behind [`SimStats`], written by the engine.
        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub(super) $name: AtomicU64,)*
        }

        impl Counters {
            pub(super) fn snapshot(&self) -> SimStats {
                SimStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Descriptors that arrived at work queues.
    arrived,
    /// Descriptors completed with any status, including batches and their members.
    completed,
    /// Batches completed.
    batches,
    /// Descriptors completed with an error.
    failed,
    /// Bytes processed by operations.
    bytes,
    /// Descriptors silently dropped because a dedicated queue was full.
    overflowed,
    /// Descriptors refused because a shared queue was full.
    retried,
    /// Page faults at pages that are really missing.
    real_page_faults,
    /// Page faults injected.
    injected_page_faults,
    /// Hardware errors injected.
    injected_hardware_errors,
    /// Submissions lost by injection.
    injected_drops,
    /// Completions delayed by injection.
    injected_late,
    /// Completion records not written by injection.
    injected_lost,
    /// Completion records overwritten by the CPU's late store, which no fence ordered.
    injected_overwritten,
    /// Retry answers injected.
    injected_retries,
    /// Number of halts.
    halts,
    /// Number of resets.
    resets,
    /// Descriptors aborted because their client closed the queue, or the device halted or was reset.
    aborted,
}
