//! Guests that cause a lot of work with few packets. The work of each call is bounded, and waiting packets are not
//! lost.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use offcore_dma::core::CoreDevice;
use offcore_dma::{Binding, CopyDevice, Mode};
use offcore_mem::{Burst, Packet};
use offcore_ring::{device::Direction, driver};
use offcore_vhost::dequeue::Arm;
use offcore_vhost::features::{
    VIRTIO_F_VERSION_1, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_USO,
    VIRTIO_NET_F_MRG_RXBUF,
};
use offcore_vhost::pair::{Next, Pair};
use offcore_vhost::testing::*;
use offcore_vhost::{Dequeue, Enqueue, VringCell, VringConfig};
use offcore_wire::virtio_net::{
    HEADER_LEN, NetHeader, VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_UDP,
    VIRTIO_NET_HDR_GSO_UDP_L4,
};

/// Features of a driver that requests TCP segmentation.
const TSO: u64 = FEATURES | VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_TSO4 | VIRTIO_NET_F_HOST_USO;
/// Maximum number of descriptors in a chain.
const CHAIN: usize = 64;

/// A header that requests segments of `gso_size` bytes.
fn asking(gso_size: u16) -> NetHeader {
    NetHeader {
        flags: VIRTIO_NET_HDR_F_NEEDS_CSUM,
        gso_type: VIRTIO_NET_HDR_GSO_TCPV4,
        gso_size,
        csum_start: 34,
        csum_offset: 16,
        ..NetHeader::default()
    }
}

/// A transmitting guest, and the worker's side.
struct Sender {
    guest: Guest,
    worker: Worker,
    cell: Arc<VringCell>,
    dequeue: Dequeue,
    driver: driver::RingDriver<()>,
    sent: u64,
    step: Box<dyn FnMut()>,
}

fn sender(size: u16, offload: bool) -> Sender {
    let (guest, mut worker) = (Guest::new(size), Worker::new());
    let cell = Arc::new(VringCell::new(1));
    let mut step: Box<dyn FnMut()> = Box::new(|| ());
    if offload {
        let (device, mut stepper) = CoreDevice::stepped();
        let channel = worker.mover.add_channel(device.open_channel(1024).unwrap());
        cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, vec![channel]));
        step = Box::new(move || while stepper.step() > 0 {});
    }
    start(&cell, guest.config(TSO));
    let dequeue = Dequeue::attach(&cell, &mut worker.mover).unwrap();
    let driver = driver::RingDriver::new(guest.layout.clone(), false);
    Sender { guest, worker, cell, dequeue, driver, sent: 0, step }
}

impl Sender {
    /// Makes `packets` packets of 1500 bytes available, with a request for segments of `gso_size` bytes.
    fn transmit(&mut self, packets: u64, gso_size: u16) {
        self.transmit_with(packets, asking(gso_size));
    }

    fn transmit_with(&mut self, packets: u64, header: NetHeader) {
        let header = header.to_bytes();
        for serial in self.sent..self.sent + packets {
            let address = self.guest.buffer(serial as usize % 128, 4096);
            self.guest.write(address, &[&header[..], &pattern(serial, 1500)].concat());
            self.driver.add(address, (HEADER_LEN + 1500) as u32, Direction::Readable, ()).unwrap();
        }
        self.driver.publish();
        self.sent += packets;
    }

    /// Returns the packets of one call.
    fn call(&mut self, drains: bool) -> Burst {
        (self.step)();
        let (mut burst, mut ctx) = (Burst::new(), self.worker.ctx());
        ctx.mover.poll(ctx.clock);
        let dequeued = match drains {
            true => self.dequeue.drain(&mut ctx, &mut burst),
            false => self.dequeue.try_dequeue(&mut ctx, &mut burst),
        };
        assert_eq!((dequeued.packets, dequeued.malformed), (burst.len(), 0));
        assert_eq!(dequeued.bytes, burst.iter().map(|packet| packet.len() as u64).sum::<u64>());
        burst
    }
}

