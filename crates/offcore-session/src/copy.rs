//! Copies between shared memory and private memory.
//!
//! Another thread or process may store to the shared bytes during a copy: it must not, but nothing here can keep it from doing
//! so. An ordinary copy would be a data race then, which is undefined behaviour in Rust. Assembly copies the bytes that are there.

/// Copies `len` bytes.
///
/// # Safety
/// `len` bytes at `from` can be read and `len` bytes at `to` can be written; they do not overlap. One of them may be memory
/// that others use at the same time, by this function or by atomics only.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the caller vouches for both ranges. The direction flag is clear, as `asm!` guarantees.
    #[cfg(not(any(miri, tsan)))]
    unsafe {
        core::arch::asm!(
            "rep movsb",
            inout("rcx") len => _, inout("rsi") from => _, inout("rdi") to => _,
            options(nostack, preserves_flags)
        );
    }
    // SAFETY: as above. Miri executes no assembly, and ThreadSanitizer does not see it.
    #[cfg(any(miri, tsan))]
    unsafe {
        core::ptr::copy_nonoverlapping(from, to, len); // copy-ok: see above
    }
}
