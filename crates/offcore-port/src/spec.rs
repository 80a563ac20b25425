//! Ports as they are written: `KIND:ARGS,key=value,flag`.
//!
//! | kind | written as |
//! |---|---|
//! | vhost | `vhost:SOCKET[,queues=N,client,FEATURE=off…,dmas=[txq0@wq0.0;rxq0@wq0.1]]` |
//! | virtio-user | `virtio-user:SOCKET[,queues=N,queue_size=N,server,packed,mrg=off,event_idx=off,mac=MAC]` |
//! | tap | `tap:NAME[,queues=N,offloads=off]` |
//! | pcap | `pcap:IN[,OUT][,loop]`, where `-` or nothing stands for no file |
//! | gen | `gen:[size=N,count=N,rate=N,flows=N,verify=N,queues=N]` |
//!
//! A FEATURE that a vhost port need not offer is packed, in_order, mrg, indirect, event_idx or offloads.
//!
//! A flag may be given a value (`client=off`), a switch may go without (`mrg`). Numbers may end in k, M or G.
//! [`PortSpec`] reads and writes them; each port's own module opens it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use offcore_wire::ethernet::MacAddr;
use offcore_wire::{probe, template};

use crate::PortError;

/// Queue pairs that a port can have, at most.
pub const MAX_QUEUES: u16 = 128;
/// Flows that a generator can have, at most: what its two varied address bytes tell apart.
pub const MAX_FLOWS: u32 = 1 << 16;
/// Bytes of the frame check sequence, which sizes on the command line include and packet buffers do not.
pub const FCS: usize = 4;

/// Longest path of a Unix socket in bytes: `sun_path` less its final zero (unix(7)).
const MAX_SOCKET_PATH: usize = 107;
/// Longest interface name in bytes: IFNAMSIZ less its final zero.
const MAX_INTERFACE_NAME: usize = 15;
const KINDS: &str = "vhost, virtio-user, tap, pcap or gen";

/// A port as it was described.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PortSpec {
    /// A traffic generator and verifying sink.
    Gen(GenSpec),
    /// Capture files.
    Pcap(PcapSpec),
    /// A TAP interface of the kernel.
    Tap(TapSpec),
    /// A vhost-user back end.
    Vhost(VhostSpec),
    /// A vhost-user front end.
    VirtioUser(VirtioUserSpec),
}

/// `gen:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenSpec {
    /// Bytes of a frame, FCS included.
    pub size: usize,
    /// Packets to send, all queues together; `None`: without end.
    pub count: Option<u64>,
    /// Packets per second, all queues together; `None`: as many as are asked for.
    pub rate: Option<u64>,
    /// Flows that the packets belong to in turn.
    pub flows: u32,
    /// Content is checked on one packet in this many; 0: on none. Sequence and length are always checked.
    pub verify: u32,
    /// Queue pairs.
    pub queues: u16,
}

/// `pcap:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcapSpec {
    /// The file to receive from.
    pub input: Option<PathBuf>,
    /// The file to write what is sent to.
    pub output: Option<PathBuf>,
    /// Begin the input again when it ends.
    pub repeat: bool,
}

/// `tap:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapSpec {
    /// Name of the interface.
    pub name: String,
    /// Queue pairs.
    pub queues: u16,
    /// Open checksums and TCP packets to be segmented, from and to the kernel.
    pub offloads: bool,
}

/// `vhost:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSpec {
    /// The socket.
    pub path: PathBuf,
    /// Queue pairs offered.
    pub queues: u16,
    /// Connect to the socket instead of listening on it.
    pub client: bool,
    /// Offer packed virtqueues (RING_PACKED).
    pub packed: bool,
    /// Offer in-order use of buffers (IN_ORDER).
    pub in_order: bool,
    /// Offer mergeable buffers (MRG_RXBUF).
    pub mrg: bool,
    /// Offer indirect descriptors (INDIRECT_DESC).
    pub indirect: bool,
    /// Offer the event index (EVENT_IDX).
    pub event_idx: bool,
    /// Offer open checksums and TCP packets to be segmented, both ways (CSUM, HOST_TSO4, HOST_TSO6, HOST_ECN,
    /// GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN).
    pub offloads: bool,
    /// Channels of the virtqueues in the vhost guide's syntax, without the brackets.
    pub dmas: Option<String>,
}

/// `virtio-user:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtioUserSpec {
    /// The socket.
    pub path: PathBuf,
    /// Queue pairs wanted.
    pub queues: u16,
    /// Descriptors of a virtqueue.
    pub queue_size: u16,
    /// Listen on the socket instead of connecting to it.
    pub server: bool,
    /// Accept packed virtqueues (RING_PACKED).
    pub packed: bool,
    /// Accept mergeable buffers (MRG_RXBUF).
    pub mrg: bool,
    /// Accept the event index (EVENT_IDX).
    pub event_idx: bool,
    /// Ethernet address; `None`: made from the port's description.
    pub mac: Option<MacAddr>,
}

