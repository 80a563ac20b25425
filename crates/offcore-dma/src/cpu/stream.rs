//! Copy loops that write whole lines past the caches: non-temporal vector stores, and MOVDIR64B.
//!
//! These stores are weakly ordered. Each loop ends with a fence, so that no copy is published before its bytes have
//! arrived. One fence per burst is sufficient, because nothing is published within a burst.

use core::arch::asm;
use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256,
    _mm256_stream_si256, _mm512_loadu_si512, _mm512_stream_si512,
};

use offcore_ring::prefetch::{self, LINE};

use super::kernel::{self, SOURCE_AHEAD, Vector};
use crate::channel::CopyOp;

/// Minimum length in bytes of a copy that bypasses the caches: whole lines are too small a part of shorter copies.
const WORTH_STREAMING: usize = 256;

/// A store of a whole line that bypasses the caches.
trait Line {
    /// # Safety
    /// 64 bytes are readable at `from` and writable at `to`, which is aligned to a line, and the CPU has the
    /// instruction.
    unsafe fn stream(from: *const u8, to: *mut u8);
}

macro_rules! line {
    ($register:ty, $load:ident, $stream:ident) => {
        impl Line for $register {
            #[inline(always)]
            unsafe fn stream(from: *const u8, to: *mut u8) {
                for at in (0..LINE).step_by(size_of::<Self>()) {
                    // SAFETY: both addresses are within the line that the caller guarantees; its start is aligned for
                    // any register.
                    unsafe { $stream(to.add(at).cast(), $load(from.add(at).cast())) };
                }
            }
        }
    };
}

line!(__m128i, _mm_loadu_si128, _mm_stream_si128);
line!(__m256i, _mm256_loadu_si256, _mm256_stream_si256);
line!(__m512i, _mm512_loadu_si512, _mm512_stream_si512);

/// Direct stores. The registers are fixed so that a test can check the encoding.
struct Direct;

macro_rules! movdir64b {
    () => {
        "movdir64b rax, [rcx]"
    };
}

impl Line for Direct {
    #[inline(always)]
    unsafe fn stream(from: *const u8, to: *mut u8) {
        // SAFETY: the instruction reads the 64 bytes at `from` and writes the 64 bytes at `to`, which is aligned to 64,
        // as the caller guarantees. It affects neither flags nor stack.
        unsafe { asm!(movdir64b!(), in("rax") to, in("rcx") from, options(nostack, preserves_flags)) };
    }
}

macro_rules! loops {
    ($name:ident, $register:ty, $line:ty, $feature:literal) => {
        /// # Safety
        /// As for [`super::copy_burst`], and the CPU has the feature and the instructions.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name(ops: &[CopyOp]) {
            // SAFETY: the caller keeps source and destination of each copy valid for its length during the call; the
            // feature is enabled here.
            unsafe { burst::<$register, $line>(ops) };
        }
    };
}

loops!(sse2, __m128i, __m128i, "sse2");
loops!(avx2, __m256i, __m256i, "avx2");
loops!(avx512, __m512i, __m512i, "avx512f");
// The remaining bytes next to whole lines are too few for the width to matter.
loops!(direct, __m128i, Direct, "sse2");

/// Makes the copies: whole lines with `L`, the remaining bytes at either end with `V`.
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
        // SAFETY: the caller keeps `op.src` readable and `op.dst` writable for `op.len` bytes during the call; the CPU
        // has `V` and `L`.
        unsafe { copy::<V, L>(op.src, op.dst, op.len as usize) };
    }
    // SAFETY: every x86-64 CPU has SFENCE, which has no preconditions.
    unsafe { _mm_sfence() };
}

/// Prefetches the source's lines, and the two destination lines that may be written partially.
#[inline(always)]
fn fetch(op: &CopyOp) {
    kernel::fetch_source(op);
    prefetch::write(op.dst);
    prefetch::write(op.dst.wrapping_add(op.len as usize));
}

/// Copies `len` bytes; the ranges must not overlap.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`, and the CPU has `V` and `L`.
#[inline(always)]
unsafe fn copy<V: Vector, L: Line>(src: *const u8, dst: *mut u8, len: usize) {
    if len < WORTH_STREAMING {
        // SAFETY: `src` has `len` readable and `dst` has `len` writable bytes, as the caller guarantees; the CPU has
        // `V`.
        return unsafe { kernel::copy::<V>(src, dst, len) };
    }
    // The number of bytes up to the first line boundary in the destination. It is less than a line, and so less than
    // `len`.
    let mut at = dst.addr().wrapping_neg() % LINE;
    // SAFETY: `at` is less than `len`.
    unsafe { kernel::copy::<V>(src, dst, at) };
    while at + LINE <= len {
        // SAFETY: the line ends at `len` or before, and `dst + at` is a line's start.
        unsafe { L::stream(src.add(at), dst.add(at)) };
        at += LINE;
    }
    // SAFETY: `len - at` bytes are left from `at` on.
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
        // MOVDIR64B r64, m512 is 66 0F 38 F8 /r. ModRM 01 is register RAX (the destination address), memory at RCX.
        // SAFETY: the label is followed by five bytes of instruction and three of padding, which are never written.
        let bytes = unsafe { INSTRUCTION };
        assert_eq!(bytes, [0x66, 0x0f, 0x38, 0xf8, 0x01, 0x90, 0x90, 0x90]);
    }
}
