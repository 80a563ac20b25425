//! A switch: assembles, starts and stops ports, engines and workers.

mod bridging;
mod check;
mod config;
mod copying;
mod hosting;
mod mirroring;
mod mtu;
mod working;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::sync::Arc;

use offcore_dma::mover::MAX_CHANNELS_PER_QUEUE;
use offcore_dma::{Binding, ChannelId, Mode, Mover};
use offcore_mem::Pool;
use offcore_port::stats::PortNames;
use offcore_port::vhost::OneCopy;
use offcore_port::{Port, RxQueue, TxQueue};
use offcore_stats::page::{Block, Reader, StatsPage};
use offcore_stats::stage::STAGES;
use offcore_stats::{Label, StageClock, tsc};
use offcore_wire::MacAddr;

use crate::engines::Engines;
use crate::engines::dma_map::{DmaMap, QueueHalf};
use crate::forwarding::forward::{Addresses, Forward, Rewrite, Source};
use crate::forwarding::guest_pair::GuestPair;
use crate::forwarding::{Forwarding, Rules};
use crate::host::watched::HostState;
use crate::report::Reporter;
use crate::worker::Worker;
use crate::worker::idle::{IDLE, Idle, Sleeper};
use crate::worker::stats::{CHANNEL, MoverBlocks};
use crate::worker::threads::Threads;
use crate::worker::turns::Turns;
use bridging::Bridging;
use mirroring::Target;
use mtu::HostMtu;

pub use crate::error::{Field, SwitchError};
pub use config::{Copying, EthPeers, HostIface, Hosting, PortShape, Run, SwitchConfig, Working, Workload};
pub use working::Devices;

/// Bytes of the statistics page.
const STATS_PAGE: usize = 4 << 20;

/// A running switch.
#[derive(Debug)]
pub struct Running {
    ports: Vec<Box<dyn Port>>,
    workers: Threads,
    page: StatsPage,
    /// All blocks on the page, for reports after the workers have ended.
    _blocks: Vec<Block>,
    bridging: Option<Bridging>,
    /// The MTUs of a host's interfaces.
    mtus: Vec<HostMtu>,
    notes: Vec<String>,
    names: PortNames,
    host_state: Arc<HostState>,
    /// Devices that process packets.
    devices: Devices,
    profiling: bool,
}

/// The path of one queue through the switch, and the workers on it.
#[derive(Clone, Copy, Debug)]
struct Route {
    worker: usize,
    /// The worker that sends. It differs from `worker` if a ring is between them.
    sender: usize,
    rx_port: usize,
    tx_port: usize,
    queue: u16,
}

impl Route {
    /// Returns the two queue halves that may have channels, and their workers.
    fn halves(&self) -> [(usize, QueueHalf, usize); 2] {
        [(self.rx_port, QueueHalf::Rx, self.worker), (self.tx_port, QueueHalf::Tx, self.sender)]
    }
}

/// Returns a route for every queue that has a queue at the other end. Routes are assigned to workers round-robin.
fn routes(config: &SwitchConfig, ports: &[Box<dyn Port>]) -> Vec<Route> {
    match config.run {
        Run::Bridge(_) => return bridging::routes(ports, config.lcores.len()),
        Run::Host(_) => return hosting::routes(config.lcores.len()),
        _ => {}
    }
    let mut routes = Vec::new();
    for rx_port in 0..ports.len() {
        let Some(tx_port) = config.run.peer(rx_port, ports.len()) else { continue };
        for queue in 0..ports[rx_port].queues().min(ports[tx_port].queues()) {
            let (worker, sender) = config.run.workers(routes.len(), config.lcores.len());
            routes.push(Route { worker, sender, rx_port, tx_port, queue });
        }
    }
    routes
}

/// Returns a warning if a port gets its own packets back while other ports send to one another.
fn alone(run: &Run, ports: usize) -> Option<String> {
    let own = |port: &usize| run.peer(*port, ports) == Some(*port);
    let alone = (0..ports).find(own).filter(|_| !(0..ports).all(|port| own(&port)))?;
    Some(format!(
        "warning: port{alone} has no neighbour, so its packets go back to it: name an even number of ports, or \
         --port-topology chained or loop"
    ))
}

/// Returns a warning for queues without a queue at the other end. Nothing is received from these, and a guest that
/// spreads its flows over all of its queues loses some flows.
fn unpaired_queue_warnings(run: &Run, queues: &[u16]) -> Vec<String> {
    let ports = (0..queues.len()).filter_map(|rx| Some((rx, run.peer(rx, queues.len())?)));
    let dead = ports.filter(|&(rx, tx)| queues[rx] > queues[tx]);
    dead.map(|(rx, tx)| {
        let (has, found, first) = (queues[rx], queues[tx], queues[tx]);
        let which = if has - found == 1 { format!("queue {first}") } else { format!("queues {first} to {}", has - 1) };
        format!(
            "warning: port{rx} has {has} queues and port{tx} has {found}: nothing is received from {which} of port{rx}; \
             give both the same queues=N"
        )
    })
    .collect()
}