impl FromStr for PortSpec {
    type Err = PortError;

    fn from_str(text: &str) -> Result<Self, PortError> {
        let error = |expected: String| PortError::Syntax { found: text.into(), expected };
        let (kind, rest) =
            text.split_once(':').ok_or_else(|| error(format!("expected KIND:ARGS with kind {KINDS}")))?;
        let fields = split_fields(rest).map_err(error)?;
        let parsed = match kind {
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

impl GenSpec {
    fn parse(fields: &[&str]) -> Result<Self, String> {
        // `gen:` alone takes every default.
        let fields = if fields == [""] { &[] } else { fields };
        let options = Options::parse(fields, &["size", "count", "rate", "flows", "verify", "queues"])?;
        let sizes = (probe::MIN_FRAME_LEN + FCS) as u64..=(template::MAX_FRAME_LEN + FCS) as u64;
        let verify = match options.find("verify") {
            None | Some(None | Some("on")) => 1,
            Some(Some("off")) => 0,
            Some(Some(_)) => options.number("verify", 1, 1..=u32::MAX.into())?,
        };
        Ok(Self {
            size: narrow(options.number("size", 64, sizes)?),
            count: options.optional_number("count", 1..=u64::MAX)?,
            rate: options.optional_number("rate", 1..=1_000_000_000)?,
            flows: narrow(options.number("flows", 1, 1..=MAX_FLOWS.into())?),
            verify: narrow(verify),
            queues: options.queues()?,
        })
    }
}

impl PcapSpec {
    fn parse(fields: &[&str]) -> Result<Self, String> {
        let file = |field: &str| (!matches!(field, "" | "-")).then(|| PathBuf::from(field));
        // The second field is the output, unless it is the flag: a file of that name is written `./loop`.
        let (files, options) = match fields {
            [_, second, ..] if *second != "loop" => fields.split_at(2),
            _ => fields.split_at(1.min(fields.len())),
        };
        let options = Options::parse(options, &["loop"])?;
        let spec = Self {
            input: files.first().and_then(|field| file(field)),
            output: files.get(1).and_then(|field| file(field)),
            repeat: options.switch("loop", false)?,
        };
        match &spec {
            Self { input: None, output: None, .. } => {
                Err("it names no file, expected pcap:IN,OUT with '-' for the one that is not wanted".into())
            }
            Self { input: None, repeat: true, .. } => {
                Err("'loop' is given without an input, expected pcap:IN,OUT,loop".into())
            }
            Self { input, output, .. } if input == output => {
                Err("input and output are the same file, expected two different ones".into())
            }
            _ => Ok(spec),
        }
    }
}

impl TapSpec {
    fn parse(fields: &[&str]) -> Result<Self, String> {
        let (name, options) = first(fields, "the interface's name, as in tap:tap0")?;
        let options = Options::parse(options, &["queues", "offloads"])?;
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
        let offloads = options.switch("offloads", true)?;
        Ok(Self { name: name.into(), queues: options.queues()?, offloads })
    }
}

impl VhostSpec {
    fn parse(fields: &[&str]) -> Result<Self, String> {
        let (path, options) = first(fields, "the socket's path, as in vhost:/run/vm1.sock")?;
        let switches = ["packed", "in_order", "mrg", "indirect", "event_idx", "offloads"];
        let known = [&["queues", "client"], &switches[..], &["dmas"]].concat();
        let options = Options::parse(options, &known)?;
        let dmas = match options.find("dmas") {
            None => None,
            Some(Some(text)) if !inner(text).is_empty() => Some(inner(text).to_string()),
            Some(_) => return Err("'dmas' has no value, expected dmas=[txq0@wq0.0;rxq0@wq0.1]".into()),
        };
        Ok(Self {
            path: socket_path(path)?,
            queues: options.queues()?,
            client: options.switch("client", false)?,
            packed: options.switch("packed", true)?,
            in_order: options.switch("in_order", true)?,
            mrg: options.switch("mrg", true)?,
            indirect: options.switch("indirect", true)?,
            event_idx: options.switch("event_idx", true)?,
            offloads: options.switch("offloads", true)?,
            dmas,
        })
    }
}

impl VirtioUserSpec {
    fn parse(fields: &[&str]) -> Result<Self, String> {
        let (path, options) = first(fields, "the socket's path, as in virtio-user:/run/vm1.sock")?;
        let known = ["queues", "queue_size", "server", "packed", "mrg", "event_idx", "mac"];
        let options = Options::parse(options, &known)?;
        let queue_size: u16 = narrow(options.number("queue_size", 256, 2..=32768)?);
        // Of a packed virtqueue, too: the back end may have none.
        if !queue_size.is_power_of_two() {
            return Err(format!("queue_size={queue_size}: expected a power of two from 2 to 32768"));
        }
        let mac = match options.find("mac") {
            None => None,
            Some(value) => {
                let mac: MacAddr = value.unwrap_or_default().parse().map_err(|e| format!("mac: {e}"))?;
                if !mac.is_unicast() {
                    return Err(format!("mac={mac}: expected the address of one station"));
                }
                Some(mac)
            }
        };
        Ok(Self {
            path: socket_path(path)?,
            queues: options.queues()?,
            queue_size,
            server: options.switch("server", false)?,
            packed: options.switch("packed", false)?,
            mrg: options.switch("mrg", true)?,
            event_idx: options.switch("event_idx", true)?,
            mac,
        })
    }
}

impl fmt::Display for PortSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gen(spec) => spec.fmt(f),
            Self::Pcap(spec) => spec.fmt(f),
            Self::Tap(spec) => spec.fmt(f),
            Self::Vhost(spec) => spec.fmt(f),
            Self::VirtioUser(spec) => spec.fmt(f),
        }
    }
}

