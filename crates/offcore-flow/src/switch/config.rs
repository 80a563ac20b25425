//! What a switch shall do, and why it cannot.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use offcore_dma::Mode;
use offcore_gpu::device::DeviceError;
use offcore_mem::{BURST, Pool};
use offcore_port::{Port, PortError};
use offcore_stats::lcore::{self, LcoreError};
use offcore_stats::page::PageError;
use offcore_wire::{MacAddr, ethernet};

use super::{Copying, Devices, Working, bridging, copying, mirroring};
use crate::bridge::BridgeConfig;
use crate::dma_map::{DmaMap, Half};
use crate::forward::{Forward, Topology};
use crate::idle::Idle;
use crate::mirror::Mirror;
use crate::simulator::Simulator;

/// Destination addresses by TX port; those of other ports are 02:00:00:00:00:PORT.
pub type EthPeers = BTreeMap<usize, MacAddr>;

/// What a switch shall do.
#[derive(Clone, Debug)]
pub struct SwitchConfig {
    /// What becomes of packets.
    pub run: Run,
    /// Ports whose packets are sent to another one, too; these come after all ports that are forwarded between.
    pub mirrors: Vec<Mirror>,
    /// Who makes the copies of the queues that `dma` maps.
    pub mode: Mode,
    /// Queues and their channels.
    pub dma: DmaMap,
    /// Simulated devices that channels may name.
    pub simulators: Vec<Simulator>,
    pub lcores: Vec<usize>,
    /// Packets a round takes from one queue, 1 to 64.
    pub burst: usize,
    /// Application work per packet in nanoseconds.
    pub work_ns: u64,
    /// SCHED_FIFO priority of the workers.
    pub rt_priority: Option<i32>,
    pub idle: Idle,
    /// In mode `auto`, how long a packet may take through an engine, from submission to publication.
    pub max_latency: Option<Duration>,
}

impl Default for SwitchConfig {
    fn default() -> Self {
        Self {
            run: Run::forward(Forward::Io),
            mirrors: Vec::new(),
            mode: Mode::Offload,
            dma: DmaMap::default(),
            simulators: Vec::new(),
            lcores: vec![0],
            burst: 32,
            work_ns: 0,
            rt_priority: None,
            idle: Idle::Poll,
            max_latency: None,
        }
    }
}

/// What becomes of packets.
#[derive(Clone, Debug)]
pub enum Run {
    /// They go from port to port in one of testpmd's modes.
    Forward {
        /// The mode.
        mode: Forward,
        /// Which port's packets go where.
        topology: Topology,
        /// Destinations for `mac`, `txonly` and `flowgen`.
        eth_peers: EthPeers,
    },
    /// They go to where their destination was seen, or to all other ports: a learning switch ([`bridge`](crate::bridge)).
    Bridge(BridgeConfig),
    /// They are copied into new buffers first, as dpdk-dma does ([`copy`](crate::copy)).
    Copy(Copying),
    /// They are worked on in pipelines, as l2fwd-nv does ([`pipeline`](crate::pipeline)).
    Pipelines(Working),
}

impl Run {
    /// A forwarding mode between neighbours.
    pub fn forward(mode: Forward) -> Self {
        Self::Forward { mode, topology: Topology::Paired, eth_peers: EthPeers::new() }
    }

    /// The one of `ports` ports that the packets of `port` go to, where it is always the same one and both take part.
    pub(super) fn peer(&self, port: usize, ports: usize) -> Option<usize> {
        match self {
            Self::Forward { topology, .. } => Some(topology.peer(port, ports)),
            Self::Bridge(_) => None,
            Self::Copy(copying) => {
                let peer = copying.topology.peer(port, ports);
                (copying.has(port) && copying.has(peer)).then_some(peer)
            }
            Self::Pipelines(working) => Some(working.topology.peer(port, ports)),
        }
    }

    /// The workers of route number `index`: who receives, and who sends.
    pub(super) fn workers(&self, index: usize, lcores: usize) -> (usize, usize) {
        let paired = match self {
            Self::Forward { .. } | Self::Bridge(_) => false,
            Self::Copy(copying) => copying.two_lcores,
            Self::Pipelines(_) => lcores > 1,
        };
        match paired {
            true => (index % (lcores / 2) * 2, index % (lcores / 2) * 2 + 1),
            false => (index % lcores, index % lcores),
        }
    }

    /// The port that only packets with a match are sent to.
    pub(super) fn elsewhere(&self) -> Option<usize> {
        if let Self::Pipelines(working) = self { working.elsewhere } else { None }
    }
}

/// A field of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the configurations document them")]
pub enum Field {
    Batch,
    Bidirectional,
    Burst,
    Devices,
    Dma,
    Elsewhere,
    EthPeers,
    Flows,
    Frame,
    Lcores,
    LinkSpeed,
    Memory,
    Mirrors,
    OnHit,
    Pool,
    PortMask,
    Ports,
    RingSize,
    Simulators,
    Sizes,
    SplitAt,
    Vlans,
}

impl Field {
    /// An error about the field: what was found, and what was expected.
    pub(crate) fn refuse<T>(self, text: impl Into<String>) -> Result<T, SwitchError> {
        Err(SwitchError::Config { field: self, text: text.into() })
    }

    /// Refuses the first of `found` that is none of `ports` ports.
    pub(crate) fn check_ports(
        self,
        ports: usize,
        mut found: impl Iterator<Item = usize>,
    ) -> Result<(), SwitchError> {
        match found.find(|&port| port >= ports) {
            Some(port) => self.refuse(format!("port {port}: {}", counted(ports))),
            None => Ok(()),
        }
    }
}

