//! The device side, with a test as the driver.

use proptest::prelude::*;

use super::*;

#[test]
fn first_used_descriptor_is_written_last() {
    let guest = guest(3);
    let mut queue = guest.device(false);
    for turn in [true, false, true] {
        for (index, id) in [(0, 40), (1, 30), (2, 50)] {
            guest.put(index, desc(0x8000, 64, id, available(turn)));
        }
        assert_eq!(queue.look(8), Ok(3));
        let chains = [0, 1, 2].map(|ahead| guest.single(&mut queue, ahead, Direction::Readable).unwrap().1);
        queue.consume(3);
        assert_eq!(queue.look(1), Ok(0));
        // Returned in another order than taken.
        queue.push_used(chains[1], 0);
        queue.push_used(chains[2], 7);
        queue.push_used(chains[0], 0);
        assert_eq!(guest.read(0), desc(0x8000, 64, 40, available(turn)), "the driver waits here");
        assert_eq!(guest.read(1), desc(0x8000, 7, 50, used(turn) | VIRTQ_DESC_F_WRITE));
        assert_eq!(guest.read(2), desc(0x8000, 0, 40, used(turn)));
        queue.publish();
        assert_eq!(guest.read(0), desc(0x8000, 0, 30, used(turn)));
    }
}

#[test]
fn chains_wrap_around_the_ring() {
    let guest = guest(5);
    let mut queue = guest.device(false);
    let next = available(true) | VIRTQ_DESC_F_NEXT;
    // The ID is ignored except in the last descriptor.
    guest.put(0, desc(0x8000, 1, 9, next));
    guest.put(1, desc(0x8100, 2, 8, next));
    guest.put(2, desc(0x8200, 3, 1, available(true)));
    guest.put(3, desc(0x8300, 4, 9, next));
    guest.put(4, desc(0x8400, 0, 2, available(true)));
    assert_eq!(queue.look(64), Ok(5));
    assert_eq!(guest.single(&mut queue, 0, Direction::Readable), None);
    let (buffers, chain) = guest.walk(&mut queue, 0, Direction::Readable).unwrap();
    assert_eq!((buffers, chain), (vec![(0x8000, 1), (0x8100, 2), (0x8200, 3)], Chain { id: 1, entries: 3 }));
    let (buffers, second) = guest.walk(&mut queue, 3, Direction::Readable).unwrap();
    assert_eq!((buffers, second), (vec![(0x8300, 4)], Chain { id: 2, entries: 2 }));
    queue.consume(3);
    queue.push_used(chain, 5);
    queue.publish();
    assert_eq!(guest.read(0), desc(0x8000, 5, 1, used(true) | VIRTQ_DESC_F_WRITE));
    // A chain that wraps: descriptors 3 and 4, which are still in flight, are followed by 0 and 1 of the next turn.
    queue.consume(2);
    queue.push_used(second, 0);
    queue.publish();
    assert_eq!(guest.read(3), desc(0x8300, 0, 2, used(true)));
    guest.put(0, desc(0x8500, 6, 3, available(false)));
    assert_eq!(guest.walk(&mut queue, 0, Direction::Readable).unwrap().1, Chain { id: 3, entries: 1 });
}

#[test]
fn indirect_table_at_any_address() {
    for table in [TABLE, TABLE + 3, SEAM - 16, SEAM - 32] {
        let guest = guest(4);
        let mut queue = guest.device(false);
        // WRITE is ignored together with INDIRECT, and so are all other flags within the table.
        guest.put(0, desc(table, 48, 7, available(true) | VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_WRITE));
        guest.write(table, desc(0x8000, 1, 99, VIRTQ_DESC_F_NEXT));
        guest.write(table + 16, desc(0x8100, 2, 98, VIRTQ_DESC_F_INDIRECT));
        guest.write(table + 32, desc(0x8200, 3, 97, 0xfffd));
        assert_eq!(queue.look(1), Ok(1));
        assert!(guest.single(&mut queue, 0, Direction::Readable).is_none());
        let (buffers, chain) = guest.walk(&mut queue, 0, Direction::Readable).unwrap();
        assert_eq!(buffers, [(0x8000, 1), (0x8100, 2), (0x8200, 3)]);
        assert_eq!(chain, Chain { id: 7, entries: 1 });
        let wrong = guest.walk(&mut queue, 0, Direction::Writable);
        assert_eq!(wrong, Err(RingError::Direction { head: 0 }));
    }
}

