//! Parses and prints port specifications: `KIND:ARGS,key=value,flag`.
//!
//! * `vhost:SOCKET` with the options `queues=N`, `client`, `owner=USER`, `group=GROUP`, `mode=MODE`, `FEATURE=off`,
//!   `max_memory=MIB` and `dmas=[txq0@wq0.0;rxq0@wq0.1]`
//! * `af_xdp:INTERFACE` with the options `queues=N`, `first=N`, `mode=MODE`, `ring_size=N`, `busy_poll=N`,
//!   `need_wakeup=off` and `promisc=off`
//! * `virtio-user:SOCKET` with the options `queues=N`, `queue_size=N`, `server`, `packed`, `mrg=off`, `event_idx=off`,
//!   `offloads=off`, `mtu=N`, `mac=MAC` and `peer=USER`
//! * `af_packet:INTERFACE` with the options `queues=N`, `fanout=MODE`, `slots=N`, `promisc=off` and `qdisc_bypass`
//! * `dpdk:DEVICE` with the options `queues=N`, `mtu=N`, `rx_desc=N`, `tx_desc=N`, `rss=off`, `rss=[ip,tcp,udp,sctp]`,
//!   `promisc=off` and `args=[KEY=VALUE,…]`
//! * `tap:NAME` with the options `queues=N`, `offloads=off`, `mac=MAC` and `mtu=N`
//! * `pcap:IN[,OUT][,loop,overwrite]`, where `-` or nothing stands for no file
//! * `gen:` with the options `size=N`, `count=N`, `rate=N`, `flows=N`, `verify=N` and `queues=N`
//! * `impair:PORT` with the options `loss=P%`, `reorder=P%`, `duplicate=P%`, `corrupt=P%`, `delay=TIME`, `jitter=TIME`,
//!   `rate=N` and `seed=N`, which are written before the inner `PORT`
//!
//! The MODE of af_packet is hash, lb, cpu, rollover, rnd or qm. A FEATURE that can be switched off for a vhost port is
//! packed, in_order, mrg, indirect, event_idx or offloads.
//!
//! Flags may have a value (`client=off`), and switches may omit it (`mrg`). Numbers may end in k, M or G. [`PortSpec`]
//! parses and prints specifications. Each port's own module opens the port.

mod af_packet;
mod af_xdp;
mod dpdk;
mod generator;
mod impair;
mod pcap;
mod tap;
mod text;
pub mod values;
mod vhost;
mod virtio_user;

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use crate::PortError;
use text::Pairs;

pub use af_packet::{AfPacketSpec, Fanout};
pub use af_xdp::{AfXdpSpec, XdpMode};
pub use dpdk::{DpdkSpec, Hash};
pub use generator::GenSpec;
pub use impair::{ImpairSpec, LineFaults, Share};
pub use pcap::PcapSpec;
pub use tap::TapSpec;
pub use text::split_fields;
pub use vhost::VhostSpec;
pub use virtio_user::VirtioUserSpec;

/// Maximum number of queue pairs of a port.
pub const MAX_QUEUES: u16 = 128;
/// Maximum number of flows of a generator: the number of values of its two varying address bytes.
pub const MAX_FLOWS: u32 = 1 << 16;
/// Length of the frame check sequence in bytes. Sizes on the command line include it, packet buffers do not.
pub const FCS: usize = 4;

/// Longest path of a Unix socket in bytes: `sun_path` without its terminating zero (unix(7)).
const MAX_SOCKET_PATH: usize = 107;
/// Longest interface name in bytes: IFNAMSIZ without its terminating zero.
const MAX_INTERFACE_NAME: usize = 15;
const KINDS: &str = "vhost, virtio-user, af_xdp, af_packet, dpdk, tap, pcap, gen or impair";

/// The specification of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortSpec {
    /// An interface of the kernel, through packet sockets.
    AfPacket(AfPacketSpec),
    /// An interface of the kernel, through XDP sockets.
    AfXdp(AfXdpSpec),
    /// A DPDK device.
    Dpdk(DpdkSpec),
    /// A traffic generator and verifying sink.
    Gen(GenSpec),
    /// Another port whose packets are deliberately lost, delayed or changed.
    Impair(ImpairSpec),
    /// Capture files.
    Pcap(PcapSpec),
    /// A TAP interface of the kernel.
    Tap(TapSpec),
    /// A vhost-user back end.
    Vhost(VhostSpec),
    /// A vhost-user front end.
    VirtioUser(VirtioUserSpec),
}

