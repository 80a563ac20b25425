//! Names of operations and flags, and the codes that completion records do not use: other software errors (Table 5-7),
//! administrative commands (Table 5-8), and the kernel's additional codes of `cmd_status` (enum idxd_scmd_stat of
//! linux/idxd.h).

use crate::descriptor::Flags;

use super::{Codes, Explanation, words_of};

/// Returns the name of a descriptor flag, by its bit (0 to 23).
pub const fn flag_name(bit: u32) -> &'static str {
    const NAMES: [&str; 24] = [
        "fence",
        "block on fault",
        "completion record address valid",
        "request completion record",
        "request completion interrupt",
        "cache control 3",
        "reserved bit 6",
        "check result",
        "cache control 1",
        "address 1 TC selector",
        "address 2 TC selector",
        "address 3 TC selector",
        "completion record TC selector",
        "strict ordering",
        "cache control 2",
        "reserved bit 15",
        "operation-specific bit 16",
        "operation-specific bit 17",
        "operation-specific bit 18",
        "operation-specific bit 19",
        "operation-specific bit 20",
        "operation-specific bit 21",
        "operation-specific bit 22",
        "operation-specific bit 23",
    ];
    if bit < 24 { NAMES[bit as usize] } else { "no flag" }
}

/// Returns the most probable reason why a flag is invalid.
pub(super) fn flag_reason(flag: Flags) -> &'static str {
    match flag {
        Flags::FENCE => "only descriptors in a batch may have it; submitted directly it is reserved",
        Flags::BLOCK_ON_FAULT => "the work queue has block_on_fault 0, or the operation touches no memory",
        Flags::CRAV | Flags::RCR => {
            "it must be set for operations with a result, and be clear without a record"
        }
        Flags::RCI => "user-mode interrupts are not enabled",
        Flags::CHECK_RESULT => "only comparisons, delta creation and reductions have it",
        Flags::CACHE_CONTROL_1 | Flags::CACHE_CONTROL_2 | Flags::CACHE_CONTROL_3 => {
            "the operation does not write memory, or gen_cap lacks this cache control"
        }
        Flags::STRICT_ORDER => "the operation does not write memory",
        Flags::ADDR1_TC | Flags::ADDR2_TC | Flags::ADDR3_TC => "the operation does not have this address",
        Flags::CR_TC => "the descriptor has no completion record",
        _ => "the operation or this device does not have it",
    }
}

/// Explains the codes 0x51 to 0x54 of SWERROR and the event log, which do not belong to an operation; `None` for
/// others.
pub fn software_error(code: u8) -> Option<Explanation> {
    let (name, meaning, advice) = words_of(SOFTWARE, code.into())?;
    Some(Explanation::new(format!("0x{code:02x} (SWERROR): {name}"), meaning, advice))
}

const SOFTWARE: Codes = codes! {
    0x51 "PCI configuration changed while enabled"
        "An unsupported change was made to the PCI configuration while the device was not disabled; it is halted."
        "Reset the device (function-level reset), and configure it again.";
    0x52 "command while a command was active"
        "The command register was written while another command was running."
        "Two drivers use the device at once.";
    0x53 "dedicated queue overflow"
        "A descriptor was submitted to a dedicated work queue that had no room, and was dropped."
        "Count descriptors in flight, at most the queue's size; a dedicated queue has only one client.";
    0x54 "event log" "The device could not append to the event log."
        "Enlarge event_log_size, and look for what fills it.";
};

