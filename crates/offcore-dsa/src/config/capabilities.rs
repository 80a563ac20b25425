//! The limits of a device's layout: its capability registers as sysfs reports them.

use crate::wq::{OpSet, gen_cap};

/// The capabilities that limit a device's layout (sections 9.2.4 to 9.2.10).
#[derive(Clone, Debug, PartialEq, Eq)]
// fields-ok: plain figures of a device
pub struct DeviceCapabilities {
    /// Version of the device: 0x100, 0x200, …
    pub version: u32,
    /// GENCAP, as in [`crate::wq::gen_cap`].
    pub gen_cap: u64,
    /// OPCAP: the device's operations. For version 1 devices the kernel hides Batch in sysfs.
    pub ops: OpSet,
    pub groups: usize,
    pub wqs: usize,
    pub engines: usize,
    /// Number of descriptors that all work queues hold together.
    pub total_wq_size: u32,
    /// Read buffers; 0 if the device has no controls for them.
    pub read_buffers: u32,
    pub max_batch_size: u32,
    pub max_transfer_size: u64,
    /// Whether PASIDs are enabled. Shared queues need them, and in Linux user queues do, too.
    pub pasid: bool,
    /// Whether the page request service is on. Without it, no descriptor can block on faults.
    pub page_requests: bool,
    pub event_log: bool,
    /// Whether ATS can be turned off for a single queue.
    pub wq_ats_control: bool,
    /// Whether PRS can be turned off for a single queue.
    pub wq_prs_control: bool,
    /// Whether operations can be forbidden for a single queue.
    pub wq_op_config: bool,
    /// Whether groups can share a limit of read buffers.
    pub read_buffer_limit: bool,
    /// Whether descriptors in progress can be limited per group.
    pub progress_limits: bool,
}

impl DeviceCapabilities {
    /// A device of the first generation (Sapphire Rapids), as in public listings of accel-config. The operations are
    /// from the listings that show all of them: newer firmware hides the delta operations.
    pub const fn spr() -> Self {
        Self {
            version: 0x100,
            gen_cap: 0x40_915f_0107,
            ops: OpSet([0x1_003f_03ff, 0, 0, 0]),
            groups: 4,
            wqs: 8,
            engines: 4,
            total_wq_size: 128,
            read_buffers: 96,
            max_batch_size: 1024,
            max_transfer_size: 1 << 31,
            pasid: true,
            page_requests: true,
            event_log: false,
            wq_ats_control: true,
            wq_prs_control: false,
            wq_op_config: true,
            read_buffer_limit: true,
            progress_limits: false,
        }
    }

    /// A device of the second generation (Granite Rapids): twice the queue space, an event log, and the operations that
    /// accel-config's tests name for it. Values that public listings do not show are from the first generation.
    pub const fn dsa2() -> Self {
        Self {
            version: 0x200,
            gen_cap: Self::spr().gen_cap
                | gen_cap::CACHE_CONTROL_FLUSH
                | gen_cap::DRAIN_READBACK
                | 1 << 13
                | gen_cap::BATCH_CONTINUATION,
            ops: OpSet([0x7b_00bf_07ff, 0, 0, 0]),
            total_wq_size: 256,
            event_log: true,
            wq_prs_control: true,
            progress_limits: true,
            ..Self::spr()
        }
    }
}
