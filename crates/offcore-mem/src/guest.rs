//! Memory of another party: a table of regions, as described by vhost-user's SET_MEM_TABLE message.
//!
//! Addresses come from a hostile guest, so every use checks the complete range against the table. A table is immutable.
//! A change creates a new table, which shares unchanged regions with the old one. The old table lives until the last
//! in-flight copy that uses it has completed.

use std::ptr::NonNull;
use std::sync::Arc;

use crate::mapping::Mapping;
use crate::sigbus::Guarded;

/// Errors of the creation of a table. `guest` is a guest physical address.
#[derive(Debug, displaydoc::Display, thiserror::Error, PartialEq, Eq)]
pub enum TableError {
    /// guest memory region {guest:#x}+{len:#x} is empty or wraps around
    Range { guest: u64, len: u64 },
    /// guest memory regions {0:#x} and {1:#x} overlap
    Overlap(u64, u64),
    /// guest memory region {guest:#x}+{len:#x} does not fit its mapping of {mapped:#x} bytes at offset {offset:#x}
    Mapping { guest: u64, len: u64, offset: usize, mapped: usize },
}

/// One region of another party's memory.
#[derive(Debug)]
pub struct GuestRegion {
    guest: u64,
    len: u64,
    user: u64,
    host: NonNull<u8>,
    mapping: Guarded,
}

// SAFETY: a region is an address range; users of its raw pointers justify their accesses.
unsafe impl Send for GuestRegion {}
// SAFETY: a region is an address range; users of its raw pointers justify their accesses.
unsafe impl Sync for GuestRegion {}

impl GuestRegion {
    /// Creates the region of `len` bytes at guest physical address `guest` and front-end address `user`, which starts
    /// at `offset` in `mapping`.
    ///
    /// # Errors
    /// If the range is empty, wraps around, or does not fit the mapping.
    pub fn new(guest: u64, user: u64, len: u64, mapping: Mapping, offset: usize) -> Result<Self, TableError> {
        if len == 0 || guest.checked_add(len).is_none() || user.checked_add(len).is_none() {
            return Err(TableError::Range { guest, len });
        }
        let fits = usize::try_from(len)
            .ok()
            .and_then(|len| offset.checked_add(len))
            .is_some_and(|end| end <= mapping.len());
        if !fits {
            return Err(TableError::Mapping { guest, len, offset, mapped: mapping.len() });
        }
        // SAFETY: the offset was just checked to be within the mapping.
        let host = unsafe { mapping.base().add(offset) };
        Ok(Self { guest, len, user, host, mapping: Guarded::new(mapping) })
    }

    /// Guest physical address of the first byte.
    pub fn guest(&self) -> u64 {
        self.guest
    }

    /// The front end's address of the first byte. Ring addresses are given in this form.
    pub fn user(&self) -> u64 {
        self.user
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Offset of the region's first byte in the mapping.
    pub fn offset(&self) -> usize {
        self.host.as_ptr() as usize - self.mapping.base().as_ptr() as usize
    }

    /// Returns whether pages of the region have vanished because its file was truncated. The other party must be
    /// disconnected then.
    pub fn vanished(&self) -> bool {
        self.mapping.has_vanished()
    }

    /// Returns the region's mapping.
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }
}

/// The region of the last translation: most buffers of a burst are in the same region.
#[derive(Clone, Copy, Debug)]
pub struct RegionCache {
    guest: u64,
    len: u64,
    host: *mut u8,
}

// SAFETY: the cache is a copy of a region's addresses; it is only used together with the table that it was filled from.
unsafe impl Send for RegionCache {}

impl RegionCache {
    /// Creates an empty cache. It must be emptied when the table changes.
    pub const fn empty() -> Self {
        Self { guest: 0, len: 0, host: std::ptr::null_mut() }
    }

    /// Returns the region: guest address, length (0 if the cache is empty) and host address.
    #[inline(always)]
    pub fn range(&self) -> (u64, u64, *mut u8) {
        (self.guest, self.len, self.host)
    }
}

/// A table of regions. Owners of in-flight copies that use it hold it as [`Held`].
#[derive(Debug)]
pub struct GuestMemory {
    regions: Vec<Arc<GuestRegion>>,
}

impl GuestMemory {
    /// Creates a table of `regions`, in any order.
    ///
    /// # Errors
    /// [`TableError::Overlap`].
    pub fn new(regions: Vec<GuestRegion>) -> Result<Self, TableError> {
        Self::sharing(regions.into_iter().map(Arc::new).collect())
    }