/// How many ports there are, in words.
pub(super) fn counted(ports: usize) -> String {
    match ports {
        1 => "there is one port, number 0".into(),
        _ => format!("there are {ports} ports, counted from 0"),
    }
}

/// Why a switch cannot be put together.
#[derive(Debug, thiserror::Error)]
pub enum SwitchError {
    /// The configuration contradicts itself, or what there is.
    #[error("{field:?}: {text}")]
    Config {
        /// Where.
        field: Field,
        /// What was found, and what was expected.
        text: String,
    },
    /// A port.
    #[error(transparent)]
    Port(#[from] PortError),
    /// The statistics page.
    #[error(transparent)]
    Stats(#[from] PageError),
    /// A device that works on packets.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Pinning a worker.
    #[error(transparent)]
    Lcore(#[from] LcoreError),
    /// Starting a worker.
    #[error("starting the worker of lcore {lcore}: {source}")]
    Thread {
        lcore: usize,
        source: std::io::Error,
    },
}

impl SwitchConfig {
    /// Refuses what cannot be with so many ports, whatever they are.
    ///
    /// # Errors
    /// [`SwitchError::Config`] for a field, [`SwitchError::Lcore`] for an lcore that is not to be had.
    pub fn check(&self, ports: usize) -> Result<(), SwitchError> {
        if ports == 0 {
            return Field::Ports.refuse("none, expected one at least");
        }
        if !(1..=BURST).contains(&self.burst) {
            return Field::Burst.refuse(format!("{}, expected 1 to {BURST}", self.burst));
        }
        check_lcores(&self.lcores)?;
        let count = mirroring::forwarding(self, ports);
        Field::Mirrors.check_ports(count, self.mirrors.iter().map(|mirror| mirror.port))?;
        Field::Mirrors.check_ports(ports, self.mirrors.iter().map(|mirror| mirror.to))?;
        Field::Dma.check_ports(ports, self.dma.entries.iter().filter_map(|entry| entry.port))?;
        self.check_simulators()?;
        match &self.run {
            Run::Forward { eth_peers, .. } => Field::EthPeers.check_ports(count, eth_peers.keys().copied()),
            Run::Bridge(bridge) => bridging::check(bridge, count),
            Run::Copy(copying) => copying::check(self, copying, count),
            Run::Pipelines(working) => working.check(self.lcores.len(), ports),
        }
    }

    /// A simulated device is asked for once, and every one that a channel names is asked for.
    fn check_simulators(&self) -> Result<(), SwitchError> {
        let mut names = BTreeSet::new();
        if let Some(twice) = self.simulators.iter().find(|simulator| !names.insert(simulator.name())) {
            return Field::Simulators
                .refuse(format!("{} twice, expected it once, with all its keys", twice.name()));
        }
        let devices = self.dma.entries.iter().flat_map(|entry| &entry.channels).filter_map(|channel| {
            channel.split_once(':').map(|(device, _)| device).filter(|device| device.starts_with("dsa-sim"))
        });
        match devices.into_iter().find(|device| !names.contains(*device)) {
            Some(device) => Field::Simulators.refuse(format!("none is {device}, which a channel names")),
            None => Ok(()),
        }
    }

    /// Refuses what cannot be with these ports, packet buffers and devices.
    pub(super) fn check_opened(
        &self,
        ports: &[Box<dyn Port>],
        pool: &Pool,
        devices: &Devices,
    ) -> Result<(), SwitchError> {
        self.check(ports.len())?;
        let longest = pool.longest() + ethernet::FCS_LEN;
        match &self.run {
            Run::Forward { mode: Forward::Txonly { frame } | Forward::Flowgen { frame }, .. }
                if *frame > longest =>
            {
                return too_long(*frame, longest);
            }
            Run::Bridge(_) => {
                bridging::check_queues(
                    &ports[..mirroring::forwarding(self, ports.len())],
                    self.lcores.len(),
                )?;
            }
            Run::Pipelines(working) => working.check_opened(ports, devices)?,
            Run::Forward { .. } | Run::Copy(_) => {}
        }
        check_dma(self, ports)
    }
}

/// Refuses lcores that workers cannot run on.
pub(crate) fn check_lcores(lcores: &[usize]) -> Result<(), SwitchError> {
    if lcores.is_empty() {
        return Field::Lcores.refuse("none, expected one at least");
    }
    let available = lcore::available()?;
    match lcores.iter().find(|lcore| !available.contains(lcore)) {
        Some(&found) => Err(LcoreError::Unavailable { found, available }.into()),
        None => Ok(()),
    }
}

/// Packets of so many bytes take more of the packet buffers than one packet may.
pub(crate) fn too_long<T>(found: usize, most: usize) -> Result<T, SwitchError> {
    Field::Pool.refuse(format!(
        "too small for packets of {found} bytes, expected at most {most}: a quarter of the packet buffers"
    ))
}

/// Each queue that is mapped has copies to offload.
fn check_dma(config: &SwitchConfig, ports: &[Box<dyn Port>]) -> Result<(), SwitchError> {
    for entry in &config.dma.entries {
        let mut named = entry.port.map_or(0..ports.len(), |port| port..port + 1);
        // A copy stage is around any port's RX queue.
        let stage = matches!(config.run, Run::Copy(_)) && entry.half == Half::Rx;
        let makes_copies = |port: &dyn Port| (port.offloads() || stage) && entry.queue < port.queues();
        if !named.any(|port| ports.get(port).is_some_and(|port| makes_copies(&**port))) {
            return Field::Dma.refuse(format!(
                "{}q{} of {}, which has no such queue with copies to offload (vhost ports have)",
                if entry.half == Half::Rx { "rx" } else { "tx" },
                entry.queue,
                entry.port.map_or("any port".into(), |port| format!("port {port}")),
            ));
        }
    }
    Ok(())
}
