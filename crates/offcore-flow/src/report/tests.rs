use std::collections::BTreeSet;
use std::fmt::Display;
use std::sync::Arc;

use offcore_dma::channel::ChannelStats;
use offcore_dma::mover::MoverStats;
use offcore_port::stats::PortNames;
use offcore_port::{DropReason, RxCounters, TxCounters};
use offcore_stats::page::{Block, Reader, StatsPage};
use offcore_stats::{Family, Label};

use super::decode::FAMILIES;
use super::*;
use crate::bridge::{AgedCounts, BRIDGE, BRIDGE_AGED, BRIDGE_PORT, DatabaseCounts, PortCounts};
use crate::host::serve::{ServeCounts, TCP_SERVE};
use crate::host::watched::{HostState, TCP, TCP_DROPS};
use crate::worker::stats::{AUTO, CHANNEL, ClassCounts, MOVER};
use crate::worker::turns::{PORT_TURNS, PortTurnCounts};

fn reporter(page: &StatsPage) -> Reporter {
    Reporter::new(Reader::open(page.fd()).unwrap(), PortNames::default(), Arc::new(HostState::new(1, false)))
}

/// Creates a block with these first values.
fn block(
    page: &StatsPage,
    family: &'static Family,
    labels: &[(Label, &dyn Display)],
    values: impl IntoIterator<Item = u64>,
) -> Block {
    let block = page.block(family, labels).unwrap();
    block.set(values);
    block
}

#[test]
fn families_have_different_names() {
    let names: BTreeSet<&str> = FAMILIES.iter().map(|(family, _)| family.name).collect();
    assert_eq!(names.len(), FAMILIES.len());
    for (family, _) in FAMILIES {
        let counters: BTreeSet<&str> = family.counters().map(|counter| counter.name).collect();
        assert_eq!(counters.len(), family.size(), "{}", family.name);
    }
}

#[test]
fn queues_are_reported_by_port() {
    let page = StatsPage::new(1 << 14).unwrap();
    let (rx, tx) = (RxCounters::new(&page, "port0", 1).unwrap(), TxCounters::new(&page, "ring2", 0).unwrap());
    let mut reporter = reporter(&page);
    rx.add(10, 1000);
    rx.drop(DropReason::Full, 3);
    tx.starved(2);
    let report = reporter.report("interval").unwrap();
    let [rx, tx] = &report.queues[..] else { panic!("{report:?}") };
    assert_eq!((&*rx.port, &*rx.half, rx.queue, rx.packets, rx.bytes), ("port0", "rx", 1, 10, 1000));
    assert_eq!((rx.drops.as_slice(), rx.starved), (&[("full".into(), 3)][..], 0));
    assert_eq!((&*tx.port, &*tx.half, tx.queue, tx.drops.len(), tx.starved), ("ring2", "tx", 0, 0, 2));
}

#[test]
fn rates_of_new_queues_begin_at_zero() {
    let page = StatsPage::new(1 << 14).unwrap();
    let mut reporter = reporter(&page);
    let old = RxCounters::new(&page, "port0", 0).unwrap();
    old.add(1_000_000, 1_000_000);
    reporter.report("interval").unwrap();
    drop(old);
    let new = RxCounters::new(&page, "port0", 0).unwrap();
    new.add(5, 500);
    let report = reporter.report("interval").unwrap();
    let [queue] = &report.queues[..] else { panic!("{report:?}") };
    assert_eq!((queue.packets, queue.bytes), (5, 500));
    let counted = queue.packets_per_second * report.over_seconds;
    assert!((4.9..5.1).contains(&counted), "{counted}");
}

