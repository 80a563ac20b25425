//! What a switch shall do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use offcore_dma::Mode;
use offcore_gpu::device::{Launch, Memory};
use offcore_gpu::layout::Kind;
use offcore_gpu::patterns::Patterns;
use offcore_mem::Hugepages;
use offcore_port::Port;
use offcore_port::spec::PortSpec;
use offcore_tcp::proto::{Algorithm, Prefix, Route as IpRoute};
use offcore_wire::MacAddr;

use crate::bridge::BridgeConfig;
use crate::engines::dma_map::DmaMap;
use crate::engines::simulator::Simulator;
use crate::forwarding::forward::{Forward, Topology};
use crate::host::apps::Hosted;
use crate::mirror::Mirror;
use crate::pipeline::OnHit;
use crate::worker::idle::Idle;

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
    /// They are a TCP/IP host's, with an application on it ([`host`](crate::host)).
    Host(Hosting),
    /// They are worked on in pipelines, as l2fwd-nv does ([`pipeline`](crate::pipeline)).
    Pipelines(Working),
}

impl Run {
    /// A forwarding mode between neighbours.
    pub fn forward(mode: Forward) -> Self {
        Self::Forward { mode, topology: Topology::Paired, eth_peers: EthPeers::new() }
    }

    /// Whether reports tell of a host's connections.
    pub(super) fn tells_of_connections(&self) -> bool {
        matches!(self, Self::Host(Hosting { connections: true, .. }))
    }

    /// The one of `ports` ports that the packets of `port` go to, where it is always the same one and both take part.
    pub(super) fn peer(&self, port: usize, ports: usize) -> Option<usize> {
        match self {
            Self::Forward { topology, .. } => Some(topology.peer(port, ports)),
            Self::Bridge(_) | Self::Host(_) => None,
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
            Self::Forward { .. } | Self::Bridge(_) | Self::Host(_) => false,
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

/// The configuration of a switch that copies. The defaults are dpdk-dma's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copying {
    /// Which port's packets go where.
    pub topology: Topology,
    /// Destinations; addresses are rewritten as `mac` does, or not at all where there are none.
    pub eth_peers: Option<EthPeers>,
    /// Ports that take part, one bit each, where not all do; those beyond the 64th do.
    pub ports: Option<u64>,
    /// Packets in flight in the copy stage of one queue, and packets that a ring has room for: 1 to 32768.
    pub ring_size: usize,
    /// Packets whose copies are submitted together, 1 to 64.
    pub batch: usize,
    /// Bytes of a packet, FCS included; longer ones are dropped. 0: any.
    pub max_frame: usize,
    /// Packets with fewer bytes, FCS included, are copied by the core.
    pub min_copy: usize,
    /// Bytes that are copied of every packet at least.
    pub at_least: usize,
    /// Whether lcores come in twos, of which the first receives and copies and the second sends.
    pub two_lcores: bool,
}

impl Default for Copying {
    fn default() -> Self {
        Self {
            topology: Topology::Loop,
            eth_peers: Some(EthPeers::new()),
            ports: None,
            ring_size: 2048,
            batch: 32,
            max_frame: 0,
            min_copy: 0,
            at_least: 0,
            two_lcores: false,
        }
    }
}

impl Copying {
    /// Whether a port takes part.
    pub(super) fn has(&self, port: usize) -> bool {
        port >= 64 || self.ports.is_none_or(|ports| ports >> port & 1 != 0)
    }
}

/// The configuration of a host.
#[derive(Clone, Debug)]
pub struct Hosting {
    /// The interfaces, by port.
    pub ifaces: Vec<HostIface>,
    pub app: Hosted,
    /// How connections avoid congestion whose application does not choose it.
    pub congestion: Algorithm,
    /// Whether reports tell of its connections.
    pub connections: bool,
}

/// One interface of a host.
#[derive(Clone, Debug, Default)]
pub struct HostIface {
    /// Its station address, where it is not the port's: a TAP port's is the kernel's.
    pub mac: Option<MacAddr>,
    /// The MTU. The default is the MTU of the port's interface.
    pub mtu: Option<u16>,
    /// The VLAN, 1 to 4094; `None` for untagged packets.
    pub vlan: Option<u16>,
    /// Whether a DHCP client gets an address, routes and an MTU.
    pub dhcp: bool,
    /// Whether router advertisements give IPv6 addresses and routes.
    pub slaac: bool,
    pub addresses: Vec<Prefix>,
    pub routes: Vec<IpRoute>,
}

impl HostIface {
    /// Whether the network gives it addresses.
    pub fn is_configured(&self) -> bool {
        self.dhcp || self.slaac
    }
}

/// What processes bursts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// Nothing: packets pass unchanged.
    None,
    /// The sending lcore.
    #[default]
    Cpu,
    /// A device.
    Device(Launch),
}

impl Workload {
    /// The name, also in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cpu => "cpu",
            Self::Device(launch) => launch.name(),
        }
    }
}

