use std::time::Duration;

use offcore_dma::{Binding, Mover};
use offcore_mem::{HEADROOM, Hugepages, PoolCache};
use offcore_stats::StageClock;
use offcore_stats::page::StatsPage;

use super::*;
use crate::spec::PortSpec;

/// A port with one queue, which receives `packets` packets and sends `at_a_time` packets per call.
#[derive(Debug)]
struct Plain {
    base: PortBase,
    packets: u32,
    waits: bool,
    at_a_time: usize,
}

#[derive(Debug)]
struct PlainRx {
    packets: u32,
    waits: bool,
    counters: RxCounters,
}

#[derive(Debug)]
struct PlainTx {
    at_a_time: usize,
    counters: TxCounters,
}

impl Port for Plain {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        Ok(Box::new(PlainRx { packets: self.packets, waits: self.waits, counters }))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        Ok(Box::new(PlainTx { at_a_time: self.at_a_time, counters }))
    }

    fn status(&self) -> String {
        "plain".into()
    }
}

impl RxQueue for PlainRx {
    fn rx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let come = self.packets.min(room(ctx, burst) as u32);
        burst.extend((0..come).map(|_| ctx.cache.take_sized(HEADROOM, 60).unwrap()));
        self.packets -= come;
        self.counters.add(come.into(), u64::from(come) * 60);
    }

    fn counters(&self) -> &RxCounters {
        &self.counters
    }

    fn arm(&mut self) -> Wake<'_> {
        Wake::Never
    }

    fn waits(&self) -> bool {
        self.waits
    }
}

impl TxQueue for PlainTx {
    fn tx(&mut self, ctx: &mut Context<'_>, burst: &mut Burst) {
        let sent = burst.len().min(self.at_a_time);
        self.counters.add(sent as u64, 0);
        ctx.cache.free_all(burst.drain(..sent));
    }

    fn counters(&self) -> &TxCounters {
        &self.counters
    }
}

fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::core(), port: "port0" }
}

/// Both halves of an impairment port's queue, and the state that a worker lends them.
struct Rig {
    port: ImpairPort,
    rx: Box<dyn RxQueue>,
    tx: Box<dyn TxQueue>,
    mover: Mover,
    cache: PoolCache,
    clock: StageClock,
}

impl Rig {
    fn new(keys: &str, packets: u32, waits: bool, at_a_time: usize) -> Self {
        let Ok(PortSpec::Impair(spec)) = format!("impair:{keys},gen:size=64").parse() else {
            panic!("{keys}")
        };
        let pool = Pool::new(4096, 2048, Hugepages::None).unwrap();
        let base = PortBase::new("plain".into(), MacAddr::local(3), 1);
        let inner = Plain { base, packets, waits, at_a_time };
        let mut port = ImpairPort::new(&spec, Box::new(inner), pool);
        let (mut mover, stats) = (Mover::default(), StatsPage::new(1 << 16).unwrap());
        let rx = port.rx_queue(0, setup(&mut mover, &stats)).unwrap();
        let tx = port.tx_queue(0, setup(&mut mover, &stats)).unwrap();
        Self { port, rx, tx, mover, cache: pool.cache(), clock: StageClock::private() }
    }