/// Returns the mapping with every channel name resolved.
fn resolved(dma: &DmaMap, engines: &mut Engines) -> Result<DmaMap, SwitchError> {
    let mut dma = dma.clone();
    for entry in &mut dma.entries {
        let mut channels = Vec::new();
        for name in &entry.channels {
            let found = engines.resolve(name).map_err(SwitchError::Channel)?;
            for name in found {
                if !channels.contains(&name) {
                    channels.push(name);
                }
            }
        }
        if channels.len() > MAX_CHANNELS_PER_QUEUE {
            return Field::Dma.refuse(format!(
                "{} channels for one queue, expected at most {MAX_CHANNELS_PER_QUEUE}: name them one by one",
                channels.len()
            ));
        }
        entry.channels = channels;
    }
    Ok(dma)
}

/// Returns the number of workers that use each channel.
fn sharers(dma: &DmaMap, routes: &[Route]) -> BTreeMap<String, usize> {
    let mut workers: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
    for route in routes {
        for (port, half, worker) in route.halves() {
            for name in dma.channels(port, half, route.queue) {
                workers.entry(name.clone()).or_default().insert(worker);
            }
        }
    }
    workers.into_iter().map(|(name, workers)| (name, workers.len())).collect()
}

struct Assembly<'a> {
    config: &'a SwitchConfig,
    pool: &'static Pool,
    dma: DmaMap,
    sharers: BTreeMap<String, usize>,
    engines: Engines,
    page: StatsPage,
    workers: Vec<(Worker, Vec<(String, ChannelId)>)>,
    targets: Vec<Target>,
    host_state: Arc<HostState>,
    /// Declared after their queues, so that ports are dropped last.
    ports: Vec<Box<dyn Port>>,
}

/// Assembles the switch and starts its workers.
///
/// # Errors
/// [`SwitchError`]; no worker runs then.
pub fn start(
    config: &SwitchConfig,
    ports: Vec<Box<dyn Port>>,
    pool: &'static Pool,
) -> Result<Running, SwitchError> {
    start_with(config, ports, pool, Devices::open(config, pool)?)
}

/// Like [`start`], with devices that are already open. Devices must be opened before ports that use their memory.
///
/// # Errors
/// The same as for [`start`].
pub fn start_with(
    config: &SwitchConfig,
    ports: Vec<Box<dyn Port>>,
    pool: &'static Pool,
    mut devices: Devices,
) -> Result<Running, SwitchError> {
    config.check_opened(&ports, pool, &devices)?;
    let page = StatsPage::new(STATS_PAGE)?;
    let count = mirroring::forwarding(config, ports.len());
    let routes = routes(config, &ports[..count]);
    let mirrors = mirroring::routes(config, &routes);
    let node = pool.numa_node();
    let mut engines = Engines::new(&config.simulators, &config.lcores, node, config.idle).with_pool(pool);
    let dma = resolved(&config.dma, &mut engines)?;
    let sharers = sharers(&dma, &[&routes[..], &mirrors].concat());
    let (workers, targets) = (Vec::new(), Vec::new());
    let host_state = Arc::new(HostState::new(config.lcores.len(), config.run.reports_connections()));
    let mut assembly =
        Assembly { config, ports, pool, dma, sharers, engines, page, workers, targets, host_state };
    for &lcore in &config.lcores {
        assembly.add_worker(lcore, pool)?;
    }
    let (mut bridging, mut mtus) = (None, Vec::new());
    match &config.run {
        Run::Bridge(bridge) => bridging = Some(assembly.add_bridges(bridge, &routes, count)?),
        Run::Forward { mode, eth_peers, .. } => {
            for route in &routes {
                assembly.add_stream(*mode, eth_peers, route)?;
            }
        }
        Run::Copy(copying) => {
            for route in &routes {
                assembly.add_copying(copying, route)?;
            }
        }
        Run::Host(hosting) => mtus = assembly.add_host(hosting)?,
        Run::Pipelines(working) => {
            for (index, route) in routes.iter().enumerate() {
                assembly.add_pipeline(working, index, route, &mut devices)?;
            }
        }
    }
    assembly.add_mirrors(&mirrors)?;
    let mut notes = shared_lcores(&config.lcores, &assembly.engines.helper_lcores());
    let queues = assembly.ports[..count].iter().map(|port| port.queues());
    notes.extend(alone(&config.run, count));
    notes.extend(unpaired_queue_warnings(&config.run, &queues.collect::<Vec<_>>()));
    notes.extend(assembly.engines.notes().iter().cloned());
    notes.extend(devices.notes());
    notes.extend(mtus.iter().filter_map(HostMtu::warning));
    let Assembly { ports, page, workers, host_state, .. } = assembly;
    let workers = workers.into_iter().zip(&config.lcores);
    let threads = Threads::default();
    let mut running = Running {
        ports,
        workers: threads,
        page,
        _blocks: Vec::new(),
        bridging,
        mtus,
        notes,
        names: config.names.clone(),
        host_state,
        devices,
        profiling: false,
    };
    running.begin_profile(config)?;
    for ((worker, _), &lcore) in workers {
        let sleeper = match config.idle {
            Idle::Poll => None,
            Idle::Sleep => Some(Sleeper::new(running.page.block(&IDLE, &[(Label::Lcore, &lcore)])?)),
        };
        running.workers.start(lcore, config.rt_priority, |stop| worker.run(sleeper, stop))?;
    }
    running._blocks = running.page.blocks();
    Ok(running)
}

