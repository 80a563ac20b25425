//! Tests of both sides against each other, and of the device side against a hostile driver.

use std::ptr::NonNull;

use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_memory;

use super::*;
use crate::device::{Chain, DeviceQueue, Direction};
use crate::driver;
use crate::vector::{Single, Wanted};

#[cfg(not(miri))]
mod exhaustive;

const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x4000;
const USED: u64 = 0x6000;
const TABLE: u64 = 0x9000;

struct Guest {
    memory: Arc<GuestMemory>,
    base: NonNull<u8>,
    layout: SplitLayout,
}

fn guest(size: u16) -> Guest {
    let memory = guest_memory(1 << 20);
    let base = memory.regions()[0].mapping().base();
    let layout = SplitLayout::in_memory(
        &memory,
        Areas { descriptors: DESC, driver: AVAIL, device: USED },
        size.into(),
    )
    .unwrap();
    Guest { memory, base, layout }
}

impl Guest {
    fn write<V>(&self, address: u64, value: V) {
        // SAFETY: test addresses are inside the 1 MiB mapping.
        unsafe { self.base.add(address as usize).cast::<V>().write_unaligned(value) };
    }

    fn descriptor(&self, table: u64, index: u64, desc: Descriptor) {
        self.write(table + index * 16, desc);
    }

    fn available(&self, heads: &[u16]) {
        for (i, head) in heads.iter().enumerate() {
            self.write(AVAIL + 4 + 2 * i as u64, *head);
        }
        self.write(AVAIL + 2, heads.len() as u16);
    }

    fn walk(&self, direction: Direction) -> Result<Vec<(u64, u32)>, RingError> {
        let mut queue = device::SplitDevice::new(self.layout.clone(), 0, false, true);
        queue.look(1)?;
        let mut buffers = Vec::new();
        queue.walk(0, &self.memory, direction, &mut 64, |b| {
            buffers.push((b.addr.as_ptr() as u64 - self.base.as_ptr() as u64, b.len));
        })?;
        Ok(buffers)
    }
}

fn desc(addr: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { addr, len, flags, next }
}

#[test]
fn sizes_and_alignment_are_checked() {
    let at = NonNull::<u8>::without_provenance;
    let layout = |d: usize, a: usize, u: usize, size| {
        let part = |x| at(std::num::NonZeroUsize::new(x).unwrap());
        // SAFETY: the layout is only used for these checks.
        unsafe { SplitLayout::new(part(d), part(a), part(u), size) }
    };
    for size in [0, 3, 65536, 32769] {
        assert_eq!(layout(16, 16, 16, size).unwrap_err(), RingError::Size(size));
    }
    assert!(matches!(layout(8, 16, 16, 8), Err(RingError::Alignment { part: "descriptor table", .. })));
    assert!(matches!(layout(16, 1, 16, 8), Err(RingError::Alignment { part: "available ring", .. })));
    assert!(matches!(layout(16, 16, 2, 8), Err(RingError::Alignment { part: "used ring", .. })));
    assert!(layout(16, 2, 4, 32768).is_ok());
}

#[test]
fn a_chain_yields_its_buffers() {
    let guest = guest(8);
    guest.descriptor(DESC, 3, desc(0x10000, 10, VIRTQ_DESC_F_NEXT, 5));
    guest.descriptor(DESC, 5, desc(0x20000, 0, VIRTQ_DESC_F_NEXT, 7));
    guest.descriptor(DESC, 7, desc(0x30000, 30, 0, 0));
    guest.available(&[3]);
    assert_eq!(guest.walk(Direction::Readable).unwrap(), [(0x10000, 10), (0x30000, 30)]);
    assert_eq!(guest.walk(Direction::Writable), Err(RingError::Direction { head: 3 }));
}

#[test]
fn indirect_table_at_any_address() {
    for table in [TABLE, TABLE + 3] {
        let guest = guest(8);
        guest.descriptor(DESC, 0, desc(table, 48, VIRTQ_DESC_F_INDIRECT, 0));
        guest.descriptor(table, 0, desc(0x10000, 1, VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_WRITE, 2));
        guest.descriptor(table, 2, desc(0x20000, 2, VIRTQ_DESC_F_WRITE, 0));
        guest.available(&[0]);
        assert_eq!(guest.walk(Direction::Writable).unwrap(), [(0x10000, 1), (0x20000, 2)]);
    }
}

