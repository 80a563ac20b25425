//! Bugs in the split data path of other back ends, named after the report or the fix (DPDK's commit).

use std::sync::Arc;

use offcore_ring::RingError;
use offcore_ring::split::{VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE};
use offcore_vhost::features::{VIRTIO_F_INDIRECT_DESC, VIRTIO_F_VERSION_1, VIRTIO_NET_F_MRG_RXBUF};

use crate::arena::{BUFFERS, END, RX, SEAM, START, TX, desc};
use crate::rig::{Engine, Memories, Rig, Setup};

const SIZE: u16 = 64;
const ALL: u64 = VIRTIO_F_VERSION_1 | VIRTIO_NET_F_MRG_RXBUF | VIRTIO_F_INDIRECT_DESC;

fn rig(engine: Engine, features: u64) -> Rig {
    let memories = Memories::new();
    Rig::new(memories, Setup { engine, features, size: SIZE, seed: 1 }, 0)
}

impl Rig {
    fn tx(&self, head: u16, descs: &[(u64, u32, u16, u16)]) {
        for (i, &(addr, len, flags, next)) in descs.iter().enumerate() {
            self.arena.descriptor(TX.desc, head + i as u16, desc(addr, len, flags, next));
        }
        self.arena.offer(TX, SIZE, head);
    }

    fn rx(&self, head: u16, descs: &[(u64, u32, u16, u16)]) {
        for (i, &(addr, len, flags, next)) in descs.iter().enumerate() {
            self.arena.descriptor(
                RX.desc,
                head + i as u16,
                desc(addr, len, flags | VIRTQ_DESC_F_WRITE, next),
            );
        }
        self.arena.offer(RX, SIZE, head);
    }

    fn broken(&self, queue: usize) -> Option<RingError> {
        self.cells[queue].report().broken
    }

    /// Packets taken, invalid chains, and chains returned.
    fn counts(&self) -> (usize, usize, u16) {
        let dequeued = self.dequeued;
        (dequeued.packets, dequeued.malformed + dequeued.too_big, self.arena.used_idx(TX))
    }
}

/// Fields of a descriptor: addr, len, flags, next.
type Fields = (u64, u32, u16, u16);

/// Checks that the TX virtqueue breaks with `error` on this chain, and that both guests work afterwards.
fn breaks(descs: &[Fields], tables: &[(u64, u16, Fields)], error: RingError) {
    let mut rig = rig(Engine::Core, ALL);
    for &(table, index, (addr, len, flags, next)) in tables {
        rig.arena.descriptor(table, index, desc(addr, len, flags, next));
    }
    rig.tx(0, descs);
    rig.take();
    assert_eq!(rig.broken(1), Some(error));
    assert_eq!(rig.counts(), (0, 0, 0));
    rig.finish();
}

/// Only the first byte of a buffer was checked, although the rest could be elsewhere in host memory or unmapped.
#[test]
fn cve_2018_1059_whole_ranges_are_checked() {
    let mut rig = rig(Engine::Core, ALL);
    let frame: Vec<u8> = (0..112).collect();
    // A buffer across two regions that are adjacent only in guest addresses: two copies with the right bytes.
    rig.arena.write(SEAM - 50, &[[0; 12].as_slice(), &frame[12..]].concat());
    rig.tx(0, &[(SEAM - 50, 112, 0, 0)]);
    rig.take();
    assert_eq!((rig.counts(), &rig.latest[..]), ((1, 0, 1), &frame[12..]));
    // The same for a packet to the guest.
    rig.rx(0, &[(SEAM - 50, 1526, 0, 0)]);
    rig.give(&[200]);
    assert_eq!(rig.arena.used(RX, SIZE, 0), (0, 212));
    assert_eq!(rig.arena.read(SEAM - 38, 200), offcore_vhost::testing::pattern(0, 200));
    rig.finish();
    let outside = |addr, len| breaks(&[(addr, len, 0, 0)], &[], RingError::Address { addr, len });
    outside(END - 100, 101);
    outside(START - 1, 100);
    outside(END, 100);
    outside(u64::MAX - 50, 100);
    outside(START, u32::MAX);
}

