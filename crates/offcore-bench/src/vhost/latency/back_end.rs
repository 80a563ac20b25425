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
use offcore_flow::worker::Worker;
use offcore_flow::worker::stats::{AUTO, ClassCounts, MoverBlocks};
use offcore_flow::worker::turns::{PORT_TURNS, PortTurnCounts, TURNS, TurnCounts, Turns};
use offcore_mem::Pool;
use offcore_port::stats::PortNames;
use offcore_port::vhost::VhostPort;
use offcore_port::{Port, QueueSetup};
use offcore_stats::page::{Block, Reader, Snapshot, StatsPage};
use offcore_stats::{Family, StageClock, lcore};
use offcore_vhost::BackendConfig;

use crate::BURST;
use crate::guests::guest::{PEER_MAC, PORT_MAC};
use crate::method::copier::CHANNEL;

/// Vhost ports and their worker, which forwards until it is stopped.
#[derive(Debug)]
pub(in crate::vhost) struct BackEnd {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<usize>>,
    stepper: Option<Stepper>,
    page: StatsPage,
    /// Keeps the counters on the page when the worker has ended.
    _blocks: Vec<Block>,
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
            turns: Turns::on(&page, core, &PortNames::default(), sockets.len())?,
            mover_stats: MoverBlocks::on(&page, core)?,
            channel_stats: Vec::new(),
        };
        let blocks = page.blocks();
        let stop = Arc::new(AtomicBool::new(false));
        let (ready, pinned) = std::sync::mpsc::channel();
        let flag = Arc::clone(&stop);
        let thread = std::thread::Builder::new().name("bench-worker".into()).spawn(move || {
            // The receiver exists until the answer has arrived.
            let _ = ready.send(lcore::pin(core));
            worker.run(None, &flag)
        })?;
        let back_end = Self { stop, thread: Some(thread), stepper, page, _blocks: blocks, _ports: ports };
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
        let classes = self.blocks(&AUTO)?.iter().map(ClassCounts::decode).collect::<Vec<_>>();
        Ok([classes.iter().map(|of| of.by_core).sum(), classes.iter().map(|of| of.by_engine).sum()])
    }

    /// Returns the counters of turns in TSC ticks, which are kept while turns are measured: the longest turn, the time
    /// used for the packets of the first socket, and the time in which that socket had packets.
    pub(in crate::vhost) fn turns(&self) -> Result<[u64; 3]> {
        let (turns, ports) = (self.blocks(&TURNS)?, self.blocks(&PORT_TURNS)?);
        let (Some(turns), Some(port)) = (turns.first(), ports.first()) else { bail!("no turns are counted") };
        let PortTurnCounts { used_ticks, active_ticks, .. } = PortTurnCounts::decode(port);
        Ok([TurnCounts::decode(turns).longest_ticks, used_ticks, active_ticks])
    }

    /// Returns the blocks of a family, in the order of their creation.
    fn blocks(&self, family: &Family) -> Result<Vec<Snapshot>> {
        let blocks = Reader::open(self.page.fd())?.read()?;
        Ok(blocks.into_iter().filter(|block| block.is_of(family)).collect())
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
