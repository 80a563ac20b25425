//! Compares doubles with the general walk.

use std::sync::Arc;

use offcore_mem::GuestMemory;
use offcore_mem::testing::guest_regions;
use proptest::prelude::*;

use super::*;
use crate::device::{Chain, DeviceQueue, Direction};
use crate::{Areas, packed, split};

/// Two adjacent regions.
const LEN: u64 = 0x1_0000;
const DESC: u64 = 0x1000;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
const AREAS: Areas = Areas { descriptors: DESC, driver: AVAIL, device: USED };
const TABLES: u64 = 0x8000;
const SIZE: u16 = 16;

struct Guest {
    memory: Arc<GuestMemory>,
}

/// The words of a descriptor: address, length, and two fields whose meaning depends on the format.
type Raw = (u64, u32, u16, u16);

impl Guest {
    fn new() -> Self {
        Self { memory: guest_regions([(0, 0, LEN as usize), (LEN, LEN, LEN as usize)]) }
    }

    /// Writes to the first region.
    fn write(&self, address: u64, bytes: &[u8]) {
        let mapping = self.memory.regions()[0].mapping();
        if address.checked_add(bytes.len() as u64).is_some_and(|end| end <= LEN) {
            mapping.write_at(address as usize, bytes);
        }
    }

    fn descriptor(&self, address: u64, raw: Raw) {
        let (addr, len, a, b) = raw;
        let raw = u128::from(addr) | u128::from(len) << 64 | u128::from(a) << 96 | u128::from(b) << 112;
        self.write(address, &raw.to_le_bytes());
    }

    /// Makes chains available whose first descriptors have these addresses, lengths and flags.
    fn split(&self, heads: &[(u64, u32, u16)]) -> split::device::SplitDevice {
        let layout = split::SplitLayout::in_memory(&self.memory, AREAS, SIZE.into()).unwrap();
        for (i, &(addr, len, flags)) in heads.iter().enumerate() {
            self.descriptor(DESC + i as u64 * 16, (addr, len, flags, 0));
            self.write(AVAIL + 4 + i as u64 * 2, &(i as u16).to_le_bytes());
        }
        self.write(AVAIL + 2, &(heads.len() as u16).to_le_bytes());
        split::device::SplitDevice::new(layout, 0, false, true)
    }

    /// Makes the same chains available in a packed ring.
    fn packed(&self, heads: &[(u64, u32, u16)]) -> packed::device::PackedDevice {
        let layout = packed::PackedLayout::in_memory(&self.memory, AREAS, SIZE.into()).unwrap();
        for (i, &(addr, len, flags)) in heads.iter().enumerate() {
            let raw = (addr, len, i as u16 + 100, flags | packed::VIRTQ_DESC_F_AVAIL);
            self.descriptor(DESC + i as u64 * 16, raw);
        }
        packed::device::PackedDevice::new(layout, packed::FRESH_BASE, false, true).unwrap()
    }
}

/// Returns the number of doubles after the singles. Checks that each is equal to the result of the walk.
fn compared<Q: DeviceQueue>(queue: &mut Q, memory: &GuestMemory, wanted: Wanted) -> usize {
    let known = queue.look(SIZE.into()).unwrap() as u16;
    let ahead = queue.singles(0, known, memory, wanted).len() as u16;
    let doubles = queue.doubles(ahead, known - ahead, memory, wanted).to_vec();
    for (i, double) in doubles.iter().enumerate() {
        let mut buffers = Vec::new();
        let direction = wanted.direction;
        let walked = queue.walk(ahead + i as u16, memory, direction, &mut 64, |buffer| buffers.push(buffer));
        assert_eq!(walked, Ok(Chain::one(double.id)));
        let mut expected = vec![double.first, double.second];
        expected.retain(|buffer| buffer.len > 0);
        assert_eq!(buffers, expected);
        let total: u32 = buffers.iter().map(|buffer| buffer.len).sum();
        assert!((wanted.least..=wanted.most).contains(&total));
    }
    doubles.len()
}

fn wanted(direction: Direction) -> Wanted {
    Wanted { direction, least: 26, most: 1792 }
}

