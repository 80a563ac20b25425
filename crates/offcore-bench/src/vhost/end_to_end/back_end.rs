//! Back ends of an end-to-end measurement: our worker, and dpdk-testpmd with net_vhost or Open vSwitch with DPDK. They
//! share a core, and only one back end runs at a time. With testpmd as the peer, both forward in mode `mac` from their
//! only port to itself, or from each of two ports to the other. With Open vSwitch as the peer, ours is a learning
//! switch as well.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, ensure};
use offcore_dma::{Binding, Mode, Mover};
use offcore_flow::Forward;
use offcore_flow::bridge::{BRIDGE_PORT, Bridge, BridgeConfig, Input, Shared};
use offcore_flow::forward::Addresses;
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::guest_pair::GuestPair;
use offcore_flow::task::Task;
use offcore_flow::worker::Worker;
use offcore_mem::Pool;
use offcore_port::vhost::{OneCopy, VhostPort};
use offcore_port::{Port, QueueSetup, RxQueue, TxQueue};
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{lcore, tsc};
use offcore_vhost::BackendConfig;

use crate::BURST;
use crate::guests::guest::{PEER_MAC, PORT_MAC};
use crate::peer::ovs::Ovs;
use crate::peer::testpmd::{Memory, NetVhost, Testpmd, TestpmdConfig};
use crate::report::sample::ClockCheck;

/// Number of packet buffers of the peer, the same as ours.
pub(crate) const BUFFERS: u32 = 8192;

/// A back end on the measured core.
pub(crate) trait BackEnd {
    /// Starts forwarding.
    fn resume(&mut self) -> Result<()>;

    /// Stops forwarding and releases the core. Returns the TSC ticks per packet without empty polls, if counting was
    /// enabled.
    fn pause(&mut self) -> Result<Option<f64>>;

    /// Enables or disables the counting of ticks from the next [`BackEnd::resume`].
    fn count_cycles(&mut self, on: bool) -> Result<()>;

    /// Returns the number of packets moved so far, as counted by the back end.
    fn moved(&mut self) -> Result<u64>;
}

impl<B: BackEnd + ?Sized> BackEnd for Box<B> {
    fn resume(&mut self) -> Result<()> {
        (**self).resume()
    }

    fn pause(&mut self) -> Result<Option<f64>> {
        (**self).pause()
    }

    fn count_cycles(&mut self, on: bool) -> Result<()> {
        (**self).count_cycles(on)
    }

    fn moved(&mut self) -> Result<u64> {
        (**self).moved()
    }
}

/// A command for our worker's thread.
enum Order {
    /// Forward until the flag is cleared.
    Forward { count_cycles: bool },
    /// Check whether the core's clock is unchanged.
    CheckClock,
}

/// The result of a command.
enum Done {
    Forwarded { ticks: u64, packets: u64 },
    Clock { holds: bool },
}

/// Our ports and their worker.
#[derive(Debug)]
pub(crate) struct Ours {
    forwarding: Arc<AtomicBool>,
    moved: Arc<AtomicU64>,
    count_cycles: bool,
    orders: Option<Sender<Order>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    /// Dropped after the worker has ended: dropping a port waits for the worker, which may be paused.
    _ports: Vec<Box<dyn Port>>,
}

impl Ours {
    /// Opens a port at each of `sockets`, one or two, with their worker on lcore `core`. The worker starts forwarding
    /// at once, so that the front ends can connect.
    pub(super) fn start(
        sockets: &[PathBuf],
        core: usize,
        pool: &'static Pool,
        (forward, one_copy): (Option<Forward>, bool),
    ) -> Result<Self> {
        let page = StatsPage::new(1 << 16)?;
        let mut mover = Mover::new();
        let (mut ports, mut rxs, mut txs) = (Vec::new(), Vec::new(), Vec::new());
        for (index, socket) in sockets.iter().enumerate() {
            let name = ["port0", "port1"][index % 2];
            let mut port = VhostPort::open(name, PORT_MAC, BackendConfig::new(socket))?;
            rxs.push(port.rx_queue(0, setup(&mut mover, &page, name))?);
            txs.push(port.tx_queue(0, setup(&mut mover, &page, name))?);
            ports.push(Box::new(port) as Box<dyn Port>);
        }
        let tasks: Vec<Box<dyn Task>> = match forward {
            None => vec![Box::new(bridge(rxs, txs))],
            Some(mode) => forwarding(rxs, txs, (mode, one_copy && sockets.len() > 1), &mut mover)?,
        };
        let worker = Worker::new(tasks, mover, pool.cache());
        let mut ours = Self::over(worker, core, ports)?;
        ours.resume()?;
        Ok(ours)
    }

