//! A generator waits for the other side: packets that do not fit are sent again, unchanged.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use offcore_dma::Binding;
use offcore_flow::forward::{Addresses, Forward};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::worker::Worker;
use offcore_port::generator::GenPort;
use offcore_port::spec::PortSpec;
use offcore_port::vhost::tx_over;
use offcore_port::{DropReason, Port, QueueSetup, TxCounters};
use offcore_stats::page::StatsPage;
use offcore_vhost::VringCell;
use offcore_vhost::testing::{FEATURES, Guest, Receiver, Worker as Parts, start};
use offcore_wire::virtio_net::HEADER_LEN;
use offcore_wire::{MacAddr, probe};

/// Number of packets, which is much more than the guest ever has room for.
const PACKETS: u64 = 1000;

#[test]
fn full_virtqueue_loses_nothing() {
    for forward in [Forward::Io, Forward::Mac, Forward::Macswap] {
        let (guest, mut parts) = (Guest::new(64), Parts::new());
        let cell = Arc::new(VringCell::new(0));
        let mut receiver = Receiver::new(&guest, 2048);
        start(&cell, guest.config(FEATURES));
        let PortSpec::Gen(spec) = format!("gen:size=128,count={PACKETS}").parse().unwrap() else {
            panic!("no generator")
        };
        let mut port = GenPort::open(&spec, parts.cache.pool()).unwrap();
        let stats = StatsPage::new(1 << 16).unwrap();
        let (mover, binding) = (&mut parts.mover, Binding::core());
        let setup = QueueSetup { mover, stats: &stats, binding, port: "port0" };
        let rx = port.rx_queue(0, setup).unwrap();
        let counters = TxCounters::private();
        let tx = tx_over(&cell, &mut parts.mover, counters.clone()).unwrap();
        let addresses = Addresses { source: MacAddr::local(1), destination: MacAddr::local(2) };
        let mut worker = Worker::new(
            vec![Box::new(Forwarding::new(rx, tx, Rules::new(forward, addresses, 0)))],
            parts.mover,
            parts.cache,
        );
        let expected = match forward {
            Forward::Mac => [addresses.destination, addresses.source],
            Forward::Macswap => [port.mac(), MacAddr::LOCAL],
            _ => [MacAddr::LOCAL, port.mac()],
        };

        let mut received = 0;
        for round in 0..10 * PACKETS {
            worker.round();
            // Slower than the generator, and not in step with its bursts.
            for _ in 0..round % 4 {
                let Some(packet) = receiver.receive(&guest) else { break };
                let frame = &packet[HEADER_LEN..];
                assert_eq!(frame[..12], [expected[0].0, expected[1].0].concat(), "{forward:?}");
                assert_eq!(probe::check_header(frame).unwrap().sequence, received, "{forward:?}");
                probe::check_content(frame).unwrap();
                received += 1;
            }
        }
        assert_eq!((received, counters.packets()), (PACKETS, PACKETS), "{forward:?}");
        assert_eq!(counters.dropped(DropReason::Full), 0, "{forward:?}");
        assert_eq!(port.report().sent, PACKETS, "{forward:?}");
    }
}
