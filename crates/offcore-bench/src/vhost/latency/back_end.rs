//! A measured back end: vhost ports and a worker on a dedicated core that returns packets to their senders. The owner
//! steps its engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use offcore_dma::core::{CoreDevice, Stepper};
use offcore_dma::{Binding, CopyDevice, Mode, Mover};
use offcore_flow::Forward;
use offcore_flow::forward::Addresses;
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::task::Task;
use offcore_flow::worker::turns::Turns;
use offcore_flow::worker::{MOVER_COUNTERS, Worker};
use offcore_mem::Pool;
use offcore_port::vhost::VhostPort;
use offcore_port::{Port, QueueSetup};
use offcore_stats::page::{Reader, StatsPage};
use offcore_stats::{StageClock, lcore};
use offcore_vhost::BackendConfig;

use crate::BURST;
use crate::guests::guest::{PEER_MAC, PORT_MAC};
use crate::method::copier::CHANNEL;

/// Names of the statistics blocks that are read.
const STATS: &str = "mover";
const TURNS: &str = "turns";

/// Vhost ports and their worker, which forwards until it is stopped.
#[derive(Debug)]
pub(in crate::vhost) struct BackEnd {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
    stepper: Option<Stepper>,
    page: StatsPage,
    /// Dropped after the worker has ended: dropping a port waits until the worker has released its virtqueues.
    _ports: Vec<VhostPort>,
}

impl BackEnd {
    /// Opens ports at `sockets` with their worker on lcore `core`.
    pub(in crate::vhost) fn start(
        sockets: &[PathBuf],
        core: usize,
        pool: &'static Pool,
        mode: Mode,
        max_latency: Option<u64>,
    ) -> Result<Self> {
        let page = StatsPage::new(1 << 16)?;
        let mut mover = Mover::new();
        mover.set_max_latency(max_latency);
        let mut channels = Vec::new();
        let mut stepper = None;
        if mode != Mode::Cpu {
            let (device, steps) = CoreDevice::stepped();
            channels.push(mover.add_channel(device.open_channel(CHANNEL)?));
            stepper = Some(steps);
        }
        let binding = Binding::new(mode, channels);
        let addresses = Addresses { source: PORT_MAC, destination: PEER_MAC };
        let (mut ports, mut tasks) = (Vec::new(), Vec::<Box<dyn Task>>::new());
        for (index, socket) in sockets.iter().enumerate() {
            let mut port = VhostPort::open("vhost", PORT_MAC, BackendConfig::new(socket))?;
            let name = format!("port{index}");
            let rx = port.rx_queue(0, setup(&mut mover, &page, &binding, &name))?;
            let tx = port.tx_queue(0, setup(&mut mover, &page, &binding, &name))?;
            let rules = Rules::new(Forward::Mac, addresses, 0).of_port(index);
            tasks.push(Box::new(Forwarding::new(rx, tx, rules)));
            ports.push(port);
        }
        let worker = Worker {
            tasks,
            burst: BURST,
            mover,
            cache: pool.cache(),
            clock: StageClock::private(),
            turns: Turns::on(&page, TURNS, sockets.len())?,
            mover_stats: page.block(STATS, &MOVER_COUNTERS)?,
            channel_stats: Vec::new(),
        };
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, pinned) = std::sync::mpsc::channel();
        let flag = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("bench-worker".into()).spawn(move || {
            // The receiver exists until the answer has arrived.
            let _ = ready.send(lcore::pin(core));
            worker.run(None, &flag)
        })?;
        let back_end = Self { stop, thread: Some(thread), stepper, page, _ports: ports };
        pinned.recv().context("the worker's thread has ended")??;
        Ok(back_end)
    }

    /// Lets the engine, if present, make some of its copies.
    #[inline(always)]
    pub(in crate::vhost) fn step(&mut self) {
        if let Some(stepper) = &mut self.stepper {
            stepper.step();
        }
    }

    /// Returns the copies made so far by the core and by the engine, as counted in mode `auto`. A worker updates these
    /// counters every 1024 rounds.
    pub(in crate::vhost) fn copies(&self) -> Result<[u64; 2]> {
        let counters = self.counters(STATS)?;
        let sum = |end: &str| {
            let of_class = |name: &str| name.starts_with("auto_") && name.ends_with(end);
            counters.iter().filter(|(name, _)| of_class(name)).map(|(_, value)| value).sum()
        };
        Ok([sum("_by_core"), sum("_by_engine")])
    }

    /// Returns the counters of turns in TSC ticks, which are kept while turns are measured: the longest turn, the time
    /// used for the packets of the first socket, and the time in which that socket had packets.
    pub(in crate::vhost) fn turns(&self) -> Result<[u64; 3]> {
        let counters = self.counters(TURNS)?;
        let value = |name: &str| counters.iter().find(|(n, _)| n == name).map(|(_, value)| *value);
        let names = ["longest_ticks", "port0_used_ticks", "port0_active_ticks"];
        let [Some(longest), Some(used), Some(active)] = names.map(value) else {
            bail!("no turns are counted")
        };
        Ok([longest, used, active])
    }

    fn counters(&self, name: &str) -> Result<Vec<(String, u64)>> {
        let blocks = Reader::open(self.page.fd())?.read()?;
        let block = blocks.into_iter().find(|block| block.name == name).context("no statistics")?;
        Ok(block.counters)
    }

    /// Stops the worker. Returns the number of packets that it could not finish.
    pub(in crate::vhost) fn stop(&mut self) -> Result<usize> {
        self.stop.store(true, Ordering::Relaxed);
        let Some(thread) = self.thread.take() else { return Ok(0) };
        while !thread.is_finished() {
            self.step();
            std::thread::yield_now();
        }
        thread.join().map_err(|_| anyhow!("the worker has panicked"))
    }
}

fn setup<'a>(mover: &'a mut Mover, stats: &'a StatsPage, binding: &Binding, port: &'a str) -> QueueSetup<'a> {
    QueueSetup { mover, stats, binding: binding.clone(), port }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        // Callers that need the result have called `stop`.
        let _ = self.stop();
    }
}