/// DPDK's driver sets WRITE for the header of a packet in several pieces.
#[test]
fn indirect_tx_may_be_writable() {
    let guest = guest(4);
    let mut queue = guest.device(false);
    guest.put(0, desc(TABLE, 32, 7, available(true) | VIRTQ_DESC_F_INDIRECT));
    guest.write(TABLE, desc(0x8000, 12, 0, VIRTQ_DESC_F_WRITE));
    guest.write(TABLE + 16, desc(0x8100, 60, 0, 0));
    assert_eq!(queue.look(1), Ok(1));
    let (buffers, _) = guest.walk(&mut queue, 0, Direction::Readable).unwrap();
    assert_eq!(buffers, [(0x8000, 12), (0x8100, 60)]);
    let wrong = guest.walk(&mut queue, 0, Direction::Writable);
    assert_eq!(wrong, Err(RingError::Direction { head: 0 }), "what is received must be writable");
}

#[test]
fn indirect_table_may_exceed_the_ring() {
    let guest = guest(2);
    let mut queue = guest.device(false);
    guest.put(0, desc(TABLE, 79 * 16, 7, available(true) | VIRTQ_DESC_F_INDIRECT));
    (0..79).for_each(|i| guest.write(TABLE + i * 16, desc(0x8000 + i, 1, 0, 0)));
    assert_eq!(guest.walk(&mut queue, 0, Direction::Readable).unwrap().0.len(), 79);
}

#[test]
fn buffers_across_regions_come_in_pieces() {
    let guest = guest(4);
    let mut queue = guest.device(false);
    guest.put(0, desc(SEAM - 10, 30, 3, available(true) | VIRTQ_DESC_F_WRITE));
    assert_eq!(queue.look(4), Ok(1));
    assert!(guest.single(&mut queue, 0, Direction::Writable).is_none());
    let (buffers, chain) = guest.walk(&mut queue, 0, Direction::Writable).unwrap();
    assert_eq!((buffers, chain), (vec![(SEAM - 10, 10), (SEAM, 20)], Chain { id: 3, entries: 1 }));
}

#[test]
fn looked_at_descriptors_are_not_reread() {
    let guest = guest(4);
    let mut queue = guest.device(false);
    guest.put(0, desc(0x8000, 64, 1, available(true)));
    assert_eq!(queue.look(1), Ok(1));
    guest.put(0, desc(u64::MAX, u32::MAX, 2, VIRTQ_DESC_F_INDIRECT));
    let (buffer, chain) = guest.single(&mut queue, 0, Direction::Readable).unwrap();
    assert_eq!((buffer.addr, buffer.len, chain), (guest.at(0x8000), 64, Chain { id: 1, entries: 1 }));
    assert_eq!(guest.walk(&mut queue, 0, Direction::Readable).unwrap().0, [(0x8000, 64)]);
    assert!(guest.single(&mut queue, 1, Direction::Readable).is_none(), "not looked at");
}