#[test]
fn invalid_chains_are_reported() {
    let case = |descs: &[(u64, u64, Descriptor)], heads: &[u16]| {
        let guest = guest(8);
        for &(table, index, d) in descs {
            guest.descriptor(table, index, d);
        }
        guest.available(heads);
        guest.walk(Direction::Readable).unwrap_err()
    };
    assert_eq!(case(&[], &[8]), RingError::Descriptor { found: 8, size: 8 });
    assert_eq!(case(&[], &[0; 9]), RingError::Index { ring: "available", found: 9, expected: 0, size: 8 });
    assert_eq!(
        case(&[(DESC, 0, desc(0, 1, VIRTQ_DESC_F_NEXT, 8))], &[0]),
        RingError::Descriptor { found: 8, size: 8 }
    );
    assert_eq!(
        case(&[(DESC, 0, desc(0, 1, VIRTQ_DESC_F_NEXT, 0))], &[0]),
        RingError::Loop { head: 0, size: 8 }
    );
    assert_eq!(
        case(&[(DESC, 0, desc(0, 0, VIRTQ_DESC_F_NEXT, 0))], &[0]),
        RingError::Loop { head: 0, size: 8 }
    );
    let out = |addr, len| case(&[(DESC, 0, desc(addr, len, 0, 0))], &[0]);
    for (addr, len) in [(1 << 20, 1), ((1 << 20) - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX)]
    {
        assert!(matches!(out(addr, len), RingError::Address { .. }), "{addr:#x}+{len:#x}");
    }
    for len in [0, 15, 17, 0xffff_fff0] {
        let error = case(&[(DESC, 0, desc(TABLE, len, VIRTQ_DESC_F_INDIRECT, 0))], &[0]);
        assert_eq!(error, RingError::IndirectTable { head: 0, len, flags: VIRTQ_DESC_F_INDIRECT });
    }
    let flags = VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_NEXT;
    assert!(matches!(case(&[(DESC, 0, desc(TABLE, 16, flags, 1))], &[0]), RingError::IndirectTable { .. }));
    let nested = [
        (DESC, 0, desc(TABLE, 16, VIRTQ_DESC_F_INDIRECT, 0)),
        (TABLE, 0, desc(TABLE, 16, VIRTQ_DESC_F_INDIRECT, 0)),
    ];
    assert_eq!(case(&nested, &[0]), RingError::IndirectNotAllowed { head: 0 });
    let outside = desc((1 << 20) - 8, 16, VIRTQ_DESC_F_INDIRECT, 0);
    assert!(matches!(case(&[(DESC, 0, outside)], &[0]), RingError::Address { .. }));
    let mut long: Vec<_> =
        (0..100).map(|i| (TABLE, i, desc(0x10000, 1, VIRTQ_DESC_F_NEXT, i as u16 + 1))).collect();
    long.push((DESC, 0, desc(TABLE, 1600, VIRTQ_DESC_F_INDIRECT, 0)));
    assert_eq!(case(&long, &[0]), RingError::TooManyBuffers { head: 0, max: 64 });
}

/// Descriptors are read once even if a run is often interrupted by longer chains. Reading the rest of the run again
/// each time would be quadratic, and a driver could change the descriptors in between.
#[test]
fn each_descriptor_of_a_run_is_read_once() {
    let guest = guest(8);
    for head in [0, 2, 3] {
        guest.descriptor(DESC, head, desc(0x1_0000, 100, 0, 0));
    }
    guest.descriptor(DESC, 1, desc(0x1_0000, 100, VIRTQ_DESC_F_NEXT, 4));
    guest.descriptor(DESC, 4, desc(0x1_0000, 100, 0, 0));
    guest.available(&[0, 1, 2, 3]);
    let mut queue = device::SplitDevice::new(guest.layout.clone(), 0, false, true);
    let wanted = Wanted { direction: Direction::Readable, least: 0, most: u32::MAX };
    let lengths = |queue: &mut device::SplitDevice, ahead| -> Vec<u32> {
        queue.singles(ahead, 8, &guest.memory, wanted).iter().map(Single::len).collect()
    };
    assert_eq!(queue.look(8), Ok(4));
    assert_eq!(lengths(&mut queue, 0), [100]);
    for head in [2, 3] {
        guest.descriptor(DESC, head, desc(0x1_0000, 7, 0, 0));
    }
    assert_eq!(lengths(&mut queue, 2), [100, 100], "as they were when the run was read");
    // A new look starts a new run.
    assert_eq!(queue.look(8), Ok(4));
    assert_eq!(lengths(&mut queue, 2), [7, 7]);
}

#[test]
fn inflight_chains_bound_available_index() {
    let guest = guest(8);
    let mut queue = device::SplitDevice::new(guest.layout.clone(), 0, false, false);
    let error = |found, expected| RingError::Index { ring: "available", found, expected, size: 8 };
    guest.write(AVAIL + 2, 8u16);
    assert_eq!(queue.available(8), Ok(8));
    queue.consume(8);
    // All descriptors are in flight, so no other chain can exist.
    guest.write(AVAIL + 2, 9u16);
    assert_eq!(queue.available(1), Err(error(9, 0)));
    queue.push_used(Chain::one(0), 0);
    assert_eq!(queue.available(1), Err(error(9, 0)), "the driver does not know yet");
    queue.publish();
    assert_eq!(queue.available(1), Ok(1));
    guest.write(AVAIL + 2, 8u16);
    assert_eq!(queue.available(2), Err(error(8, 9)), "backwards");
    guest.write(AVAIL + 2, 7u16);
    assert_eq!(queue.available(2), Err(error(7, 9)), "behind what was taken");
}

