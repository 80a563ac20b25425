//! `[switch]` and `[copy]`: forwarding between ports.

use std::time::Duration;

use offcore_flow::bridge::BridgeConfig;
use offcore_flow::switch::{Copying, EthPeers, Run};
use offcore_flow::{Forward as FlowMode, Topology};
use offcore_port::spec::values::{Number, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::names::{Key, Names, Refusal};
use crate::values::{Choice, Choices, choice};

/// Forwarding mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forward {
    Io,
    Mac,
    Macswap,
    L2,
    Rxonly,
    Txonly,
    Flowgen,
    /// As `[copy]`, with its defaults and between paired ports.
    Copy,
}

impl Choices for Forward {
    const ALL: &'static [(&'static str, Self)] = &[
        ("io", Self::Io),
        ("mac", Self::Mac),
        ("macswap", Self::Macswap),
        ("l2", Self::L2),
        ("rxonly", Self::Rxonly),
        ("txonly", Self::Txonly),
        ("flowgen", Self::Flowgen),
        ("copy", Self::Copy),
    ];
}

impl Forward {
    /// Whether packets are generated.
    fn generates(self) -> bool {
        matches!(self, Self::Txonly | Self::Flowgen)
    }
}

/// `[switch]`: forwarding between ports in a mode of testpmd, or a learning switch.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Switch {
    /// A forwarding mode of testpmd, l2 (a learning switch between all ports), or copy (as the section copy with its
    /// defaults). Default: io.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Forward>")]
    pub forward: Option<Forward>,
    /// Output port of a port's packets: its neighbour (the first and the second port, and so on), the next port, or the
    /// same port. Default: paired.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Topology>")]
    pub topology: Option<Topology>,
    /// With l2: time after which the entry of a silent station is removed; 0s: learn nothing, flood all packets.
    /// Default: 300s.
    #[serde(
        default,
        deserialize_with = "Ageing::optional",
        serialize_with = "Ageing::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "Ageing")]
    pub ageing: Option<Duration>,
    /// With l2: maximum number of addresses in the forwarding table. Default: 16384.
    #[serde(default, deserialize_with = "FdbSize::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "FdbSize")]
    pub addresses: Option<usize>,
    /// With l2: maximum packets per second of one port that are flooded; the others are dropped.
    #[serde(default, deserialize_with = "Rate::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Rate")]
    pub flood_limit: Option<usize>,
    /// With txonly and flowgen: length of packets in bytes, including FCS. Default: 64.
    #[serde(default, deserialize_with = "Frame::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Frame")]
    pub frame: Option<usize>,
    /// With copy: whether the source address becomes the TX port's, and the destination the port's eth_peer. Default:
    /// true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac_updating: Option<bool>,
    /// Simulated application work per received packet.
    #[serde(
        default,
        deserialize_with = "WorkTime::optional",
        serialize_with = "WorkTime::write",
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(with = "WorkTime")]
    pub work: Option<Duration>,
}

type Ageing = Time<0, 1_000_000_000_000_000>;
type WorkTime = Time<1, 1_000_000_000>;
type FdbSize = Number<1, { 1 << 20 }>;
type Rate = Number<1, 1_000_000_000>;
type Frame = Number<46, 65553>;

impl Switch {
    /// Default frame length of `txonly` and `flowgen`.
    const FRAME: usize = 64;

    /// Returns the forwarding mode.
    pub fn mode(&self) -> Forward {
        self.forward.unwrap_or(Forward::Io)
    }

    /// Returns the treatment of packets. `bridge` has the rules of the ports; other settings are added to it.
    ///
    /// # Errors
    /// Settings that have no effect in this mode.
    pub fn run(&self, names: Names, eth_peers: EthPeers, bridge: BridgeConfig) -> Result<Run, Refusal> {
        self.check(names, &eth_peers, &bridge)?;
        let frame = self.frame.unwrap_or(Self::FRAME);
        let topology = self.topology.unwrap_or(Topology::Paired);
        let mode = match self.mode() {
            Forward::Io => FlowMode::Io,
            Forward::Mac => FlowMode::Mac,
            Forward::Macswap => FlowMode::Macswap,
            Forward::Rxonly => FlowMode::Rxonly,
            Forward::Txonly => FlowMode::Txonly { frame },
            Forward::Flowgen => FlowMode::Flowgen { frame },
            Forward::Copy => {
                let eth_peers = self.mac_updating.unwrap_or(true).then_some(eth_peers);
                return Ok(Run::Copy(Copying { topology, eth_peers, ..Copying::default() }));
            }
            Forward::L2 => {
                return Ok(Run::Bridge(BridgeConfig {
                    ageing: self.ageing.unwrap_or(BridgeConfig::AGEING),
                    addresses: self.addresses.unwrap_or(BridgeConfig::ADDRESSES),
                    flood_limit: self.flood_limit.map(|pps| pps as u64),
                    ..bridge
                }));
            }
        };
        Ok(Run::Forward { mode, topology, eth_peers })
    }

