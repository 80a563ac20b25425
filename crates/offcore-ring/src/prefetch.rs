//! Prefetching of cache lines.
//!
//! The usual intrinsics prefetch for reading. If a line in another core's cache is going to be *written*, the store
//! still has to fetch ownership. PREFETCHW does this ahead of time. The compiler emits it only for targets that are
//! known to support it, so this module uses assembly. Every x86-64 CPU executes it; old ones treat it as a no-op.

use core::arch::asm;
use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

/// Length of a cache line in bytes.
pub const LINE: usize = 64;

/// Prefetches the line at `address` into the first-level cache, for reading. Any address is allowed.
#[inline(always)]
pub fn read<T>(address: *const T) {
    // SAFETY: a prefetch is a hint. It faults on no address and changes no memory.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Prefetches the line at `address` into the second-level cache, for reading. Any address is allowed.
#[inline(always)]
pub fn read_l2<T>(address: *const T) {
    // SAFETY: a prefetch is a hint. It faults on no address and changes no memory.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}

/// Prefetches the line at `address` for writing, which removes it from the caches of other cores. Any address is
/// allowed.
#[inline(always)]
pub fn write<T>(address: *const T) {
    // Miri does not support assembly.
    if cfg!(miri) {
        return;
    }
    // SAFETY: PREFETCHW is a hint. It faults on no address and changes no memory, flags or stack.
    unsafe { asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) };
}