impl PortSpec {
    /// The kinds of ports in a file. Impairments are a key of a port there.
    pub const KINDS: [&str; 8] =
        ["vhost", "virtio-user", "af_xdp", "af_packet", "dpdk", "tap", "pcap", "gen"];

    /// Returns the port itself, or the inner port of an impairment port.
    pub fn bare(&self) -> &Self {
        match self {
            Self::Impair(spec) => spec.port.bare(),
            other => other,
        }
    }

    /// Number of queue pairs of the port.
    pub fn queues(&self) -> u16 {
        self.clone().queues_mut().map_or(1, |queues| *queues)
    }

    /// The number of queue pairs, for changes; `None` for a port that always has one.
    pub fn queues_mut(&mut self) -> Option<&mut u16> {
        match self {
            Self::AfPacket(spec) => Some(&mut spec.queues),
            Self::AfXdp(spec) => Some(&mut spec.queues),
            Self::Dpdk(spec) => Some(&mut spec.queues),
            Self::Gen(spec) => Some(&mut spec.queues),
            Self::Impair(spec) => spec.port.queues_mut(),
            Self::Pcap(_) => None,
            Self::Tap(spec) => Some(&mut spec.queues),
            Self::Vhost(spec) => Some(&mut spec.queues),
            Self::VirtioUser(spec) => Some(&mut spec.queues),
        }
    }

    /// Whether its queues make copies that an engine can perform: [`Port::offloads`](crate::Port::offloads).
    pub fn offloads(&self) -> bool {
        matches!(self.bare(), Self::Vhost(_))
    }
}

/// Names of kinds in DPDK, QEMU and the kernel.
const OTHER_NAMES: [(&str, &str); 8] = [
    ("vhost-user", "vhost"),
    ("net_vhost", "vhost"),
    ("virtio", "virtio-user"),
    ("virtio_user", "virtio-user"),
    ("xdp", "af_xdp"),
    ("packet", "af_packet"),
    ("tun", "tap"),
    ("pci", "dpdk"),
];

fn unknown_kind(kind: &str) -> String {
    match OTHER_NAMES.iter().find(|(name, _)| *name == kind) {
        Some((_, meant)) => format!("kind '{kind}' is not known, did you mean '{meant}'?"),
        None => format!("kind '{kind}' is not known, expected {KINDS}"),
    }
}

/// The error for a text without a kind, which may be an interface or a socket.
fn without_kind(text: &str) -> String {
    let expected = format!("expected KIND:ARGS with kind {KINDS}, such as af_packet:eth0");
    let is_interface =
        !text.is_empty() && !text.contains('/') && Path::new("/sys/class/net").join(text).exists();
    match text {
        _ if is_interface => {
            format!("'{text}' is an interface of this machine: expected af_xdp:{text} or af_packet:{text}")
        }
        path if path.starts_with('/') => {
            format!("'{path}' is a path: expected vhost:{path} for a guest's socket; {expected}")
        }
        _ => expected,
    }
}

/// The kinds whose first value is written without its key: kind, key, and the expected value.
const POSITIONAL: [(&str, &[&str], &str); 6] = [
    ("af_packet", &["interface"], "the interface's name, as in af_packet:eth0"),
    ("af_xdp", &["interface"], "the interface's name, as in af_xdp:eth0"),
    ("dpdk", &["device"], "the device's name, as in dpdk:0000:43:00.0 or dpdk:net_null0"),
    ("tap", &["interface"], "the interface's name, as in tap:tap0"),
    ("vhost", &["socket"], "the socket's path, as in vhost:/run/vm1.sock"),
    ("virtio-user", &["socket"], "the socket's path, as in virtio-user:/run/vm1.sock"),
];

impl PortSpec {
    /// Reads the keys of a port of this kind, as in a table of a file. Ports with impairments are written as the inner
    /// port there.
    ///
    /// # Errors
    /// An unknown kind, an unknown key, or a wrong value.
    pub fn of_kind<'de, D: Deserializer<'de>>(kind: &str, keys: D) -> Result<Self, D::Error> {
        let checked = match kind {
            "af_packet" => Ok(Self::AfPacket(AfPacketSpec::deserialize(keys)?)),
            "af_xdp" => Ok(Self::AfXdp(AfXdpSpec::deserialize(keys)?)),
            "dpdk" => Ok(Self::Dpdk(DpdkSpec::deserialize(keys)?)),
            "gen" => Ok(Self::Gen(GenSpec::deserialize(keys)?)),
            "pcap" => PcapSpec::deserialize(keys)?.check().map(Self::Pcap),
            "tap" => Ok(Self::Tap(TapSpec::deserialize(keys)?)),
            "vhost" => VhostSpec::deserialize(keys)?.check().map(Self::Vhost),
            "virtio-user" => Ok(Self::VirtioUser(VirtioUserSpec::deserialize(keys)?)),
            _ => Err(unknown_kind(kind)),
        };
        checked.map_err(D::Error::custom)
    }