    /// Creates a paused back end with `worker` on lcore `core`. The worker's queues belong to `ports`.
    pub(crate) fn over(worker: Worker, core: usize, ports: Vec<Box<dyn Port>>) -> Result<Self> {
        let forwarding = Arc::new(AtomicBool::new(false));
        let moved = Arc::new(AtomicU64::new(0));
        let (orders, incoming) = channel();
        let (outgoing, done) = channel();
        let shared = (Arc::clone(&forwarding), Arc::clone(&moved));
        let (ready, pinned) = channel();
        let thread = std::thread::Builder::new().name("bench-worker".into()).spawn(move || {
            // The receiver exists until the answer has arrived.
            let _ = ready.send(lcore::pin(core));
            run_commands(worker, (&shared.0, &shared.1), &incoming, &outgoing);
        })?;
        let thread = Some(thread);
        let orders = Some(orders);
        let ours = Self { forwarding, moved, count_cycles: false, orders, done, thread, _ports: ports };
        pinned.recv().context("the worker's thread has ended")??;
        Ok(ours)
    }

    /// Returns whether the core runs at its usual speed. Must be called only while the worker is paused.
    pub(crate) fn clock_holds(&mut self) -> Result<bool> {
        self.order(Order::CheckClock)?;
        match self.done.recv().map_err(|_| gone())? {
            Done::Clock { holds } => Ok(holds),
            Done::Forwarded { .. } => Err(anyhow!("the worker was not at rest")),
        }
    }

    fn order(&self, order: Order) -> Result<()> {
        self.orders.as_ref().and_then(|orders| orders.send(order).ok()).ok_or_else(gone)
    }
}

/// Creates the tasks that forward the packets of each port to the next port; a single port forwards to itself.
fn forwarding(
    rxs: Vec<Box<dyn RxQueue>>,
    mut txs: Vec<Box<dyn TxQueue>>,
    (mode, one_copy): (Forward, bool),
    mover: &mut Mover,
) -> Result<Vec<Box<dyn Task>>> {
    txs.rotate_left(1);
    let task = |(rx, tx): (Box<dyn RxQueue>, Box<dyn TxQueue>)| -> Result<Box<dyn Task>> {
        let rules = Rules::new(mode, Addresses { source: PORT_MAC, destination: PEER_MAC }, 0);
        if !one_copy {
            return Ok(Box::new(Forwarding::new(rx, tx, rules)));
        }
        let guests = OneCopy::between(rx, tx, mover).map_err(|_| anyhow!("these are no queues of guests"))?;
        Ok(Box::new(GuestPair::new(guests, rules)))
    };
    rxs.into_iter().zip(txs).map(task).collect()
}

/// Creates a learning switch with all ports.
fn bridge(rxs: Vec<Box<dyn RxQueue>>, txs: Vec<Box<dyn TxQueue>>) -> Bridge {
    let shared = Shared::new(&BridgeConfig::default(), rxs.len(), tsc::hz());
    let counters = rxs.iter().map(|_| Block::private(&BRIDGE_PORT)).collect();
    let inputs = (0..).zip(rxs).map(|(port, rx)| Input { rx, port, turn: 0 }).collect();
    Bridge::new(Arc::new(shared), inputs, txs.into_iter().map(|tx| vec![tx]).collect(), counters, 0)
}

/// Returns the set-up of a port whose queues are copied by the core.
fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage, port: &'a str) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::new(Mode::Cpu, Vec::new()), port }
}

fn gone() -> anyhow::Error {
    anyhow!("the worker's thread has ended")
}

/// Main function of the worker's thread. It sleeps until a command arrives.
fn run_commands(
    mut worker: Worker,
    (forwarding, moved): (&AtomicBool, &AtomicU64),
    orders: &Receiver<Order>,
    done: &Sender<Done>,
) {
    let mut clock = ClockCheck::new();
    for order in orders {
        let answer = match order {
            Order::Forward { count_cycles: false } => {
                let mut all = moved.load(Ordering::Relaxed);
                while forwarding.load(Ordering::Relaxed) {
                    all += worker.round() as u64;
                    moved.store(all, Ordering::Relaxed);
                }
                Done::Forwarded { ticks: 0, packets: 0 }
            }
            Order::Forward { count_cycles: true } => {
                let (mut ticks, mut packets) = (0, 0);
                let before = moved.load(Ordering::Relaxed);
                while forwarding.load(Ordering::Relaxed) {
                    let start = tsc::now();
                    let in_round = worker.round() as u64;
                    if in_round > 0 {
                        ticks += tsc::now() - start;
                        packets += in_round;
                        moved.store(before + packets, Ordering::Relaxed);
                    }
                }
                Done::Forwarded { ticks, packets }
            }
            Order::CheckClock => Done::Clock { holds: clock.holds() },
        };
        if done.send(answer).is_err() {
            return;
        }
    }
}

