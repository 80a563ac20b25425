//! The back ends of an end-to-end measurement: our worker, and dpdk-testpmd with net_vhost. Both forward `mac` from
//! their one port to itself, both on the same core; one forwards while the other rests.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, ensure};
use offcore_dma::{Mode, Mover};
use offcore_flow::Forward;
use offcore_flow::forward::Addresses;
use offcore_flow::worker::{MOVER_COUNTERS, Stream, Worker};
use offcore_mem::Pool;
use offcore_port::vhost::VhostPort;
use offcore_port::{Port, QueueSetup};
use offcore_stats::page::{Block, StatsPage};
use offcore_stats::{StageClock, lcore, tsc};
use offcore_vhost::{BackendConfig, Binding};

use crate::guest::{PEER_MAC, PORT_MAC};
use crate::peer::testpmd::{Memory, NetVhost, Testpmd, TestpmdConfig};
use crate::sample::ClockCheck;

/// Packets in a burst.
pub(super) const BURST: usize = 32;
/// The peer's packet buffers: as many as ours.
pub(super) const BUFFERS: u32 = 8192;

/// Something that forwards what it gets from the front end at its socket.
pub(super) trait BackEnd {
    /// Begins to forward.
    fn resume(&mut self) -> Result<()>;

    /// Stops forwarding and leaves the core to others. Tells the TSC ticks that forwarding took per packet, polls in
    /// vain not counted, where that was asked for.
    fn pause(&mut self) -> Result<Option<f64>>;

    /// Asks for the ticks from the next [`BackEnd::resume`] on, or no more.
    fn count_cycles(&mut self, on: bool) -> Result<()>;
}

/// What our worker's thread is to do next.
enum Order {
    /// Forward as long as the flag is set.
    Forward { count_cycles: bool },
    /// Say whether the core's clock is what it was.
    CheckClock,
}

/// What it has done.
enum Done {
    Forwarded { ticks: u64, packets: u64 },
    Clock { holds: bool },
}

/// Our vhost port and its worker.
#[derive(Debug)]
pub(super) struct Ours {
    forwarding: Arc<AtomicBool>,
    count_cycles: bool,
    orders: Option<Sender<Order>>,
    done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
    /// Dropped after the worker has ended: it would wait for one that rests.
    _port: VhostPort,
}

impl Ours {
    /// Opens the port at `socket`, with its worker on lcore `core`. It forwards, so that a front end can start.
    pub(super) fn start(socket: &Path, core: usize, pool: &'static Pool, forward: Forward) -> Result<Self> {
        let mut port = VhostPort::open("vhost", PORT_MAC, BackendConfig::new(socket))?;
        let page = StatsPage::new(1 << 16)?;
        let mut mover = Mover::new();
        let rx = port.rx_queue(0, setup(&mut mover, &page))?;
        let tx = port.tx_queue(0, setup(&mut mover, &page))?;
        let addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };
        let worker = Worker {
            streams: vec![Stream { rx, tx, addresses, source: None }],
            forward,
            burst: BURST,
            work: 0,
            mover,
            cache: pool.cache(),
            clock: StageClock::private(),
            mover_stats: Block::private(&MOVER_COUNTERS),
            channel_stats: Vec::new(),
        };
        let forwarding = Arc::new(AtomicBool::new(false));
        let (orders, incoming) = channel();
        let (outgoing, done) = channel();
        let flag = Arc::clone(&forwarding);
        let (ready, pinned) = channel();
        let thread = std::thread::Builder::new().name("bench-worker".into()).spawn(move || {
            // Who waits for the answer is there until it has come.
            let _ = ready.send(lcore::pin(core));
            obey(worker, &flag, &incoming, &outgoing);
        })?;
        let thread = Some(thread);
        let orders = Some(orders);
        let mut ours = Self { forwarding, count_cycles: false, orders, done, thread, _port: port };
        pinned.recv().context("the worker's thread has ended")??;
        ours.resume()?;
        Ok(ours)
    }

    /// Whether the core runs as fast as it did at its fastest. Only while the worker rests.
    pub(super) fn clock_holds(&mut self) -> Result<bool> {
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

/// The core copies.
fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: Binding::new(Mode::Cpu, Vec::new()), port: "port0" }
}

fn gone() -> anyhow::Error {
    anyhow!("the worker's thread has ended")
}

/// The worker's thread: sleeps while there is no order.
fn obey(mut worker: Worker, forwarding: &AtomicBool, orders: &Receiver<Order>, done: &Sender<Done>) {
    let mut clock = ClockCheck::new();
    for order in orders {
        let answer = match order {
            Order::Forward { count_cycles: false } => {
                while forwarding.load(Ordering::Relaxed) {
                    worker.round();
                }
                Done::Forwarded { ticks: 0, packets: 0 }
            }
            Order::Forward { count_cycles: true } => {
                let (mut ticks, mut packets) = (0, 0);
                while forwarding.load(Ordering::Relaxed) {
                    let start = tsc::now();
                    let moved = worker.round() as u64;
                    if moved > 0 {
                        ticks += tsc::now() - start;
                        packets += moved;
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
}

impl Drop for Ours {
    fn drop(&mut self) {
        self.forwarding.store(false, Ordering::Relaxed);
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the order that it left unanswered.
            let _ = thread.join();
        }
    }
}

/// dpdk-testpmd with a net_vhost port.
#[derive(Debug)]
pub(super) struct Theirs {
    testpmd: Testpmd,
    count_cycles: bool,
}

impl Theirs {
    /// Starts a testpmd on `lcore` that makes `socket`; it does not forward yet.
    pub(super) fn start(socket: &Path, lcore: usize, memory: Memory) -> Result<Self> {
        let port = NetVhost::new(socket);
        let burst = u16::try_from(BURST)?;
        let config =
            TestpmdConfig { memory, mbufs: BUFFERS, burst, ..TestpmdConfig::net_vhost(lcore, &port) };
        let mut testpmd = Testpmd::start(&config)?;
        testpmd.set_forward("mac")?;
        testpmd.set_peer_address(0, &PEER_MAC.to_string())?;
        Ok(Self { testpmd, count_cycles: false })
    }

    /// Waits until the front end is there.
    pub(super) fn wait_ready(&mut self) -> Result<()> {
        self.testpmd.wait_link_up(0)
    }
}

impl BackEnd for Theirs {
    fn resume(&mut self) -> Result<()> {
        self.testpmd.start_forwarding()
    }

    fn pause(&mut self) -> Result<Option<f64>> {
        let stats = self.testpmd.stop_forwarding()?;
        let port = stats.port(0)?;
        ensure!(
            port.tx_dropped == 0 && port.rx_dropped == 0,
            "dpdk-testpmd has dropped packets, so its rate is none: {port:?}"
        );
        Ok(stats.cycles.filter(|_| self.count_cycles).map(|cycles| cycles.per_packet))
    }

    fn count_cycles(&mut self, on: bool) -> Result<()> {
        self.count_cycles = on;
        self.testpmd.record_core_cycles(on)
    }
}
