//! What a simulated device counts, and the errors that it cannot report in a completion record.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::completion::Status;

/// An error that no completion record tells of (section 5.4 and 5.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SoftwareError {
    /// What is wrong; `None` for a descriptor that was dropped because the dedicated queue was full.
    pub status: Option<Status>,
    pub wq: u32,
    pub opcode: u8,
    pub batch_member: Option<u32>,
    pub address: u64,
}

/// SWERROR and, where the device has one, the event log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SoftwareErrors {
    /// SWERROR: the first error since the device was reset or the register cleared.
    pub first: Option<SoftwareError>,
    /// SWERROR's overflow bit: there were others.
    pub overflow: bool,
    /// The event log, oldest first; empty where the device has none.
    pub log: Vec<SoftwareError>,
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What a simulated device has done so far.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct SimStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters behind [`SimStats`]; the engine writes them.
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
    /// Descriptors completed, with whatever status; members of batches and batches count.
    completed,
    /// Batches completed.
    batches,
    /// Completed with an error.
    failed,
    /// Bytes that operations were made on.
    bytes,
    /// Silently dropped, because a dedicated queue was full.
    overflowed,
    /// Refused, because a shared queue was full.
    retried,
    /// Page faults for pages that are not there.
    real_page_faults,
    /// Page faults injected.
    injected_page_faults,
    /// Hardware errors injected.
    injected_hardware_errors,
    /// Submissions that vanished.
    injected_drops,
    /// Completions made late.
    injected_late,
    /// Completion records not written.
    injected_lost,
    /// Completion records overwritten by the CPU's late store, since no fence kept it in order.
    injected_overwritten,
    /// Retry answers injected.
    injected_retries,
    /// Times the device halted.
    halts,
    /// Times the device was reset.
    resets,
    /// Descriptors given up because their client closed the queue, or the device halted or was reset.
    aborted,
}