#[test]
fn invalid_chains_are_reported() {
    let case = |descs: &[(u64, PackedDescriptor)]| {
        let guest = guest(4);
        for &(address, desc) in descs {
            guest.write(address, desc);
        }
        let mut queue = guest.device(false);
        queue.look(64).unwrap();
        guest.walk(&mut queue, 0, Direction::Readable).unwrap_err()
    };
    let av = available(true);
    let at = |index: u64| RING + index * 16;
    assert_eq!(case(&[]), RingError::PartialChain { head: 0 }, "nothing is available");
    let next = |index| (at(index), desc(0x8000, 1, 0, av | VIRTQ_DESC_F_NEXT));
    assert_eq!(case(&[next(0)]), RingError::PartialChain { head: 0 });
    assert_eq!(case(&[next(0), next(1), next(2), next(3)]), RingError::Loop { head: 0, size: 4 });
    for (addr, len) in [(END, 1), (END - 1, 2), (u64::MAX, 1), (u64::MAX, u32::MAX), (0, u32::MAX)] {
        let error = case(&[(at(0), desc(addr, len, 0, av))]);
        assert_eq!(error, RingError::Address { addr, len });
    }
    for len in [0, 15, 17, 16 * 32769, 0xffff_fff0] {
        let error = case(&[(at(0), desc(TABLE, len, 0, av | VIRTQ_DESC_F_INDIRECT))]);
        assert_eq!(error, RingError::IndirectTable { head: 0, len, flags: av | VIRTQ_DESC_F_INDIRECT });
    }
    let flags = av | VIRTQ_DESC_F_INDIRECT | VIRTQ_DESC_F_NEXT;
    assert_eq!(
        case(&[(at(0), desc(TABLE, 16, 0, flags)), next(1)]),
        RingError::IndirectTable { head: 0, len: 16, flags }
    );
    let second = (at(1), desc(TABLE, 16, 0, av | VIRTQ_DESC_F_INDIRECT));
    assert_eq!(case(&[next(0), second]), RingError::IndirectNotAllowed { head: 0 });
    let outside = (at(0), desc(END - 16, 32, 0, av | VIRTQ_DESC_F_INDIRECT));
    assert_eq!(case(&[outside]), RingError::Address { addr: END, len: 16 });
    let around = (at(0), desc(u64::MAX - 15, 32, 0, av | VIRTQ_DESC_F_INDIRECT));
    assert!(matches!(case(&[around]), RingError::Address { .. }));
    assert_eq!(
        case(&[(at(0), desc(TABLE, 81 * 16, 0, av | VIRTQ_DESC_F_INDIRECT))]),
        RingError::TooManyBuffers { head: 0, max: 80 },
        "empty buffers count"
    );
    assert_eq!(
        case(&[(at(0), desc(0x8000, 1, 0, av | VIRTQ_DESC_F_WRITE))]),
        RingError::Direction { head: 0 }
    );
}

#[test]
fn indirect_needs_the_feature() {
    let guest = guest(4);
    guest.put(0, desc(TABLE, 16, 0, available(true) | VIRTQ_DESC_F_INDIRECT));
    let mut queue = device::PackedDevice::new(guest.layout.clone(), FRESH_BASE, false, false).unwrap();
    assert_eq!(
        guest.walk(&mut queue, 0, Direction::Readable),
        Err(RingError::IndirectNotAllowed { head: 0 })
    );
}

#[test]
fn inflight_descriptors_are_not_available() {
    let guest = guest(4);
    let mut queue = guest.device(false);
    (0..4).for_each(|index| guest.put(index, desc(0x8000, 1, index, available(true))));
    assert_eq!(queue.look(4), Ok(4));
    queue.consume(3);
    // All but one are in flight, and the first of them is made available again.
    guest.put(0, desc(0x8000, 1, 0, available(false)));
    assert_eq!(queue.look(1), Ok(1));
    assert_eq!(queue.look(2), Err(RingError::Taken { index: 0 }));
    assert_eq!(queue.has(1), Err(RingError::Taken { index: 0 }));
    queue.consume(1);
    queue.push_used(Chain { id: 0, entries: 1 }, 0);
    assert_eq!(queue.look(1), Err(RingError::Taken { index: 0 }), "the driver does not know yet");
    queue.publish();
    assert_eq!(queue.look(1), Ok(0), "overwritten");
    guest.put(0, desc(0x8000, 1, 0, available(false)));
    assert_eq!(queue.look(1), Ok(1));
}

#[test]
fn chains_may_exceed_the_window() {
    let guest = guest(200);
    let mut queue = guest.device(false);
    for index in 0..200 {
        let next = if index % 79 < 78 { VIRTQ_DESC_F_NEXT } else { 0 };
        guest.put(index, desc(0x8000, 1, index, available(true) | next));
    }
    assert_eq!(queue.look(1000), Ok(64));
    assert_eq!(queue.has(199), Ok(true));
    assert_eq!(queue.has(200), Ok(false));
    for (ahead, id) in [(0, 78), (79, 157)] {
        let (buffers, chain) = guest.walk(&mut queue, ahead, Direction::Readable).unwrap();
        assert_eq!((buffers.len(), chain), (79, Chain { id, entries: 79 }));
    }
    queue.consume(158);
    assert_eq!(queue.look(64), Ok(42));
    let error = guest.walk(&mut queue, 0, Direction::Readable);
    assert_eq!(error, Err(RingError::Loop { head: 158, size: 200 }));
    guest.put(0, desc(0, 0, 0, available(false)));
    assert_eq!(queue.has(199), Err(RingError::Taken { index: 0 }));
}