impl fmt::Display for GenSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "gen:size={}", self.size)?;
        if let Some(count) = self.count {
            write!(f, ",count={count}")?;
        }
        if let Some(rate) = self.rate {
            write!(f, ",rate={rate}")?;
        }
        unless(f, "flows", self.flows, 1)?;
        match self.verify {
            0 => f.write_str(",verify=off")?,
            verify => unless(f, "verify", verify, 1)?,
        }
        unless(f, "queues", self.queues, 1)
    }
}

impl fmt::Display for PcapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |file: &Option<PathBuf>| match file {
            None => "-".to_string(),
            Some(path) => path.display().to_string(),
        };
        write!(f, "pcap:{},{}{}", name(&self.input), name(&self.output), flag(self.repeat, ",loop"))
    }
}

impl fmt::Display for TapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap:{}", self.name)?;
        unless(f, "queues", self.queues, 1)?;
        f.write_str(flag(!self.offloads, ",offloads=off"))
    }
}

impl fmt::Display for VhostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vhost:{}", self.path.display())?;
        unless(f, "queues", self.queues, 1)?;
        f.write_str(flag(self.client, ",client"))?;
        f.write_str(flag(!self.packed, ",packed=off"))?;
        f.write_str(flag(!self.in_order, ",in_order=off"))?;
        f.write_str(flag(!self.mrg, ",mrg=off"))?;
        f.write_str(flag(!self.indirect, ",indirect=off"))?;
        f.write_str(flag(!self.event_idx, ",event_idx=off"))?;
        f.write_str(flag(!self.offloads, ",offloads=off"))?;
        match &self.dmas {
            None => Ok(()),
            Some(dmas) => write!(f, ",dmas=[{dmas}]"),
        }
    }
}

impl fmt::Display for VirtioUserSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtio-user:{}", self.path.display())?;
        unless(f, "queues", self.queues, 1)?;
        unless(f, "queue_size", self.queue_size, 256)?;
        f.write_str(flag(self.server, ",server"))?;
        f.write_str(flag(self.packed, ",packed"))?;
        f.write_str(flag(!self.mrg, ",mrg=off"))?;
        f.write_str(flag(!self.event_idx, ",event_idx=off"))?;
        match self.mac {
            None => Ok(()),
            Some(mac) => write!(f, ",mac={mac}"),
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

/// The comma-separated fields of `text`; commas within brackets do not separate.
fn split_fields(text: &str) -> Result<Vec<&str>, String> {
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

/// The field that every port of a kind begins with, and the others.
fn first<'a>(fields: &'a [&'a str], expected: &str) -> Result<(&'a str, &'a [&'a str]), String> {
    match fields {
        ["", ..] | [] => Err(format!("expected {expected}")),
        // A first field such as `queues=2` is an option in the wrong place; a path may have an '=' further on.
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

/// What is inside the brackets, if there are any.
fn inner(text: &str) -> &str {
    text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text)
}

/// A number whose range was checked, in the type that the range was chosen for.
fn narrow<T: TryFrom<u64>>(value: u64) -> T
where
    T::Error: fmt::Debug,
{
    T::try_from(value).expect("the caller's range fits the type")
}

/// Keys, each with its value if it has one.
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

    /// `None`: not given; `Some(None)`: given without a value.
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

    fn queues(&self) -> Result<u16, String> {
        Ok(narrow(self.number("queues", 1, 1..=MAX_QUEUES.into())?))
    }
}

/// A decimal number that may end in k, M or G.
fn parse_number(text: &str) -> Option<u64> {
    let (digits, unit) = match text.as_bytes().last()? {
        b'k' => (&text[..text.len() - 1], 1_000),
        b'M' => (&text[..text.len() - 1], 1_000_000),
        b'G' => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text, 1),
    };
    // `parse` alone would also take "+1".
    let number: u64 = digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())??;
    number.checked_mul(unit)
}

#[cfg(test)]
mod tests;
