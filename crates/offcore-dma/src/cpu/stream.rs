//! Copy loops that store whole lines past the caches: non-temporal vector stores, and MOVDIR64B.
//!
//! Such stores are not ordered with others. Each loop ends with a fence, so that nobody finds a copy published whose
//! bytes have not arrived: one fence a burst, since nothing is published inside of it.

use core::arch::asm;
use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

use offcore_ring::prefetch::{self, LINE};

use super::kernel::{self, SOURCE_AHEAD, Vector};
use crate::channel::CopyOp;

/// A shorter copy goes through the caches: too little of it is whole lines.
const WORTH_STREAMING: usize = 256;

/// Takes a whole line past the caches.
trait Line {
    /// # Safety
    /// 64 bytes are readable at `from` and writable at `to`, which is a line's start, and the CPU has the instruction.
    unsafe fn stream(from: *const u8, to: *mut u8);
}

macro_rules! line {
    ($register:ty, $load:ident, $stream:ident) => {
        impl Line for $register {
            #[inline(always)]
            unsafe fn stream(from: *const u8, to: *mut u8) {
                for at in (0..LINE).step_by(size_of::<Self>()) {
                    // SAFETY: inside the line that the caller promises, whose start is aligned for any register.
                    unsafe { $stream(to.add(at).cast(), $load(from.add(at).cast())) };
                }
            }
        }
    };
}

line!(__m128i, _mm_loadu_si128, _mm_stream_si128);
line!(__m256i, _mm256_loadu_si256, _mm256_stream_si256);
line!(__m512i, _mm512_loadu_si512, _mm512_stream_si512);

/// Direct stores. The registers are fixed so that a test can compare the instruction's bytes.
struct Direct;

macro_rules! movdir64b {
    () => {
        "movdir64b rax, [rcx]"
    };
}

impl Line for Direct {
    #[inline(always)]
    unsafe fn stream(from: *const u8, to: *mut u8) {
        // SAFETY: reads the 64 bytes at `from` and writes those at `to`, which is aligned to 64, as the caller promises;
        // the instruction touches neither flags nor stack.
        unsafe { asm!(movdir64b!(), in("rax") to, in("rcx") from, options(nostack, preserves_flags)) };
    }
}

macro_rules! loops {
    ($name:ident, $register:ty, $line:ty, $feature:literal) => {
        /// # Safety
        /// As for [`super::copy_burst`], and the CPU has the feature and the instructions.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name(ops: &[CopyOp]) {
            // SAFETY: the caller's promises; the feature is enabled here.
            unsafe { burst::<$register, $line>(ops) };
        }
    };
}

loops!(sse2, __m128i, __m128i, "sse2");
loops!(avx2, __m256i, __m256i, "avx2");
loops!(avx512, __m512i, __m512i, "avx512f");
// What is left of a copy beside whole lines is too short for the width to matter.
loops!(direct, __m128i, Direct, "sse2");

/// Makes the copies, whole lines by `L`, what is left at either end by `V`.
///
/// # Safety
/// As for [`super::copy_burst`], and the CPU has `V` and `L`.
#[inline(always)]
unsafe fn burst<V: Vector, L: Line>(ops: &[CopyOp]) {
    for op in ops.iter().take(SOURCE_AHEAD) {
        fetch(op);
    }
    for (i, op) in ops.iter().enumerate() {
        if let Some(later) = ops.get(i + SOURCE_AHEAD) {
            fetch(later);
        }
        // SAFETY: the caller's promises.
        unsafe { copy::<V, L>(op.src, op.dst, op.len as usize) };
    }
    // SAFETY: every x86-64 CPU has SFENCE; it has no preconditions.
    unsafe { _mm_sfence() };
}

/// Asks for the source's lines, and for the two of the destination that may be written in part only.
#[inline(always)]
fn fetch(op: &CopyOp) {
    kernel::fetch_source(op);
    prefetch::write(op.dst);
    prefetch::write(op.dst.wrapping_add(op.len as usize));
}

/// Copies `len` bytes that do not overlap.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`, and the CPU has `V` and `L`.
#[inline(always)]
unsafe fn copy<V: Vector, L: Line>(src: *const u8, dst: *mut u8, len: usize) {
    if len < WORTH_STREAMING {
        // SAFETY: the same promises.
        return unsafe { kernel::copy::<V>(src, dst, len) };
    }
    // Up to the first line that begins in the destination: less than a line, and so less than `len`.
    let mut at = dst.addr().wrapping_neg() % LINE;
    // SAFETY: `at` is less than `len`.
    unsafe { kernel::copy::<V>(src, dst, at) };
    while at + LINE <= len {
        // SAFETY: the line ends at `len` or before, and `dst + at` is a line's start.
        unsafe { L::stream(src.add(at), dst.add(at)) };
        at += LINE;
    }
    // SAFETY: from `at` on, `len - at` bytes are left.
    unsafe { kernel::copy::<V>(src.add(at), dst.add(at), len - at) };
}

#[cfg(test)]
mod tests {
    use core::arch::global_asm;

    global_asm!(
        ".global offcore_test_movdir64b",
        "offcore_test_movdir64b:",
        movdir64b!(),
        ".byte 0x90, 0x90, 0x90",
    );

    unsafe extern "C" {
        #[link_name = "offcore_test_movdir64b"]
        static INSTRUCTION: [u8; 8];
    }

    #[test]
    fn direct_store_encoding() {
        // MOVDIR64B r64, m512 is 66 0F 38 F8 /r; ModRM 01 is register RAX (the destination's address), memory at RCX.
        // SAFETY: five bytes of instruction and three of padding stand at the label, and are never written.
        let bytes = unsafe { INSTRUCTION };
        assert_eq!(bytes, [0x66, 0x0f, 0x38, 0xf8, 0x01, 0x90, 0x90, 0x90]);
    }
}