/// 64 packets of 1500 bytes would be 12,000 segments of 8 bytes.
#[test]
fn segments_of_a_call_are_bounded() {
    for (offload, drains) in [(false, false), (true, false), (true, true)] {
        let mut t = sender(256, offload);
        t.transmit(64, 8);
        let mut received = 0;
        for call in 0.. {
            assert!(call < 64, "of {} packets {received} came", t.sent);
            let burst = t.call(drains && call > 0);
            let segments_of = |packet: &Packet| {
                let header = packet.headroom_bytes(HEADER_LEN).first_chunk().map(NetHeader::from_bytes);
                packet.len() / usize::from(header.unwrap().gso_size)
            };
            let segments: usize = burst.iter().map(segments_of).sum();
            assert!(segments <= 768, "{segments} segments in one call");
            if call == 1 && !drains {
                // Packets that the guest sends now follow the waiting ones.
                t.transmit(30, 1448);
            }
            for packet in &burst {
                assert_eq!(packet.bytes(), pattern(received, 1500), "packet {received}");
                received += 1;
            }
            t.worker.cache.free_all(burst);
            if received == t.sent {
                break;
            }
            if call == 2 {
                assert!(t.dequeue.in_flight(&mut t.worker.mover) > 0, "packets that wait are in flight");
                assert!(matches!(t.dequeue.arm(), Arm::Now), "they keep the worker awake");
                t.dequeue.disarm();
            }
        }
        assert_eq!(t.driver.used(), Ok(t.sent as u16));
        t.cell.publish(|wanted| wanted.vring = None);
        assert!(t.call(true).is_empty() && t.dequeue.in_flight(&mut t.worker.mover) == 0);
    }
}

/// A datagram may have one byte, so a packet of 1500 bytes can request about 1500 segments.
#[test]
fn datagram_segments_are_bounded() {
    let mut t = sender(256, false);
    let header = NetHeader { gso_type: VIRTIO_NET_HDR_GSO_UDP_L4, csum_offset: 6, ..asking(1) };
    t.transmit_with(20, header);
    for packet in 0..20 {
        let burst = t.call(false);
        assert_eq!(burst.len(), 1, "packet {packet}");
        assert_eq!(burst[0].headroom_bytes(HEADER_LEN), header.essence().to_bytes());
        t.worker.cache.free_all(burst);
    }
    // UFO is not offered.
    t.transmit_with(1, NetHeader { gso_type: VIRTIO_NET_HDR_GSO_UDP, ..header });
    let (mut burst, mut ctx) = (Burst::new(), t.worker.ctx());
    let dequeued = t.dequeue.try_dequeue(&mut ctx, &mut burst);
    assert_eq!((dequeued.packets, dequeued.malformed), (0, 1));
}

/// Packets with common segment sizes (the kernel's and old defaults of TCP) are delivered in full bursts.
#[test]
fn ordinary_packets_fill_one_burst() {
    for gso_size in [536, 1448] {
        let mut t = sender(256, false);
        t.transmit(64, gso_size);
        assert_eq!(t.call(false).len(), 64, "{gso_size}");
    }
}

/// Chains of 64 descriptors, some too long for a packet. A call walks only as many as have 256 descriptors together.
#[test]
fn descriptors_of_a_call_are_bounded() {
    for len in [40, 2000] {
        let mut t = sender(64 * CHAIN as u16, false);
        let chain = vec![(t.guest.buffer(0, 4096), len); CHAIN];
        (0..64).for_each(|_| t.driver.add_chain(&chain, Direction::Readable, ()).unwrap());
        t.driver.publish();
        let mut returned = 0;
        while returned < 64 {
            let mut burst = Burst::new();
            let dequeued = t.dequeue.try_dequeue(&mut t.worker.ctx(), &mut burst);
            let chains = dequeued.packets + dequeued.too_big;
            assert!((1..=4).contains(&chains), "{chains} chains of {CHAIN} in one call");
            returned += chains;
            t.worker.cache.free_all(burst);
        }
        assert_eq!(t.driver.used(), Ok(64));
    }
}

/// A guest that receives in chains with indirect tables, so that the tables can be invalidated.
struct Taker {
    guest: Guest,
    driver: driver::RingDriver<usize>,
    tables: usize,
}

impl Taker {
    fn new(guest: Guest) -> Self {
        let driver = driver::RingDriver::new(guest.layout.clone(), false);
        Self { guest, driver, tables: 0 }
    }

    /// Address of table `index`. Each table has one page.
    fn table(&self, index: usize) -> u64 {
        self.guest.buffer(1024 + index, 4096)
    }