    fn check(&self, names: Names, eth_peers: &EthPeers, bridge: &BridgeConfig) -> Result<(), Refusal> {
        let mode = self.mode();
        let found = names.with(Key::Forward, mode.name_of());
        let refuse = |key: Key, text: String| Err(Refusal { key, text });
        if self.frame.is_some() && !mode.generates() {
            let wanted = names.with(Key::Forward, "txonly or flowgen");
            let text = format!(
                "{} is for {wanted}, found {found}, which generates no packets",
                names.of(Key::Frame)
            );
            return refuse(Key::Frame, text);
        }
        if !eth_peers.is_empty() && !mode.generates() && !matches!(mode, Forward::Mac | Forward::Copy) {
            let wanted = names.with(Key::Forward, "mac, copy, txonly or flowgen");
            let text = format!("{} is for {wanted}, found {found}, which sets none", names.of(Key::EthPeer));
            return refuse(Key::EthPeer, text);
        }
        if self.mac_updating.is_some() && mode != Forward::Copy {
            let (updating, wanted) = (names.of(Key::MacUpdating), names.with(Key::Forward, "copy"));
            return refuse(Key::MacUpdating, format!("{updating} is for {wanted}, found {found}"));
        }
        if self.topology.is_some() && mode == Forward::L2 {
            let text = format!(
                "{} cannot be used with {found}, which forwards by learned addresses",
                names.of(Key::Topology)
            );
            return refuse(Key::Topology, text);
        }
        if self.work.is_some() && mode == Forward::Txonly {
            let text =
                format!("{} is work per received packet, and {found} receives none", names.of(Key::Work));
            return refuse(Key::Work, text);
        }
        let learning = [
            (Key::Ageing, self.ageing.is_some()),
            (Key::FdbSize, self.addresses.is_some()),
            (Key::FloodLimit, self.flood_limit.is_some()),
            (Key::Vlan, !bridge.vlans.is_empty()),
            (Key::Fdb, !bridge.stations.is_empty()),
        ];
        match learning.into_iter().find(|&(_, given)| given && mode != Forward::L2) {
            Some((key, _)) => {
                let wanted = names.with(Key::Forward, "l2");
                refuse(
                    key,
                    format!("{} is for {wanted}, found {found}, which learns no addresses", names.of(key)),
                )
            }
            None => Ok(()),
        }
    }
}

/// `[copy]`: every packet is copied into a new buffer and sent, as in dpdk-dma.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Copy {
    /// Output port of a port's packets: the same port, its neighbour, or the next port. Default: loop.
    #[serde(default, with = "choice", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Choice<Topology>")]
    pub topology: Option<Topology>,
    /// Whether the source address is set to the TX port's, and the destination to its eth_peer. Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac_updating: Option<bool>,
    /// Maximum packets in flight per queue, and size of the ring between two lcores. Default: 2048.
    #[serde(default, deserialize_with = "RingSize::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "RingSize")]
    pub ring_size: Option<usize>,
    /// Packets per submitted batch of copies. Default: 32.
    #[serde(default, deserialize_with = "Batch::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Batch")]
    pub batch: Option<usize>,
    /// Maximum packet length in bytes, including FCS; longer packets are dropped. Default: unlimited.
    #[serde(default, deserialize_with = "MaxFrame::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "MaxFrame")]
    pub max_frame: Option<usize>,
    /// Minimum packet length in bytes, including FCS, for copies by an engine. Default: 0.
    #[serde(default, deserialize_with = "MinCopy::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "MinCopy")]
    pub min_copy: Option<usize>,
    /// Minimum number of bytes copied per packet. Default: 0.
    #[serde(default, deserialize_with = "AtLeast::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "AtLeast")]
    pub at_least: Option<usize>,
    /// 1: a queue's packets stay on one lcore; 2: the first lcore of a pair receives and copies, the second sends.
    /// Default: 2 with an even number of lcores.
    #[serde(default, deserialize_with = "PerPort::optional", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "PerPort")]
    pub lcores_per_port: Option<usize>,
}

type RingSize = Number<1, 32768>;
type Batch = Number<1, { offcore_mem::BURST as u64 }>;
type MaxFrame = Number<64, 65_561>;
type MinCopy = Number<0, 65_561>;
type AtLeast = Number<0, 32768>;
type PerPort = Number<1, 2>;

impl Copy {
    /// Burst size of a queue, unless more packets are submitted together. It is dpdk-dma's default.
    const BURST: usize = 32;

    /// Returns the burst size: packets that are submitted together must be received together.
    pub fn burst(&self) -> usize {
        self.batch.map_or(Self::BURST, |batch| batch.max(Self::BURST))
    }

    /// Returns the configuration for `lcores` workers and the ports in the bit mask; `None` selects all ports.
    pub fn copying(&self, ports: Option<u64>, eth_peers: EthPeers, lcores: usize) -> Copying {
        let default = Copying::default();
        Copying {
            topology: self.topology.unwrap_or(default.topology),
            eth_peers: self.mac_updating.unwrap_or(true).then_some(eth_peers),
            ports,
            ring_size: self.ring_size.unwrap_or(default.ring_size),
            batch: self.batch.unwrap_or(default.batch),
            max_frame: self.max_frame.unwrap_or(default.max_frame),
            min_copy: self.min_copy.unwrap_or(default.min_copy),
            at_least: self.at_least.unwrap_or(default.at_least),
            two_lcores: self.lcores_per_port.map_or(lcores.is_multiple_of(2), |lcores| lcores == 2),
        }
    }
}
