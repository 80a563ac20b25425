//! Enqueue and dequeue with copies by the core: content, order, merged buffers, chains, drops, stop and restart.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::time::Instant;

use offcore_dma::core::CoreDevice;
use offcore_dma::{Binding, CopyDevice, Mode};
use offcore_mem::Burst;
use offcore_ring::RingError;
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_vhost::features::{VIRTIO_F_EVENT_IDX, VIRTIO_F_VERSION_1};
use offcore_vhost::testing::*;
use offcore_vhost::vring::Arm;
use offcore_vhost::{Dequeue, Enqueue, VringCell, VringConfig};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// [`FEATURES`] and EVENT_IDX.
const FEATURES_EVENT: u64 = FEATURES | VIRTIO_F_EVENT_IDX;

struct ToGuest {
    guest: Guest,
    worker: Worker,
    cell: Arc<VringCell>,
    enqueue: Enqueue,
}

fn to_guest(size: u16, features: u64) -> ToGuest {
    let (guest, mut worker) = (Guest::new(size), Worker::new());
    let cell = Arc::new(VringCell::new(0));
    let enqueue = Enqueue::attach(&cell, &mut worker.mover).unwrap();
    start(&cell, guest.config(features));
    ToGuest { guest, worker, cell, enqueue }
}

impl ToGuest {
    fn send(&mut self, burst: &mut Burst) -> usize {
        let mut ctx = self.worker.ctx();
        let submitted = self.enqueue.submit(&mut ctx, burst);
        assert_eq!(self.enqueue.in_flight(ctx.mover), 0, "the core's copies are done at once");
        submitted.packets
    }
}

/// A transmitting guest: its driver, and the worker that dequeues.
struct FromGuest {
    guest: Guest,
    worker: Worker,
    cell: Arc<VringCell>,
    dequeue: Dequeue,
    driver: driver::RingDriver<u32>,
}

fn from_guest(guest: Guest, config: VringConfig) -> FromGuest {
    let mut worker = Worker::new();
    let cell = Arc::new(VringCell::new(1));
    let dequeue = Dequeue::attach(&cell, &mut worker.mover).unwrap();
    let event_idx = config.features & VIRTIO_F_EVENT_IDX != 0;
    let driver = driver::RingDriver::new(config.layout.clone(), event_idx);
    start(&cell, config);
    FromGuest { guest, worker, cell, dequeue, driver }
}

#[test]
fn packets_reach_the_guest() {
    for buffer in [2048, 1526, 600, 128] {
        let mut t = to_guest(256, FEATURES);
        let mut receiver = Receiver::new(&t.guest, buffer);
        let mut expected = 0u64;
        for round in 0..200 {
            let lengths: Vec<usize> = (0..32).map(|i| 14 + (round * 37 + i * 101) % 1500).collect();
            let mut burst = t.worker.packets(round as u64 * 32, &lengths);
            while !burst.is_empty() {
                assert!(t.send(&mut burst) > 0);
                while let Some(packet) = receiver.receive(&t.guest) {
                    let len = 14 + ((expected / 32) as usize * 37 + (expected % 32) as usize * 101) % 1500;
                    assert_eq!(packet[12..], pattern(expected, len), "packet {expected}");
                    assert_eq!(packet[..10], [0; 10]);
                    expected += 1;
                }
            }
        }
        assert_eq!(expected, 6400);
    }
}

#[test]
fn unmerged_long_packet_is_dropped() {
    let mut t = to_guest(8, VIRTIO_F_VERSION_1);
    let mut receiver = Receiver::new(&t.guest, 100);
    let mut burst = t.worker.packets(0, &[60, 200, 61]);
    let submitted = t.enqueue.submit(&mut t.worker.ctx(), &mut burst);
    assert_eq!((submitted.packets, submitted.too_big, burst.len()), (2, 1, 0));
    assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(0, 60));
    assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(2, 61));
}

#[test]
fn packets_without_chains_stay_in_burst() {
    let mut t = to_guest(8, FEATURES);
    let _receiver = Receiver::new(&t.guest, 600);
    let mut burst = t.worker.packets(0, &[1400; 4]);
    // Three chains per packet: two packets fit into eight chains.
    assert_eq!(t.send(&mut burst), 2);
    assert_eq!(burst.len(), 2);
    assert_eq!(burst[0].bytes(), pattern(2, 1400));
}

#[test]
fn broken_queue_waits_for_a_start() {
    let mut t = to_guest(8, FEATURES);
    let mut driver = driver::RingDriver::new(t.guest.layout.clone(), false);
    driver.add(GUEST - 1, 2048, Direction::Writable, ()).unwrap();
    driver.publish();
    let mut burst = t.worker.packets(0, &[60]);
    assert_eq!(t.send(&mut burst), 0);
    let broken = t.cell.report().broken;
    assert_eq!(broken, Some(RingError::Address { addr: GUEST - 1, len: 2048 }));
    assert_eq!(t.send(&mut burst), 0);
    // Changing the notification descriptor is not a restart.
    let same = t.cell.wanted().vring.unwrap();
    start(&t.cell, VringConfig { call: None, ..(*same).clone() });
    assert_eq!(t.send(&mut burst), 0);
    assert!(t.cell.report().broken.is_some());
    let mut receiver = Receiver::new(&t.guest, 2048);
    start(&t.cell, t.guest.config(FEATURES));
    assert_eq!(t.send(&mut burst), 1);
    assert!(receiver.receive(&t.guest).is_some());
    assert_eq!(t.cell.report().broken, None);
}