    /// Writes table `index` with `buffers` buffers of `len` bytes each, the first at `address`.
    fn write(&self, index: usize, buffers: usize, len: u32, address: u64) {
        let last = |i| i + 1 == buffers;
        let table: Vec<u8> = (0..buffers)
            .flat_map(|i| {
                let (write, next) = (2u16, u16::from(!last(i)));
                let tail = match self.guest.packed() {
                    true => u32::from(write) << 16,
                    false => u32::from(write | next) | (i as u32 + 1) << 16,
                };
                [
                    (address + u64::from(len) * i as u64).to_le_bytes(),
                    (u64::from(len) | u64::from(tail) << 32).to_le_bytes(),
                ]
                .concat()
            })
            .collect();
        self.guest.write(self.table(index), &table);
    }

    /// Makes a chain of `buffers` buffers of `len` bytes available.
    fn add(&mut self, buffers: usize, len: u32) {
        let index = self.tables;
        self.tables += 1;
        self.write(index, buffers, len, self.guest.buffer(index, 65536));
        self.driver.add_indirect(self.table(index), 16 * buffers as u32, index).unwrap();
        self.driver.publish();
    }

    /// Invalidates the tables, so that the ring breaks when they are read.
    fn spoil(&self) {
        (0..self.tables).for_each(|index| self.write(index, 1, 2000, u64::MAX / 2));
    }
}

/// If a packet does not fit, the next packet for the same chains is rejected without reading them again.
#[test]
fn chains_without_room_are_read_once() {
    for (packed, merges) in [(false, true), (false, false), (true, true), (true, false)] {
        let mut worker = Worker::new();
        let mut taker = Taker::new(Guest::with_rings(64, packed));
        let cell = Arc::new(VringCell::new(0));
        let features = if merges { FEATURES } else { FEATURES & !VIRTIO_NET_F_MRG_RXBUF };
        start(&cell, taker.guest.config(features));
        let mut enqueue = Enqueue::attach(&cell, &mut worker.mover).unwrap();
        let mut submit = |worker: &mut Worker, lengths: &[usize]| {
            let mut burst = worker.packets(0, lengths);
            let submitted = enqueue.submit(&mut worker.ctx(), &mut burst);
            let left = burst.len();
            worker.cache.free_all(burst);
            (submitted.packets, submitted.too_big, left)
        };
        // The maximum number of descriptors for a packet, 640 bytes together.
        taker.add(CHAIN, 10);
        assert_eq!(submit(&mut worker, &[1400]), (0, 1, 0));
        taker.spoil();
        assert_eq!(submit(&mut worker, &[1400; 64]), (0, 64, 0), "packed {packed}, merges {merges}");
        assert_eq!(cell.report().broken, None, "the chain was read again");
        // A shorter packet reads the chain and takes it. Other chains follow.
        taker.write(0, CHAIN, 10, taker.guest.buffer(0, 65536));
        taker.add(CHAIN, 100);
        assert_eq!(submit(&mut worker, &[600, 1400]), (2, 0, 0));
        if !merges {
            continue;
        }
        // Chains that may be followed by others are read again only after further chains were added.
        taker.add(1, 500);
        assert_eq!(submit(&mut worker, &[1400; 2]), (0, 0, 2));
        taker.spoil();
        assert_eq!(submit(&mut worker, &[1400; 2]), (0, 0, 2));
        assert_eq!(cell.report().broken, None, "the chain was read again");
        let last = taker.tables - 1;
        taker.write(last, 1, 500, taker.guest.buffer(last, 65536));
        taker.add(1, 2000);
        taker.add(1, 2000);
        assert_eq!(submit(&mut worker, &[1400; 2]), (2, 0, 0));
    }
}

/// Two guests with one copy.
struct Guests {
    worker: Worker,
    sender: Guest,
    tx: driver::RingDriver<()>,
    taker: Taker,
    cells: [Arc<VringCell>; 2],
    dequeue: Dequeue,
    enqueue: Enqueue,
    pair: Pair,
}

