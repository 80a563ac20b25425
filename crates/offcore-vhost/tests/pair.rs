//! Forwarding between guests in one copy: content, order, accounting, and the conditions for using the ordinary path.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::VecDeque;
use std::sync::Arc;

use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, CopyDevice, Mode};
use offcore_mem::Burst;
use offcore_ring::RingError;
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_vhost::features::{VIRTIO_F_VERSION_1, VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM};
use offcore_vhost::pair::{Forwarded, Next};
use offcore_vhost::testing::*;
use offcore_vhost::{Dequeue, Enqueue, Pair, VringCell, VringConfig};
use proptest::prelude::*;

const HEADER: usize = 12;
/// Bytes of a packet that the core writes itself, including the virtio-net header.
const HEAD: usize = 64;
/// The value that the switch writes to the first byte of each frame.
const MARK: u8 = 0xa5;

/// Two guests, and the path from the first to the second.
struct Rig {
    sender: Guest,
    receiver: Guest,
    worker: Worker,
    tx_cell: Arc<VringCell>,
    rx_cell: Arc<VringCell>,
    dequeue: Dequeue,
    enqueue: Enqueue,
    pair: Pair,
    stepper: Option<Stepper>,
    tx: driver::RingDriver<u64>,
    rx: Receiver,
    /// Free buffers of the sender.
    free: VecDeque<u64>,
    sum: Forwarded,
    /// Rounds that used the ordinary path, and the packets in them.
    ordinary: (usize, usize),
}

#[derive(Clone, Copy, Debug)]
struct Setup {
    packed: (bool, bool),
    size: u16,
    offload: bool,
    features: (u64, u64),
    rx_buffer: u32,
}

const PLAIN: Setup = Setup {
    packed: (false, false),
    size: 64,
    offload: false,
    features: (FEATURES, FEATURES),
    rx_buffer: 2048,
};

impl Rig {
    fn new(setup: Setup) -> Self {
        let (sender, receiver) =
            (Guest::with_rings(setup.size, setup.packed.0), Guest::with_rings(setup.size, setup.packed.1));
        let mut worker = Worker::new();
        let (mut stepper, mut binding) = (None, Binding::core());
        if setup.offload {
            let (device, steps) = CoreDevice::stepped();
            let channel = worker.mover.add_channel(device.open_channel(256).unwrap());
            (stepper, binding) = (Some(steps), Binding::new(Mode::Offload, vec![channel]));
        }
        let (rx_cell, tx_cell) = (Arc::new(VringCell::new(0)), Arc::new(VringCell::new(1)));
        rx_cell.publish(|wanted| wanted.binding = binding.clone());
        start(&rx_cell, receiver.config(setup.features.1));
        start(&tx_cell, VringConfig { layout: sender.tx_layout.clone(), ..sender.config(setup.features.0) });
        Self {
            dequeue: Dequeue::attach(&tx_cell, &mut worker.mover).unwrap(),
            enqueue: Enqueue::attach(&rx_cell, &mut worker.mover).unwrap(),
            pair: Pair::new(&mut worker.mover),
            tx: driver::RingDriver::new(sender.tx_layout.clone(), false),
            rx: Receiver::new(&receiver, setup.rx_buffer),
            free: (0..usize::from(setup.size)).map(|i| sender.buffer(i, 4096)).collect(),
            sender,
            receiver,
            worker,
            tx_cell,
            rx_cell,
            stepper,
            sum: Forwarded::default(),
            ordinary: (0, 0),
        }
    }

    /// Makes a packet available in a chain of `parts` buffers. Its frame is `pattern(serial, len)`.
    fn transmit(&mut self, serial: u64, len: usize, parts: usize) -> bool {
        self.transmit_with([0; HEADER], &pattern(serial, len), parts)
    }

    fn transmit_with(&mut self, header: [u8; HEADER], frame: &[u8], parts: usize) -> bool {
        if usize::from(self.tx.free()) < parts {
            return false;
        }
        let Some(address) = self.free.pop_front() else { return false };
        let bytes = [&header[..], frame].concat();
        self.sender.write(address, &bytes);
        // As in real drivers, the first buffer holds only the header.
        let mut chain = Vec::new();
        let mut at = 0;
        for part in 0..parts {
            let len = match (part, parts - part) {
                (_, 1) => bytes.len() - at,
                (0, _) => HEADER,
                (_, left) => (bytes.len() - at) / left,
            };
            chain.push((address + at as u64, len as u32));
            at += len;
        }
        self.tx.add_chain(&chain, Direction::Readable, address).unwrap();
        self.tx.publish();
        true
    }

