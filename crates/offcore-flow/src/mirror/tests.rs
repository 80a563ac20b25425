use offcore_mem::{HEADROOM, Hugepages, Pool};
use offcore_stats::page::StatsPage;
use offcore_vhost::testing::Worker;

use super::*;
use crate::ring::{RingSetup, ring};

/// A worker's resources, and rings that stand for ports.
struct Setup {
    page: StatsPage,
    pool: &'static Pool,
    worker: Worker,
}

impl Setup {
    fn new() -> Self {
        let pool = Pool::new(1024, 2048, Hugepages::None).unwrap();
        let page = StatsPage::new(1 << 18).unwrap();
        Self { page, pool, worker: Worker { burst: 32, ..Worker::over(pool) } }
    }

    fn ring(&self, name: &str, packets: usize) -> (RingTx, RingRx) {
        let Self { page, pool, .. } = self;
        ring(RingSetup { packets, pool, waits: false, wakes: false, stats: page, name, index: 0 }).unwrap()
    }

    /// Returns packets with these first bytes.
    fn packets(&mut self, numbers: impl IntoIterator<Item = u8>) -> Burst {
        let packet = |number| {
            let mut packet = self.worker.cache.take_sized(HEADROOM, 64).unwrap();
            packet.bytes_mut()[0] = number;
            packet
        };
        numbers.into_iter().map(packet).collect()
    }

    /// Returns the first bytes of all packets from a ring.
    fn received(&mut self, ring: &mut RingRx) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let mut burst = Burst::new();
            ring.rx(&mut self.worker.ctx(), &mut burst);
            if burst.is_empty() {
                return all;
            }
            all.extend(burst.iter().map(|packet| packet.bytes()[0]));
            self.worker.cache.free_all(burst);
        }
    }
}

#[test]
fn mirror_orders_both_directions() {
    let mut setup = Setup::new();
    let (mut from, source) = setup.ring("source", 256);
    let (to, mut sink) = setup.ring("sink", 256);
    let (rx_ring, rx_end) = setup.ring("m0", 256);
    let (tx_ring, tx_end) = setup.ring("m1", 256);
    let (mirror_tx, mut mirrored) = setup.ring("out", 1024);
    let (mut rx, mut tx) = (MirrorRx::new(Box::new(source), rx_ring), MirrorTx::new(Box::new(to), tx_ring));
    let mut mirror = MirrorOut::new(vec![tx_end, rx_end], Box::new(mirror_tx));
    let (mut number, mut expected, mut forwarded) = (0u8, Vec::new(), Vec::new());
    for round in 0..60 {
        let numbers = number..number.saturating_add(round % 5);
        number = numbers.end;
        expected.extend(numbers.clone());
        let mut packets = setup.packets(numbers.clone());
        from.tx(&mut setup.worker.ctx(), &mut packets);
        let mut burst = Burst::new();
        rx.rx(&mut setup.worker.ctx(), &mut burst);
        assert_eq!(burst.len(), numbers.len());
        // The top bit marks packets that the port sends.
        burst.iter_mut().for_each(|packet| packet.bytes_mut()[0] |= 0x80);
        tx.tx(&mut setup.worker.ctx(), &mut burst);
        expected.extend(numbers.map(|number| number | 0x80));
        forwarded.extend(setup.received(&mut sink));
        // The mirror runs rarely.
        if round % 7 == 0 {
            mirror.round(&mut setup.worker.ctx());
        }
    }
    drop((rx, tx));
    while mirror.drain(&mut setup.worker.ctx()) > 0 {}
    assert_eq!(setup.received(&mut mirrored), expected);
    assert_eq!(forwarded, (0..number).map(|number| number | 0x80).collect::<Vec<_>>());
}

#[test]
fn slow_mirror_drops_only_copies() {
    let mut setup = Setup::new();
    let (mut from, source) = setup.ring("source", 64);
    let (copies, mut end) = setup.ring("m0", 4);
    let mut rx = MirrorRx::new(Box::new(source), copies);
    let mut packets = setup.packets(0..10);
    from.tx(&mut setup.worker.ctx(), &mut packets);
    let mut burst = Burst::new();
    rx.rx(&mut setup.worker.ctx(), &mut burst);
    assert_eq!(burst.len(), 10);
    assert_eq!(rx.tap.to.ring.counters().dropped(DropReason::Full), 6);
    assert_eq!(setup.received(&mut end), [0, 1, 2, 3]);
    setup.worker.cache.free_all(burst);
}