impl Assembly<'_> {
    fn add_worker(&mut self, lcore: usize, pool: &'static Pool) -> Result<(), SwitchError> {
        let stages = self.page.block(&STAGES, &[(Label::Lcore, &lcore)])?;
        let mut mover = Mover::new();
        mover.set_max_latency(self.config.max_latency.map(tsc::ticks));
        let worker = Worker {
            tasks: Vec::new(),
            burst: self.config.burst,
            mover,
            cache: pool.cache(),
            clock: StageClock::new(stages),
            turns: Turns::on(&self.page, lcore, &self.config.names, self.ports.len())?,
            mover_stats: MoverBlocks::on(&self.page, lcore)?,
            channel_stats: Vec::new(),
        };
        self.workers.push((worker, Vec::new()));
        Ok(())
    }

    fn add_stream(
        &mut self,
        mode: Forward,
        eth_peers: &EthPeers,
        &Route { worker, rx_port, tx_port, queue, .. }: &Route,
    ) -> Result<(), SwitchError> {
        let addresses = addresses(eth_peers, tx_port, &*self.ports[tx_port]);
        let source = Source::of(mode, &addresses).or_else(|error| Field::Frame.refuse(error))?;
        let rules = Rules::new(mode, addresses, self.work()).with_source(source).of_port(rx_port);
        let rx = self.open_rx(worker, rx_port, queue)?;
        let tx = self.open_tx(worker, tx_port, queue)?;
        let forwards = matches!(mode, Forward::Io | Forward::Mac | Forward::Macswap);
        let worker = &mut self.workers[worker].0;
        // Packets from a port to itself do not go from guest to guest.
        let guests = match forwards && rx_port != tx_port {
            true => OneCopy::between(rx, tx, &mut worker.mover),
            false => Err((rx, tx)),
        };
        worker.tasks.push(match guests {
            Ok(guests) => Box::new(GuestPair::new(guests, rules)),
            Err((rx, tx)) => Box::new(Forwarding::new(rx, tx, rules)),
        });
        Ok(())
    }

    /// Adds a task that forwards packets of `port` between two queues of a worker. The packets get `addresses`, if
    /// given.
    fn forward(
        &mut self,
        worker: usize,
        port: usize,
        rx: Box<dyn RxQueue>,
        tx: Box<dyn TxQueue>,
        addresses: Option<Addresses>,
    ) {
        let rewrite = addresses.map_or(Rewrite::None, Rewrite::Mac);
        let rules = Rules::sending(rewrite, self.work()).of_port(port);
        self.workers[worker].0.tasks.push(Box::new(Forwarding::new(rx, tx, rules)));
    }

    /// Returns the application work per packet, in TSC ticks.
    fn work(&self) -> u64 {
        (self.config.work_ns as f64 * tsc::hz() as f64 / 1e9) as u64
    }

    /// Returns the channels of one queue, and opens them for its worker if necessary.
    fn binding(
        &mut self,
        worker: usize,
        port: usize,
        half: QueueHalf,
        queue: u16,
    ) -> Result<Binding, SwitchError> {
        let mut channels = Vec::new();
        // copy-ok: names, once at the start
        let names = self.dma.channels(port, half, queue).to_vec();
        // The core needs no channel: every queue can fall back on it.
        for name in names.iter().filter(|name| *name != "cpu") {
            channels.push(self.channel(worker, name)?);
        }
        let mode = if channels.is_empty() { Mode::Cpu } else { self.config.mode };
        Ok(Binding { weight: self.dma.weight(port, half, queue), ..Binding::new(mode, channels) })
    }

    fn channel(&mut self, worker: usize, name: &str) -> Result<ChannelId, SwitchError> {
        let lcore = self.config.lcores[worker];
        let (worker, open) = &mut self.workers[worker];
        if let Some((_, id)) = open.iter().find(|(known, _)| known == name) {
            return Ok(*id);
        }
        let workers = self.sharers.get(name).copied().unwrap_or(1);
        let opened = self.engines.open_channel(name, workers);
        let (channel, sharing) = opened.map_err(SwitchError::Channel)?;
        let id = worker.mover.add_channel(channel);
        open.push((name.into(), id));
        let sharing = sharing.name();
        let labels: [(_, &dyn Display); 3] =
            [(Label::Lcore, &lcore), (Label::Channel, &name), (Label::Sharing, &sharing)];
        let block = self.page.block(&CHANNEL, &labels)?;
        worker.channel_stats.push((id, block));
        Ok(id)
    }
}