#[test]
fn restarted_ring_resumes_at_base() {
    let mut t = to_guest(8, FEATURES);
    let mut receiver = Receiver::new(&t.guest, 2048);
    let mut burst = t.worker.packets(0, &[60; 5]);
    assert_eq!(t.send(&mut burst), 5);
    t.cell.publish(|wanted| wanted.vring = None);
    let mut burst = t.worker.packets(5, &[60]);
    assert_eq!(t.send(&mut burst), 0);
    let base = t.cell.wait(TIMEOUT).unwrap().base;
    assert_eq!(base, 5);
    let mut config = t.guest.config(FEATURES);
    config.base = base;
    start(&t.cell, config);
    assert_eq!(t.send(&mut burst), 1);
    for serial in 0..6 {
        assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(serial, 60));
    }
}

/// Packets in one buffer; in three buffers, cut inside the header and inside the payload; and in two pieces in an
/// indirect table, as Linux sends them, cut at arbitrary places.
#[test]
fn packets_leave_the_guest() {
    for (packed, mode, features) in [
        (false, Mode::Cpu, FEATURES_EVENT),
        (false, Mode::Offload, FEATURES),
        (true, Mode::Cpu, FEATURES),
        (true, Mode::Offload, FEATURES_EVENT),
    ] {
        let (guest, mut worker) = (Guest::with_rings(256, packed), Worker::new());
        let (device, mut stepper) = CoreDevice::stepped();
        let channel = worker.mover.add_channel(device.open_channel(256).unwrap());
        let cell = Arc::new(VringCell::new(1));
        cell.publish(|wanted| wanted.binding = Binding::new(mode, vec![channel]));
        let mut dequeue = Dequeue::attach(&cell, &mut worker.mover).unwrap();
        start(&cell, guest.config(features));
        let mut driver = driver::RingDriver::new(guest.layout.clone(), features == FEATURES_EVENT);
        let (mut sent, mut received) = (0u64, 0u64);
        let length = |serial: u64| 14 + (serial as usize * 131) % 1500;
        let mut burst = Burst::new();
        while received < 5000 {
            for _ in 0..23 {
                let bytes = [vec![0; 12], pattern(sent, length(sent))].concat();
                let address = guest.buffer(sent as usize % 200, 2048);
                guest.write(address, &bytes);
                let piece = |from: usize, to: usize| (address + from as u64, (to - from) as u32);
                match sent % 5 {
                    0 => driver.add_chain(&[piece(0, bytes.len())], Direction::Readable, 0).unwrap(),
                    1 => {
                        let pieces = [piece(0, 5), piece(5, 20), piece(20, bytes.len())];
                        driver.add_chain(&pieces, Direction::Readable, 0).unwrap();
                    }
                    _ => {
                        let cut = 1 + sent as usize * 7 % (bytes.len() - 1);
                        // Only in a split table is the first descriptor linked to the second.
                        let link = if packed { 0 } else { 1u128 << 96 | 1 << 112 };
                        let entry = |(addr, len): (u64, u32)| u128::from(addr) | u128::from(len) << 64;
                        let entries = [entry(piece(0, cut)) | link, entry(piece(cut, bytes.len()))];
                        let table = guest.buffer(200 + sent as usize % 200, 2048);
                        guest.write(table, &entries.map(u128::to_le_bytes).concat());
                        driver.add_indirect(table, 32, 0).unwrap();
                    }
                }
                sent += 1;
            }
            driver.publish();
            while received < sent {
                worker.mover.poll(&mut worker.clock);
                dequeue.try_dequeue(&mut worker.ctx(), &mut burst);
                stepper.step();
                for packet in burst.drain(..) {
                    let due = pattern(received, length(received));
                    assert_eq!(packet.bytes(), due, "packet {received}, {packed} {mode:?}");
                    received += 1;
                    worker.cache.free(packet);
                }
            }
            driver.used().unwrap();
            while driver.pop().unwrap().is_some() {}
        }
    }
}