#[test]
fn a_queue_may_start_at_any_entry() {
    for (base, used) in [(0, 0), (0, 5), (5, 0), (65535, 65535), (3, 65530)] {
        let guest = guest(8);
        guest.write(USED + 2, used);
        let mut queue = device::SplitDevice::new(guest.layout.clone(), base, false, false);
        for round in 0..100u16 {
            let start = base.wrapping_add(round * 8);
            guest.write(AVAIL + 2, start.wrapping_add(8));
            assert_eq!(queue.available(8), Ok(8));
            queue.consume(8);
            guest.write(AVAIL + 2, start.wrapping_add(9));
            assert!(queue.available(1).is_err());
            (0..8).for_each(|_| queue.push_used(Chain::one(0), 0));
            queue.publish();
        }
    }
}

#[test]
fn empty_buffers_are_counted() {
    let guest = guest(256);
    for i in 0..256 {
        guest.descriptor(DESC, i, desc(0x10000, 0, VIRTQ_DESC_F_NEXT, i as u16 + 1));
    }
    guest.available(&[0]);
    assert_eq!(guest.walk(Direction::Readable), Err(RingError::TooManyBuffers { head: 0, max: 64 }));
}

#[test]
fn indirect_needs_the_feature() {
    let guest = guest(8);
    guest.descriptor(DESC, 0, desc(TABLE, 16, VIRTQ_DESC_F_INDIRECT, 0));
    guest.available(&[0]);
    let mut queue = device::SplitDevice::new(guest.layout.clone(), 0, false, false);
    queue.available(1).unwrap();
    let walked = queue.walk(0, &guest.memory, Direction::Readable, &mut 64, |_| ());
    assert_eq!(walked, Err(RingError::IndirectNotAllowed { head: 0 }));
}

#[test]
fn a_hostile_device_is_reported() {
    let guest = guest(8);
    let mut driver = driver::RingDriver::new(guest.layout.clone(), false);
    driver.add(0x10000, 64, Direction::Writable, 'a').unwrap();
    driver.publish();
    guest.write(USED + 2, 2u16);
    assert!(matches!(driver.used(), Err(RingError::Index { ring: "used", .. })));
    guest.write(USED + 2, 1u16);
    guest.write(USED + 4, 7u32);
    assert_eq!(driver.used(), Ok(1));
    assert_eq!(driver.pop(), Err(RingError::NotInFlight(7)));
    guest.write(USED + 4, u32::MAX);
    assert_eq!(driver.pop(), Err(RingError::NotInFlight(u32::MAX)));
}

#[test]
fn event_index_notifies_exactly_when_asked() {
    let guest = guest(8);
    let mut driver = driver::RingDriver::new(guest.layout.clone(), true);
    let mut device = device::SplitDevice::new(guest.layout.clone(), 0, true, true);
    let add = |driver: &mut driver::RingDriver<u8>| driver.add(0x10000, 64, Direction::Readable, 0).unwrap();
    device.set_notification(true);
    add(&mut driver);
    driver.publish();
    assert!(driver.needs_kick(), "the device asked to be told of the first chain");
    add(&mut driver);
    driver.publish();
    assert!(!driver.needs_kick(), "it has not asked again");
    device.available(2).unwrap();
    device.consume(2);
    device.set_notification(false);
    add(&mut driver);
    driver.publish();
    assert!(!driver.needs_kick());
    driver.set_notification(true);
    device.push_used(Chain::one(0), 0);
    device.publish();
    assert!(device.needs_notification());
    assert!(!device.needs_notification(), "nothing new");
    device.push_used(Chain::one(1), 0);
    device.publish();
    assert!(!device.needs_notification());
}

#[test]
fn unchanged_descriptor_is_not_rewritten() {
    let guest = guest(4);
    let mut driver = driver::RingDriver::new(guest.layout.clone(), false);
    let mut device = device::SplitDevice::new(guest.layout.clone(), 0, false, false);
    let mut round = |driver: &mut driver::RingDriver<u8>, addr, len| {
        driver.add(addr, len, Direction::Writable, 1).unwrap();
        driver.publish();
        device.available(1).unwrap();
        let head = device.head(0).unwrap();
        assert_eq!(head, 0);
        device.consume(1);
        device.push_used(Chain::one(head), 0);
        device.publish();
        assert_eq!(driver.used(), Ok(1));
        driver.pop().unwrap().unwrap();
        guest.layout.descriptor(0)
    };
    assert_eq!(round(&mut driver, 0, 0), desc(0, 0, VIRTQ_DESC_F_WRITE, 0));
    assert_eq!(round(&mut driver, 0x800, 64), desc(0x800, 64, VIRTQ_DESC_F_WRITE, 0));
    // Overwritten with a marker, to detect writes.
    guest.descriptor(DESC, 0, desc(7, 7, 7, 7));
    assert_eq!(round(&mut driver, 0x800, 64), desc(7, 7, 7, 7));
    assert_eq!(round(&mut driver, 0x800, 65), desc(0x800, 65, VIRTQ_DESC_F_WRITE, 0));
}
