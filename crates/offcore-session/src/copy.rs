//! Copies between shared memory and private memory.
//!
//! A misbehaving thread or process may store to the shared bytes during a copy, which cannot be prevented here. An
//! ordinary copy would then be a data race, which is undefined behaviour in Rust. Assembly copies the bytes without
//! undefined behaviour.

/// Copies `len` bytes.
///
/// # Safety
/// `len` bytes must be readable at `from` and writable at `to`. They must not overlap. Other parties may use either
/// range at the same time, but not both ranges, and only by this function or by atomics.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: `len` bytes are readable at `from` and writable at `to`, as the caller guarantees. The direction flag is
    // clear, as `asm!` guarantees.
    #[cfg(not(any(miri, tsan)))]
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    // SAFETY: both ranges are valid and do not overlap, as the caller guarantees. Miri executes no assembly, and
    // ThreadSanitizer does not see it.
    #[cfg(any(miri, tsan))]
    unsafe {
        core::ptr::copy_nonoverlapping(from, to, len); // copy-ok: see above
    }
}