    /// One round of a worker.
    fn round(&mut self) -> Forwarded {
        let mut ctx = self.worker.ctx();
        ctx.mover.poll(ctx.clock);
        let rewrite = |frame: &mut [u8]| frame[0] = MARK;
        let forwarded = self.pair.forward(&mut ctx, &mut self.dequeue, &mut self.enqueue, rewrite);
        let mut burst = Burst::new();
        match forwarded.next {
            Next::Nothing => {}
            Next::Ordinary => {
                let dequeued = self.dequeue.try_dequeue(&mut ctx, &mut burst);
                self.ordinary.0 += 1;
                self.sum.malformed += dequeued.malformed;
            }
            Next::Finish => drop(self.dequeue.drain(&mut ctx, &mut burst)),
        }
        self.ordinary.1 += burst.len();
        for packet in &mut burst {
            packet.bytes_mut()[0] = MARK;
        }
        if forwarded.next != Next::Nothing {
            self.enqueue.submit(&mut ctx, &mut burst);
            ctx.cache.free_all(burst.drain(..));
            self.enqueue.poll_completed(&mut ctx);
        }
        self.sum.packets += forwarded.packets;
        self.sum.bytes += forwarded.bytes;
        self.sum.malformed += forwarded.malformed;
        self.sum.too_long += forwarded.too_long;
        self.sum.too_big += forwarded.too_big;
        self.reclaim();
        forwarded
    }

    /// Collects the sender's returned buffers.
    fn reclaim(&mut self) {
        while self.tx.used().unwrap() > 0 {
            while let Some(used) = self.tx.pop().unwrap() {
                self.free.push_back(used.token);
            }
        }
    }

    fn step(&mut self) {
        if let Some(stepper) = &mut self.stepper {
            stepper.step();
        }
    }

    fn receive(&mut self) -> Option<Vec<u8>> {
        self.rx.receive(&self.receiver)
    }

    fn copied(&self) -> u64 {
        let engines: u64 = self.worker.mover.channels().map(|(_, channel)| channel.stats().bytes).sum();
        self.worker.mover.stats().core_bytes + engines
    }

    /// Number of packets that keep the memory of both guests in use.
    fn in_flight(&self) -> u64 {
        self.tx_cell.in_flight() + self.rx_cell.in_flight()
    }
}

/// The frame of packet `serial` as received.
fn arrives(serial: u64, len: usize) -> Vec<u8> {
    let mut frame = pattern(serial, len);
    frame[0] = MARK;
    frame
}

fn both(values: [bool; 2]) -> impl Iterator<Item = (bool, bool)> {
    values.into_iter().flat_map(move |a| values.into_iter().map(move |b| (a, b)))
}

#[test]
fn packets_arrive_copied_once() {
    for (packed, offload) in both([false, true]).flat_map(|packed| [(packed, false), (packed, true)]) {
        for (rx_buffer, parts) in [(2048, 1), (2048, 3), (300, 1), (300, 2)] {
            let mut rig = Rig::new(Setup { packed, offload, rx_buffer, ..PLAIN });
            let length = |serial: u64| 14 + (serial as usize * 101) % 1500;
            let (mut sent, mut received, mut payload, mut bytes) = (0u64, 0u64, 0, 0);
            while received < 2000 {
                while sent < 2000 && sent - received < 8 && rig.transmit(sent, length(sent), parts) {
                    payload += (HEADER + length(sent)).saturating_sub(HEAD) as u64;
                    bytes += length(sent) as u64;
                    sent += 1;
                }
                rig.round();
                rig.step();
                while let Some(packet) = rig.receive() {
                    assert_eq!(packet[HEADER..], arrives(received, length(received)), "packet {received}");
                    assert_eq!(packet[..10], [0; 10]);
                    received += 1;
                }
            }
            assert_eq!(rig.copied(), payload, "once, but for the heads");
            assert_eq!((rig.sum.packets, rig.sum.bytes, rig.ordinary), (2000, bytes, (0, 0)));
            assert_eq!(rig.in_flight(), 0);
            assert_eq!(rig.free.len(), 64, "every buffer is back with the sender");
        }
    }
}

