//! Memory of a device in place of a pool's own: packets that a network card puts into a GPU's memory itself.
//!
//! The pool still gives out chunks, and handles say where in a chunk a packet is; but its bytes are in the device's memory,
//! chunk `i` from `i` times the chunk size on. Nobody may read or write them through a handle: what is there is the pool's
//! own memory, which holds something else.

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use crate::pool::Pool;

/// Memory of a device for the packets of a pool. It stays for as long as a clone of this is there.
#[derive(Clone, Debug)]
pub struct DeviceMemory {
    device: String,
    base: usize,
    len: usize,
    page_size: usize,
    mapped: bool,
    _keep: Arc<dyn Any + Send + Sync>,
}

impl DeviceMemory {
    /// `len` bytes from the address `base` on, in whole pages of `page_size` bytes, which `keep` keeps; of the device of this
    /// name. `mapped`: the CPU reaches them at the same address, so that somebody who copies can stand in for a network card.
    ///
    /// # Safety
    /// The bytes are there, for devices and, if `mapped`, for the CPU, as long as `keep` is; and nobody else uses them.
    ///
    /// # Panics
    /// When they are not whole pages, or pages no power of two.
    pub unsafe fn new(
        device: &str,
        (base, len): (usize, usize),
        page_size: usize,
        mapped: bool,
        keep: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        assert!(page_size.is_power_of_two(), "pages of {page_size} bytes");
        assert!(base.is_multiple_of(page_size) && len.is_multiple_of(page_size), "{len} bytes at {base:#x}");
        Self { device: device.into(), base, len, page_size, mapped, _keep: keep }
    }

    /// The device's name.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Where it begins: an address that means something to devices, and to the CPU only when it is [mapped](Self::is_mapped).
    pub fn base(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.base)
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Whether the CPU can read and write it.
    pub fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Whether there is room for all chunks of `pool`.
    pub fn holds(&self, pool: &Pool) -> bool {
        pool.chunks() * pool.chunk_size() <= self.len
    }
}

#[cfg(test)]
mod tests {
    use crate::{Hugepages, Pool};

    use super::*;

    #[test]
    fn it_holds_pools_that_are_not_larger() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        // SAFETY: nothing is put there.
        let memory = |len| unsafe { DeviceMemory::new("host", (1 << 30, len), 65_536, false, Arc::new(())) };
        assert!(
            memory(128 << 10).holds(pool) && !memory(64 << 10).holds(pool) && !memory(64 << 10).is_empty()
        );
    }

    #[test]
    #[should_panic(expected = "bytes at 0x40000800")]
    fn it_is_whole_pages() {
        // SAFETY: nothing is put there.
        unsafe { DeviceMemory::new("host", ((1 << 30) + 2048, 65_536), 65_536, false, Arc::new(())) };
    }
}
