//! Guest memory for tests, in ordinary pages and full of zeroes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use crate::{GuestMemory, GuestRegion, Hugepages, Mapping};

/// A region of `len` bytes at guest physical address `guest` and front-end address `user`.
pub fn region(guest: u64, user: u64, len: usize) -> GuestRegion {
    let (mapping, _fd) = Mapping::memfd("guest", len, Hugepages::None).unwrap();
    GuestRegion::new(guest, user, len as u64, mapping, 0).unwrap()
}

/// One region of `len` bytes at address 0, for the guest and for its front end.
pub fn guest_memory(len: usize) -> Arc<GuestMemory> {
    guest_regions([(0, 0, len)])
}

/// Regions by guest physical address, front-end address and length.
pub fn guest_regions<const N: usize>(regions: [(u64, u64, usize); N]) -> Arc<GuestMemory> {
    let regions = regions.map(|(guest, user, len)| region(guest, user, len));
    Arc::new(GuestMemory::new(regions.into()).unwrap())
}