#[test]
fn header_changes_after_check_are_ignored() {
    for parts in [1, 2] {
        let mut rig = Rig::new(Setup { offload: true, ..PLAIN });
        assert!(rig.transmit(7, 1000, parts));
        let buffer = rig.sender.buffer(0, 4096);
        rig.round();
        // While the engine has the copy, the sender changes the addresses and requests an offload.
        rig.sender.write(buffer, &[0xff; HEAD]);
        rig.step();
        rig.round();
        let packet = rig.receive().unwrap();
        assert_eq!(packet[..HEADER], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(packet[HEADER..], arrives(7, 1000));
    }
}

#[test]
fn incomplete_copies_are_not_published() {
    for packed in both([false, true]) {
        let mut rig = Rig::new(Setup { offload: true, packed, ..PLAIN });
        assert!((0..4).all(|serial| rig.transmit(serial, 500, 1)));
        for _ in 0..3 {
            assert_eq!(rig.round(), Forwarded::default());
            assert_eq!((rig.receive(), rig.free.len()), (None, 60));
        }
        assert_eq!(rig.in_flight(), 8, "both guests' memory is held");
        rig.step();
        assert_eq!(rig.round().packets, 4);
        assert!((0..4).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 500)));
        assert_eq!((rig.receive(), rig.free.len(), rig.in_flight()), (None, 64, 0));
    }
}

#[test]
fn sender_does_not_wait_for_buffers() {
    for (packed, offload) in [((false, false), false), ((true, true), true)] {
        let mut rig = Rig::new(Setup { packed, offload, size: 8, ..PLAIN });
        assert!((0..8).all(|serial| rig.transmit(serial, 100, 1)));
        rig.round();
        rig.step();
        rig.round();
        // All eight buffers of the receiver are used.
        assert!((8..12).all(|serial| rig.transmit(serial, 100, 1)));
        for _ in 0..4 {
            rig.round();
            rig.step();
        }
        assert_eq!((rig.sum.packets, rig.ordinary.1), (8, 4), "four took the ordinary way, to be dropped");
        assert_eq!(rig.free.len(), 8, "the sender has its buffers back");
        assert!((0..8).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 100)));
        // Afterwards, packets use one copy again.
        assert!(rig.transmit(12, 100, 1));
        for _ in 0..3 {
            rig.round();
            rig.step();
        }
        assert_eq!((rig.sum.packets, rig.ordinary.1), (9, 4));
        assert_eq!(rig.receive().unwrap()[HEADER..], arrives(12, 100));
    }
}

#[test]
fn fast_receiver_gets_one_copy() {
    for offload in [false, true] {
        let mut rig = Rig::new(Setup { offload, size: 8, ..PLAIN });
        assert!((0..6).all(|serial| rig.transmit(serial, 100, 1)));
        rig.round();
        rig.step();
        rig.round();
        // Two buffers are left, and six more are added before the next round.
        assert!((6..10).all(|serial| rig.transmit(serial, 100, 1)));
        rig.round();
        assert!((0..6).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 100)));
        for _ in 0..4 {
            rig.round();
            rig.step();
        }
        assert_eq!((rig.sum.packets, rig.ordinary), (10, (0, 0)), "offload: {offload}");
        assert!((6..10).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 100)));
    }
}

#[test]
fn malformed_packets_are_returned() {
    for (packed, offload) in [((false, false), false), ((true, true), true)] {
        let mut rig =
            Rig::new(Setup { packed, offload, features: (VIRTIO_F_VERSION_1, VIRTIO_F_VERSION_1), ..PLAIN });
        assert!(rig.transmit_with([0; HEADER], &[1; 13], 1), "shorter than an Ethernet header");
        assert!(rig.transmit(1, 100, 1));
        assert!(rig.transmit_with([1, 0, 0, 0, 0, 0, 14, 0, 0, 0, 0, 0], &[2; 100], 1), "nothing negotiated");
        assert!(rig.transmit(3, 2040, 1), "longer than the receiver's buffers");
        assert!(rig.transmit(4, 100, 1));
        for _ in 0..3 {
            rig.round();
            rig.step();
        }
        let Forwarded { packets, malformed, too_big, .. } = rig.sum;
        assert_eq!((packets, malformed, too_big), (2, 2, 1));
        assert_eq!(rig.free.len(), 64, "every chain goes back to the guest");
        for serial in [1, 4] {
            assert_eq!(rig.receive().unwrap()[HEADER..], arrives(serial, 100));
        }
        assert_eq!((rig.receive(), rig.in_flight()), (None, 0));
    }
}