#[test]
fn copies_are_reported_by_worker() {
    let page = StatsPage::new(1 << 14).unwrap();
    let stats = MoverStats { fallbacks: 2, probes: 4, ..MoverStats::default() };
    let lcore: (_, &dyn Display) = (Label::Lcore, &7);
    let channel: [(_, &dyn Display); 3] = [lcore, (Label::Channel, &"dsa:wq0.1"), (Label::Sharing, &"lock")];
    let class = ClassCounts { way: 2, reason: 1, by_engine: 9, held: 1, ..ClassCounts::default() };
    let channel_stats = ChannelStats { submitted: 6, completed: 3, failed: 2, bytes: 5 };
    let turns = PortTurnCounts { used_ticks: 1, waited: 8, ..PortTurnCounts::default() };
    let _blocks = [
        block(&page, &MOVER, &[lcore], stats.values()),
        block(&page, &AUTO, &[lcore, (Label::Class, &64)], ClassCounts::default().values()),
        block(&page, &AUTO, &[lcore, (Label::Class, &"max")], class.values()),
        block(&page, &CHANNEL, &channel, channel_stats.values().into_iter().chain([1])),
        block(&page, &PORT_TURNS, &[lcore, (Label::Port, &"port3")], turns.values()),
        block(&page, &PORT_TURNS, &[lcore, (Label::Port, &"port4")], []),
    ];
    let report = reporter(&page).report("final").unwrap();
    let [worker] = &report.workers[..] else { panic!("{report:?}") };
    assert_eq!((worker.lcore, worker.fallbacks, worker.probes), (7, 2, 4));
    assert_eq!(worker.turns.iter().map(|turns| (turns.port, turns.waited)).collect::<Vec<_>>(), [(3, 8)]);
    let [decision] = &report.decisions[..] else { panic!("{report:?}") };
    assert_eq!((decision.lcore, &*decision.up_to, decision.way), (7, "max", "engine"));
    assert_eq!((decision.reason, decision.by_engine, decision.held_by_order), ("cheaper", 9, 1));
    let [channel] = &report.channels[..] else { panic!("{report:?}") };
    assert_eq!((&*channel.channel, &*channel.sharing), ("dsa:wq0.1", "lock"));
    assert_eq!([channel.submitted, channel.completed, channel.failed, channel.in_flight], [6, 3, 2, 1]);
}

#[test]
fn bridge_counters_of_workers_are_added() {
    let page = StatsPage::new(1 << 14).unwrap();
    let port = |name: &'static &'static str, lcore: &'static u64| -> [(Label, &'static dyn Display); 2] {
        [(Label::Port, name), (Label::Lcore, lcore)]
    };
    let counts = |learned| PortCounts { learned, refused: 1, ..PortCounts::default() }.values();
    let _blocks = [
        block(&page, &BRIDGE, &[], DatabaseCounts { addresses: 12 }.values()),
        block(&page, &BRIDGE_AGED, &[(Label::Port, &"port0")], AgedCounts { aged: 4 }.values()),
        block(&page, &BRIDGE_PORT, &port(&"port0", &0), counts(1)),
        block(&page, &BRIDGE_PORT, &port(&"port1", &0), counts(2)),
        block(&page, &BRIDGE_PORT, &port(&"port0", &1), counts(4)),
    ];
    let bridge = reporter(&page).report("final").unwrap().bridge.unwrap();
    let ports = bridge.ports.iter().map(|port| (&*port.port, port.learned, port.aged, port.refused));
    assert_eq!(ports.collect::<Vec<_>>(), [("port0", 5, 4, 2), ("port1", 2, 0, 1)]);
    assert_eq!(bridge.addresses, 12);
}

#[test]
fn hosts_are_reported_with_all_counters() {
    let page = StatsPage::new(1 << 14).unwrap();
    let lcore: (_, &dyn Display) = (Label::Lcore, &2);
    let _blocks =
        [block(&page, &TCP, &[lcore], 1..=TCP.size() as u64), block(&page, &TCP_DROPS, &[lcore], [0, 5])];
    let mut reporter = reporter(&page);
    let host = reporter.report("final").unwrap().tcp.remove(0);
    let counts: Vec<_> = host.stack.named().chain(host.path.named()).collect();
    assert_eq!(counts, TCP.counters().map(|counter| counter.name).zip(1..).collect::<Vec<_>>());
    assert_eq!((host.lcore, host.drops, host.serve), (2, vec![("checksum".into(), 5)], None));
    let serve = ServeCounts { sessions: 3, misused: 1, ..ServeCounts::default() };
    let _serve = block(&page, &TCP_SERVE, &[lcore], serve.values());
    let hosts = reporter.report("final").unwrap().tcp;
    assert_eq!((hosts.len(), hosts[0].serve), (1, Some(serve)));
}