/// Only the first entry of an indirect table was checked, or the table was assumed to be contiguous.
#[test]
fn cve_2018_1059_indirect_tables() {
    let mut rig = rig(Engine::Core, ALL);
    let table = SEAM - 24;
    rig.arena.descriptor(table, 0, desc(BUFFERS, 20, VIRTQ_DESC_F_NEXT, 1));
    rig.arena.descriptor(table, 2, desc(BUFFERS + 30, 50, 0, 0));
    // Half of the second entry is in each region. The chain is refused, and the entry is never read partially.
    rig.arena.descriptor(table, 1, desc(BUFFERS + 20, 10, VIRTQ_DESC_F_NEXT, 2));
    rig.tx(0, &[(table, 48, VIRTQ_DESC_F_INDIRECT, 0)]);
    rig.take();
    assert_eq!(rig.broken(1), Some(RingError::Address { addr: SEAM - 8, len: 16 }));
    rig.finish();
    let table = END - 16;
    let tail = RingError::Address { addr: END, len: 16 };
    breaks(
        &[(table, 32, VIRTQ_DESC_F_INDIRECT, 0)],
        &[(table, 0, (BUFFERS, 60, VIRTQ_DESC_F_NEXT, 1))],
        tail,
    );
    for (len, more) in [(16 * 32769, 0), (0, 0), (24, 0), (15, 0), (16, VIRTQ_DESC_F_NEXT)] {
        let flags = VIRTQ_DESC_F_INDIRECT | more;
        breaks(&[(BUFFERS, len, flags, 0)], &[], RingError::IndirectTable { head: 0, len, flags });
    }
}

/// A buffer of length 0 at an invalid address was translated to a null pointer and used.
#[test]
fn cve_2020_10725_zero_length() {
    for engine in [Engine::Core, Engine::Helper] {
        let mut rig = rig(engine, ALL);
        rig.tx(0, &[(u64::MAX, 0, 0, 0)]);
        rig.tx(1, &[(0, 0, VIRTQ_DESC_F_NEXT, 2), (BUFFERS, 72, VIRTQ_DESC_F_NEXT, 3), (END, 0, 0, 0)]);
        rig.rx(0, &[(u64::MAX, 0, 0, 0)]);
        rig.rx(1, &[(0, 0, VIRTQ_DESC_F_NEXT, 2), (BUFFERS, 1526, 0, 0)]);
        rig.turn(&[300]);
        rig.stepper.step();
        rig.turn(&[]);
        assert_eq!(rig.counts(), (1, 1, 2));
        assert_eq!((rig.arena.used(RX, SIZE, 0), rig.arena.used(RX, SIZE, 1)), ((0, 0), (1, 312)));
        rig.finish();
    }
}

/// Descriptors were read again after they were checked.
#[test]
fn cve_2020_14375_descriptors_are_read_once() {
    let mut rig = rig(Engine::Helper, ALL);
    rig.arena.write(BUFFERS, &[[0; 12].as_slice(), &[7; 100]].concat());
    rig.tx(0, &[(BUFFERS, 112, 0, 0)]);
    rig.rx(0, &[(BUFFERS + 4096, 1526, 0, 0)]);
    rig.take();
    rig.give(&[100]);
    // They are checked and passed to the engine. Later writes by the guest have no effect.
    for ring in [RX, TX] {
        rig.arena.descriptor(ring.desc, 0, desc(u64::MAX, u32::MAX, VIRTQ_DESC_F_INDIRECT, 9));
        rig.arena.write_u16(ring.avail + 4, 0xffff);
    }
    rig.turn(&[]);
    rig.stepper.step();
    rig.turn(&[]);
    assert_eq!((rig.counts(), &rig.latest[..]), ((1, 0, 1), &[7; 100][..]));
    assert_eq!(rig.arena.used(RX, SIZE, 0), (0, 112));
    assert_eq!((rig.broken(0), rig.broken(1)), (None, None));
    rig.finish();
}

/// The number of remaining chains underflowed, and the loop ran for a very long time.
#[test]
fn cve_2020_14378_index_goes_back() {
    let mut rig = rig(Engine::Core, ALL);
    for head in 0..10 {
        rig.rx(head, &[(BUFFERS + u64::from(head) * 64, 64, 0, 0)]);
    }
    rig.give(&[14]);
    assert_eq!(rig.arena.used_idx(RX), 1);
    rig.arena.write_u16(RX.avail + 2, 2);
    // The packet needs more chains than are known, so the index is read again.
    rig.give(&[1500]);
    assert_eq!(
        rig.broken(0),
        Some(RingError::Index { ring: "available", found: 2, expected: 10, size: SIZE })
    );
    assert_eq!(rig.arena.used_idx(RX), 1);
    rig.finish();
}

