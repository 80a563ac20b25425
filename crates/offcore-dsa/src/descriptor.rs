//! The 64-byte descriptor: DSA architecture specification 3.0, section 8.1.

use bitflags::bitflags;

/// Defines the operation codes and the list of all of them.
macro_rules! opcodes {
    ($($(#[doc = $name:literal])+ $op:ident = $code:literal,)*) => {
        /// Operation codes (Table 8-2).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, displaydoc::Display)]
        #[repr(u8)]
        pub enum Opcode {
            $($(#[doc = $name])+ $op = $code,)*
        }

        impl Opcode {
            /// All operation codes.
            pub const ALL: [Self; [$($code),*].len()] = [$(Self::$op),*];
        }
    };
}

opcodes! {
    /// no-op
    Noop = 0x00,
    /// batch
    Batch = 0x01,
    /// drain
    Drain = 0x02,
    /// memory move
    MemoryMove = 0x03,
    /// fill
    Fill = 0x04,
    /// compare
    Compare = 0x05,
    /// compare pattern
    ComparePattern = 0x06,
    /// create delta record
    CreateDelta = 0x07,
    /// apply delta record
    ApplyDelta = 0x08,
    /// copy with dualcast
    Dualcast = 0x09,
    /// translation fetch
    TranslationFetch = 0x0a,
    /// CRC generation
    CrcGeneration = 0x10,
    /// copy with CRC
    CopyCrc = 0x11,
    /// DIF check
    DifCheck = 0x12,
    /// DIF insert
    DifInsert = 0x13,
    /// DIF strip
    DifStrip = 0x14,
    /// DIF update
    DifUpdate = 0x15,
    /// DIX generate
    DixGenerate = 0x17,
    /// type conversion
    TypeConversion = 0x18,
    /// reduce
    Reduce = 0x19,
    /// reduce with dualcast
    ReduceDualcast = 0x1a,
    /// gather reduce
    GatherReduce = 0x1b,
    /// gather copy
    GatherCopy = 0x1c,
    /// scatter copy
    ScatterCopy = 0x1d,
    /// scatter fill
    ScatterFill = 0x1e,
    /// cache flush
    CacheFlush = 0x20,
    /// update window
    UpdateWindow = 0x21,
    /// inter-domain copy
    InterDomainCopy = 0x23,
    /// inter-domain fill
    InterDomainFill = 0x24,
    /// inter-domain compare
    InterDomainCompare = 0x25,
    /// inter-domain compare pattern
    InterDomainComparePattern = 0x26,
}

impl Opcode {
    /// Returns the operation with this code; `None` for a reserved code.
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|&op| op as u8 == code)
    }
}

bitflags! {
    /// Descriptor flags, bits 0 to 23 (Table 8-3). The meaning of bits 16 to 23 depends on the operation.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Flags: u32 {
        /// In a batch: the descriptor waits for the descriptors before it. Reserved in a descriptor that is submitted
        /// directly.
        const FENCE = 1 << 0;
        /// The device waits for a page fault to be resolved.
        const BLOCK_ON_FAULT = 1 << 1;
        /// The completion record address is valid.
        const CRAV = 1 << 2;
        /// A completion record is also written on success.
        const RCR = 1 << 3;
        /// Request completion interrupt.
        const RCI = 1 << 4;
        /// Cache control 3.
        const CACHE_CONTROL_3 = 1 << 5;
        /// The result selects between the statuses success and success with false predicate.
        const CHECK_RESULT = 1 << 7;
        /// Cache control 1: write to the cache instead of memory.
        const CACHE_CONTROL_1 = 1 << 8;
        /// Traffic class selector of address 1.
        const ADDR1_TC = 1 << 9;
        /// Traffic class selector of address 2.
        const ADDR2_TC = 1 << 10;
        /// Traffic class selector of address 3.
        const ADDR3_TC = 1 << 11;
        /// Traffic class selector of the completion record.
        const CR_TC = 1 << 12;
        /// All writes become visible in order.
        const STRICT_ORDER = 1 << 13;
        /// Cache control 2 (destination readback in version 1).
        const CACHE_CONTROL_2 = 1 << 14;
        /// Operation-specific flag 0 (batch error, drain readback address 1 valid, CRC: read seed, …).
        const OP_0 = 1 << 16;
        /// Operation-specific flag 1.
        const OP_1 = 1 << 17;
        /// Operation-specific flag 2 (fill: 16-byte pattern, …).
        const OP_2 = 1 << 18;
        /// Operation-specific flag 7.
        const OP_7 = 1 << 23;
        const _ = !0;
    }
}

/// A descriptor: 64 bytes, 64-byte aligned, little endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct Descriptor {
    /// Bytes 0 to 3: PASID in bits 19:0, privilege in bit 31. Zero from user code; ENQCMD fills it in.
    pub pasid: u32,
    /// Bytes 4 to 7: flags in bits 23:0, opcode in bits 31:24.
    pub flags_opcode: u32,
    /// Bytes 8 to 15: completion record address, 32-byte aligned.
    pub completion: u64,
    /// Bytes 16 to 23: source address, descriptor list address, pattern.
    pub src: u64,
    /// Bytes 24 to 31: destination address, second source, pattern to compare with.
    pub dst: u64,
    /// Bytes 32 to 35: transfer size in bytes, or descriptor count.
    pub size: u32,
    /// Bytes 36 and 37: completion interrupt handle.
    pub interrupt: u16,
    /// Bytes 38 and 39.
    pub reserved: u16,
    /// Bytes 40 to 63: operation-specific.
    pub specific: [u64; 3],
}

