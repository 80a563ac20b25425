//! A device's memory in place of a pool's memory, for packets that a network card writes directly into a GPU's memory.
//!
//! The pool still allocates chunks, and handles contain the range of a packet in its chunk. But the packet's bytes are
//! in the device's memory: chunk `i` begins at `i` times the chunk size. They must not be accessed through a handle,
//! because the handle's address is in the pool's memory, which contains other data.

use std::any::Any;
use std::ptr;
use std::sync::Arc;

use crate::pool::Pool;

/// A device's memory for the packets of a pool. It is kept while a clone of this exists.
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
    /// Describes `len` bytes at address `base` in the memory of `device`, in whole pages of `page_size` bytes. `keep`
    /// keeps the memory alive. `mapped`: the CPU can access the bytes at the same address, so that copies by the CPU
    /// can replace a network card.
    ///
    /// # Safety
    /// The bytes must exist, for devices and, if `mapped`, for the CPU, while `keep` exists, and must not be used
    /// elsewhere.
    ///
    /// # Panics
    /// If they are not whole pages, or the page size is not a power of two.
    pub unsafe fn new(
        device: &str,
        base: usize,
        len: usize,
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

    /// Returns the start address. It is valid for devices, and for the CPU only if the memory is
    /// [mapped](Self::is_mapped).
    pub fn base(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.base)
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the page size in bytes.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns whether the CPU can access it.
    pub fn is_mapped(&self) -> bool {
        self.mapped
    }

    /// Returns whether it has room for all chunks of `pool`.
    pub fn holds(&self, pool: &Pool) -> bool {
        pool.chunks() * pool.chunk_size() <= self.len
    }
}

#[cfg(test)]
mod tests {
    use crate::{Hugepages, Pool};

    use super::*;

    #[test]
    fn device_memory_holds_smaller_pools() {
        let pool = Pool::new(64, 2048, Hugepages::None).unwrap();
        // SAFETY: the memory is not accessed.
        let memory = |len| unsafe { DeviceMemory::new("host", 1 << 30, len, 65_536, false, Arc::new(())) };
        assert!(
            memory(128 << 10).holds(pool) && !memory(64 << 10).holds(pool) && !memory(64 << 10).is_empty()
        );
    }

    #[test]
    #[should_panic(expected = "bytes at 0x40000800")]
    fn device_memory_needs_page_alignment() {
        // SAFETY: the memory is not accessed.
        unsafe { DeviceMemory::new("host", (1 << 30) + 2048, 65_536, 65_536, false, Arc::new(())) };
    }
}