#[test]
fn partial_checksums_need_guest_csum() {
    let open = [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 9, 9];
    let mut rig = Rig::new(Setup {
        features: (FEATURES | VIRTIO_NET_F_CSUM, FEATURES | VIRTIO_NET_F_GUEST_CSUM),
        ..PLAIN
    });
    assert!(rig.transmit_with(open, &pattern(0, 200), 1));
    rig.round();
    let packet = rig.receive().unwrap();
    assert_eq!(packet[..HEADER], [1, 0, 0, 0, 0, 0, 34, 0, 6, 0, 1, 0]);
    assert_eq!((rig.sum.packets, rig.ordinary.1), (1, 0));

    let mut rig = Rig::new(Setup { features: (FEATURES | VIRTIO_NET_F_CSUM, FEATURES), ..PLAIN });
    assert!(rig.transmit(0, 200, 1));
    assert!(rig.transmit_with(open, &pattern(1, 200), 1));
    rig.round();
    assert_eq!((rig.sum.packets, rig.ordinary.1), (1, 1), "one side has to compute it");
}

#[test]
fn either_side_can_stop() {
    for sender_stops in [true, false] {
        let mut rig = Rig::new(Setup { offload: true, ..PLAIN });
        assert!((0..3).all(|serial| rig.transmit(serial, 300, 1)));
        rig.round();
        let stops = Arc::clone(if sender_stops { &rig.tx_cell } else { &rig.rx_cell });
        stops.publish(|wanted| wanted.vring = None);
        assert!(rig.transmit(3, 300, 1));
        for _ in 0..3 {
            assert_eq!(rig.round(), Forwarded::default());
            assert!(stops.wait(std::time::Duration::ZERO).is_err(), "copies are in flight");
        }
        rig.step();
        rig.round();
        rig.round();
        let base = stops.wait(TIMEOUT).unwrap().base;
        assert_eq!(base, 3);
        assert_eq!((rig.sum.packets, rig.in_flight()), (3, 0));
        assert!((0..3).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 300)));
        // It works again after a restart.
        let (guest, layout) = match sender_stops {
            true => (&rig.sender, rig.sender.tx_layout.clone()),
            false => (&rig.receiver, rig.receiver.layout.clone()),
        };
        start(&stops, VringConfig { base, layout, ..guest.config(FEATURES) });
        if !sender_stops {
            assert!(rig.transmit(4, 300, 1), "the one before was taken for a receiver that was not there");
        }
        for _ in 0..4 {
            rig.round();
            rig.step();
        }
        let last = if sender_stops { 3 } else { 4 };
        assert_eq!(rig.receive().unwrap()[HEADER..], arrives(last, 300));
    }
}

#[test]
fn slow_engine_falls_back_to_two_copies() {
    let mut rig = Rig::new(Setup { offload: true, ..PLAIN });
    assert!(rig.transmit(0, 300, 1));
    rig.round();
    let since = std::time::Instant::now();
    while since.elapsed() < std::time::Duration::from_millis(300) {
        rig.round();
    }
    rig.step();
    rig.round();
    assert_eq!(rig.sum.packets, 1);
    assert!(rig.transmit(1, 300, 1));
    for _ in 0..4 {
        rig.round();
        rig.step();
    }
    assert_eq!((rig.sum.packets, rig.ordinary.1), (1, 1));
    assert!((0..2).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 300)));
}

#[test]
fn impossible_binding_uses_the_core() {
    let mut rig = Rig::new(PLAIN);
    let missing = channel_of_another_mover();
    rig.rx_cell.publish(|wanted| wanted.binding = Binding::new(Mode::Offload, vec![missing]));
    assert!(rig.transmit(0, 300, 1));
    rig.round();
    assert_eq!((rig.sum.packets, rig.ordinary), (1, (0, 0)), "in one copy");
    assert_eq!(rig.receive().unwrap()[HEADER..], arrives(0, 300));
}