#[test]
fn queue_resumes_at_base() {
    for base in [0, 5, 4 | WRAP | 1, 0x7fff] {
        let guest = guest(5);
        let queue = device::PackedDevice::new(guest.layout.clone(), u32::from(base), false, false);
        let wrong = RingError::Base { found: base, size: 5 };
        assert_eq!(queue.err(), (base != 0).then_some(wrong), "{base:#x}");
    }
    let guest = guest(5);
    let mut base = FRESH_BASE;
    for round in 0..30u16 {
        // The upper half is ignored.
        let mut queue = device::PackedDevice::new(guest.layout.clone(), base & 0xffff, false, false).unwrap();
        assert_eq!(queue.base(), base);
        let (index, wrap) = (round % 5, round / 5 % 2 == 0);
        assert_eq!(base as u16, index | u16::from(wrap) << 15);
        assert_eq!(queue.look(1), Ok(0));
        guest.put(index, desc(0x8000, 1, 3, available(wrap)));
        assert_eq!(queue.look(1), Ok(1));
        assert_eq!(queue.base(), base, "only looked at");
        queue.consume(1);
        assert_ne!(queue.base() as u16, base as u16);
        assert_eq!(queue.base() >> 16, base >> 16, "taken, and not returned");
        queue.push_used(Chain { id: 3, entries: 1 }, 0);
        queue.publish();
        assert_eq!(queue.base() as u16, (queue.base() >> 16) as u16);
        base = queue.base();
    }
}

/// A driver that writes the ring as in the example of section 2.8.20, and its record of the chains.
struct Model {
    size: u16,
    next: u16,
    wrap: bool,
    used: u16,
    used_wrap: bool,
    free: u16,
    /// Number of descriptors of the chains in flight, by ID.
    lengths: Vec<Option<u16>>,
}

impl Model {
    fn new(size: u16) -> Self {
        let lengths = vec![None; usize::from(size)];
        Self { size, next: 0, wrap: true, used: 0, used_wrap: true, free: size, lengths }
    }

    /// Makes a chain available and writes its first descriptor last. Returns `None` if the ring has no room.
    fn add(&mut self, guest: &Guest, buffers: &[(u64, u32)], table: Option<u64>) -> Option<u16> {
        let entries = if table.is_some() { 1 } else { buffers.len() as u16 };
        if entries > self.free {
            return None;
        }
        let id = self.lengths.iter().rposition(Option::is_none)? as u16;
        let mut ring = Vec::new();
        let (mut index, mut wrap) = (self.next, self.wrap);
        for i in 0..entries {
            let more = if i + 1 < entries { VIRTQ_DESC_F_NEXT } else { 0 };
            let (addr, len) = buffers[usize::from(i)];
            let entry = match table {
                Some(table) => {
                    desc(table, buffers.len() as u32 * 16, id, available(wrap) | VIRTQ_DESC_F_INDIRECT)
                }
                None => desc(addr, len, id, available(wrap) | more),
            };
            ring.push((index, entry));
            index += 1;
            if index == self.size {
                (index, wrap) = (0, !wrap);
            }
        }
        for (i, &(addr, len)) in buffers.iter().enumerate().filter(|_| table.is_some()) {
            guest.write(table.unwrap() + i as u64 * 16, desc(addr, len, 0, 0));
        }
        for (index, entry) in ring.into_iter().rev() {
            guest.put(index, entry);
        }
        (self.next, self.wrap) = (index, wrap);
        self.free -= entries;
        self.lengths[usize::from(id)] = Some(entries);
        Some(id)
    }

    /// Returns the next chain that the device has returned, and the number of bytes written.
    fn pop(&mut self, guest: &Guest) -> Option<(u16, u32)> {
        let found = guest.read(self.used);
        if found.flags & STATE != used(self.used_wrap) || self.free == self.size {
            return None;
        }
        assert_eq!(found.flags & VIRTQ_DESC_F_WRITE != 0, found.len > 0);
        let entries = self.lengths[usize::from(found.id)].take().expect("in flight");
        self.free += entries;
        self.used += entries;
        if self.used >= self.size {
            (self.used, self.used_wrap) = (self.used - self.size, !self.used_wrap);
        }
        Some((found.id, found.len))
    }
}

