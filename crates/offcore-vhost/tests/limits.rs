//! Limits: channels that are full or too small, full lists, a guest that makes more chains available than it has, and
//! workers that detach.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::mover::MoverError;
use offcore_dma::{Binding, ChannelId, CopyDevice, Mode};
use offcore_mem::Burst;
use offcore_ring::RingError;
use offcore_ring::{device::Direction, driver};
use offcore_vhost::testing::*;
use offcore_vhost::{Dequeue, Enqueue, VringCell, VringConfig};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A worker with a channel of `ring` operations, and a virtqueue bound to it.
struct Rig {
    guest: Guest,
    worker: Worker,
    channel: ChannelId,
    stepper: Stepper,
    cell: Arc<VringCell>,
}

fn rig(queue: u16, ring: usize) -> Rig {
    let (guest, mut worker) = (Guest::new(256), Worker::new());
    let (device, stepper) = CoreDevice::stepped();
    let channel = worker.mover.add_channel(device.open_channel(ring).unwrap());
    let cell = Arc::new(VringCell::new(queue));
    cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, vec![channel]));
    start(&cell, guest.config(FEATURES));
    Rig { guest, worker, channel, stepper, cell }
}

impl Rig {
    fn enqueue(&mut self) -> Enqueue {
        Enqueue::attach(&self.cell, &mut self.worker.mover).unwrap()
    }

    fn step(&mut self) {
        while self.stepper.step() > 0 {}
        self.worker.mover.poll(&mut self.worker.clock);
    }
}

#[test]
fn core_copies_the_overflow() {
    let mut t = rig(0, 8);
    let mut receiver = Receiver::new(&t.guest, 2048);
    let mut enqueue = t.enqueue();
    let mut burst = t.worker.packets(0, &[500; 32]);
    let submitted = enqueue.submit(&mut t.worker.ctx(), &mut burst);
    assert_eq!((submitted.packets, burst.len()), (32, 0), "there are chains for all of them");
    assert_eq!(t.worker.mover.stats().overflow, 24);
    assert!(receiver.receive(&t.guest).is_none(), "the core's copies wait behind the channel's");
    t.step();
    assert_eq!(enqueue.poll_completed(&mut t.worker.ctx()), 32);
    for serial in 0..32 {
        assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(serial, 500), "packet {serial}");
    }
}

#[test]
fn enqueued_packet_may_exceed_channel_ring() {
    let mut t = rig(0, 4);
    let mut receiver = Receiver::new(&t.guest, 128);
    let mut enqueue = t.enqueue();
    let mut burst = t.worker.packets(0, &[100, 1000, 100]);
    enqueue.submit(&mut t.worker.ctx(), &mut burst);
    assert_eq!(burst.len(), 0);
    t.step();
    enqueue.poll_completed(&mut t.worker.ctx());
    for (serial, len) in [(0, 100), (1, 1000), (2, 100)] {
        assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(serial, len), "packet {serial}");
    }
}

#[test]
fn burst_may_exceed_copy_list() {
    let (guest, mut worker) = (Guest::new(1024), Worker::new());
    let cell = Arc::new(VringCell::new(0));
    start(&cell, guest.config(FEATURES));
    let mut enqueue = Enqueue::attach(&cell, &mut worker.mover).unwrap();
    let mut receiver = Receiver::new(&guest, 128);
    // Nine pieces each, in total 576 copies. A list holds 256.
    let mut burst = worker.packets(0, &[1100; 64]);
    assert_eq!(enqueue.submit(&mut worker.ctx(), &mut burst).packets, 64);
    for serial in 0..64 {
        assert_eq!(receiver.receive(&guest).unwrap()[12..], pattern(serial, 1100), "packet {serial}");
    }
}