#[test]
fn hung_mirror_leaves_eighth_of_pool() {
    let mut setup = Setup::new();
    let (mut from, source) = setup.ring("source", 64);
    let (copies, end) = setup.ring("m0", 2048);
    let mut rx = MirrorRx::new(Box::new(source), copies);
    for _ in 0..64 {
        let mut packets = setup.packets(0..32);
        from.tx(&mut setup.worker.ctx(), &mut packets);
        let mut burst = Burst::new();
        rx.rx(&mut setup.worker.ctx(), &mut burst);
        assert_eq!(burst.len(), 32);
        setup.worker.cache.free_all(burst);
    }
    let counters = rx.tap.to.ring.counters();
    let (kept, dropped) = (counters.packets(), counters.dropped(DropReason::NoBuffer));
    assert_eq!(kept + dropped, 64 * 32);
    let free = setup.worker.cache.available() as u64;
    assert_eq!(kept + free, 1024);
    // Whole bursts are copied, while the bursts themselves still hold buffers.
    assert!((128..128 + 64).contains(&free), "{free} of 1024 left");

    // Packets that a port does not accept are not mirrored, so they do not count as missing copies.
    let (to, _sink) = setup.ring("sink", 4);
    let (copies, _end) = setup.ring("m1", 2048);
    let mut tx = MirrorTx::new(Box::new(to), copies);
    let others: Vec<Packet> = (128..free).filter_map(|_| setup.worker.cache.take()).collect();
    let mut burst = setup.packets(0..10);
    for _ in 0..3 {
        tx.tx(&mut setup.worker.ctx(), &mut burst);
    }
    assert_eq!((burst.len(), tx.tap.to.ring.counters().dropped(DropReason::NoBuffer)), (6, 4));
    setup.worker.cache.free_all(burst.into_iter().chain(others));
    drop(end);
}

#[test]
fn refused_packets_are_not_mirrored() {
    let mut setup = Setup::new();
    let (to, _sink) = setup.ring("sink", 4);
    let (copies, mut end) = setup.ring("m0", 64);
    let mut tx = MirrorTx::new(Box::new(to), copies);
    let mut packets = setup.packets(0..10);
    tx.tx(&mut setup.worker.ctx(), &mut packets);
    assert_eq!((packets.len(), setup.received(&mut end)), (6, vec![0, 1, 2, 3]));
    tx.tx(&mut setup.worker.ctx(), &mut packets);
    assert_eq!((packets.len(), setup.received(&mut end)), (6, vec![]));
    setup.worker.cache.free_all(packets);
}

/// A queue that takes all packets back, like a generator.
#[derive(Debug)]
struct Patient(Burst, RxCounters);

impl RxQueue for Patient {
    fn rx(&mut self, _ctx: &mut Context<'_>, burst: &mut Burst) {
        burst.extend(self.0.drain(..));
    }
    fn counters(&self) -> &RxCounters {
        &self.1
    }
    fn take_back(&mut self, burst: &mut Burst) {
        self.0.extend(burst.drain(..));
    }
}

#[test]
fn retaken_packet_is_mirrored_once() {
    let mut setup = Setup::new();
    let packets = setup.packets(0..10);
    let (copies, mut end) = setup.ring("m0", 64);
    let mut rx = MirrorRx::new(Box::new(Patient(packets, RxCounters::private())), copies);
    let mut burst = Burst::new();
    rx.rx(&mut setup.worker.ctx(), &mut burst);
    // Three packets could be sent.
    setup.worker.cache.free_all(burst.drain(..3));
    rx.take_back(&mut burst);
    rx.rx(&mut setup.worker.ctx(), &mut burst);
    assert_eq!((burst.len(), setup.received(&mut end)), (7, (0..10).collect()));
    setup.worker.cache.free_all(burst);
}