const _: () = assert!(size_of::<Descriptor>() == 64 && align_of::<Descriptor>() == 64);

impl Descriptor {
    /// Returns a descriptor with this opcode and these flags; all other fields are zero.
    #[inline(always)]
    pub const fn new(opcode: Opcode, flags: Flags) -> Self {
        Self {
            pasid: 0,
            flags_opcode: (flags.bits() & 0xff_ffff) | (opcode as u32) << 24,
            completion: 0,
            src: 0,
            dst: 0,
            size: 0,
            interrupt: 0,
            reserved: 0,
            specific: [0; 3],
        }
    }

    /// Returns the operation code, valid or not.
    #[inline(always)]
    pub const fn code(&self) -> u8 {
        (self.flags_opcode >> 24) as u8
    }

    /// Returns the operation; `None` for a reserved code.
    pub fn opcode(&self) -> Option<Opcode> {
        Opcode::from_code(self.code())
    }

    /// Returns the flags.
    #[inline(always)]
    pub const fn flags(&self) -> Flags {
        Flags::from_bits_retain(self.flags_opcode & 0xff_ffff)
    }

    /// Returns the descriptor with other flags.
    #[must_use]
    #[inline(always)]
    pub const fn with_flags(mut self, flags: Flags) -> Self {
        self.flags_opcode = (self.flags_opcode & 0xff00_0000) | (flags.bits() & 0xff_ffff);
        self
    }

    /// Returns the 64 bytes that are written to a portal.
    #[inline(always)]
    pub fn bytes(&self) -> &[u8; 64] {
        // SAFETY: the struct consists of 64 bytes of integers without padding (asserted above), all of them
        // initialized.
        unsafe { &*std::ptr::from_ref(self).cast() }
    }

    /// Returns the descriptor that these 64 bytes encode.
    pub fn from_bytes(bytes: &[u8; 64]) -> Self {
        // SAFETY: every bit pattern is a valid descriptor, and `read_unaligned` needs no alignment.
        unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() }
    }

    /// Returns one byte of the operation-specific fields, by its offset in the descriptor (40 to 63).
    pub const fn specific_byte(&self, offset: usize) -> u8 {
        (self.specific[(offset - 40) / 8] >> ((offset % 8) * 8)) as u8
    }
}

/// The result of a submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitResult {
    /// The device has accepted the descriptor. A dedicated queue that is full drops the descriptor silently.
    Accepted,
    /// The shared queue was full: try again later.
    Retry,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_specified_offsets() {
        let descriptor = Descriptor {
            pasid: 0x0403_0201,
            completion: 0x0f0e_0d0c_0b0a_0908,
            src: 0x1716_1514_1312_1110,
            dst: 0x1f1e_1d1c_1b1a_1918,
            size: 0x2322_2120,
            interrupt: 0x2524,
            reserved: 0x2726,
            specific: [0x2f2e_2d2c_2b2a_2928, 0x3736_3534_3332_3130, 0x3f3e_3d3c_3b3a_3938],
            ..Descriptor::new(Opcode::MemoryMove, Flags::CRAV | Flags::RCR | Flags::CACHE_CONTROL_1)
        };
        let bytes = descriptor.bytes();
        assert_eq!(bytes[..4], [1, 2, 3, 4]);
        assert_eq!(bytes[4..8], [0x0c, 0x01, 0x00, 0x03]);
        assert!(bytes[8..].iter().zip(8..).all(|(&byte, at)| byte == at), "{bytes:02x?}");
        assert_eq!(Descriptor::from_bytes(bytes), descriptor);
        assert_eq!((descriptor.specific_byte(40), descriptor.specific_byte(63)), (0x28, 0x3f));
    }

    #[test]
    fn codes_have_one_operation() {
        for code in 0..=255 {
            let known = Opcode::from_code(code);
            assert!(known.is_none_or(|op| op as u8 == code));
        }
        assert_eq!(Opcode::from_code(0x0b), None);
        assert_eq!(Opcode::ALL.len(), (0..=255).filter(|&code| Opcode::from_code(code).is_some()).count());
    }
}
