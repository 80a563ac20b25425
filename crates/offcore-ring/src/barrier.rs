//! The one full barrier of either side of a virtqueue.

use core::arch::asm;

/// A full barrier: what we passed on is visible before the other side's event field is read, and what we ask for before
/// the ring is looked at again.
///
/// A locked instruction on the stack, as the kernel's and DPDK's: MFENCE, which `fence(SeqCst)` becomes, does the same for
/// ordinary memory and takes several times as long.
#[inline(always)]
pub(crate) fn full_barrier() {
    // Miri runs no assembly.
    if cfg!(miri) {
        return std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }
    // SAFETY: four bytes below the stack pointer are the stack's; nothing is changed there, be they in use or not.
    unsafe { asm!("lock or dword ptr [rsp - 4], 0", options(nostack)) };
}