/// Returns the addresses that mode `mac` writes into packets sent on port `index`.
fn addresses(eth_peers: &EthPeers, index: usize, port: &dyn Port) -> Addresses {
    let destination = eth_peers.get(&index).copied().unwrap_or(MacAddr::local(index as u8));
    Addresses { source: port.mac(), destination }
}

/// Returns warnings about lcores with several spinning threads, which compete for the core.
fn shared_lcores(workers: &[usize], helpers: &[usize]) -> Vec<String> {
    let mut threads: BTreeMap<usize, usize> = BTreeMap::new();
    for &lcore in workers.iter().chain(helpers) {
        *threads.entry(lcore).or_default() += 1;
    }
    let shared = threads.into_iter().filter(|&(_, n)| n > 1);
    shared
        .map(|(lcore, n)| {
            format!("warning: lcore {lcore} is shared by {n} spinning threads: rates measure the scheduler, not the data path")
        })
        .collect()
}

impl Running {
    /// Returns the names of the ports.
    pub fn names(&self) -> &PortNames {
        &self.names
    }

    /// Returns notes for the user about the setup.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the ports.
    pub fn ports(&self) -> &[Box<dyn Port>] {
        &self.ports
    }

    /// Lets ports, bridges and interface MTUs follow changes. Call it about every 20 ms.
    pub fn tend(&mut self) {
        self.ports.iter_mut().for_each(|port| port.tend());
        self.bridging.iter_mut().for_each(Bridging::tend);
        self.mtus.iter_mut().for_each(|mtu| mtu.tend(&self.ports));
    }

    /// Returns a reporter for the switch's statistics page.
    ///
    /// # Errors
    /// If the page cannot be mapped.
    pub fn reporter(&self) -> Result<Reporter, SwitchError> {
        let reader = Reader::open(self.page.fd())?;
        Ok(Reporter::new(reader, self.names.clone(), Arc::clone(&self.host_state)))
    }

    /// Tells profilers that the run begins, if profiling is enabled.
    fn begin_profile(&mut self, config: &SwitchConfig) -> Result<(), SwitchError> {
        if matches!(&config.run, Run::Pipelines(working) if working.profile) {
            self.devices.each().try_for_each(|device| device.profile(true))?;
            self.profiling = true;
        }
        Ok(())
    }

    /// Whether every worker is still running.
    pub fn is_running(&self) -> bool {
        self.workers.all_run()
    }

    /// Stops the workers after they have finished the packets in flight. Returns the number of unfinished packets.
    pub fn stop(&mut self) -> usize {
        let left = self.workers.stop();
        self.bridging.iter().for_each(Bridging::publish);
        if std::mem::take(&mut self.profiling) {
            for error in self.devices.each().filter_map(|device| device.profile(false).err()) {
                tracing::warn!("the profiler was not told that the run has ended: {error}");
            }
        }
        left
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::forwarding::forward::Topology;

    #[test]
    fn unpaired_queues_are_reported() {
        let notes = |topology, queues: &[u16]| {
            unpaired_queue_warnings(
                &Run::Forward { mode: Forward::Io, topology, eth_peers: EthPeers::new() },
                queues,
            )
        };
        assert_eq!(notes(Topology::Paired, &[2, 2, 4]), [""; 0]);
        let [note] = &notes(Topology::Paired, &[2, 1])[..] else { panic!("one port has a queue too many") };
        assert!(note.contains("queue 1 of port0") && note.contains("queues=N"), "{note}");
        let notes = notes(Topology::Chained, &[4, 2, 1]);
        assert_eq!(notes.len(), 2);
        assert!(notes[0].contains("queues 2 to 3 of port0") && notes[1].contains("port1"), "{notes:?}");
    }
}