/// As above: more chains at once than the virtqueue has, because chains in flight are not returned yet.
#[test]
fn cve_2020_14378_too_many_chains() {
    let mut rig = rig(Engine::Helper, ALL);
    let half = SIZE / 2;
    for head in 0..half {
        rig.tx(head, &[(BUFFERS, 72, 0, 0)]);
    }
    rig.take();
    assert_eq!((rig.dequeue.in_flight(&mut rig.worker.mover), rig.broken(1)), (half.into(), None));
    for head in half..=SIZE {
        rig.tx(head % SIZE, &[(BUFFERS, 72, 0, 0)]);
    }
    rig.take();
    let error = RingError::Index { ring: "available", found: SIZE + 1, expected: 0, size: SIZE };
    assert_eq!(rig.broken(1), Some(error));
    // The chains in flight are still completed.
    rig.stepper.step();
    rig.poll();
    rig.take();
    assert_eq!(rig.counts(), (half.into(), 0, half));
    rig.finish();
}

/// The virtio-net header was assumed to be within two descriptors and to be followed by a packet.
#[test]
fn cve_2022_2132_header_only_descriptors() {
    for engine in [Engine::Core, Engine::Helper] {
        let mut rig = rig(engine, ALL);
        let pieces = |bytes: u16| -> Vec<_> {
            let last = bytes - 1;
            let flags = |i| if i == last { 0 } else { VIRTQ_DESC_F_NEXT };
            (0..bytes).map(|i| (BUFFERS + u64::from(i) * 3, 1, flags(i), i + 1)).collect()
        };
        // One byte per descriptor: a packet of 20 bytes.
        for i in 0..32u64 {
            rig.arena.write(BUFFERS + i * 3, &[if i < 12 { 0 } else { i as u8 }]);
        }
        rig.tx(0, &pieces(32));
        for _ in 0..2 {
            rig.stepper.step();
            rig.turn(&[]);
        }
        assert_eq!(rig.counts(), (1, 0, 1));
        assert_eq!(rig.latest, (12..32).collect::<Vec<u8>>());
        // Part of the header, the whole header, and the header with an incomplete Ethernet header.
        for len in [1, 11, 12, 13, 25] {
            rig.tx(32, &[(BUFFERS, len, 0, 0)]);
            rig.take();
        }
        rig.tx(0, &pieces(12));
        rig.take();
        rig.take();
        assert_eq!(rig.counts(), (1, 6, 7));
        rig.finish();
    }
}

/// As above, towards the guest: merged chains that are shorter than the header.
#[test]
fn cve_2022_2132_header_over_chains() {
    for engine in [Engine::Core, Engine::Helper] {
        let mut rig = rig(engine, ALL);
        for head in 0..20u16 {
            rig.rx(head, &[(BUFFERS + u64::from(head) * 8, 5, 0, 0)]);
        }
        rig.turn(&[60]);
        rig.stepper.step();
        rig.turn(&[]);
        assert_eq!(rig.arena.used_idx(RX), 15);
        let packet: Vec<u8> = (0..15).flat_map(|i| rig.arena.read(BUFFERS + i * 8, 5)).collect();
        assert_eq!(packet[..12], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 15, 0]);
        assert_eq!(packet[12..72], offcore_vhost::testing::pattern(0, 60));
        rig.finish();
    }
}

/// The virtio-net header was checked in guest memory and read from there again when it was used.
#[test]
fn fix_285e6b8b18_header_read_from_copy() {
    for (copied, then) in [(0, 1), (1, 0)] {
        let mut rig = rig(Engine::Helper, ALL);
        rig.arena.write(BUFFERS, &[copied, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0]);
        rig.tx(0, &[(BUFFERS, 112, 0, 0)]);
        rig.take();
        assert_eq!(rig.stepper.step(), 1);
        rig.arena.write(BUFFERS, &[then]);
        rig.poll();
        rig.take();
        let malformed = usize::from(copied);
        assert_eq!(rig.counts(), (1 - malformed, malformed, 1));
        rig.finish();
    }
}

