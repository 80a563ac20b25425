//! Tests of each side alone. The test writes the other side's memory, following or violating the specification.

use std::ptr::NonNull;

use offcore_mem::testing::{guest_memory, guest_regions};
use offcore_mem::{GuestMemory, RegionCache};

use super::*;
use crate::device::{Buffer, Chain, DeviceQueue, Direction, Single, Wanted};
use crate::driver;
use crate::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT};
use crate::testing;
use crate::vector::Level;

mod device_side;
mod driver_side;
mod events;
#[cfg(not(miri))]
mod exhaustive;

const RING: u64 = 0x1000;
const DRIVER_EVENT: u64 = 0x400;
const DEVICE_EVENT: u64 = 0x404;
const TABLE: u64 = 0x9000;
/// End of the first region and start of the second one, which is at another place in host memory.
const SEAM: u64 = 0x2_0000;
const END: u64 = 0x4_0000;

struct Guest {
    memory: Arc<GuestMemory>,
    layout: PackedLayout,
}

fn guest(size: u16) -> Guest {
    let memory = guest_regions([(0, 0, SEAM as usize), (SEAM, 1 << 40, SEAM as usize)]);
    let areas = Areas { descriptors: RING, driver: DRIVER_EVENT, device: DEVICE_EVENT };
    let layout = PackedLayout::in_memory(&memory, areas, size.into()).unwrap();
    Guest { memory, layout }
}

impl Guest {
    fn at(&self, address: u64) -> NonNull<u8> {
        self.memory.translate(address, 16, &mut RegionCache::empty()).unwrap()
    }

    fn write(&self, address: u64, desc: PackedDescriptor) {
        // SAFETY: `at` found room for 16 bytes.
        unsafe { self.at(address).cast().write_unaligned(desc) };
    }

    fn read(&self, index: u16) -> PackedDescriptor {
        // SAFETY: `at` found 16 bytes.
        unsafe { self.at(RING + u64::from(index) * 16).cast().read() }
    }

    fn put(&self, index: u16, desc: PackedDescriptor) {
        self.write(RING + u64::from(index) * 16, desc);
    }

    fn device(&self, event_idx: bool) -> device::PackedDevice {
        device::PackedDevice::new(self.layout.clone(), FRESH_BASE, event_idx, true).unwrap()
    }

    fn driver_event(&self, off_wrap: u16, flags: u16) {
        self.layout.driver_event().store(u32::from(off_wrap) | u32::from(flags) << 16, Ordering::Relaxed);
    }

    fn device_event(&self, off_wrap: u16, flags: u16) {
        self.layout.device_event().store(u32::from(off_wrap) | u32::from(flags) << 16, Ordering::Relaxed);
    }

    fn single(
        &self,
        queue: &mut device::PackedDevice,
        ahead: u16,
        direction: Direction,
    ) -> Option<(Buffer, Chain)> {
        testing::single(queue, ahead, &self.memory, direction)
    }

    /// Returns guest addresses and lengths of the chain `ahead`, and the chain.
    fn walk(
        &self,
        queue: &mut device::PackedDevice,
        ahead: u16,
        direction: Direction,
    ) -> Result<(Vec<(u64, u32)>, Chain), RingError> {
        let (first, second) = (self.at(0).as_ptr() as u64, self.at(SEAM).as_ptr() as u64);
        let mut buffers = Vec::new();
        let chain = queue.walk(ahead, &self.memory, direction, &mut 80, |buffer| {
            let host = buffer.addr.as_ptr() as u64;
            let guest =
                if (first..first + SEAM).contains(&host) { host - first } else { host - second + SEAM };
            assert!(guest + u64::from(buffer.len) <= END);
            buffers.push((guest, buffer.len));
        })?;
        Ok((buffers, chain))
    }
}

fn desc(addr: u64, len: u32, id: u16, flags: u16) -> PackedDescriptor {
    PackedDescriptor { addr, len, id, flags }
}

/// State bits of an available descriptor in a turn with this wrap counter.
fn available(wrap: bool) -> u16 {
    if wrap { 1 << 7 } else { 1 << 15 }
}

/// State bits of a used descriptor in a turn with this wrap counter.
fn used(wrap: bool) -> u16 {
    if wrap { 1 << 7 | 1 << 15 } else { 0 }
}

#[test]
fn sizes_and_alignment_are_checked() {
    let at = NonNull::<u8>::without_provenance;
    let layout = |ring: usize, driver: usize, device: usize, size| {
        let part = |x| at(std::num::NonZeroUsize::new(x).unwrap());
        // SAFETY: the layout is only used for these checks.
        unsafe { PackedLayout::new(part(ring), part(driver), part(device), size) }
    };
    for size in [0, 32769, 65536, u32::MAX] {
        assert_eq!(layout(16, 16, 16, size).unwrap_err(), RingError::PackedSize(size));
    }
    for size in [1, 3, 7, 256, 32767, 32768] {
        assert_eq!(u32::from(layout(16, 4, 8, size).unwrap().size()), size);
    }
    assert!(matches!(layout(8, 16, 16, 8), Err(RingError::Alignment { part: "descriptor ring", .. })));
    assert!(matches!(layout(16, 2, 16, 8), Err(RingError::Alignment { part: "driver event structure", .. })));
    assert!(matches!(layout(16, 16, 2, 8), Err(RingError::Alignment { part: "device event structure", .. })));
}

#[test]
fn ring_parts_are_bounds_checked() {
    let of = |descriptors, driver, device| {
        PackedLayout::in_memory(&guest_memory(0x2000), Areas { descriptors, driver, device }, 256)
    };
    assert_eq!(of(0x1000, 0, 4).unwrap().size(), 256);
    assert!(matches!(of(0x1010, 0, 4), Err(RingError::Part { part: "descriptor ring", len: 4096, .. })));
    assert!(matches!(of(0, 0x1fff, 4), Err(RingError::Part { part: "driver event structure", .. })));
    assert!(matches!(of(0, 0, u64::MAX), Err(RingError::Part { part: "device event structure", .. })));
}

#[test]
fn positions_wrap_with_wrap_counter() {
    for size in [1u32, 2, 3, 8, 32768] {
        let (mut at, mut index, mut wrap) = (Position::FRESH, 0, true);
        for step in 0..(4 * size).min(70_000) {
            assert_eq!((at.index(size), at.wrap(size)), (index, wrap));
            assert_eq!(at.encode(size), index as u16 | u16::from(wrap) << 15);
            assert_eq!(Position::decode(at.encode(size), size), Some(at));
            assert_eq!(at.since(Position::FRESH, size), step % (2 * size));
            assert_eq!(at.after(size, size).since(at, size), size);
            at = at.after(1, size);
            index += 1;
            if index == size {
                (index, wrap) = (0, !wrap);
            }
        }
        assert_eq!(Position::decode(size as u16 & !WRAP, size).is_none(), size < 32768);
        // The position stays inside the ring, even if a caller passes too many entries.
        assert!(Position(2 * size - 1).after(u32::MAX, size).index(size) < size);
    }
}
