//! The counters of a simulated device.

use std::sync::atomic::{AtomicU64, Ordering};

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