/// The front end disables a virtqueue briefly while restarting it. The grace period is half a second.
#[test]
fn grace_period_starts_at_disable() {
    let mut rig = Rig::new(PLAIN);
    let enable = |rig: &mut Rig, enabled| {
        rig.tx_cell.publish(|wanted| {
            wanted.vring =
                wanted.vring.as_deref().cloned().map(|vring| Arc::new(VringConfig { enabled, ..vring }));
        });
        rig.round();
    };
    enable(&mut rig, false);
    enable(&mut rig, true);
    assert!(rig.transmit(0, 300, 1));
    rig.round();
    assert_eq!((rig.sum.packets, rig.free.len()), (1, 64), "in one copy");
    std::thread::sleep(std::time::Duration::from_millis(600));
    assert!(rig.transmit(1, 300, 1));
    enable(&mut rig, false);
    rig.round();
    assert_eq!(rig.free.len(), 63, "what waits is not discarded yet");
    enable(&mut rig, true);
    assert!((0..2).all(|serial| rig.receive().unwrap()[HEADER..] == arrives(serial, 300)));
}

#[test]
fn invalid_chain_breaks_only_its_virtqueue() {
    for sender_breaks in [true, false] {
        let mut rig = Rig::new(PLAIN);
        let outside = GUEST - 1;
        if sender_breaks {
            rig.tx.add(outside, 100, Direction::Readable, 0).unwrap();
            rig.tx.publish();
        } else {
            let size = rig.receiver.layout.size();
            rig.receiver.reset_rings();
            let mut rx = driver::RingDriver::new(rig.receiver.layout.clone(), false);
            (0..size).for_each(|_| rx.add(outside, 2048, Direction::Writable, ()).unwrap());
            rx.publish();
            assert!(rig.transmit(0, 100, 1));
        }
        rig.round();
        let [tx, rx] = [&rig.tx_cell, &rig.rx_cell].map(|cell| cell.report().broken);
        let len = if sender_breaks { 100 } else { 2048 };
        let error = Some(RingError::Address { addr: outside, len });
        assert_eq!((tx, rx), if sender_breaks { (error, None) } else { (None, error) });
        assert_eq!(rig.in_flight(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// For any combination of rings, chains, lengths and timing, the received packets are the sent ones, in order. Only
    /// packets sent while the receiver has no buffers may be missing.
    #[test]
    fn pair_keeps_packet_order(
        packed: (bool, bool),
        offload: bool,
        size_bits in 3u32..7,
        rx_buffer in prop_oneof![Just(2048u32), Just(700), Just(120)],
        steps in proptest::collection::vec((0..6u8, 14..1600usize, 1..4usize), 1..120),
    ) {
        let mut rig = Rig::new(Setup { packed, offload, size: 1 << size_bits, rx_buffer, ..PLAIN });
        let mut sent = VecDeque::new();
        let mut serial = 0u64;
        let mut lost = 0usize;
        let mut receive = |rig: &mut Rig, sent: &mut VecDeque<(u64, usize)>| {
            while let Some(packet) = rig.receive() {
                // The missing packets before it were dropped because no buffers were available.
                while let Some((serial, len)) = sent.pop_front() {
                    if packet[HEADER..] == arrives(serial, len) {
                        break;
                    }
                    lost += 1;
                }
            }
        };
        for (what, len, parts) in steps {
            match what {
                0..3 => {
                    if rig.transmit(serial, len, parts) {
                        sent.push_back((serial, len));
                        serial += 1;
                    }
                }
                3 => drop(rig.round()),
                4 => rig.step(),
                _ => receive(&mut rig, &mut sent),
            }
        }
        for _ in 0..600 {
            rig.round();
            rig.step();
            receive(&mut rig, &mut sent);
        }
        lost += sent.len();
        prop_assert!(lost <= rig.ordinary.1, "{lost} of {serial} are missing, {} could", rig.ordinary.1);
        prop_assert_eq!(rig.free.len(), 1usize << size_bits);
        prop_assert_eq!(rig.in_flight(), 0);
        prop_assert_eq!([rig.tx_cell.report().broken, rig.rx_cell.report().broken], [None, None]);
    }
}