/// Explains error codes of administrative commands, which the kernel shows in `cmd_status`; `None` for unused codes.
pub fn command_error(code: u8) -> Option<Explanation> {
    let (command, meaning) = match code {
        0x10 => ("enable device", "the device is not disabled"),
        0x11 => ("enable device", "unspecified error in the configuration"),
        0x12 => ("enable device", "bus mastering is off"),
        0x13 => ("enable device", "PRSREQALLOC has an unsupported value"),
        0x14 => ("enable device", "the work queues' sizes add up to more than the device has"),
        0x15 => ("enable device", "a group has work queues and no engine, or engines and no work queue"),
        0x16 => (
            "enable device",
            "a work queue is in two groups, or has a size and no group, or a group and no size",
        ),
        0x17 => ("enable device", "an engine is in two groups"),
        0x18 => ("enable device", "invalid read buffers or bandwidth limits"),
        0x19 => ("enable device", "invalid event log configuration"),
        0x1a => ("enable device", "invalid ATS configuration"),
        0x1b => ("enable device", "invalid PASID configuration"),
        0x20 => ("enable work queue", "the device is not enabled"),
        0x21 => ("enable work queue", "the work queue is not disabled"),
        0x22 => ("enable work queue", "its size is 0"),
        0x23 => ("enable work queue", "its priority is 0"),
        0x24 => ("enable work queue", "the device does not have this mode (shared or dedicated)"),
        0x25 => ("enable work queue", "block on fault without page requests, or not supported"),
        0x26 => ("enable work queue", "a shared queue needs PASID, and PASID must be enabled"),
        0x27 => ("enable work queue", "invalid max_batch_size"),
        0x28 => ("enable work queue", "max_transfer_size is more than the device's"),
        0x2a => ("enable work queue", "privileged without privileged mode"),
        0x2b => ("enable work queue", "invalid occupancy interrupt"),
        0x2c => ("enable work queue", "ats_disable is not supported"),
        0x2d => ("enable work queue", "op_config has operations that the device lacks"),
        0x2e => ("enable work queue", "prs_disable needs the event log and block_on_fault 0"),
        0x31 => ("disable device", "the device is not enabled"),
        0x32 => ("disable, drain or abort work queue", "one of the work queues is not enabled"),
        0x41 => ("interrupt handle", "invalid interrupt table index"),
        0x42 => ("request interrupt handle", "no handle is available"),
        0x51 => ("inter-domain handle", "invalid table index"),
        0x52 => ("request inter-domain handle", "no handle is available"),
        _ => return None,
    };
    let advice = "correct the configuration of the device and enable it again";
    Some(Explanation::new(format!("cmd_status 0x{code:02x}: {command}: {meaning}"), "", advice))
}

/// Explains the kernel driver's own codes of `cmd_status`, 0x80000010 and up; `None` for others.
pub fn kernel_error(code: u32) -> Option<Explanation> {
    let (name, meaning, advice) = words_of(KERNEL, code)?;
    Some(Explanation::new(format!("cmd_status 0x{code:08x}: {name}"), meaning, advice))
}

const KERNEL: Codes = codes! {
    0x8000_0010 "DEV_ENABLED" "The device is enabled already."
        "Disable it first, to change its configuration.";
    0x8000_0020 "DEV_NOT_ENABLED" "The device is not enabled."
        "Enable the device before its work queues (accel-config enable-device).";
    0x8000_0021 "WQ_ENABLED" "The work queue is enabled already." "";
    0x8002_0000 "DEV_DMA_ERR" "Registering the device as DMA engine failed." "See dmesg.";
    0x8003_0000 "WQ_NO_GRP" "The work queue is in no group." "Write its group_id.";
    0x8004_0000 "WQ_NO_NAME" "The work queue has no name." "Write a name; DPDK looks for dpdk_…";
    0x8005_0000 "WQ_NO_SVM" "A user work queue needs shared virtual memory, and the device has none."
        "Boot with intel_iommu=on,sm_on and enable VT-d in the BIOS; see dmesg for 'Unable to turn on user SVA'.";
    0x8006_0000 "WQ_NO_THRESH" "A shared work queue needs a threshold."
        "Write its threshold, at most its size.";
    0x8007_0000 "WQ_PORTAL_ERR" "The portal could not be mapped." "See dmesg.";
    0x8008_0000 "WQ_RES_ALLOC_ERR" "Memory for the work queue's descriptors could not be had."
        "Free memory, or make the queue smaller.";
    0x8009_0000 "PERCPU_ERR" "A per-CPU counter could not be set up." "See dmesg.";
    0x800a_0000 "DMA_CHAN_ERR" "Registering the DMA channel failed." "See dmesg.";
    0x800b_0000 "CDEV_ERR" "The character device /dev/dsa/wqN.M could not be made." "See dmesg.";
    0x800c_0000 "WQ_NO_SWQ_SUPPORT" "Shared work queues are not available: no PASID."
        "Boot with intel_iommu=on,sm_on, or make the queue dedicated.";
    0x800d_0000 "WQ_NONE_CONFIGURED" "No work queue is configured."
        "Give at least one work queue a size and a group.";
    0x800e_0000 "WQ_NO_SIZE" "The work queue has size 0." "Write its size.";
    0x800f_0000 "WQ_NO_PRIV" "A kernel work queue needs privileged mode, which is not available."
        "Boot with intel_iommu=on,sm_on, or use a user queue.";
    0x8010_0000 "WQ_IRQ_ERR" "The work queue's interrupt could not be set up." "See dmesg.";
    0x8011_0000 "WQ_USER_NO_IOMMU" "A user work queue needs the IOMMU with shared virtual memory."
        "Boot with intel_iommu=on,sm_on; without it only kernel queues work.";
    0x8012_0000 "DEV_EVL_ERR" "The event log could not be set up." "See dmesg; check event_log_size.";
    0x8020_0000 "WQ_NO_DRV_NAME"
        "The work queue's driver_name is not the driver that binds it (kernel 6.7 and later)."
        "Write driver_name: user for user queues, dmaengine for the kernel's.";
};
