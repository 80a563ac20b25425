//! In every forwarding mode, a worker follows the front end of its ports: virtqueues that it does not use stop as
//! promptly as virtqueues that it uses.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use offcore_flow::forward::{Addresses, Forward, Source};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::worker::Worker;
use offcore_port::vhost::{rx_over, tx_over};
use offcore_port::{RxCounters, TxCounters};
use offcore_vhost::testing::{FEATURES, Guest, Worker as Parts};
use offcore_vhost::{VringCell, VringConfig};
use offcore_wire::MacAddr;

#[test]
fn virtqueues_stop_in_every_mode() {
    let sending = [Forward::Txonly { frame: 64 }, Forward::Flowgen { frame: 64 }];
    for forward in [&[Forward::Io, Forward::Mac, Forward::Macswap, Forward::Rxonly], &sending[..]].concat() {
        let (guest, mut parts) = (Guest::new(64), Parts::new());
        let cells = [0, 1].map(|queue| Arc::new(VringCell::new(queue)));
        let addresses = Addresses { source: MacAddr::local(0), destination: MacAddr::local(1) };
        let source = Source::of(forward, &addresses).unwrap();
        let rules = Rules::new(forward, addresses, 0).with_source(source);
        let rx = rx_over(&cells[1], &mut parts.mover, RxCounters::private()).unwrap();
        let tx = tx_over(&cells[0], &mut parts.mover, TxCounters::private()).unwrap();
        let mut worker =
            Worker::new(vec![Box::new(Forwarding::new(rx, tx, rules))], parts.mover, parts.cache);
        let soon = std::time::Duration::ZERO;
        for wanted in [true, false, true, false] {
            for (cell, layout) in cells.iter().zip([&guest.layout, &guest.tx_layout]) {
                let vring = VringConfig { layout: layout.clone(), ..guest.config(FEATURES) };
                cell.publish(|state| state.vring = wanted.then(|| Arc::new(vring)));
            }
            (0..4).for_each(|_| {
                worker.round();
            });
            for cell in &cells {
                cell.wait(soon).unwrap_or_else(|error| panic!("{forward:?}: {error}"));
            }
        }
    }
}
