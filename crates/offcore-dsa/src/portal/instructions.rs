//! The two instructions that store 64 bytes to a device at once, and the fence before them.
//!
//! They are written by hand: compilers emit them only for CPUs that are known to have them. Operands stand in fixed
//! registers, so that the bytes are known and tested. Intel SDM volume 2: MOVDIR64B is `66 0F 38 F8 /r`, ENQCMD is
//! `F2 0F 38 F8 /r`; the destination's address is in the register operand, the source's in the memory operand.

use core::arch::asm;
use core::arch::x86_64::{__cpuid_count, _mm_sfence};

use crate::descriptor::Descriptor;
use crate::portal::Submitted;

/// Bits of CPUID leaf 7, subleaf 0, register ECX.
const MOVDIR64B: u32 = 1 << 28;
const ENQCMD: u32 = 1 << 29;
/// The highest basic leaf must be at least this.
const LEAF: u32 = 7;

/// Which of the instructions this CPU has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// For dedicated queues.
    pub movdir64b: bool,
    /// For shared queues.
    pub enqcmd: bool,
}

impl Instructions {
    /// Asks the CPU.
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

/// Stores a descriptor to a dedicated queue's portal: one 64-byte write that nothing tears, and that is not waited for.
///
/// # Safety
/// The CPU has MOVDIR64B, and `portal` is a 64-byte aligned address that may be written.
#[inline(always)]
pub(super) unsafe fn movdir64b(portal: *mut u8, descriptor: &Descriptor) {
    // SAFETY: the caller vouches for the instruction and the destination; the source is 64 readable bytes.
    unsafe {
        asm!(movdir64b!(), in("rdi") portal, in("rsi") descriptor, options(nostack, preserves_flags));
    }
}

/// Offers a descriptor to a shared queue; the device answers through the zero flag, which is set when it had no room.
///
/// # Safety
/// The CPU has ENQCMD, and `portal` is the 64-byte aligned address of a mapped portal.
#[inline(always)]
pub(super) unsafe fn enqcmd(portal: *mut u8, descriptor: &Descriptor) -> Submitted {
    let retry: u8;
    // SAFETY: as for MOVDIR64B. The flags are clobbered, which is what `asm!` assumes unless told otherwise.
    unsafe {
        asm!(
            enqcmd!(), "setz {retry}",
            in("rdi") portal, in("rsi") descriptor, retry = out(reg_byte) retry, options(nostack),
        );
    }
    if retry == 0 { Submitted::Accepted } else { Submitted::Retry }
}

/// Stores before it are visible to the device before stores to a portal after it.
#[inline(always)]
pub(super) fn sfence() {
    // SAFETY: every x86-64 CPU has SFENCE; it only orders.
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
        // SAFETY: both functions are an instruction of five bytes and a return of one.
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
            // Not a device, right or program that could be missing: most CPUs before 2021 have no such instruction.
            println!("this CPU has no MOVDIR64B; its bytes are tested above");
            return;
        }
        let descriptor = Descriptor { src: 1, dst: 2, size: 3, specific: [4, 5, 6], ..Descriptor::default() };
        let mut portal = Descriptor::default();
        // SAFETY: the CPU has the instruction; the destination is an aligned descriptor of our own.
        unsafe { movdir64b(std::ptr::from_mut(&mut portal).cast(), &descriptor) };
        sfence();
        assert_eq!(portal, descriptor);
    }
}