    /// Creates a table of `regions`, in any order, that other tables may share. Their mappings are not created again.
    ///
    /// # Errors
    /// [`TableError::Overlap`].
    pub fn sharing(mut regions: Vec<Arc<GuestRegion>>) -> Result<Self, TableError> {
        regions.sort_by_key(|r| r.guest);
        if let Some(pair) = regions.windows(2).find(|pair| pair[0].guest + pair[0].len > pair[1].guest) {
            return Err(TableError::Overlap(pair[0].guest, pair[1].guest));
        }
        Ok(Self { regions })
    }

    /// Returns the regions, by ascending guest address.
    pub fn regions(&self) -> &[Arc<GuestRegion>] {
        &self.regions
    }

    /// Returns the host address of the `len` bytes at guest address `guest`, if all of them are in one region.
    #[inline(always)]
    pub fn translate(&self, guest: u64, len: u32, cache: &mut RegionCache) -> Option<NonNull<u8>> {
        let (host, room) = self.translate_some(guest, cache)?;
        (u64::from(len) <= room).then_some(host)
    }

    /// Returns the host address of guest address `guest`, and the number of bytes from there to the end of its region.
    #[inline(always)]
    pub fn translate_some(&self, guest: u64, cache: &mut RegionCache) -> Option<(NonNull<u8>, u64)> {
        let mut offset = guest.wrapping_sub(cache.guest);
        if offset >= cache.len {
            *cache = self.find(guest)?;
            offset = guest - cache.guest;
        }
        // SAFETY: the cache describes a region, and the offset is below its length, so this is the address of a byte in
        // its mapping, which is not null. (The addition wraps, because a cache that was filled from another table may
        // describe a region that is gone.)
        let host = unsafe { NonNull::new_unchecked(cache.host.wrapping_add(offset as usize)) };
        Some((host, cache.len - offset))
    }

    #[cold]
    fn find(&self, guest: u64) -> Option<RegionCache> {
        let after = self.regions.partition_point(|r| r.guest <= guest);
        let region = &self.regions[after.checked_sub(1)?];
        (guest - region.guest < region.len).then_some(RegionCache {
            guest: region.guest,
            len: region.len,
            host: region.host.as_ptr(),
        })
    }

    /// Returns the host address of the `len` bytes at front-end address `user`, the form of ring addresses.
    pub fn translate_user(&self, user: u64, len: usize) -> Option<NonNull<u8>> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user)?;
            let end = offset.checked_add(len as u64)?;
            // SAFETY: `end` is at most the region's length, so the offset is within its mapping.
            (end <= region.len).then(|| unsafe { region.host.add(offset as usize) })
        })
    }

    /// Returns the guest address of a host address, if a region contains it.
    pub fn guest_address(&self, host: NonNull<u8>) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = (host.as_ptr() as usize).checked_sub(region.host.as_ptr() as usize)? as u64;
            (offset < region.len).then_some(region.guest + offset)
        })
    }

    /// Returns whether pages of the table have vanished: see [`crate::sigbus`].
    pub fn vanished(&self) -> bool {
        self.regions.iter().any(|region| region.vanished())
    }
}

/// A table, and the number of in-flight copies that use it, during which its mappings must not be removed.
#[derive(Debug)]
pub struct Held {
    memory: Arc<GuestMemory>,
    in_flight: usize,
}

impl Held {
    /// Creates a holder of a table with no copies in flight.
    pub fn new(memory: Arc<GuestMemory>) -> Self {
        Self { memory, in_flight: 0 }
    }

    /// Sets the number of copies in flight. Called once per burst, not once per copy.
    #[inline(always)]
    pub fn set_in_flight(&mut self, copies: usize) {
        self.in_flight = copies;
    }
}

