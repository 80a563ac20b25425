//! Figures 6 and 7 of the vhost guide (758358-001US): any virtqueue can use any channel, and the order is kept.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::cpu::CpuDevice;
use offcore_dma::fault::{Faults, FaultyChannel};
use offcore_dma::{Binding, ChannelId, CopyDevice, Mode};
use offcore_mem::Burst;
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_vhost::testing::*;
use offcore_vhost::{Dequeue, Enqueue, VringCell, VringConfig};

/// A virtqueue that a guest receives from, bound to channels.
struct Virtqueue {
    guest: Guest,
    receiver: Receiver,
    cell: Arc<VringCell>,
    enqueue: Enqueue,
}

fn virtqueue(worker: &mut Worker, queue: u16, channels: &[ChannelId]) -> Virtqueue {
    let guest = Guest::new(64);
    let receiver = Receiver::new(&guest, 2048);
    let cell = Arc::new(VringCell::new(queue));
    cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, channels.to_vec()));
    start(&cell, guest.config(FEATURES));
    let enqueue = Enqueue::attach(&cell, &mut worker.mover).unwrap();
    Virtqueue { guest, receiver, cell, enqueue }
}

impl Virtqueue {
    fn submit(&mut self, worker: &mut Worker, serial: u64, lengths: &[usize]) {
        let mut burst = worker.packets(serial, lengths);
        let submitted = self.enqueue.submit(&mut worker.ctx(), &mut burst);
        assert_eq!(submitted.packets, lengths.len());
    }

    fn poll(&mut self, worker: &mut Worker) -> usize {
        let mut ctx = worker.ctx();
        ctx.mover.poll(ctx.clock);
        self.enqueue.poll_completed(&mut ctx)
    }

    fn expect(&mut self, serial: u64, len: usize) {
        let packet = self.receiver.receive(&self.guest).expect("a packet was published");
        assert_eq!(packet[12..], pattern(serial, len), "packet {serial}");
    }
}

/// A channel whose operations complete in random order.
fn shuffled(seed: u64) -> Box<dyn offcore_dma::Channel> {
    let faults = Faults { seed, reorder: 800, delay: 500, delay_polls: 5, ..Faults::default() };
    Box::new(FaultyChannel::new(CpuDevice.open_channel(256).unwrap(), faults))
}

#[test]
fn figure_6_one_channel_three_virtqueues() {
    let mut worker = Worker::new();
    let channel = worker.mover.add_channel(shuffled(7));
    let mut virtqueues: Vec<Virtqueue> = (0..3).map(|i| virtqueue(&mut worker, 2 * i, &[channel])).collect();
    let (mut submitted, mut received) = (0u64, [0u64; 3]);
    while received.iter().any(|&n| n < 3000) {
        if submitted < 3000 && virtqueues.iter().all(|v| v.enqueue.in_flight(&mut worker.mover) < 32) {
            for (i, virtqueue) in virtqueues.iter_mut().enumerate() {
                virtqueue.submit(
                    &mut worker,
                    (i as u64) << 32 | submitted,
                    &[60 + (submitted % 1400) as usize; 4],
                );
            }
            submitted += 4;
        }
        // Polling for one virtqueue also completes packets of the others.
        for (i, virtqueue) in virtqueues.iter_mut().enumerate() {
            for _ in 0..virtqueue.poll(&mut worker) {
                let serial = received[i];
                virtqueue.expect((i as u64) << 32 | serial, 60 + ((serial & !3) % 1400) as usize);
                received[i] += 1;
            }
        }
    }
    let (_, channel) = worker.mover.channels().next().unwrap();
    assert_eq!((channel.stats().submitted, channel.in_flight()), (9000, 0));
}

#[test]
fn figure_6_one_virtqueue_uses_two_channels() {
    let mut worker = Worker::new();
    let channels = [shuffled(1), shuffled(2)].map(|c| worker.mover.add_channel(c));
    let mut virtqueue = virtqueue(&mut worker, 0, &channels);
    let (mut submitted, mut received) = (0u64, 0u64);
    while received < 4000 {
        if submitted < 4000 && virtqueue.enqueue.in_flight(&mut worker.mover) < 32 {
            virtqueue.submit(&mut worker, submitted, &[1000; 8]);
            submitted += 8;
        }
        for _ in 0..virtqueue.poll(&mut worker) {
            virtqueue.expect(received, 1000);
            received += 1;
        }
    }
    let counts: Vec<u64> = worker.mover.channels().map(|(_, c)| c.stats().completed).collect();
    assert_eq!(counts.iter().sum::<u64>(), 4000);
    assert!(counts.iter().all(|&n| n > 1000), "the load is spread: {counts:?}");
}

