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
//! * `tap:NAME` with the options `queues=N` and `offloads=off`
//! * `pcap:IN[,OUT][,loop]`, where `-` or nothing stands for no file
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
mod vhost;
mod virtio_user;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use nix::unistd::{Group, User};

use crate::PortError;

pub use af_packet::{AfPacketSpec, Fanout};
pub use af_xdp::{AfXdpSpec, XdpMode};
pub use dpdk::{DpdkSpec, Hash};
pub use generator::GenSpec;
pub use impair::{ImpairSpec, Share};
pub use pcap::PcapSpec;
pub use tap::TapSpec;
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

impl FromStr for PortSpec {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let error = |expected: String| PortError::Syntax { found: text.into(), expected };
        let (kind, rest) = text
            .split_once(':')
            .ok_or_else(|| error(format!("expected KIND:ARGS with kind {KINDS}, such as af_packet:eth0")))?;
        if kind == "impair" {
            return ImpairSpec::parse(rest).map(Self::Impair).map_err(error);
        }
        let fields = split_fields(rest).map_err(error)?;
        let parsed = match kind {
            "af_packet" => AfPacketSpec::parse(&fields).map(Self::AfPacket),
            "af_xdp" => AfXdpSpec::parse(&fields).map(Self::AfXdp),
            "dpdk" => DpdkSpec::parse(&fields).map(Self::Dpdk),
            "gen" => GenSpec::parse(&fields).map(Self::Gen),
            "pcap" => PcapSpec::parse(&fields).map(Self::Pcap),
            "tap" => TapSpec::parse(&fields).map(Self::Tap),
            "vhost" => VhostSpec::parse(&fields).map(Self::Vhost),
            "virtio-user" => VirtioUserSpec::parse(&fields).map(Self::VirtioUser),
            _ => Err(format!("kind '{kind}' is not known, expected {KINDS}")),
        };
        parsed.map_err(error)
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

/// Returns the comma-separated fields of `text`. Commas within brackets do not separate fields.
///
/// # Errors
/// Brackets that are not closed or not opened.
pub fn split_fields(text: &str) -> Result<Vec<&str>, String> {
    let (mut fields, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' | ']' if inside == (c == '[') => {
                return Err(format!("'{c}' is not expected after '{}'", &text[..at]));
            }
            '[' | ']' => inside = !inside,
            ',' if !inside => {
                fields.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("'[' is not closed, expected ']'".into());
    }
    fields.push(&text[start..]);
    Ok(fields)
}

/// Returns the mandatory first field of a kind of port, and the other fields.
fn first<'a>(fields: &'a [&'a str], expected: &str) -> Result<(&'a str, &'a [&'a str]), String> {
    match fields {
        ["", ..] | [] => Err(format!("expected {expected}")),
        // A first field such as `queues=2` is a misplaced option. A path may contain an '='.
        [first, ..] if !first.contains('/') && first.contains('=') => {
            Err(format!("it begins with '{first}', expected {expected}"))
        }
        [first, rest @ ..] => Ok((first, rest)),
    }
}

fn socket_path(path: &str) -> Result<PathBuf, String> {
    match path.len() {
        ..=MAX_SOCKET_PATH => Ok(path.into()),
        found => Err(format!("socket path has {found} bytes, expected at most {MAX_SOCKET_PATH}")),
    }
}

/// Checks the name of a network interface against the kernel's rules.
fn interface_name(name: &str) -> Result<String, String> {
    let bad = |c: char| c == '/' || c == ':' || c.is_whitespace() || c.is_control();
    if name.len() > MAX_INTERFACE_NAME {
        let found = name.len();
        return Err(format!(
            "interface name '{name}' has {found} bytes, expected at most {MAX_INTERFACE_NAME}"
        ));
    }
    if name.contains(bad) || matches!(name, "." | "..") {
        return Err(format!("interface name '{name}': expected one without '/', ':' and blanks"));
    }
    Ok(name.into())
}

/// Returns the text inside the brackets, if there are any.
fn inner(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

/// Converts a number whose range was checked to a type that covers the range.
fn narrow<T: TryFrom<u64>>(value: u64) -> T
where
    T::Error: fmt::Debug,
{
    T::try_from(value).expect("the caller's range fits the type")
}

/// Option keys, each with its value if it has one.
struct Options<'a>(Vec<(&'a str, Option<&'a str>)>);

impl<'a> Options<'a> {
    fn parse(fields: &[&'a str], known: &[&str]) -> Result<Self, String> {
        let mut list: Vec<(&str, Option<&str>)> = Vec::with_capacity(fields.len());
        for field in fields {
            let (key, value) = match field.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (*field, None),
            };
            if !known.contains(&key) {
                return Err(format!("key '{key}' is not known, expected {}", known.join(", ")));
            }
            if list.iter().any(|(other, _)| *other == key) {
                return Err(format!("key '{key}' is given twice, expected it once"));
            }
            list.push((key, value));
        }
        Ok(Self(list))
    }

    /// Returns `None` if the key is not given, and `Some(None)` if it is given without a value.
    fn find(&self, key: &str) -> Option<Option<&'a str>> {
        self.0.iter().find(|(other, _)| *other == key).map(|(_, value)| *value)
    }

    fn switch(&self, key: &str, default: bool) -> Result<bool, String> {
        match self.find(key) {
            None => Ok(default),
            Some(None | Some("on")) => Ok(true),
            Some(Some("off")) => Ok(false),
            Some(Some(found)) => Err(format!("{key}={found}: expected on or off")),
        }
    }

    fn number(&self, key: &str, default: u64, range: std::ops::RangeInclusive<u64>) -> Result<u64, String> {
        Ok(self.optional_number(key, range)?.unwrap_or(default))
    }

    fn optional_number(
        &self,
        key: &str,
        range: std::ops::RangeInclusive<u64>,
    ) -> Result<Option<u64>, String> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let found = value.unwrap_or_default();
        match parse_number(found).filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                Err(format!("{key}={found}: expected a number from {} to {}", range.start(), range.end()))
            }
        }
    }

    /// Returns a user id, given by name or number.
    fn user(&self, key: &str) -> Result<Option<u32>, String> {
        let by_name = |name: &str| User::from_name(name).ok().flatten().map(|user| user.uid.as_raw());
        self.id(key, "user", by_name)
    }

    /// Returns a group id, given by name or number.
    fn group(&self, key: &str) -> Result<Option<u32>, String> {
        let by_name = |name: &str| Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw());
        self.id(key, "group", by_name)
    }

    fn id(
        &self,
        key: &str,
        what: &str,
        by_name: impl FnOnce(&str) -> Option<u32>,
    ) -> Result<Option<u32>, String> {
        let Some(value) = self.find(key) else { return Ok(None) };
        let found = value.unwrap_or_default();
        // The highest id means "no id".
        let number = found.parse().ok().filter(|id| *id != u32::MAX);
        match number.or_else(|| by_name(found)) {
            Some(id) => Ok(Some(id)),
            None => Err(format!("{key}={found}: there is no such {what}, expected its name or number")),
        }
    }

    fn queues(&self) -> Result<u16, String> {
        Ok(narrow(self.number("queues", 1, 1..=MAX_QUEUES.into())?))
    }
}

/// Parses a decimal number that may end in k, M or G.
fn parse_number(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 1_000),
        b'M' => (&text[..text.len() - 1], 1_000_000),
        b'G' => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    // `parse` alone would also accept "+1".
    let number: u64 = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())??;
    number.checked_mul(unit)
}

#[cfg(test)]
mod tests;