#[test]
fn linux_and_dpdk_chains_are_doubles() {
    let guest = Guest::new();
    let heads: Vec<_> = (0..8).map(|i| (TABLES + i * 32, 32, VIRTQ_DESC_F_INDIRECT)).collect();
    for i in 0..8 {
        guest.descriptor(TABLES + i * 32, (0x9000, 12, VIRTQ_DESC_F_NEXT, 1));
        guest.descriptor(TABLES + i * 32 + 16, (LEN + i * 2048, 1514, 0, 0));
    }
    let readable = wanted(Direction::Readable);
    assert_eq!(compared(&mut guest.split(&heads), &guest.memory, readable), 8);
    assert_eq!(compared(&mut guest.packed(&heads), &guest.memory, readable), 8);
    let guest = Guest::new();
    // A table of one buffer, a table of two buffers whose first is not linked, and WRITE, which DPDK leaves set in a
    // packed queue's table.
    let heads = [(TABLES, 16, VIRTQ_DESC_F_INDIRECT), (TABLES, 32, VIRTQ_DESC_F_INDIRECT)];
    guest.descriptor(TABLES, (0x9000, 60, 0, 0));
    assert_eq!(compared(&mut guest.split(&heads), &guest.memory, readable), 2);
    guest.descriptor(TABLES, (0x9000, 60, 7, VIRTQ_DESC_F_WRITE));
    guest.descriptor(TABLES + 16, (0x9100, 60, 7, 0));
    assert_eq!(compared(&mut guest.packed(&heads), &guest.memory, readable), 2);
    assert_eq!(compared(&mut guest.packed(&heads), &guest.memory, wanted(Direction::Writable)), 1);
}

#[test]
fn indirect_table_needs_negotiated_feature() {
    let guest = Guest::new();
    guest.descriptor(TABLES, (0x9000, 60, 0, 0));
    let heads = [(TABLES, 16, VIRTQ_DESC_F_INDIRECT)];
    let readable = wanted(Direction::Readable);
    guest.split(&heads);
    let layout = split::SplitLayout::in_memory(&guest.memory, AREAS, SIZE.into()).unwrap();
    let mut queue = split::device::SplitDevice::new(layout, 0, false, false);
    assert_eq!(compared(&mut queue, &guest.memory, readable), 0);
    guest.packed(&heads);
    let layout = packed::PackedLayout::in_memory(&guest.memory, AREAS, SIZE.into()).unwrap();
    let mut queue = packed::device::PackedDevice::new(layout, packed::FRESH_BASE, false, false).unwrap();
    assert_eq!(compared(&mut queue, &guest.memory, readable), 0);
}

fn flags() -> impl Strategy<Value = u16> {
    prop_oneof![6 => Just(0u16), 6 => Just(VIRTQ_DESC_F_NEXT), 2 => Just(VIRTQ_DESC_F_WRITE), 2 => Just(VIRTQ_DESC_F_NEXT | VIRTQ_DESC_F_WRITE), 1 => any::<u16>()]
}

fn next() -> impl Strategy<Value = u16> {
    prop_oneof![8 => Just(1u16), 2 => 0u16..4, 1 => any::<u16>()]
}

/// Buffers: anywhere in memory, at the boundary of the regions, at the end, or outside.
fn buffers() -> impl Strategy<Value = (u64, u32)> {
    let addr = prop_oneof![
        8 => 0..2 * LEN - 4096,
        1 => LEN - 100..LEN + 1,
        1 => 2 * LEN - 100..2 * LEN + 100,
        1 => any::<u64>(),
    ];
    let len = prop_oneof![8 => 1u32..900, 1 => Just(0u32), 1 => any::<u32>()];
    (addr, len)
}

/// Descriptors of a table: a packed one has its flags at the position where a split one has the index of the next
/// descriptor.
fn entries() -> impl Strategy<Value = Raw> {
    let entry = (buffers(), flags(), next(), any::<bool>());
    entry.prop_map(
        |((addr, len), flags, next, swapped)| {
            if swapped { (addr, len, next, flags) } else { (addr, len, flags, next) }
        },
    )
}

fn chains() -> impl Strategy<Value = Vec<((u64, u32, u16), [Raw; 2])>> {
    let table = prop_oneof![8 => (0u64..60).prop_map(|i| TABLES + i * 32), 1 => TABLES..TABLES + 2000, 1 => LEN - 40..LEN + 1, 1 => any::<u64>()];
    let len = prop_oneof![8 => Just(32u32), 3 => Just(16u32), 1 => 0u32..65, 1 => any::<u32>()];
    let head = prop_oneof![20 => Just(VIRTQ_DESC_F_INDIRECT), 1 => Just(VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_WRITE), 1 => flags()];
    let chain = ((table, len, head), [entries(), entries()]);
    proptest::collection::vec(chain, 1..usize::from(SIZE))
}

proptest! {
    /// For any content of the ring, a double is equal to the result of the walk.
    #[test]
    fn doubles_are_equal_to_the_walk(chains in chains(), writable: bool, least in 0u32..70, most in 800u32..4000) {
        let guest = Guest::new();
        let heads: Vec<_> = chains.iter().map(|&(head, _)| head).collect();
        for &((table, ..), [first, second]) in &chains {
            if table >= TABLES {
                guest.descriptor(table, first);
                guest.descriptor(table.wrapping_add(16), second);
            }
        }
        let direction = if writable { Direction::Writable } else { Direction::Readable };
        let wanted = Wanted { direction, least, most };
        compared(&mut guest.split(&heads), &guest.memory, wanted);
        compared(&mut guest.packed(&heads), &guest.memory, wanted);
    }
}