#[test]
fn figure_7_late_copy_holds_later_packets() {
    let mut worker = Worker::new();
    let mut steppers: Vec<Stepper> = Vec::new();
    let channels: Vec<ChannelId> = (0..4)
        .map(|_| {
            let (device, stepper) = CoreDevice::stepped();
            steppers.push(stepper);
            worker.mover.add_channel(device.open_channel(64).unwrap())
        })
        .collect();
    let mut virtqueue = virtqueue(&mut worker, 0, &channels);
    for serial in 0..4 {
        virtqueue.submit(&mut worker, serial, &[500]);
    }
    let used: Vec<u64> = worker.mover.channels().map(|(_, c)| c.stats().submitted).collect();
    assert_eq!(used, [1, 1, 1, 1], "each packet went through a channel of its own");
    for late in [0, 2, 3] {
        assert_eq!(steppers[late].step(), 1);
    }
    assert_eq!(virtqueue.poll(&mut worker), 1, "only the first packet is returned");
    virtqueue.expect(0, 500);
    assert!(virtqueue.receiver.receive(&virtqueue.guest).is_none());
    assert_eq!(steppers[1].step(), 1);
    assert_eq!(virtqueue.poll(&mut worker), 3, "then the other three");
    for serial in 1..4 {
        virtqueue.expect(serial, 500);
    }
}

#[test]
fn stop_waits_for_inflight_copies() {
    let mut worker = Worker::new();
    let (device, mut stepper) = CoreDevice::stepped();
    let channel = worker.mover.add_channel(device.open_channel(64).unwrap());
    let mut virtqueue = virtqueue(&mut worker, 0, &[channel]);
    virtqueue.submit(&mut worker, 0, &[100, 200]);
    virtqueue.cell.publish(|wanted| wanted.vring = None);
    let soon = std::time::Duration::from_millis(1);
    assert_eq!(virtqueue.poll(&mut worker), 0);
    assert!(virtqueue.cell.wait(soon).is_err(), "two packets are in flight");
    assert_eq!(virtqueue.cell.in_flight(), 2);
    let mut burst = worker.packets(2, &[60]);
    assert!(virtqueue.enqueue.enabled());
    assert_eq!(virtqueue.enqueue.submit(&mut worker.ctx(), &mut burst).packets, 0, "nothing new is taken");
    assert!(!virtqueue.enqueue.enabled(), "and what is left has nowhere to go");
    assert_eq!(stepper.step(), 2);
    assert_eq!(virtqueue.poll(&mut worker), 2);
    virtqueue.enqueue.submit(&mut worker.ctx(), &mut burst);
    assert_eq!(virtqueue.cell.wait(TIMEOUT).unwrap().base, 2);
    assert_eq!(virtqueue.cell.in_flight(), 0);
    for (serial, len) in [(0, 100), (1, 200)] {
        virtqueue.expect(serial, len);
    }
}