#[test]
fn dequeued_packet_may_exceed_channel_ring() {
    let mut t = rig(1, 4);
    let mut dequeue = Dequeue::attach(&t.cell, &mut t.worker.mover).unwrap();
    let mut driver = driver::RingDriver::new(t.guest.layout.clone(), false);
    for serial in 0..3 {
        let bytes = [vec![0; 12], pattern(serial, 600)].concat();
        let address = t.guest.buffer(serial as usize, 2048);
        t.guest.write(address, &bytes);
        // The second packet has twelve pieces.
        let size = if serial == 1 { 51 } else { 612 };
        let pieces: Vec<_> = (0..612 / size).map(|i| (address + u64::from(i * size), size)).collect();
        driver.add_chain(&pieces, Direction::Readable, ()).unwrap();
    }
    driver.publish();
    let mut burst = Burst::new();
    for _ in 0..10 {
        dequeue.try_dequeue(&mut t.worker.ctx(), &mut burst);
        t.step();
    }
    assert_eq!(burst.len(), 3);
    for (serial, packet) in burst.iter().enumerate() {
        assert_eq!(packet.bytes(), pattern(serial as u64, 600), "packet {serial}");
    }
    assert_eq!(driver.used(), Ok(3));
}

#[test]
fn inflight_chains_are_bounded_by_ring_size() {
    let mut t = rig(1, 1024);
    let mut dequeue = Dequeue::attach(&t.cell, &mut t.worker.mover).unwrap();
    let mut driver = driver::RingDriver::new(t.guest.layout.clone(), false);
    for i in 0..200 {
        driver.add(t.guest.buffer(i, 2048), 100, Direction::Readable, ()).unwrap();
    }
    driver.publish();
    let mut burst = Burst::new();
    for _ in 0..4 {
        dequeue.try_dequeue(&mut t.worker.ctx(), &mut burst);
    }
    assert_eq!(dequeue.in_flight(&mut t.worker.mover), 200);
    // The index advances although no chain was returned.
    let at = |offset: u64| GUEST + 0x8_0000 + offset;
    t.guest.write(at(2), &257u16.to_le_bytes());
    dequeue.try_dequeue(&mut t.worker.ctx(), &mut burst);
    let broken = RingError::Index { ring: "available", found: 257, expected: 0, size: 256 };
    assert_eq!(t.cell.report().broken, Some(broken));
    // The chains taken before are still returned.
    t.step();
    t.step();
    for _ in 0..4 {
        burst.drain(..).for_each(|packet| t.worker.cache.free(packet));
        t.worker.mover.poll(&mut t.worker.clock);
        dequeue.try_dequeue(&mut t.worker.ctx(), &mut burst);
    }
    assert_eq!((dequeue.in_flight(&mut t.worker.mover), driver.used()), (0, Ok(200)));
}

#[test]
fn a_restart_with_another_size_works() {
    let (mut worker, cell) = (Worker::new(), Arc::new(VringCell::new(0)));
    let mut enqueue = Enqueue::attach(&cell, &mut worker.mover).unwrap();
    for size in [8, 256, 1, 64] {
        let guest = Guest::new(size);
        let mut receiver = Receiver::new(&guest, 2048);
        start(&cell, guest.config(FEATURES));
        let (mut sent, mut received) = (0u64, 0u64);
        while received < 1000 {
            let mut burst = worker.packets(sent, &[200; 7]);
            let submitted = enqueue.submit(&mut worker.ctx(), &mut burst);
            enqueue.poll_completed(&mut worker.ctx());
            sent += submitted.packets as u64;
            worker.cache.free_all(burst.drain(..));
            while let Some(packet) = receiver.receive(&guest) {
                assert_eq!(packet[12..], pattern(received, 200), "packet {received}");
                received += 1;
            }
        }
    }
}

#[test]
fn impossible_binding_uses_the_core() {
    let mut t = rig(0, 64);
    let mut receiver = Receiver::new(&t.guest, 2048);
    let mut enqueue = t.enqueue();
    let missing = channel_of_another_mover();
    let channels = vec![t.channel, missing];
    t.cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, channels));
    let mut burst = t.worker.packets(0, &[500]);
    enqueue.submit(&mut t.worker.ctx(), &mut burst);
    assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(0, 500));
    assert!(matches!(t.cell.report().refused, Some(MoverError::NoChannel(_))));
    t.cell.publish(|wanted| wanted.binding = Binding::core());
    enqueue.submit(&mut t.worker.ctx(), &mut burst);
    assert_eq!(t.cell.report().refused, None);
}

/// Counts log events.
struct Counting(Arc<AtomicUsize>);

