//! The two instructions that store 64 bytes to a device in one write, and the fence before them.
//!
//! They are hand-written because compilers emit them only for CPUs that are known to have them. The operands are in
//! fixed registers, so that the encoding is known and can be tested. Intel SDM volume 2: MOVDIR64B is `66 0F 38 F8 /r`,
//! ENQCMD is `F2 0F 38 F8 /r`. The register operand holds the destination address, the memory operand is the source.

use core::arch::asm;
use core::arch::x86_64::{__cpuid_count, _mm_sfence};

use crate::descriptor::Descriptor;
use crate::portal::SubmitResult;

/// Bits of CPUID leaf 7, subleaf 0, register ECX.
const MOVDIR64B: u32 = 1 << 28;
const ENQCMD: u32 = 1 << 29;
/// The highest basic leaf must not be lower than this one.
const LEAF: u32 = 7;

/// The submission instructions that this CPU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// MOVDIR64B, for dedicated queues.
    pub movdir64b: bool,
    /// ENQCMD, for shared queues.
    pub enqcmd: bool,
}

impl Instructions {
    /// Queries the CPU by CPUID.
    pub fn detect() -> Self {
        if __cpuid_count(0, 0).eax < LEAF {
            return Self::default();
        }
        let ecx = __cpuid_count(LEAF, 0).ecx;
        Self { movdir64b: ecx & MOVDIR64B != 0, enqcmd: ecx & ENQCMD != 0 }
    }
}

macro_rules! movdir64b {
    () => {
        "movdir64b rdi, [rsi]"
    };
}

macro_rules! enqcmd {
    () => {
        "enqcmd rdi, [rsi]"
    };
}

/// Stores a descriptor to a dedicated queue's portal in one 64-byte write, which is never torn. The write is posted.
///
/// # Safety
/// The CPU has MOVDIR64B, and `portal` is a 64-byte aligned address that may be written.
#[inline(always)]
pub(super) unsafe fn movdir64b(portal: *mut u8, descriptor: &Descriptor) {
    // SAFETY: the CPU has the instruction and `portal` is writable, as the caller guarantees; the source is 64 readable
    // bytes.
    unsafe {
        asm!(movdir64b!(), in("rdi") portal, in("rsi") descriptor, options(nostack, preserves_flags));
    }
}

/// Offers a descriptor to a shared queue. The device answers through the zero flag, which is set if the queue was full.
///
/// # Safety
/// The CPU has ENQCMD, and `portal` is the 64-byte aligned address of a mapped portal.
#[inline(always)]
pub(super) unsafe fn enqcmd(portal: *mut u8, descriptor: &Descriptor) -> SubmitResult {
    let retry: u8;
    // SAFETY: the CPU has ENQCMD and `portal` is a mapped portal, as the caller guarantees. `asm!` assumes by default
    // that the flags are clobbered.
    unsafe {
        asm!(
            enqcmd!(), "setz {retry}",
            in("rdi") portal, in("rsi") descriptor, retry = out(reg_byte) retry, options(nostack),
        );
    }
    if retry == 0 { SubmitResult::Accepted } else { SubmitResult::Retry }
}

/// Makes earlier stores visible to the device before later stores to a portal.
#[inline(always)]
pub(super) fn sfence() {
    // SAFETY: every x86-64 CPU has SFENCE, and it only orders stores.
    unsafe { _mm_sfence() };
}

#[cfg(test)]
mod tests {
    use core::arch::naked_asm;

    use super::*;

    #[unsafe(naked)]
    extern "C" fn movdir64b_encoded() {
        naked_asm!(movdir64b!(), "ret");
    }

    #[unsafe(naked)]
    extern "C" fn enqcmd_encoded() {
        naked_asm!(enqcmd!(), "ret");
    }

    fn bytes(function: extern "C" fn()) -> [u8; 6] {
        // SAFETY: both functions consist of an instruction of five bytes and a return of one byte.
        unsafe { (function as *const ()).cast::<[u8; 6]>().read_unaligned() }
    }

    #[test]
    fn movdir64b_is_encoded_as_the_manual_says() {
        // ModRM 0x3e: no displacement, register operand rdi, memory operand [rsi].
        assert_eq!(bytes(movdir64b_encoded), [0x66, 0x0f, 0x38, 0xf8, 0x3e, 0xc3]);
    }

    #[test]
    fn enqcmd_is_encoded_as_the_manual_says() {
        assert_eq!(bytes(enqcmd_encoded), [0xf2, 0x0f, 0x38, 0xf8, 0x3e, 0xc3]);
    }

    #[test]
    fn movdir64b_moves_a_descriptor_as_a_whole() {
        if !Instructions::detect().movdir64b {
            // This is not a missing device, right or program: most CPUs before 2021 do not have the instruction.
            println!("this CPU has no MOVDIR64B; its bytes are tested above");
            return;
        }
        let descriptor = Descriptor { src: 1, dst: 2, size: 3, specific: [4, 5, 6], ..Descriptor::default() };
        let mut portal = Descriptor::default();
        // SAFETY: the CPU has the instruction; the destination is a local, aligned descriptor.
        unsafe { movdir64b(std::ptr::from_mut(&mut portal).cast(), &descriptor) };
        sfence();
        assert_eq!(portal, descriptor);
    }
}