/// Otherwise, the next front end, which may connect at once, would get packets meant for the previous one.
#[test]
fn packets_are_delivered_before_stop_completes() {
    for drains in [false, true] {
        let mut worker = Worker::new();
        let (device, mut stepper) = CoreDevice::stepped();
        let channel = worker.mover.add_channel(device.open_channel(64).unwrap());
        let (guest, cell) = (Guest::new(16), Arc::new(VringCell::new(1)));
        cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, vec![channel]));
        start(&cell, VringConfig { layout: guest.tx_layout.clone(), ..guest.config(FEATURES) });
        let mut driver = driver::RingDriver::new(guest.tx_layout.clone(), false);
        for i in 0..3 {
            let address = guest.buffer(i, 2048);
            guest.write(address, &[0; 100]);
            driver.add(address, 100, Direction::Readable, i).unwrap();
        }
        driver.publish();
        let mut dequeue = Dequeue::attach(&cell, &mut worker.mover).unwrap();
        let mut burst = Burst::new();
        assert_eq!(dequeue.try_dequeue(&mut worker.ctx(), &mut burst).packets, 0);
        cell.publish(|wanted| wanted.vring = None);
        assert_eq!(stepper.step(), 3);
        let mut call = || {
            let mut ctx = worker.ctx();
            ctx.mover.poll(ctx.clock);
            let call = if drains { Dequeue::drain } else { Dequeue::try_dequeue };
            call(&mut dequeue, &mut ctx, &mut burst).packets
        };
        assert_eq!(call(), 3);
        let soon = std::time::Duration::from_millis(1);
        assert!(cell.wait(soon).is_err(), "the worker has packets in its hands");
        assert_eq!(call(), 0);
        assert_eq!(cell.wait(TIMEOUT).unwrap().base, 3);
        worker.cache.free_all(burst);
    }
}

#[test]
fn memory_outlives_unanswered_copies() {
    let mut worker = Worker::new();
    let (device, stepper) = CoreDevice::stepped();
    let channel = worker.mover.add_channel(device.open_channel(64).unwrap());
    let mut virtqueue = virtqueue(&mut worker, 0, &[channel]);
    virtqueue.submit(&mut worker, 0, &[1500]);
    // The guest and the worker's side are dropped. Only the engine still uses the address.
    let Virtqueue { guest, enqueue, receiver, cell } = virtqueue;
    drop((enqueue, receiver, cell));
    drop(guest);
    // If the copy did not hold a reference, the mapping would be gone and this would be a segmentation fault.
    let mut stepper = stepper;
    assert_eq!(stepper.step(), 1);
}

#[test]
fn binding_changes_in_flight() {
    let mut worker = Worker::new();
    let (device, mut stepper) = CoreDevice::stepped();
    let channel = worker.mover.add_channel(device.open_channel(64).unwrap());
    let mut virtqueue = virtqueue(&mut worker, 0, &[channel]);
    virtqueue.submit(&mut worker, 0, &[100]);
    virtqueue.cell.publish(|wanted| wanted.binding = Binding::core());
    let mut burst = worker.packets(1, &[100]);
    virtqueue.enqueue.submit(&mut worker.ctx(), &mut burst);
    assert_eq!(burst.len(), 1, "new packets wait until the old binding has drained");
    stepper.step();
    assert_eq!(virtqueue.poll(&mut worker), 1);
    assert_eq!(virtqueue.enqueue.submit(&mut worker.ctx(), &mut burst).packets, 1);
    virtqueue.cell.wait(TIMEOUT).unwrap();
    (0..2).for_each(|serial| virtqueue.expect(serial, 100));
    assert_eq!(worker.mover.stats().core_copies, 1);
}

/// A worker panics with copies in flight. Another worker can attach to the virtqueue, and the guest's memory stays
/// mapped for the copies.
#[test]
fn worker_that_panics_gives_its_virtqueue_back() {
    let (device, mut stepper) = CoreDevice::stepped();
    let channel = device.open_channel(64).unwrap();
    let (cell, memory) = std::thread::spawn(move || {
        let mut worker = Worker::new();
        let channel = worker.mover.add_channel(channel);
        let mut virtqueue = virtqueue(&mut worker, 0, &[channel]);
        virtqueue.submit(&mut worker, 0, &[100, 200]);
        let left = (Arc::clone(&virtqueue.cell), Arc::downgrade(&virtqueue.guest.memory));
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _worker = virtqueue;
            panic!("the worker's");
        }));
        assert!(panic.is_err());
        // If it was dropped here, the channel would wait for its copies, which are not stepped.
        std::mem::forget(worker);
        left
    })
    .join()
    .unwrap();
    assert_eq!(cell.in_flight(), 0);
    cell.publish(|wanted| wanted.vring = None);
    cell.wait(TIMEOUT).unwrap();
    assert!(memory.upgrade().is_some(), "copies are in flight into it");
    assert_eq!(stepper.step(), 2);
    Enqueue::attach(&cell, &mut Worker::new().mover).unwrap();
}