fn guests(size: u16, packed: bool, features: u64) -> Guests {
    let (mut worker, sender) = (Worker::new(), Guest::new(size));
    let taker = Taker::new(Guest::with_rings(64, packed));
    let cells = [Arc::new(VringCell::new(1)), Arc::new(VringCell::new(0))];
    start(&cells[0], sender.config(features));
    start(&cells[1], VringConfig { ..taker.guest.config(FEATURES) });
    Guests {
        dequeue: Dequeue::attach(&cells[0], &mut worker.mover).unwrap(),
        enqueue: Enqueue::attach(&cells[1], &mut worker.mover).unwrap(),
        pair: Pair::new(&mut worker.mover),
        tx: driver::RingDriver::new(sender.layout.clone(), false),
        worker,
        sender,
        taker,
        cells,
    }
}

impl Guests {
    fn transmit(&mut self, packets: usize, len: u32) {
        let address = self.sender.buffer(0, 1 << 17);
        (0..packets).for_each(|_| self.tx.add(address, len, Direction::Readable, ()).unwrap());
        self.tx.publish();
    }

    fn forward(&mut self) -> offcore_vhost::pair::Forwarded {
        self.pair.forward(&mut self.worker.ctx(), &mut self.dequeue, &mut self.enqueue, |_| ())
    }
}

#[test]
fn chains_without_room_are_read_once_by_a_pair() {
    for packed in [false, true] {
        let mut t = guests(256, packed, FEATURES);
        t.taker.add(CHAIN, 20);
        t.transmit(1, 1400);
        assert_eq!(t.forward().too_big, 1);
        t.taker.spoil();
        t.transmit(64, 1400);
        let forwarded = t.forward();
        assert_eq!((forwarded.too_big, forwarded.packets), (64, 0), "packed {packed}");
        t.taker.write(0, CHAIN, 20, t.taker.guest.buffer(0, 65536));
        t.taker.add(1, 500);
        t.transmit(1, 600);
        t.transmit(1, 1400);
        let forwarded = t.forward();
        assert_eq!((forwarded.too_big, forwarded.packets), (0, 1), "packed {packed}");
        // The other packet used the ordinary path, which had no room for it either.
        t.taker.spoil();
        assert_eq!(t.forward().next, Next::Ordinary);
        assert_eq!(t.cells[1].report().broken, None, "the chain was read again");
        let last = t.taker.tables - 1;
        t.taker.write(last, 1, 500, t.taker.guest.buffer(last, 65536));
        t.taker.add(1, 2000);
        assert_eq!(t.forward().packets, 1);
        assert!(t.cells.iter().all(|cell| cell.report().broken.is_none()));
    }
}

/// 64 packets of 64 KiB are 4 MiB.
#[test]
fn bytes_of_a_round_are_bounded_for_a_pair() {
    let mut t = guests(256, false, FEATURES);
    (0..64).for_each(|_| t.taker.add(1, 65535));
    t.transmit(64, 65000);
    let mut packets = 0;
    while packets < 64 {
        let forwarded = t.forward();
        assert!((1..=5).contains(&forwarded.packets), "{} packets in one round", forwarded.packets);
        packets += forwarded.packets;
    }
}

/// Packets waiting on the ordinary path are not overtaken.
#[test]
fn backlog_precedes_pair_copies() {
    let mut t = guests(256, false, VIRTIO_F_VERSION_1 | VIRTIO_NET_F_CSUM | VIRTIO_NET_F_HOST_TSO4);
    (0..8).for_each(|_| t.taker.add(1, 4096));
    let address = t.sender.buffer(0, 1 << 17);
    t.sender.write(address, &asking(8).to_bytes());
    t.transmit(4, 2000);
    // The receiver does not accept such packets.
    assert_eq!(t.forward().next, Next::Ordinary);
    let mut burst = Burst::new();
    t.dequeue.try_dequeue(&mut t.worker.ctx(), &mut burst);
    let given = burst.len();
    assert!((1..4).contains(&given), "{given} packets at once");
    t.sender.write(address, &NetHeader::default().to_bytes());
    t.transmit(1, 2000);
    let forwarded = t.forward();
    assert_eq!((forwarded.packets, forwarded.next), (0, Next::Finish));
    t.dequeue.drain(&mut t.worker.ctx(), &mut burst);
    assert_eq!(burst.len(), 4);
    t.worker.cache.free_all(burst);
    assert_eq!(t.forward().packets, 1);
}