#[derive(Clone, Debug)]
enum Op {
    Add { buffers: u8, table: bool },
    Look(u8),
    Take(u8),
    Pass(u8),
    Return(u8),
    Publish,
    Collect,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        3 => (1u8..6, any::<bool>()).prop_map(|(buffers, table)| Op::Add { buffers, table }),
        1 => any::<u8>().prop_map(Op::Look),
        2 => (0u8..9).prop_map(Op::Take),
        2 => (0u8..40).prop_map(Op::Pass),
        3 => any::<u8>().prop_map(Op::Return),
        2 => Just(Op::Publish),
        2 => Just(Op::Collect),
    ];
    proptest::collection::vec(op, 1..500)
}

proptest! {
    /// Chains of every kind arrive complete and in order, and are returned in any order, for any ring size.
    #[test]
    fn device_agrees_with_the_specification(ops in ops(), size in 1u16..40, level: prop::sample::Index) {
        let guest = guest(size);
        let levels: Vec<_> = Level::available().collect();
        let (mut model, mut queue) = (Model::new(size), guest.device(false).at_level(*level.get(&levels)));
        let (mut available, mut held, mut returned, mut visible) = (vec![], vec![], vec![], vec![]);
        let mut serial = 0u32;
        for op in ops {
            match op {
                Op::Add { buffers, table } => {
                    serial += 1;
                    let buffers: Vec<_> =
                        (0..u64::from(buffers)).map(|i| (0x1_0000 + i * 64 + u64::from(serial % 61), serial)).collect();
                    let id = model.lengths.iter().rposition(Option::is_none).unwrap_or(0) as u64;
                    if let Some(id) = model.add(&guest, &buffers, table.then_some(TABLE + id * 96)) {
                        available.push((id, buffers));
                    }
                }
                Op::Look(n) => {
                    let entries: u16 =
                        available.iter().map(|(id, _)| model.lengths[usize::from(*id)].unwrap()).sum();
                    prop_assert_eq!(queue.look(n.into()), Ok(usize::from(entries).min(usize::from(n)).min(64)));
                }
                Op::Take(n) => {
                    let mut ahead = 0;
                    for (id, expected) in available.drain(..available.len().min(n.into())) {
                        prop_assert!(queue.has(ahead).unwrap());
                        let (found, chain) = guest.walk(&mut queue, ahead, Direction::Readable).unwrap();
                        prop_assert_eq!(&found, &expected);
                        prop_assert_eq!(chain.id, id);
                        prop_assert_eq!(Some(chain.entries), model.lengths[usize::from(id)]);
                        if let Some((buffer, single)) = guest.single(&mut queue, ahead, Direction::Readable) {
                            prop_assert_eq!((buffer.len, single, expected.len()), (found[0].1, chain, 1));
                        }
                        held.push(chain);
                        ahead += chain.entries;
                    }
                    if available.is_empty() {
                        prop_assert!(!queue.has(ahead).unwrap());
                    }
                    queue.consume(ahead);
                }
                Op::Pass(n) => {
                    queue.look(n.into()).unwrap();
                    let wanted = Wanted { direction: Direction::Readable, least: 0, most: u32::MAX };
                    let found: Vec<_> = queue.singles(0, n.into(), &guest.memory, wanted).iter().map(Single::id).collect();
                    let is_single = |(id, buffers): &&(u16, Vec<(u64, u32)>)| {
                        buffers.len() == 1 && model.lengths[usize::from(*id)] == Some(1)
                    };
                    let expected = available.iter().take(usize::from(n).min(64)).take_while(is_single).map(|(id, _)| *id);
                    prop_assert!(expected.take(found.len()).eq(found.iter().copied()), "{:?}", found);
                    queue.push_used_singles(0, found.len() as u16, Direction::Readable);
                    queue.consume(found.len() as u16);
                    available.drain(..found.len());
                    returned.extend(found.into_iter().map(|id| (id, 0)));
                }
                Op::Return(pick) if !held.is_empty() => {
                    let chain = held.remove(usize::from(pick) % held.len());
                    queue.push_used(chain, u32::from(pick / 2));
                    returned.push((chain.id, u32::from(pick / 2)));
                }
                Op::Return(_) => {}
                Op::Publish => {
                    queue.publish();
                    visible.append(&mut returned);
                }
                Op::Collect => {
                    let found: Vec<_> = std::iter::from_fn(|| model.pop(&guest)).collect();
                    prop_assert_eq!(&found, &visible);
                    visible.clear();
                }
            }
        }
    }
}