#[test]
fn malformed_packets_are_returned() {
    let guest = Guest::new(16);
    let config = guest.config(FEATURES);
    let FromGuest { guest, mut worker, mut dequeue, mut driver, .. } = from_guest(guest, config);
    let address = guest.buffer(0, 8192);
    guest.write(address, &[0; 100]);
    // Too short, without a complete header, too long, and with a header that requests a checksum.
    for len in [25, 3, 70_000] {
        driver.add(address, len, Direction::Readable, len).unwrap();
    }
    let asking = guest.buffer(1, 8192);
    guest.write(asking, &[1, 0, 0, 0, 0, 0, 14, 0, 0, 0, 0, 0]);
    driver.add(asking, 72, Direction::Readable, 72).unwrap();
    driver.add(address, 72, Direction::Readable, 1).unwrap();
    driver.publish();
    let mut burst = Burst::new();
    let dequeued = dequeue.try_dequeue(&mut worker.ctx(), &mut burst);
    assert_eq!((dequeued.packets, dequeued.too_big, dequeued.malformed), (1, 1, 3));
    assert_eq!(driver.used(), Ok(5), "every chain goes back to the guest");
    assert_eq!(burst[0].len(), 60);
}

#[test]
fn disabled_queue_discards() {
    let guest = Guest::new(16);
    let config = VringConfig { enabled: false, ..guest.config(FEATURES) };
    let FromGuest { guest, mut worker, mut dequeue, mut driver, .. } = from_guest(guest, config);
    for _ in 0..3 {
        driver.add(guest.buffer(0, 2048), 72, Direction::Readable, 0).unwrap();
    }
    driver.publish();
    let (mut burst, mut discarded, begun) = (Burst::new(), 0, Instant::now());
    // A queue is enabled last when it is started, so packets are discarded only after a grace period.
    while discarded == 0 {
        let dequeued = dequeue.try_dequeue(&mut worker.ctx(), &mut burst);
        assert_eq!((dequeued.packets, dequeued.malformed), (0, 0));
        discarded += dequeued.discarded;
        assert!(begun.elapsed() < TIMEOUT, "nothing was discarded");
    }
    assert_eq!(discarded, 3);
    assert!(burst.is_empty());
    assert_eq!(driver.used(), Ok(3));
}

#[test]
fn discards_are_returned_before_a_break() {
    for packed in [false, true] {
        let guest = Guest::with_rings(16, packed);
        let config = VringConfig { enabled: false, ..guest.config(FEATURES) };
        let FromGuest { guest, mut worker, cell, mut dequeue, mut driver } = from_guest(guest, config);
        for direction in [Direction::Readable, Direction::Readable, Direction::Writable] {
            driver.add(guest.buffer(0, 2048), 72, direction, 0).unwrap();
        }
        driver.publish();
        let (mut discarded, begun) = (0, Instant::now());
        while cell.report().broken.is_none() {
            discarded += dequeue.try_dequeue(&mut worker.ctx(), &mut Burst::new()).discarded;
            assert!(begun.elapsed() < TIMEOUT, "nothing was discarded");
        }
        assert_eq!((discarded, driver.used()), (2, Ok(2)), "packed: {packed}");
        let base = cell.report().base;
        assert_eq!(base, if packed { 0x8002_8002 } else { 2 });
    }
}

#[test]
fn a_dry_pool_leaves_chains_with_the_guest() {
    let guest = Guest::new(16);
    let config = guest.config(FEATURES);
    let FromGuest { guest, mut worker, mut dequeue, mut driver, .. } = from_guest(guest, config);
    driver.add(guest.buffer(0, 2048), 72, Direction::Readable, 0).unwrap();
    driver.publish();
    let hoard: Vec<_> = std::iter::from_fn(|| worker.cache.take()).collect();
    let mut burst = Burst::new();
    let dequeued = dequeue.try_dequeue(&mut worker.ctx(), &mut burst);
    assert!(dequeued.starved && burst.is_empty());
    worker.cache.free_all(hoard);
    assert_eq!(dequeue.try_dequeue(&mut worker.ctx(), &mut burst).packets, 1);
}

#[test]
fn a_second_worker_is_refused() {
    let mut worker = Worker::new();
    let cell = Arc::new(VringCell::new(0));
    let first = Enqueue::attach(&cell, &mut worker.mover).unwrap();
    assert!(Enqueue::attach(&cell, &mut worker.mover).is_err());
    drop(first);
    assert!(Enqueue::attach(&cell, &mut worker.mover).is_ok());
}

/// The non-blocking flag of an eventfd is shared by all processes that have it, including the front end.
#[test]
fn empty_kick_does_not_block() {
    let (guest, mut worker) = (Guest::new(64), Worker::new());
    let cell = Arc::new(VringCell::new(1));
    let kick = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let kick = Some(Arc::new(kick));
    start(&cell, VringConfig { kick: kick.clone(), ..guest.config(FEATURES) });
    let mut dequeue = Dequeue::attach(&cell, &mut worker.mover).unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for kicks in [0, 3, 0] {
            let kick = kick.as_ref().unwrap();
            if kicks > 0 {
                rustix::io::write(kick, &u64::to_ne_bytes(kicks)).unwrap();
            }
            assert!(matches!(dequeue.arm(), Arm::Event(_)));
            dequeue.disarm();
            let mut empty = [PollFd::new(kick, PollFlags::IN)];
            assert_eq!(poll(&mut empty, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(0));
            done.send(()).unwrap();
        }
    });
    (0..3).for_each(|_| is_done.recv_timeout(TIMEOUT).expect("the worker waits for a kick"));
}
