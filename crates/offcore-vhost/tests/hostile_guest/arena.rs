//! Memory of a hostile guest: two regions that are adjacent in guest addresses but not in host addresses, each between
//! inaccessible pages. An access one byte outside of a region ends the test with a segmentation fault.
#![allow(dead_code, reason = "each test binary and fuzz target uses its own part")]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offcore_mem::{GuestMemory, GuestRegion, Mapping};
use offcore_ring::Areas;
use offcore_ring::split::{Descriptor, SplitLayout};
use offcore_vhost::VringConfig;
use rustix::mm::{MprotectFlags, mprotect};

/// Guest address of the first region: rings at lower addresses, buffers and indirect tables at higher ones.
pub(crate) const START: u64 = 0x4000_0000;
/// End of the first region and start of the second one.
pub(crate) const SEAM: u64 = START + 0x4_0000;
/// End of the second region.
pub(crate) const END: u64 = SEAM + 0x2_0000;
/// End of the rings and start of the buffers.
pub(crate) const BUFFERS: u64 = START + 0x1_0000;
/// Difference between front-end addresses and guest addresses.
const USER: u64 = 0x7000_0000_0000;
const GUARD: usize = 0x1_0000;

/// Guest addresses of a virtqueue's parts, with room for 1024 entries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    pub(crate) desc: u64,
    pub(crate) avail: u64,
    pub(crate) used: u64,
}

/// The virtqueue that the guest receives from.
pub(crate) const RX: Ring = Ring { desc: START, avail: START + 0x4000, used: START + 0x5000 };
/// The virtqueue that the guest transmits to.
pub(crate) const TX: Ring = Ring { desc: START + 0x8000, avail: START + 0xc000, used: START + 0xd000 };

pub(crate) struct Arena {
    pub(crate) memory: Arc<GuestMemory>,
    regions: [(u64, u64, *mut u8, OwnedFd); 2],
}

// SAFETY: the pointers refer to mappings that `memory` keeps. They are used only for volatile accesses.
unsafe impl Send for Arena {}
// SAFETY: `memory` keeps the mappings of the pointers. Threads only make volatile accesses to them.
unsafe impl Sync for Arena {}

impl Arena {
    pub(crate) fn new() -> Self {
        let parts = [(START, SEAM), (SEAM, END)].map(|(start, end)| {
            let len = (end - start) as usize;
            // Not sealed, so that the guest can truncate it.
            let fd = rustix::fs::memfd_create("arena", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, (len + 2 * GUARD) as u64).unwrap();
            let mapping = Mapping::shared(fd.as_fd(), 0, len + 2 * GUARD).unwrap();
            let base = mapping.base().as_ptr();
            for guard in [0, GUARD + len] {
                // SAFETY: the pages are in the mapping, and no references to them exist.
                unsafe { mprotect(base.add(guard).cast(), GUARD, MprotectFlags::empty()) }.unwrap();
            }
            let region = GuestRegion::new(start, start + USER, len as u64, mapping, GUARD).unwrap();
            (region, (start, end, base.wrapping_add(GUARD), fd))
        });
        let [(a, part_a), (b, part_b)] = parts;
        Self { memory: Arc::new(GuestMemory::new(vec![b, a]).unwrap()), regions: [part_a, part_b] }
    }

    pub(crate) fn layout(&self, ring: Ring, size: u16) -> SplitLayout {
        let user = |address| address + USER;
        let areas = Areas { descriptors: user(ring.desc), driver: user(ring.avail), device: user(ring.used) };
        SplitLayout::in_memory(&self.memory, areas, size.into()).unwrap()
    }

    pub(crate) fn config(&self, ring: Ring, size: u16, features: u64, base: u16) -> VringConfig {
        let memory = Arc::clone(&self.memory);
        let (layout, base) = (self.layout(ring, size).into(), base.into());
        let start = VringConfig::next_start();
        VringConfig {
            memory,
            layout,
            start,
            base,
            features,
            call: None,
            kick: None,
            log: None,
            inflight: None,
            enabled: true,
        }
    }

    fn byte(&self, address: u64) -> *mut u8 {
        let (start, _, host, _) = self.regions.iter().find(|r| (r.0..r.1).contains(&address)).unwrap();
        host.wrapping_add((address - start) as usize)
    }

    /// Writes bytes to the memory. Bytes outside of it are ignored, because a guest cannot write there.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) {
        for (i, &byte) in bytes.iter().enumerate() {
            let at = address.wrapping_add(i as u64);
            if (START..END).contains(&at) {
                // SAFETY: the address is inside a region. Volatile, because the device may access it at the same time.
                unsafe { self.byte(at).write_volatile(byte) };
            }
        }
    }

    pub(crate) fn read(&self, address: u64, len: usize) -> Vec<u8> {
        // SAFETY: `byte` panics outside of the regions. Volatile, because the device may access the byte at the same
        // time.
        (address..).take(len).map(|at| unsafe { self.byte(at).read_volatile() }).collect()
    }

    /// Makes a single aligned write, in the same way as a driver's CPU.
    pub(crate) fn write_u16(&self, address: u64, value: u16) {
        assert!(address.is_multiple_of(2));
        // SAFETY: the address is aligned and inside a region, because regions consist of whole pages.
        unsafe { self.byte(address).cast::<u16>().write_volatile(value) };
    }

    pub(crate) fn read_u16(&self, address: u64) -> u16 {
        let bytes = self.read(address, 2);
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    pub(crate) fn descriptor(&self, table: u64, index: u16, desc: Descriptor) {
        let rest = u64::from(desc.len) | u64::from(desc.flags) << 32 | u64::from(desc.next) << 48;
        let at = table.wrapping_add(u64::from(index) * 16);
        self.write(at, &desc.addr.to_le_bytes());
        self.write(at.wrapping_add(8), &rest.to_le_bytes());
    }

    /// Makes the chain at `head` available.
    pub(crate) fn offer(&self, ring: Ring, size: u16, head: u16) {
        let index = self.read_u16(ring.avail + 2);
        self.write_u16(ring.avail + 4 + u64::from(index & (size - 1)) * 2, head);
        self.write_u16(ring.avail + 2, index.wrapping_add(1));
    }

    /// Returns a used element: first descriptor of the chain, and number of bytes written.
    pub(crate) fn used(&self, ring: Ring, size: u16, position: u16) -> (u32, u32) {
        let bytes = self.read(ring.used + 4 + u64::from(position & (size - 1)) * 8, 8);
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        (word(0), word(4))
    }

    pub(crate) fn used_idx(&self, ring: Ring) -> u16 {
        self.read_u16(ring.used + 2)
    }

    /// Zeroes the memory for a reboot of the guest.
    pub(crate) fn clear(&self) {
        for (start, end, host, _) in &self.regions {
            for word in 0..(end - start) as usize / 8 {
                // SAFETY: the address is inside the region, and aligned because regions consist of whole pages.
                unsafe { host.cast::<u64>().add(word).write_volatile(0) };
            }
        }
    }

    /// Removes all pages of the first (0) or second (1) region.
    pub(crate) fn truncate(&self, region: usize) {
        rustix::fs::ftruncate(&self.regions[region].3, 0).unwrap();
    }
}

pub(crate) fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}