    /// Calls `what` with both halves and a context.
    fn call<T>(&mut self, what: impl FnOnce(&mut dyn RxQueue, &mut dyn TxQueue, &mut Context<'_>) -> T) -> T {
        let Self { rx, tx, mover, cache, clock, .. } = self;
        what(&mut **rx, &mut **tx, &mut Context { mover, cache, clock, burst: 32 })
    }

    /// Sends packets in bursts.
    fn send(&mut self, packets: usize) {
        for _ in 0..packets / 32 {
            let mut burst: Burst = (0..32).map(|_| self.cache.take_sized(HEADROOM, 60).unwrap()).collect();
            self.call(|_, tx, ctx| tx.tx(ctx, &mut burst));
            assert!(burst.is_empty());
        }
    }

    /// Returns the number of packets that `calls` calls receive.
    fn receive(&mut self, calls: usize) -> usize {
        let mut received = 0;
        for _ in 0..calls {
            let mut burst = Burst::new();
            self.call(|rx, _, ctx| rx.rx(ctx, &mut burst));
            assert!(burst.len() <= 32);
            received += burst.len();
            self.cache.free_all(burst);
        }
        received
    }

    /// Drains the queue completely; returns the number of packets.
    fn drain(&mut self) -> usize {
        let mut received = 0;
        loop {
            let mut burst = Burst::new();
            let left = self.call(|rx, _, ctx| rx.drain(ctx, &mut burst));
            received += burst.len();
            self.cache.free_all(burst);
            if left == 0 {
                return received;
            }
        }
    }

    fn assert_no_leaks(self) {
        let pool = self.cache.pool();
        drop((self.rx, self.tx, self.cache));
        assert_eq!(pool.available(), pool.chunks());
    }
}

#[test]
fn losses_are_counted_with_the_queue() {
    let mut rig = Rig::new("loss=25%", 3200, false, 64);
    let received = rig.receive(200) as u64;
    assert_eq!(rig.rx.counters().packets(), 3200);
    assert_eq!(received + rig.rx.counters().dropped(DropReason::Impaired), 3200);
    rig.send(3200);
    let sent = rig.tx.counters();
    assert_eq!(sent.packets() + sent.dropped(DropReason::Impaired), 3200);
    assert!((600..1000).contains(&sent.dropped_total()), "{sent:?}");
    assert_ne!(sent.packets(), received, "the directions have random numbers of their own");
    let status = rig.port.status();
    let expected = format!("plain; received: {} lost, 0 reordered, 0 duplicated,", 3200 - received);
    assert!(status.starts_with(&expected), "{status}");
    rig.assert_no_leaks();
}

#[test]
fn delayed_packets_wake_the_worker() {
    let mut rig = Rig::new("delay=20ms", 32, false, 64);
    assert!(matches!(rig.rx.arm(), Wake::Never), "nothing is held, so the port inside says");
    assert_eq!(rig.receive(1), 0);
    assert!(matches!(rig.rx.arm(), Wake::Poll));
    std::thread::sleep(Duration::from_millis(25));
    assert!(matches!(rig.rx.arm(), Wake::Now));
    assert_eq!(rig.receive(1), 32);
    rig.send(32);
    assert_eq!(rig.tx.counters().packets(), 0);
    assert!(matches!(rig.rx.arm(), Wake::Poll), "the sending half holds packets");
    std::thread::sleep(Duration::from_millis(25));
    rig.call(|_, tx, ctx| tx.poll(ctx));
    assert_eq!(rig.tx.counters().packets(), 32);
    assert!(matches!(rig.rx.arm(), Wake::Never));
    rig.assert_no_leaks();
}

#[test]
fn stop_flushes_delayed_packets() {
    let mut rig = Rig::new("delay=10s,reorder=10%", 320, false, 64);
    assert_eq!(rig.receive(10), 0);
    assert_eq!(rig.drain(), 320);
    rig.send(320);
    assert!(rig.call(|_, tx, ctx| tx.stop(ctx)));
    assert_eq!((rig.tx.counters().packets(), rig.tx.counters().dropped_total()), (320, 0));
    rig.assert_no_leaks();
}

#[test]
fn stop_waits_for_port_room() {
    let mut rig = Rig::new("seed=1", 0, false, 5);
    rig.send(320);
    while !rig.call(|_, tx, ctx| tx.stop(ctx)) {}
    assert_eq!((rig.tx.counters().packets(), rig.tx.counters().dropped_total()), (320, 0));
    rig.assert_no_leaks();
    // The queue does not wait forever for a port that takes no packets.
    let mut rig = Rig::new("seed=1", 0, false, 0);
    rig.send(1024);
    assert_eq!(rig.tx.counters().dropped(DropReason::Full), 1024 - 512 - 64);
    while !rig.call(|_, tx, ctx| tx.stop(ctx)) {}
    assert_eq!(rig.tx.counters().dropped(DropReason::Full), 1024);
    rig.assert_no_leaks();
}

#[test]
fn backpressure_limits_held_packets() {
    let mut rig = Rig::new("delay=10s", 3200, true, 64);
    assert!(rig.rx.waits());
    assert_eq!(rig.receive(100), 0);
    // Half of the limit of the line, which is an eighth of the pool.
    assert_eq!((rig.rx.counters().packets(), rig.rx.counters().dropped_total()), (256, 0));
    // Packets that were taken back are returned first.
    let mut burst = Burst::new();
    while burst.is_empty() {
        rig.call(|rx, _, ctx| rx.drain(ctx, &mut burst));
    }
    let chunk = burst[0].chunk();
    rig.rx.take_back(&mut burst);
    assert!(burst.is_empty() && matches!(rig.rx.arm(), Wake::Now));
    rig.call(|rx, _, ctx| rx.rx(ctx, &mut burst));
    assert_eq!(burst[0].chunk(), chunk);
    rig.rx.take_back(&mut burst);
    assert_eq!(rig.drain(), 256);
    rig.assert_no_leaks();
}

#[test]
fn dropped_port_frees_held_packets() {
    let mut rig = Rig::new("delay=10s,reorder=50%", 320, false, 64);
    rig.receive(10);
    rig.send(320);
    assert!(rig.cache.available() <= 4096 - 640);
    rig.assert_no_leaks();
}
