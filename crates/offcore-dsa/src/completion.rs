//! The 32-byte completion record: DSA architecture specification 3.0, sections 5.8.1 and 8.2.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use bitflags::bitflags;

/// Operation status, bits 5:0 of the record's first byte (Table 5-6).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Status(pub u8);

impl Status {
    pub const NONE: Self = Self(0x00);
    pub const SUCCESS: Self = Self(0x01);
    pub const FALSE_PREDICATE: Self = Self(0x02);
    pub const PAGE_FAULT: Self = Self(0x03);
    pub const PAGE_REQUEST_INVALID: Self = Self(0x04);
    pub const BATCH_FAILED: Self = Self(0x05);
    pub const BATCH_LIST_FAULT: Self = Self(0x06);
    pub const DIF_ERROR: Self = Self(0x09);
    pub const BAD_OPCODE: Self = Self(0x10);
    pub const INVALID_FLAGS: Self = Self(0x11);
    pub const NONZERO_RESERVED: Self = Self(0x12);
    pub const BAD_TRANSFER_SIZE: Self = Self(0x13);
    pub const BAD_DESCRIPTOR_COUNT: Self = Self(0x14);
    pub const OVERLAP: Self = Self(0x16);
    pub const DUALCAST_ADDRESS: Self = Self(0x17);
    pub const LIST_MISALIGNED: Self = Self(0x18);
    pub const INTERRUPT_HANDLE: Self = Self(0x19);
    pub const CR_ADDRESS_FAULT: Self = Self(0x1a);
    pub const CR_MISALIGNED: Self = Self(0x1b);
    pub const PRIVILEGE: Self = Self(0x1d);
    pub const TRAFFIC_CLASS: Self = Self(0x1e);
    pub const DRAIN_READBACK: Self = Self(0x1f);
    pub const HARDWARE: Self = Self(0x20);
    pub const HARDWARE_READBACK: Self = Self(0x21);
    pub const TRANSLATION: Self = Self(0x22);

    /// Whether the device has done everything that the descriptor asked for.
    #[inline(always)]
    pub const fn is_success(self) -> bool {
        matches!(self, Self::SUCCESS | Self::FALSE_PREDICATE)
    }

    /// Whether the operation stopped at a page fault. The record counts the bytes completed before the fault.
    pub const fn is_page_fault(self) -> bool {
        matches!(self, Self::PAGE_FAULT | Self::PAGE_REQUEST_INVALID | Self::BATCH_LIST_FAULT)
    }
}

bitflags! {
    /// Mismatches of a data integrity field: DIF Status, byte 1 of the record (section 8.3.17.4).
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct DifMismatch: u8 {
        /// The guard is not the block's CRC.
        const GUARD = 1 << 0;
        /// The application tag differs from the expected one.
        const APPLICATION = 1 << 1;
        /// The reference tag differs from the expected one.
        const REFERENCE = 1 << 2;
        /// All F Detect Error: the field is all ones.
        const ALL_F = 1 << 3;
        const _ = !0;
    }
}

/// A completion record in memory that the device writes: 32 bytes, 32-byte aligned. The status byte is written last.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub struct CompletionRecord {
    status: AtomicU8,
    result: AtomicU8,
    fault_info: AtomicU8,
    _unused: AtomicU8,
    completed: [AtomicU8; 4],
    fault_address: AtomicU64,
    specific: [AtomicU64; 2],
}

const _: () = assert!(size_of::<CompletionRecord>() == 32 && align_of::<CompletionRecord>() == 32);

/// The contents of a completion record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Completed {
    /// Bits 5:0 of the status byte.
    pub status: Status,
    /// Bit 7 of the status byte: the faulting access was a write.
    pub fault_was_write: bool,
    /// Operation-specific. Memory move: 1 when the copy ran from the end backwards.
    pub result: u8,
    /// Bit 0: the address is masked. Bits 3:1: the operand that faulted.
    pub fault_info: u8,
    /// Bytes completed, or descriptors of a batch; 0 when all of them are complete.
    pub completed: u32,
    /// The address of the page fault; the low 12 bits may be 0.
    pub fault_address: u64,
    /// Bytes 16 to 31: operation-specific (invalid flags, CRC value, delta record size, DIF status).
    pub specific: [u64; 2],
}

impl CompletionRecord {
    /// Sets the status to 0 before the descriptor is submitted. The caller must execute a fence between the two.
    #[inline(always)]
    pub fn clear(&self) {
        self.status.store(0, Ordering::Relaxed);
    }

    /// Returns the current status byte; 0 until the device has written the record. If it is not 0, everything that the
    /// device wrote before it is visible.
    #[inline(always)]
    pub fn status_byte(&self) -> u8 {
        self.status.load(Ordering::Acquire)
    }

    /// Whether the device has completed the operation with status Success.
    #[inline(always)]
    pub fn is_plain_success(&self) -> bool {
        self.status_byte() == Status::SUCCESS.0
    }

    /// Returns the whole record; `None` until the device has written it.
    pub fn read(&self) -> Option<Completed> {
        let byte = self.status_byte();
        if byte == 0 {
            return None;
        }
        let completed = self.completed.each_ref().map(|byte| byte.load(Ordering::Relaxed));
        Some(Completed {
            status: Status(byte & 0x3f),
            fault_was_write: byte & 0x80 != 0,
            result: self.result.load(Ordering::Relaxed),
            fault_info: self.fault_info.load(Ordering::Relaxed),
            completed: u32::from_le_bytes(completed),
            fault_address: self.fault_address.load(Ordering::Relaxed),
            specific: self.specific.each_ref().map(|word| word.load(Ordering::Relaxed)),
        })
    }

    /// Writes a record in the order that a device uses: the status byte last.
    pub fn write(&self, record: &Completed) {
        self.result.store(record.result, Ordering::Relaxed);
        self.fault_info.store(record.fault_info, Ordering::Relaxed);
        for (place, byte) in self.completed.iter().zip(record.completed.to_le_bytes()) {
            place.store(byte, Ordering::Relaxed);
        }
        self.fault_address.store(record.fault_address, Ordering::Relaxed);
        for (place, word) in self.specific.iter().zip(record.specific) {
            place.store(word, Ordering::Relaxed);
        }
        let write = if record.fault_was_write { 0x80 } else { 0 };
        self.status.store(record.status.0 | write, Ordering::Release);
    }
}

impl Completed {
    /// Returns a record with this status; all other fields are zero.
    pub fn of(status: Status) -> Self {
        Self { status, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_specified_offsets() {
        let record = CompletionRecord::default();
        assert_eq!(record.read(), None);
        let written = Completed {
            status: Status::PAGE_FAULT,
            fault_was_write: true,
            result: 1,
            fault_info: 7,
            completed: 0x0706_0504,
            fault_address: 0x0f0e_0d0c_0b0a_0908,
            specific: [0x1716_1514_1312_1110, 0x1f1e_1d1c_1b1a_1918],
        };
        record.write(&written);
        assert_eq!(record.read(), Some(written));
        // SAFETY: a record is 32 initialized bytes.
        let bytes: [u8; 32] = unsafe { std::ptr::from_ref(&record).cast::<[u8; 32]>().read() };
        assert_eq!(bytes[..4], [0x83, 1, 7, 0]);
        assert!(bytes[4..].iter().zip(4..).all(|(&byte, at)| byte == at), "{bytes:02x?}");
        record.clear();
        assert_eq!(record.read(), None);
    }
}