impl Drop for Held {
    /// Memory must outlive its copies: if copies are in flight, the mappings and their guards are leaked, whether or
    /// not the table is shared. Owners drain first, so this only happens if an engine never completed its copies, or in
    /// a panic.
    fn drop(&mut self) {
        if self.in_flight > 0 {
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hugepages, testing};

    fn region(guest: u64, len: usize) -> GuestRegion {
        testing::region(guest, guest + 0x7000_0000, len)
    }

    fn table() -> GuestMemory {
        GuestMemory::new(vec![region(0x10_0000, 0x8000), region(0, 0x4000)]).unwrap()
    }

    #[test]
    fn whole_ranges_are_checked() {
        let (table, mut cache) = (table(), RegionCache::empty());
        let mut translate = |guest, len| table.translate(guest, len, &mut cache);
        let base = translate(0, 0x4000).unwrap();
        assert_eq!(translate(0x10, 1).unwrap().as_ptr() as usize, base.as_ptr() as usize + 0x10);
        assert!(translate(0, 0x4001).is_none());
        assert!(translate(0x3fff, 2).is_none());
        assert!(translate(0x4000, 1).is_none());
        assert!(translate(0xf_ffff, 1).is_none());
        assert!(translate(0x10_7fff, 1).is_some());
        assert!(translate(0x10_8000, 1).is_none());
        assert!(translate(u64::MAX, u32::MAX).is_none());
    }

    #[test]
    fn front_end_addresses_are_checked() {
        let table = table();
        assert!(table.translate_user(0x7010_0000, 0x8000).is_some());
        assert!(table.translate_user(0x7010_0000, 0x8001).is_none());
        assert!(table.translate_user(u64::MAX, 2).is_none());
        assert!(table.translate_user(0, 1).is_none());
    }

    #[test]
    fn host_addresses_have_guest_addresses() {
        let (table, mut cache) = (table(), RegionCache::empty());
        for guest in [0, 1, 0x3fff, 0x10_0000, 0x10_7fff] {
            let host = table.translate(guest, 1, &mut cache).unwrap();
            assert_eq!(table.guest_address(host), Some(guest));
        }
        assert_eq!(table.guest_address(NonNull::dangling()), None);
    }

    #[test]
    fn overlaps_and_wraps_are_refused() {
        assert_eq!(
            GuestMemory::new(vec![region(0, 0x4000), region(0x3000, 0x1000)]).unwrap_err(),
            TableError::Overlap(0, 0x3000)
        );
        let mapping = || Mapping::memfd("guest", 4096, Hugepages::None).unwrap().0;
        assert!(matches!(GuestRegion::new(u64::MAX, 0, 2, mapping(), 0), Err(TableError::Range { .. })));
        assert!(matches!(GuestRegion::new(0, 0, 0, mapping(), 0), Err(TableError::Range { .. })));
        assert!(matches!(GuestRegion::new(0, 0, 4096, mapping(), 1), Err(TableError::Mapping { .. })));
        assert!(matches!(GuestRegion::new(0, 0, u64::MAX, mapping(), 1), Err(TableError::Mapping { .. })));
    }

    #[test]
    #[cfg_attr(miri, ignore = "truncates a memfd")]
    fn leaked_memory_stays_guarded() {
        let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let mapping = Mapping::shared(std::os::fd::AsFd::as_fd(&fd), 0, 8192).unwrap();
        let region = GuestRegion::new(0, 0, 8192, mapping, 0).unwrap();
        let mut table = Held::new(Arc::new(GuestMemory::new(vec![region]).unwrap()));
        let host = table.memory.translate(4096, 1, &mut RegionCache::empty()).unwrap();
        table.set_in_flight(1);
        drop(table);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        // SAFETY: the mapping was leaked with its guard, which replaces pages that the guest has removed. Without the
        // guard this write would end the process.
        unsafe { host.write_volatile(1) };
    }

    #[test]
    fn last_table_unmaps_shared_regions() {
        let (kept, other) = (Arc::new(region(0, 0x4000)), Arc::new(region(0x8000, 0x4000)));
        let first = GuestMemory::sharing(vec![Arc::clone(&kept), other]).unwrap();
        let second = GuestMemory::sharing(vec![kept, Arc::new(region(0x10_0000, 0x1000))]).unwrap();
        let at = |table: &GuestMemory, guest| table.translate(guest, 1, &mut RegionCache::empty());
        let host = at(&first, 0).unwrap();
        assert_eq!(at(&second, 0), Some(host), "mapped once");
        assert!(at(&first, 0x8000).is_some() && at(&second, 0x8000).is_none());
        drop(first);
        // SAFETY: the second table still has the region, which is what is tested. If the first table had unmapped it,
        // this would be a segmentation fault.
        unsafe { host.write_volatile(1) };
        let weak = Arc::downgrade(&second.regions()[0]);
        drop(second);
        assert!(weak.upgrade().is_none());
        let overlap = GuestMemory::sharing(vec![Arc::new(region(0, 0x4000)), Arc::new(region(0x3fff, 1))]);
        assert_eq!(overlap.unwrap_err(), TableError::Overlap(0, 0x3fff));
    }

    #[test]
    fn memory_outlives_its_copies() {
        let mut table = Held::new(Arc::new(table()));
        let host = table.memory.translate(0, 1, &mut RegionCache::empty()).unwrap();
        table.set_in_flight(2);
        table.set_in_flight(1);
        drop(table);
        // SAFETY: one copy is still in flight, so the mapping must still exist, which is what is tested. Otherwise this
        // write would be a segmentation fault.
        unsafe { host.write_volatile(1) };
    }

    #[test]
    fn memory_goes_when_all_copies_are_complete() {
        let mut table = Held::new(Arc::new(table()));
        table.set_in_flight(2);
        table.set_in_flight(0);
        let weak = Arc::downgrade(&table.memory);
        drop(table);
        assert!(weak.upgrade().is_none());
    }
}
