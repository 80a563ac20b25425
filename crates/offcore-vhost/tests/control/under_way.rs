//! Changes to a virtqueue while packets are processed. No packet is lost, duplicated or reordered.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use offcore_dma::{Context, Mover};
use offcore_mem::{Burst, GuestMemory, GuestRegion, Hugepages, Mapping, Pool};
use offcore_ring::device::Direction;
use offcore_ring::{Areas, Layout, driver, packed};
use offcore_stats::StageClock;
use offcore_vhost::features::VIRTIO_F_RING_PACKED;
use offcore_vhost::message::{MemoryRegion, Request, VringFd};
use offcore_vhost::{Backend, BackendConfig, Dequeue, VringCell};

use crate::peer::*;

const HEADER: u64 = offcore_vhost::features::NET_HEADER as u64;
const LEN: u64 = 64;
const BUFFERS: u64 = 0x4_0000;

/// Format of the virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Split,
    Packed,
}

impl Format {
    fn size(self) -> u32 {
        if self == Self::Split { 256 } else { 200 }
    }

    /// Sets up virtqueue 1 without its kick, so that it does not start yet.
    fn start(self, peer: &mut Peer) {
        let (feature, base) =
            if self == Self::Split { (0, 0) } else { (VIRTIO_F_RING_PACKED, packed::FRESH_BASE) };
        for request in [
            Request::SetFeatures(FEATURES | feature),
            Request::SetVringNum(state(1, self.size())),
            Request::SetVringBase(state(1, base)),
            Request::SetVringAddr(addresses(1)),
            Request::SetVringEnable(state(1, 1)),
            Request::SetVringKick(VringFd { index: 1, fd: None }),
        ] {
            assert_eq!(peer.ask(request), 0);
        }
    }

    /// Position of a ring after `chains` chains of one descriptor.
    fn base(self, chains: u64) -> u32 {
        let (size, chains) = (self.size(), u32::try_from(chains).unwrap());
        if self == Self::Split {
            return chains & 0xffff;
        }
        // The wrap counter starts at 1 and changes at each turn.
        let half = (chains % size) | ((1 - (chains / size) % 2) << 15);
        half | (half << 16)
    }
}

/// The guest's driver: transmits numbered packets until it is stopped. Returns their number.
fn transmit(guest: &Guest, format: Format, stop: &AtomicBool) -> u64 {
    let region = guest.region();
    let mapping = Mapping::shared(guest.fd.as_fd(), 0, guest.mapping.len()).unwrap();
    let region = GuestRegion::new(region.guest, region.user, region.size, mapping, 0).unwrap();
    let memory = Arc::new(GuestMemory::new(vec![region]).unwrap());
    let ring = addresses(1);
    let areas = Areas { descriptors: ring.desc, driver: ring.avail, device: ring.used };
    let layout = Layout::in_memory(&memory, areas, format.size(), format == Format::Packed).unwrap();
    let mut driver = driver::RingDriver::new(layout, false);
    let mut free: Vec<u64> = (0..u64::from(format.size())).map(|i| BUFFERS + i * 256).collect();
    let mut sent = 0u64;
    while !stop.load(Ordering::Relaxed) {
        for _ in 0..driver.used().unwrap() {
            free.push(driver.pop().unwrap().unwrap().token);
        }
        while let Some(offset) = free.pop() {
            guest.mapping.write_at((offset + HEADER) as usize, &sent.to_ne_bytes());
            let (address, len) = (Guest::PHYSICAL + offset, (HEADER + LEN) as u32);
            driver.add(address, len, Direction::Readable, offset).unwrap();
            sent += 1;
        }
        driver.publish();
        std::thread::yield_now();
    }
    sent
}

