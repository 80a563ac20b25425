//! Memory for all that this program allocates, in one piece, so that a device can be told of it: the conformance suite takes
//! its buffers from wherever memory is allocated, and a device reaches what is registered.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// More than all checks allocate; what is not touched takes no memory.
const SIZE: usize = 1 << 32;

/// Hands out its bytes one after the other, and takes none back.
struct Arena {
    base: OnceLock<usize>,
    used: AtomicUsize,
}

#[global_allocator]
static ARENA: Arena = Arena { base: OnceLock::new(), used: AtomicUsize::new(0) };

impl Arena {
    fn base(&self) -> *mut u8 {
        let map = || {
            let (access, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            );
            // SAFETY: a new mapping.
            let base = unsafe { libc::mmap(std::ptr::null_mut(), SIZE, access, flags, -1, 0) };
            if base == libc::MAP_FAILED {
                std::process::abort();
            }
            base.expose_provenance()
        };
        std::ptr::with_exposed_provenance_mut(*self.base.get_or_init(map))
    }
}

// SAFETY: every byte is handed out once, aligned; where there are none left they are the system's, which frees what is not the
// arena's.
unsafe impl GlobalAlloc for Arena {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let base = self.base();
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            // The mapping begins with a page, and nothing is aligned to more.
            let at = used.next_multiple_of(layout.align());
            let end = at + layout.size();
            if end > SIZE || layout.align() > 4096 {
                // SAFETY: the caller's promise.
                return unsafe { System.alloc(layout) };
            }
            match self.used.compare_exchange_weak(used, end, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return base.wrapping_add(at),
                Err(now) => used = now,
            }
        }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        if place.addr().wrapping_sub(self.base().addr()) >= SIZE {
            // SAFETY: not the arena's, so the system's; the rest is the caller's promise.
            unsafe { System.dealloc(place, layout) };
        }
    }
}

/// First byte and length.
pub(crate) fn memory() -> (*mut u8, usize) {
    (ARENA.base(), SIZE)
}

/// Memory of the system's, which no device is told of.
pub(crate) fn elsewhere(len: usize) -> &'static mut [u8] {
    let layout = Layout::array::<u8>(len).unwrap();
    // SAFETY: the layout has bytes, and they are zero; nobody else has them, and they are never given back.
    unsafe { std::slice::from_raw_parts_mut(System.alloc_zeroed(layout), len) }
}