    /// Returns the kind, and the keys that differ from their defaults with their values, as in a table of a file. For a
    /// port with impairments these are the inner port's.
    pub fn keys(&self) -> (&'static str, Vec<(String, Option<String>)>) {
        let text = self.bare().to_string();
        let (kind, rest) = text.split_once(':').unwrap_or_default();
        let kind = Self::KINDS.into_iter().find(|known| *known == kind).unwrap_or_default();
        let fields = split_fields(rest).unwrap_or_default();
        let positional = match kind {
            "pcap" => pcap::FILES,
            kind => POSITIONAL.iter().find(|(known, ..)| *known == kind).map_or(&[][..], |(_, keys, _)| keys),
        };
        (kind, Pairs::parse(&fields, positional).unwrap_or_default().into_owned())
    }

    /// Returns the JSON Schema of the keys of a kind.
    pub fn schema_of_kind(kind: &str, generator: &mut SchemaGenerator) -> Schema {
        match kind {
            "af_packet" => AfPacketSpec::json_schema(generator),
            "af_xdp" => AfXdpSpec::json_schema(generator),
            "dpdk" => DpdkSpec::json_schema(generator),
            "gen" => GenSpec::json_schema(generator),
            "pcap" => PcapSpec::json_schema(generator),
            "tap" => TapSpec::json_schema(generator),
            "vhost" => VhostSpec::json_schema(generator),
            _ => VirtioUserSpec::json_schema(generator),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let (kind, rest) = text.split_once(':').ok_or_else(|| without_kind(text))?;
        if kind == "impair" {
            return ImpairSpec::parse(rest).map(Self::Impair);
        }
        let fields = split_fields(rest)?;
        match kind {
            "pcap" => return PcapSpec::parse(&fields).map(Self::Pcap),
            // `gen:` alone means all defaults.
            "gen" if fields == [""] => return Pairs::default().port(kind),
            _ => {}
        }
        let Some(&(_, key, expected)) = POSITIONAL.iter().find(|(known, ..)| *known == kind) else {
            return Pairs::parse(&fields, &[])?.port(kind);
        };
        match fields[..] {
            ["", ..] | [] => Err(format!("expected {expected}")),
            // A first field such as `queues=2` is a misplaced option. A path may contain an '='.
            [first, ..] if !first.contains('/') && first.contains('=') => {
                Err(format!("it begins with '{first}', expected {expected}"))
            }
            _ => Pairs::parse(&fields, key)?.port(kind),
        }
    }
}

impl FromStr for PortSpec {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        Self::parse(text).map_err(|expected| PortError::Syntax { found: text.into(), expected })
    }
}

impl fmt::Display for PortSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AfPacket(spec) => spec.fmt(f),
            Self::AfXdp(spec) => spec.fmt(f),
            Self::Dpdk(spec) => spec.fmt(f),
            Self::Gen(spec) => spec.fmt(f),
            Self::Impair(spec) => spec.fmt(f),
            Self::Pcap(spec) => spec.fmt(f),
            Self::Tap(spec) => spec.fmt(f),
            Self::Vhost(spec) => spec.fmt(f),
            Self::VirtioUser(spec) => spec.fmt(f),
        }
    }
}

fn flag(set: bool, text: &str) -> &str {
    if set { text } else { "" }
}

fn unless<T: fmt::Display + PartialEq>(
    f: &mut fmt::Formatter<'_>,
    key: &str,
    value: T,
    default: T,
) -> fmt::Result {
    if value == default { Ok(()) } else { write!(f, ",{key}={value}") }
}

fn given(f: &mut fmt::Formatter<'_>, key: &str, value: Option<impl fmt::Display>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, ",{key}={value}"))
}

/// Returns the default number of queue pairs.
const fn one() -> u16 {
    1
}

/// Returns the default of a switch that is on.
const fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests;