/// A chain that forms a loop, and a next index outside of the table.
#[test]
fn fix_6ec1778134_circles_and_bad_next() {
    let looped = RingError::Loop { head: 0, size: SIZE.into() };
    breaks(&[(BUFFERS, 1, VIRTQ_DESC_F_NEXT, 0)], &[], looped);
    breaks(&[(BUFFERS, 1, VIRTQ_DESC_F_NEXT, 1), (BUFFERS, 1, VIRTQ_DESC_F_NEXT, 0)], &[], looped);
    let outside = RingError::Descriptor { found: SIZE.into(), size: SIZE.into() };
    breaks(&[(BUFFERS, 1, VIRTQ_DESC_F_NEXT, SIZE)], &[], outside);
    let table = BUFFERS + 0x1000;
    let pointer = [(table, 32, VIRTQ_DESC_F_INDIRECT, 0)];
    let looped = RingError::Loop { head: 0, size: 2 };
    breaks(&pointer, &[(table, 0, (BUFFERS, 1, VIRTQ_DESC_F_NEXT, 0))], looped);
    let outside = RingError::Descriptor { found: 2, size: 2 };
    breaks(&pointer, &[(table, 0, (BUFFERS, 1, VIRTQ_DESC_F_NEXT, 2))], outside);
    let nested = RingError::IndirectNotAllowed { head: 0 };
    breaks(&pointer, &[(table, 0, (table, 32, VIRTQ_DESC_F_INDIRECT, 0))], nested);
}

/// The longest possible chains of empty buffers. They need no copies, but reading them takes the worker's time from all
/// guests.
#[test]
fn fix_6ec1778134_empty_buffers_count() {
    let many = RingError::TooManyBuffers { head: 0, max: 64 };
    let table = BUFFERS;
    let entries: Vec<_> = (0..4096).map(|i| (table, i, (0, 0, VIRTQ_DESC_F_NEXT, i + 1))).collect();
    breaks(&[(table, 65536, VIRTQ_DESC_F_INDIRECT, 0)], &entries, many);
    // Towards the guest, with mergeable buffers: a packet is given up after the first chain, before all chains are
    // read.
    let mut rig = rig(Engine::Core, ALL);
    for i in 0..64 {
        rig.arena.descriptor(
            table,
            i,
            desc(0, 0, VIRTQ_DESC_F_WRITE | if i < 63 { VIRTQ_DESC_F_NEXT } else { 0 }, i + 1),
        );
    }
    for head in 0..SIZE {
        rig.rx(head, &[(table, 1024, VIRTQ_DESC_F_INDIRECT, 0)]);
        rig.arena.descriptor(RX.desc, head, desc(table, 1024, VIRTQ_DESC_F_INDIRECT, 0));
    }
    rig.give(&[1500; 64]);
    assert!(rig.held.is_empty(), "{} packets wait for more chains", rig.held.len());
    rig.finish();
}

/// Ring addresses were used after the virtqueue was stopped.
#[test]
fn fix_1846fe767f_addresses_after_stop() {
    for engine in [Engine::Core, Engine::Helper] {
        let mut rig = rig(engine, ALL);
        rig.tx(0, &[(BUFFERS, 112, 0, 0)]);
        rig.rx(0, &[(BUFFERS, 1526, 0, 0)]);
        rig.turn(&[60]);
        rig.stop(0);
        rig.stop(1);
        for _ in 0..3 {
            rig.stepper.step();
            rig.turn(&[]);
        }
        let held = Arc::strong_count(&rig.arena.memory);
        assert_eq!(held, 1, "only the guest holds the memory of stopped virtqueues");
        let used = (rig.arena.used_idx(RX), rig.arena.used_idx(TX));
        assert_eq!(used, (1, 1), "what was in flight was finished first");
        rig.tx(1, &[(BUFFERS, 112, 0, 0)]);
        rig.rx(1, &[(BUFFERS, 1526, 0, 0)]);
        rig.turn(&[60]);
        rig.stepper.step();
        rig.turn(&[60]);
        assert_eq!((rig.arena.used_idx(RX), rig.arena.used_idx(TX)), used);
        rig.finish();
    }
}