/// The configuration of a switch of pipelines.
#[derive(Clone, Debug)]
pub struct Working {
    /// Which port's packets go where.
    pub topology: Topology,
    pub workload: Workload,
    /// The devices, assigned to pipelines round-robin; empty except with [`Workload::Device`].
    pub devices: Vec<String>,
    /// Where a device processes packets.
    pub memory: Memory,
    /// The work, which determines a packet's result.
    pub kind: Kind,
    /// Whether to swap the MAC addresses.
    pub swap: bool,
    /// Bytes before the payload.
    pub skip: u32,
    /// Bytes to split off before the payload, if packets are split.
    pub split_at: Option<usize>,
    /// Minimum nanoseconds per packet.
    pub forced_ns: u32,
    pub patterns: Option<Arc<Patterns>>,
    /// Maximum packets per burst, 1 to 4096.
    pub burst: usize,
    /// How long a packet waits for its burst to fill.
    pub burst_timeout: Duration,
    /// Maximum bursts in flight per pipeline, a power of two from 2 to 4096.
    pub slots: usize,
    /// Blocks per pipeline, 1 to 64.
    pub blocks: u32,
    /// Threads per block, 1 to 1024.
    pub threads: u32,
    /// Time without an answer after which a device is considered hung.
    pub timeout: Duration,
    /// What happens to packets by their result.
    pub on_hit: OnHit,
    /// The port that [`OnHit::Steer`] sends to. It is used for nothing else, and comes after all forwarding ports.
    pub elsewhere: Option<usize>,
    /// Page size of the burst rings.
    pub hugepages: Hugepages,
    pub profile: bool,
}

impl Default for Working {
    fn default() -> Self {
        Self {
            topology: Topology::Loop,
            workload: Workload::Cpu,
            devices: Vec::new(),
            memory: Memory::Host,
            kind: Kind::Nothing,
            swap: true,
            skip: 42,
            split_at: None,
            forced_ns: 0,
            patterns: None,
            burst: 64,
            burst_timeout: Duration::from_micros(100),
            slots: 64,
            blocks: 4,
            threads: 256,
            timeout: Duration::from_secs(1),
            on_hit: OnHit::Pass,
            elsewhere: None,
            hugepages: Hugepages::Auto,
            profile: false,
        }
    }
}

/// What a configuration and a port must agree on, before the port is opened.
#[derive(Clone, Debug)]
pub struct PortShape {
    /// The port as it was written.
    pub name: String,
    /// Queue pairs.
    pub queues: u16,
    /// Whether its queues make copies that an engine can take.
    pub offloads: bool,
}

impl From<&PortSpec> for PortShape {
    fn from(spec: &PortSpec) -> Self {
        Self { name: spec.to_string(), queues: spec.queues(), offloads: spec.offloads() }
    }
}

impl From<&Box<dyn Port>> for PortShape {
    fn from(port: &Box<dyn Port>) -> Self {
        Self { name: port.name().into(), queues: port.queues(), offloads: port.offloads() }
    }
}
