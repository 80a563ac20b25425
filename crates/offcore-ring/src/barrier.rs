//! The full memory barrier used by both sides of a virtqueue.

use core::arch::asm;

/// A full barrier. It makes published entries visible before the event field of the other side is read, and requests
/// for notification visible before the ring is checked again.
///
/// It is a locked instruction on the stack, as in the kernel and DPDK. `fence(SeqCst)` compiles to MFENCE, which has
/// the same effect for ordinary memory, but takes several times as long.
#[inline(always)]
pub(crate) fn full_barrier() {
    // Miri does not support assembly.
    if cfg!(miri) {
        return std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
    // SAFETY: the four bytes below the stack pointer belong to the stack. OR with 0 does not change them.
    unsafe { asm!("lock or dword ptr [rsp - 4], 0", options(nostack)) };
}
