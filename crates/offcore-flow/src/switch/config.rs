//! Configuration of a switch.

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
use offcore_port::stats::PortNames;
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

/// Destination addresses by TX port. The default for a port is 02:00:00:00:00:PORT.
pub type EthPeers = BTreeMap<usize, MacAddr>;

/// Configuration of a switch.
#[derive(Clone, Debug)]
pub struct SwitchConfig {
    /// Treatment of packets.
    pub run: Run,
    /// Port mirrors. Their target ports come after all ports that take part in forwarding.
    pub mirrors: Vec<Mirror>,
    /// Choice of core or engine for the copies of mapped queues.
    pub mode: Mode,
    /// Assignment of channels to queues.
    pub dma: DmaMap,
    /// Simulated devices that channels may name.
    pub simulators: Vec<Simulator>,
    pub lcores: Vec<usize>,
    /// Names of the ports in statistics and messages.
    pub names: PortNames,
    /// Maximum packets per queue and round, 1 to 64.
    pub burst: usize,
    /// Application work per packet in nanoseconds.
    pub work_ns: u64,
    /// SCHED_FIFO priority of the workers.
    pub rt_priority: Option<i32>,
    pub idle: Idle,
    /// In mode `auto`, the maximum time of a packet in an engine, from submission to publication.
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
            names: PortNames::default(),
            burst: 32,
            work_ns: 0,
            rt_priority: None,
            idle: Idle::Poll,
            max_latency: None,
        }
    }
}

/// Treatment of packets.
#[derive(Clone, Debug)]
pub enum Run {
    /// Packets go from port to port in a forwarding mode of testpmd.
    Forward {
        /// The forwarding mode.
        mode: Forward,
        /// Mapping of ports to their peers.
        topology: Topology,
        /// Destination addresses for `mac`, `txonly` and `flowgen`.
        eth_peers: EthPeers,
    },
    /// Packets go to the port behind which their destination was seen, or to all other ports: a learning switch
    /// ([`bridge`](crate::bridge)).
    Bridge(BridgeConfig),
    /// Packets are first copied into new buffers, as in dpdk-dma ([`copy`](crate::copy)).
    Copy(Copying),
    /// Packets go to a TCP/IP host with an application ([`host`](crate::host)).
    Host(Hosting),
    /// Packets are processed in pipelines, as in l2fwd-nv ([`pipeline`](crate::pipeline)).
    Pipelines(Working),
}

impl Run {
    /// Returns a forwarding mode between paired ports.
    pub fn forward(mode: Forward) -> Self {
        Self::Forward { mode, topology: Topology::Paired, eth_peers: EthPeers::new() }
    }

    /// Whether reports contain a host's connections.
    pub(super) fn reports_connections(&self) -> bool {
        matches!(self, Self::Host(Hosting { connections: true, .. }))
    }

    /// Returns the port, below `ports`, to which packets of `port` go, if it is always the same port and both take
    /// part.
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

    /// Returns the workers of route `index`: the receiving worker and the sending worker.
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

    /// Returns the port that only gets packets with a match.
    pub fn elsewhere(&self) -> Option<usize> {
        if let Self::Pipelines(working) = self { working.elsewhere } else { None }
    }
}

/// Configuration of a switch with copy stages. The defaults are the same as for dpdk-dma.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copying {
    /// Mapping of ports to their peers.
    pub topology: Topology,
    /// Destination addresses, which are written as in mode `mac`. With `None`, addresses are unchanged.
    pub eth_peers: Option<EthPeers>,
    /// Bit mask of the ports that take part; `None` for all. Ports from number 64 on always take part.
    pub ports: Option<u64>,
    /// Maximum packets in flight in the copy stage of one queue, and size of a ring in packets: 1 to 32768.
    pub ring_size: usize,
    /// Packets whose copies are submitted together, 1 to 64.
    pub batch: usize,
    /// Maximum bytes of a packet, including the FCS. Longer packets are dropped. 0 means no limit.
    pub max_frame: usize,
    /// Packets with fewer bytes, including the FCS, are copied by the core.
    pub min_copy: usize,
    /// Minimum number of bytes to copy for every packet.
    pub at_least: usize,
    /// Whether lcores work in pairs: the first receives and copies, the second sends.
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

/// Configuration of a host.
#[derive(Clone, Debug)]
pub struct Hosting {
    /// The interfaces, by port.
    pub ifaces: Vec<HostIface>,
    pub app: Hosted,
    /// Congestion control of connections whose application does not choose an algorithm.
    pub congestion: Algorithm,
    /// Whether reports contain its connections.
    pub connections: bool,
}

/// One interface of a host.
#[derive(Clone, Debug, Default)]
pub struct HostIface {
    /// Its station address, if different from the port's. The address of a TAP port is the kernel's.
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
    /// Whether the network assigns its addresses.
    pub fn is_configured(&self) -> bool {
        self.dhcp || self.slaac
    }
}

/// The processor of bursts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Workload {
    /// No processor: packets pass unchanged.
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

/// Configuration of a switch with pipelines.
#[derive(Clone, Debug)]
// fields-ok: plain configuration
pub struct Working {
    /// Mapping of ports to their peers.
    pub topology: Topology,
    pub workload: Workload,
    /// The devices, assigned to pipelines round-robin; empty except with [`Workload::Device`].
    pub devices: Vec<String>,
    /// The memory in which a device processes packets.
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
    /// Treatment of packets by their result.
    pub on_hit: OnHit,
    /// The port to which [`OnHit::Steer`] sends. It has no other use, and comes after all forwarding ports.
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

/// Properties of a port that must match a configuration, known before the port is opened.
#[derive(Clone, Debug)]
pub struct PortShape {
    /// The port as written in the configuration.
    pub name: String,
    /// Queue pairs.
    pub queues: u16,
    /// Whether its queues make copies that an engine can make instead.
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
