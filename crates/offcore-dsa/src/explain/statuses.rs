//! Operation status codes (Table 5-6).

use std::fmt;

use crate::completion::Status;

use super::{Codes, Explanation, Words, words_of};

impl fmt::Display for Status {
    /// Formats the status as a few words and the number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (0x{:02x})", words(*self).0, self.0)
    }
}

/// Explains an operation status: bits 5:0 of the first byte of a completion record.
pub fn status(status: Status) -> Explanation {
    let (name, meaning, advice) = words(status);
    Explanation::new(format!("0x{:02x}: {name}", status.0), meaning, advice)
}

fn words(status: Status) -> Words {
    words_of(CODES, status.0.into()).unwrap_or(UNUSED)
}

const UNUSED: Words = ("unused status code", "The specification (revision 3.0) does not use this code.", "");

const CODES: Codes = codes! {
    0x00 "no status" "The device has written nothing here."
        "If it never does: a dedicated queue drops a descriptor that has no room without a word (count descriptors \
         in flight), and errors with the record's own address go to the device's error log (dmesg, SWERROR).";
    0x01 "success" "The operation is complete." "";
    0x02 "success with false predicate"
        "The operation is complete; its result is not the one that the descriptor expected (check result). In a \
         batch, a later fence stops here."
        "";
    0x03 "page fault"
        "A page was not there and the descriptor did not ask to block on fault. What the record counts is done; \
         nothing after it is."
        "Touch the memory (write to it, for a write) and go on with a descriptor for the rest; or map it with \
         MAP_POPULATE or mlock; or set block on fault, which the work queue must have enabled (block_on_fault 1).";
    0x04 "page request refused"
        "The kernel could not provide the page: the address is not mapped, or not for this access."
        "The address in the record is wrong, or the memory was unmapped or is read-only: check the pointer and its \
         length. Retrying does not help.";
    0x05 "batch with failures"
        "One or more descriptors of the batch ended with another status than success, or were abandoned behind a \
         fence."
        "Look at the completion records of the batch's descriptors.";
    0x06 "page fault on the descriptor list"
        "The list of the batch's descriptors was not in memory. The descriptors before the fault were processed."
        "Keep the descriptor list in locked, touched memory; submit the rest of the list again.";
    0x07 "delta record out of order"
        "Offsets in the delta record do not increase. The deltas before were applied."
        "The record is damaged, or two records were joined: create it again.";
    0x08 "delta record past the destination"
        "An offset in the delta record is not below the transfer size. The deltas before were applied."
        "Use the transfer size that the record was created with.";
    0x09 "data integrity field error"
        "A block's guard or tags are not what they should be. The blocks before it are done."
        "The data or the expected tags are wrong: check seeds, masks and the DIF flags against how the fields were \
         written.";
    0x10 "unsupported operation"
        "The device or the work queue does not have the operation, or it may not be in a batch (drain, batch, update \
         window)."
        "Compare with the device's op_cap and the queue's op_config in sysfs. Kernels hide Batch on version 1 \
         devices from unprivileged users.";
    0x11 "invalid flags" "A flag is set that is reserved here, or one that is required is not set."
        "A fence is only valid in a batch; block on fault only where the work queue enables it. The record's bytes \
         16 to 18 have the flags' bits.";
    0x12 "reserved field not zero" "A field that this operation does not use is not zero."
        "Clear the whole descriptor before filling it.";
    0x13 "invalid transfer size"
        "The transfer size is 0, or more than the work queue's max_transfer_size (delta records: more than 512 KiB)."
        "Compare with max_transfer_size of the work queue in sysfs, which may be far below the device's; split \
         larger transfers.";
    0x14 "invalid descriptor count"
        "A batch of 0 or 1 descriptors, or of more than the work queue's max_batch_size."
        "Submit a single descriptor directly; compare with max_batch_size of the work queue in sysfs.";
    0x15 "unsupported field value"
        "A field has a value that the operation does not take: a maximum delta record size below 80 or above the \
         maximum transfer size, a delta record below 10 bytes, a data or compute type."
        "Check the operation's fields against section 8.3 of the specification.";
    0x16 "overlapping buffers" "The destination overlaps a source or another destination."
        "Only a memory move may, and only where gen_cap bit 1 is set; let the core do it.";
    0x17 "dualcast destinations differ" "Bits 11:0 of the two destination addresses must be the same."
        "Give both destinations the same offset in their pages.";
    0x18 "misaligned descriptor list" "The address of a batch's descriptors must be a multiple of 64."
        "Align the array to 64 bytes.";
    0x19 "invalid interrupt handle" "The completion interrupt handle is not one of this queue's."
        "Do not request completion interrupts from user mode, or take the handle from the kernel.";
    0x1a "page fault on the completion record"
        "The completion record's page was not there. This goes to SWERROR or the event log, never to a record."
        "Keep completion records in locked, touched memory. The kernel counts these in cr_faults of the queue's file \
         in sysfs.";
    0x1b "misaligned completion record"
        "The completion record's address must be a multiple of 32. This goes to SWERROR or the event log, never to a \
         record."
        "Align the record to 32 bytes.";
    0x1c "misaligned address"
        "An address, size or stride is not aligned as the operation asks: delta records 8 bytes, a CRC seed in \
         memory 4, DIX destinations 8."
        "Align it, or let the core do it.";
    0x1d "privilege"
        "The descriptor asks for privilege on a shared queue of a device that does not have it enabled. This goes to \
         SWERROR or the event log, never to a record."
        "Leave bit 31 of the first word 0.";
    0x1e "traffic class" "The selected traffic class is not enabled on a virtual channel."
        "Set traffic_class_a and traffic_class_b of the group to one that is; on older devices the kernel module \
         needs tc_override=1 to change them.";
    0x1f "page fault on a drain's readback address" "A readback address of the drain was not in memory."
        "Touch it, or drain without readback addresses.";
    0x20 "hardware error"
        "A read failed: an unsupported request, a completer abort, a time-out or a parity error; without ATS also an \
         address that has no translation."
        "Do it on the core, and look for PCIe AER messages in dmesg. If it keeps coming, reset the device \
         (accel-config disable-device, enable-device).";
    0x21 "hardware error on a write" "A write or a readback of the destination failed."
        "Do it on the core, and look for PCIe AER messages in dmesg.";
    0x22 "translation error" "The IOMMU answered an address translation with an error, or not at all."
        "Look for DMAR faults in dmesg; check that intel_iommu=on,sm_on is on the kernel's command line.";
    0x26 "possible page fault on completion records before a drain"
        "Only in the event log: descriptors before the drain may have lost their completion records."
        "Their records are in the event log, which the kernel copies to their addresses.";
    0x27 "possible page fault on completion records of a batch"
        "Only in the event log: descriptors of the batch may have lost their completion records."
        "Their records are in the event log, which the kernel copies to their addresses.";
    0x28 "inter-domain operation without PASID" "The work queue has PASID disabled."
        "Inter-domain operations need a work queue with shared virtual memory.";
    0x29 "invalid inter-domain handle"
        "The handle's entry is invalid, not usable, of another type, or not for this submitter."
        "Ask the owner of the memory for a handle for this process.";
    0x2a "inter-domain permission" "The entry does not permit this read or write."
        "Ask the owner of the window for the permission.";
    0x2b "outside of the inter-domain window" "The range is not inside of the entry's window."
        "Check address, length and whether the window counts from its base (offset mode).";
    0x2c "window not modifiable"
        "The entry of an update window is invalid, not modifiable, or not owned by the submitter."
        "Only the owner may update a window, and only if the entry allows it.";
    0x2d "invalid window fields"
        "Offset mode without a window, a window of size 0, or one past the end of the address space."
        "Check flags, base and size of the update.";
    0x2e "domain gone" "The other domain was taken away while the operation ran." "Its owner has closed it.";
};