impl BackEnd for Ours {
    fn resume(&mut self) -> Result<()> {
        self.forwarding.store(true, Ordering::Relaxed);
        self.order(Order::Forward { count_cycles: self.count_cycles })
    }

    fn pause(&mut self) -> Result<Option<f64>> {
        self.forwarding.store(false, Ordering::Relaxed);
        match self.done.recv().map_err(|_| gone())? {
            Done::Forwarded { packets: 0, .. } => Ok(None),
            Done::Forwarded { ticks, packets } => Ok(Some(ticks as f64 / packets as f64)),
            Done::Clock { .. } => Err(anyhow!("the worker was at rest")),
        }
    }

    fn count_cycles(&mut self, on: bool) -> Result<()> {
        self.count_cycles = on;
        Ok(())
    }

    fn moved(&mut self) -> Result<u64> {
        Ok(self.moved.load(Ordering::Relaxed))
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.forwarding.store(false, Ordering::Relaxed);
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // The command that a panic left unanswered has already reported it.
            let _ = thread.join();
        }
    }
}

/// dpdk-testpmd with net_vhost ports.
#[derive(Debug)]
pub(super) struct Theirs {
    testpmd: Testpmd,
    ports: u16,
    count_cycles: bool,
}

impl Theirs {
    /// Starts a testpmd on `lcore` that creates `sockets`, one or two. It does not forward yet.
    pub(super) fn start(sockets: &[PathBuf], lcore: usize, memory: Memory) -> Result<Self> {
        let burst = u16::try_from(BURST)?;
        let vdevs: Vec<_> = (0..).zip(sockets).map(|(i, socket)| NetVhost::new(socket).vdev(i)).collect();
        let config = TestpmdConfig {
            core: lcore,
            topology: if vdevs.len() > 1 { "paired" } else { "loop" },
            vdevs,
            memory,
            mbufs: BUFFERS,
            burst,
            ..TestpmdConfig::default()
        };
        let mut testpmd = Testpmd::start(&config)?;
        testpmd.set_forward("mac")?;
        let ports = u16::try_from(sockets.len())?;
        for port in 0..ports {
            testpmd.set_peer_address(port, &PEER_MAC.to_string())?;
        }
        Ok(Self { testpmd, ports, count_cycles: false })
    }

    /// Returns the process ID.
    pub(super) fn id(&self) -> u32 {
        self.testpmd.id()
    }

    /// Waits until the front ends of all ports are connected.
    pub(super) fn wait_ready(&mut self) -> Result<()> {
        (0..self.ports).try_for_each(|port| self.testpmd.wait_link_up(port))
    }
}

impl BackEnd for Theirs {
    fn resume(&mut self) -> Result<()> {
        self.testpmd.start_forwarding()
    }

    fn pause(&mut self) -> Result<Option<f64>> {
        let stats = self.testpmd.stop_forwarding()?;
        for port in 0..self.ports {
            let port = stats.port(port)?;
            ensure!(
                port.tx_dropped == 0 && port.rx_dropped == 0,
                "dpdk-testpmd has dropped packets, so its rate is none: {port:?}"
            );
        }
        Ok(stats.cycles.filter(|_| self.count_cycles).map(|cycles| cycles.per_packet))
    }

    fn count_cycles(&mut self, on: bool) -> Result<()> {
        self.count_cycles = on;
        self.testpmd.record_core_cycles(on)
    }

    fn moved(&mut self) -> Result<u64> {
        Ok(self.testpmd.all_port_stats()?.iter().map(|port| port.rx_packets).sum())
    }
}

/// Open vSwitch with DPDK. Its threads always poll, so the process is stopped to pause it.
#[derive(Debug)]
pub(super) struct TheirSwitch {
    pub(super) ovs: Ovs,
    count_cycles: bool,
}

impl TheirSwitch {
    /// Starts a running switch with two ports on `lcore`.
    pub(super) fn start(lcore: usize) -> Result<Self> {
        Ok(Self { ovs: Ovs::start(lcore)?, count_cycles: false })
    }
}

impl BackEnd for TheirSwitch {
    fn resume(&mut self) -> Result<()> {
        self.ovs.set_running(true)?;
        if self.count_cycles { self.ovs.clear_counters() } else { Ok(()) }
    }

    fn pause(&mut self) -> Result<Option<f64>> {
        let cycles = if self.count_cycles { self.ovs.counters()?.1 } else { None };
        self.ovs.set_running(false)?;
        Ok(cycles)
    }

    fn count_cycles(&mut self, on: bool) -> Result<()> {
        self.count_cycles = on;
        Ok(())
    }

    fn moved(&mut self) -> Result<u64> {
        Ok(self.ovs.counters()?.0)
    }
}