impl Subscriber for Counting {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The reader of the log may be slow, so workers do not log. This holds even if a front end and its guest repeat the
/// same actions forever.
#[test]
fn workers_log_nothing() {
    let logged = Arc::new(AtomicUsize::new(0));
    tracing::subscriber::with_default(Counting(Arc::clone(&logged)), || {
        let mut t = rig(0, 64);
        let mut enqueue = t.enqueue();
        let channels = vec![channel_of_another_mover()];
        t.cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, channels));
        for _ in 0..3 {
            start(&t.cell, t.guest.config(FEATURES));
            let mut burst = t.worker.packets(0, &[500]);
            enqueue.submit(&mut t.worker.ctx(), &mut burst);
            // More chains are available than the queue has.
            t.guest.write(GUEST + 0x8_0000 + 2, &1000u16.to_le_bytes());
            enqueue.submit(&mut t.worker.ctx(), &mut burst);
            t.worker.cache.free_all(burst);
            let report = t.cell.report();
            assert!(report.broken.is_some() && report.refused.is_some());
        }
    });
    assert_eq!(logged.load(Ordering::Relaxed), 0);
}

/// Front ends replace eventfds at run time (QEMU masks an interrupt this way), and stop and restart queues.
#[test]
fn new_binding_resets_auto_mode() {
    let mut t = rig(0, 64);
    let (channel, mut receiver) = (t.channel, Receiver::new(&t.guest, 2048));
    t.cell.publish(|wanted| wanted.binding = Binding::new(Mode::Auto, vec![channel]));
    let mut enqueue = t.enqueue();
    let queue = t.worker.mover.queues().next().unwrap();
    let counted = |t: &Rig| {
        let classes = t.worker.mover.decisions(queue).classes;
        classes.iter().map(|class| class.by_core + class.by_engine).sum::<u64>()
    };
    let mut burst = t.worker.packets(0, &[500; 32]);
    enqueue.submit(&mut t.worker.ctx(), &mut burst);
    t.step();
    enqueue.poll_completed(&mut t.worker.ctx());
    while receiver.receive(&t.guest).is_some() {}
    assert_eq!(counted(&t), 32);
    let config = t.cell.wanted().vring.unwrap();
    let masked = VringConfig { enabled: false, ..(*config).clone() };
    for vring in [Some(Arc::new(masked)), Some(config), None] {
        t.cell.publish(|wanted| wanted.vring = vring);
        enqueue.poll_completed(&mut t.worker.ctx());
        t.cell.wait(std::time::Duration::ZERO).unwrap();
        assert_eq!(counted(&t), 32);
    }
    t.cell.publish(|wanted| wanted.binding = Binding::core());
    enqueue.poll_completed(&mut t.worker.ctx());
    assert_eq!(counted(&t), 0);
}

/// A worker that detaches while a change is pending has not applied the change.
#[test]
fn leaving_worker_keeps_the_position() {
    let mut t = rig(0, 64);
    let mut receiver = Receiver::new(&t.guest, 2048);
    t.cell.publish(|wanted| wanted.binding = Binding::core());
    let mut enqueue = t.enqueue();
    let mut burst = t.worker.packets(0, &[60; 5]);
    enqueue.submit(&mut t.worker.ctx(), &mut burst);
    let channels = vec![t.channel];
    t.cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, channels));
    drop(enqueue);
    assert_eq!(t.cell.wait(TIMEOUT).unwrap().base, 5);
    // The next worker continues after the five packets.
    let mut enqueue = t.enqueue();
    let mut burst = t.worker.packets(5, &[60]);
    enqueue.submit(&mut t.worker.ctx(), &mut burst);
    t.step();
    assert_eq!(enqueue.poll_completed(&mut t.worker.ctx()), 1);
    for serial in 0..6 {
        assert_eq!(receiver.receive(&t.guest).unwrap()[12..], pattern(serial, 60));
    }
    assert!(receiver.receive(&t.guest).is_none());

    // The worker has never used this ring, so it stops at its start position.
    start(&t.cell, VringConfig { base: 100, ..t.guest.config(FEATURES) });
    drop(enqueue);
    t.cell.publish(|wanted| wanted.vring = None);
    assert_eq!(t.cell.wait(TIMEOUT).unwrap().base, 100);
}

#[test]
fn drain_applies_pending_stop() {
    let mut t = rig(1, 64);
    let mut dequeue = Dequeue::attach(&t.cell, &mut t.worker.mover).unwrap();
    t.cell.publish(|wanted| wanted.vring = None);
    dequeue.drain(&mut t.worker.ctx(), &mut Burst::new());
    t.cell.wait(std::time::Duration::ZERO).unwrap();
}