/// Successive workers that receive from a virtqueue until they are stopped. Packets must arrive in order.
fn receive(cell: &Arc<VringCell>, received: &AtomicU64, stop: &AtomicBool) {
    let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
    let mut cache = pool.cache();
    let (mut mover, mut clock, mut next) = (Mover::new(), StageClock::private(), 0u64);
    while !stop.load(Ordering::Relaxed) {
        let mut dequeue = Dequeue::attach(cell, &mut mover).unwrap();
        let until = next + 5000;
        let mut burst = Burst::new();
        while next < until && !stop.load(Ordering::Relaxed) {
            let mut ctx = Context { mover: &mut mover, cache: &mut cache, clock: &mut clock, burst: 32 };
            dequeue.try_dequeue(&mut ctx, &mut burst);
            if burst.is_empty() {
                std::thread::yield_now();
            }
            for packet in burst.drain(..) {
                let bytes = packet.bytes();
                assert_eq!((bytes.len() as u64, &bytes[..8]), (LEN, &next.to_ne_bytes()[..]));
                next += 1;
                cache.free(packet);
            }
            received.store(next, Ordering::Relaxed);
        }
        assert_eq!(dequeue.in_flight(&mut mover), 0, "the core has copied");
    }
}

/// Calls `change` a few hundred times while packets pass through virtqueue 1, and checks that all of them arrive.
fn while_packets_flow(mut change: impl FnMut(&mut Peer, &Guest, usize)) {
    for format in [Format::Split, Format::Packed] {
        flow(format, &mut change);
    }
}

fn flow(format: Format, change: &mut impl FnMut(&mut Peer, &Guest, usize)) {
    let dir = Dir::new();
    let backend = Backend::start(BackendConfig::new(dir.file("vhost.sock")), Box::new(())).unwrap();
    let guest = Guest::new();
    let (stop_driver, stop_worker, received) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _ends = [Ends(&stop_driver), Ends(&stop_worker)];
        let driver = scope.spawn(|| transmit(&guest, format, &stop_driver));
        let worker = scope.spawn(|| receive(&backend.cells()[1], &received, &stop_worker));
        let mut peer = Peer::with_memory(&dir.file("vhost.sock"), &guest);
        format.start(&mut peer);
        for round in 0..300 {
            let before = received.load(Ordering::Relaxed);
            change(&mut peer, &guest, round);
            until("packets go on", || received.load(Ordering::Relaxed) > before);
        }
        stop_driver.store(true, Ordering::Relaxed);
        let sent = driver.join().unwrap();
        until("all have arrived", || received.load(Ordering::Relaxed) == sent);
        stop_worker.store(true, Ordering::Relaxed);
        worker.join().unwrap();
        assert_eq!(peer.base(1), format.base(sent), "the position is known nevertheless");
    });
    let status = backend.device().status();
    assert!(status.vrings[1].broken.is_none() && status.refused == 0, "{status}");
}

#[test]
fn eventfd_changes_lose_no_packet() {
    let fds = [eventfd(), eventfd()];
    while_packets_flow(|peer, _, round| {
        for request in [Request::SetVringCall, Request::SetVringKick] {
            let fd = (round % 3 > 0).then(|| fds[round % 2].as_fd());
            assert_eq!(peer.ask(request(VringFd { index: 1, fd })), 0);
        }
        // Only briefly: packets of a disabled queue are discarded after half a second.
        peer.enable(1, false);
        peer.enable(1, true);
    });
}

#[test]
fn region_changes_lose_no_packet() {
    let (_mapping, fd) = Mapping::memfd("more", 1 << 20, Hugepages::None).unwrap();
    while_packets_flow(|peer, _, round| {
        let at = (round as u64 % 32) << 12;
        let region =
            MemoryRegion { guest: (1 << 33) + at, size: 4096, user: (1 << 43) + at, mmap_offset: at };
        let request = match (round / 32) % 2 {
            0 => Request::AddMemReg(region, fd.as_fd()),
            _ => Request::RemMemReg(region, None),
        };
        assert_eq!(peer.ask(request), 0);
    });
}

/// The memory table is replaced by a table with or without another region, and repeated unchanged.
#[test]
fn memory_table_changes_lose_no_packet() {
    let (_mapping, fd) = Mapping::memfd("more", 1 << 20, Hugepages::None).unwrap();
    let more = MemoryRegion { guest: 1 << 33, size: 4096, user: 1 << 43, mmap_offset: 0 };
    while_packets_flow(|peer, guest, round| {
        let mut regions = vec![(guest.region(), guest.fd.as_fd())];
        if round % 2 == 0 {
            regions.push((more, fd.as_fd()));
        }
        for _ in 0..20 {
            assert_eq!(peer.ask(Request::SetMemTable(regions.clone())), 0);
        }
    });
}
