//! Counters do not depend on the path that packets take from guest to guest.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::guest_pair::GuestPair;
use offcore_flow::task::Task;
use offcore_flow::worker::Worker;
use offcore_port::vhost::{OneCopy, rx_over, tx_over};
use offcore_port::{DropReason, RxCounters, TxCounters};
use offcore_ring::device::Direction;
use offcore_ring::driver;
use offcore_vhost::features::VIRTIO_F_VERSION_1;
use offcore_vhost::testing::{FEATURES, Guest, Receiver, Worker as Parts, pattern, start};
use offcore_vhost::{VringCell, VringConfig};
use offcore_wire::MacAddr;

const HEADER: usize = 12;

/// Packets, bytes, and packets dropped by reason; for the receiving half and the sending half.
type Counted = [(u64, u64, [u64; DropReason::ALL.len()]); 2];

/// Sends frames of these lengths from one guest to another, whose buffers have `rx_buffer` bytes. Returns the counters.
fn counted(one_copy: bool, packed: bool, features: u64, rx_buffer: u32, lengths: &[usize]) -> Counted {
    let (sender, receiver) = (Guest::with_rings(16, packed), Guest::with_rings(16, packed));
    let mut parts = Parts::new();
    let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
    start(&cells[0], receiver.config(features));
    start(&cells[1], VringConfig { layout: sender.tx_layout.clone(), ..sender.config(features) });
    let (received, sent) = (RxCounters::private(), TxCounters::private());
    let rx = rx_over(&cells[1], &mut parts.mover, received.clone()).unwrap();
    let tx = tx_over(&cells[0], &mut parts.mover, sent.clone()).unwrap();
    let addresses = Addresses { source: MacAddr::local(1), destination: MacAddr::local(2) };
    let rules = Rules::new(Forward::Mac, addresses, 0);
    let task: Box<dyn Task> = match one_copy {
        true => Box::new(GuestPair::new(OneCopy::between(rx, tx, &mut parts.mover).unwrap(), rules)),
        false => Box::new(Forwarding::new(rx, tx, rules)),
    };
    let mut worker = Worker::new(vec![task], parts.mover, parts.cache);
    let mut transmit = driver::RingDriver::new(sender.tx_layout.clone(), false);
    let _receive = Receiver::new(&receiver, rx_buffer);
    for (serial, &len) in lengths.iter().enumerate() {
        let address = sender.buffer(serial, 128 * 1024);
        sender.write(address, &[vec![0; HEADER], pattern(serial as u64, len)].concat());
        transmit.add(address, (HEADER + len) as u32, Direction::Readable, ()).unwrap();
    }
    transmit.publish();
    for _ in 0..4 {
        worker.round();
    }
    assert_eq!(transmit.used(), Ok(lengths.len() as u16));
    let drops = |dropped: &dyn Fn(DropReason) -> u64| DropReason::ALL.map(dropped);
    [
        (received.packets(), received.bytes(), drops(&|reason| received.dropped(reason))),
        (sent.packets(), sent.bytes(), drops(&|reason| sent.dropped(reason))),
    ]
}

#[test]
fn one_copy_counts_like_ordinary_path() {
    for packed in [false, true] {
        for (features, rx_buffer, lengths) in [
            (FEATURES, 2048, &[60, 13, 1500, 14, 64][..]),
            // Packets in several buffers, a packet that is too long, and a packet that needs too many buffers.
            (FEATURES, 1024, &[60, 3000, 100_000, 1500][..]),
            (FEATURES, 128, &[60, 9000, 60][..]),
            // One buffer per packet, which is too short for some packets.
            (VIRTIO_F_VERSION_1, 512, &[60, 501, 500, 1500, 64][..]),
            // More packets than buffers.
            (VIRTIO_F_VERSION_1, 2048, &[60; 16][..]),
        ] {
            let [ordinary, one_copy] =
                [false, true].map(|one_copy| counted(one_copy, packed, features, rx_buffer, lengths));
            assert_eq!(one_copy, ordinary, "packed {packed}, buffers of {rx_buffer}, frames {lengths:?}");
            let (packets, drops) = (ordinary[1].0, ordinary.iter().flat_map(|half| half.2).sum::<u64>());
            assert_eq!(packets + drops, lengths.len() as u64, "{ordinary:?}");
        }
    }
}
