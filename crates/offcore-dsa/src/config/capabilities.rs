//! What a device can be laid out as: the capability registers, as sysfs tells them.

use crate::wq::{OpSet, gen_cap};

/// What limits a device's layout (sections 9.2.4 to 9.2.10).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// 0x100, 0x200, …
    pub version: u32,
    /// GENCAP, as in [`crate::wq::gen_cap`].
    pub gen_cap: u64,
    /// OPCAP: the device's operations. The kernel hides Batch of version 1 devices in sysfs.
    pub ops: OpSet,
    pub groups: usize,
    pub wqs: usize,
    pub engines: usize,
    /// Descriptors that all work queues hold together.
    pub total_wq_size: u32,
    /// Read buffers; 0 where the device has no controls for them.
    pub read_buffers: u32,
    pub max_batch_size: u32,
    pub max_transfer_size: u64,
    /// Whether PASIDs are on, without which there are no shared queues (and no user queues in Linux).
    pub pasid: bool,
    /// Whether the page request service is on, without which nothing blocks on faults.
    pub page_requests: bool,
    pub event_log: bool,
    /// Whether ATS can be turned off for a single queue.
    pub wq_ats_control: bool,
    /// Whether PRS can be turned off for a single queue.
    pub wq_prs_control: bool,
    /// Whether operations can be forbidden for a single queue.
    pub wq_op_config: bool,
    /// Whether a limit for several groups' read buffers can be set.
    pub read_buffer_limit: bool,
    /// Whether descriptors in progress can be limited for a group.
    pub progress_limits: bool,
}

impl Capabilities {
    /// A device of the first generation (Sapphire Rapids), as public listings of accel-config have it. Its operations
    /// are those of the listings that show all: newer firmware hides the delta operations.
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
    /// accel-config's tests name for it. What public listings do not show is as in the first generation.
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
