//! Fetching cache lines ahead.
//!
//! Plain intrinsics fetch for reading; a line that is about to be *written* and that another core has in its cache
//! still has to be taken away from there at the store. PREFETCHW does that ahead of time. The compiler only emits it
//! for targets that are known to have it, so it is written by hand: every x86-64 CPU executes it, old ones as a no-op.

use core::arch::asm;
use core::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Asks for the line at `address` in the first-level cache, for reading. Any address is allowed.
#[inline(always)]
pub fn read<T>(address: *const T) {
    // SAFETY: a prefetch is a hint: it faults on no address and changes no memory.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
}

/// Asks for the line at `address` in the second-level cache, for reading. Any address is allowed.
#[inline(always)]
pub fn read_l2<T>(address: *const T) {
    // SAFETY: as in `read`.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}

/// Asks for the line at `address` for writing: takes it away from other cores' caches. Any address is allowed.
#[inline(always)]
pub fn write<T>(address: *const T) {
    // Miri runs no assembly.
    if cfg!(miri) {
        return;
    }
    // SAFETY: PREFETCHW is a hint: it faults on no address, changes no memory, no flags and no stack.
    unsafe { asm!("prefetchw [{}]", in(reg) address, options(nostack, preserves_flags, readonly)) };
}
