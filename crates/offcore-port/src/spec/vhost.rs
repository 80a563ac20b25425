//! The specification of a `vhost:` port.

use std::fmt;
use std::path::PathBuf;

use super::{Options, first, flag, given, inner, socket_path, unless};

/// `vhost:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VhostSpec {
    pub path: PathBuf,
    pub queues: u16,
    /// Whether to connect to the socket instead of listening on it.
    pub client: bool,
    /// Owner and group ids of the socket's file, and its permissions.
    pub owner: Option<u32>,
    pub group: Option<u32>,
    pub mode: Option<u32>,
    /// Whether packed virtqueues are offered (VIRTIO_F_RING_PACKED).
    pub packed: bool,
    /// Whether in-order use of buffers is offered (IN_ORDER).
    pub in_order: bool,
    /// Whether mergeable buffers are offered (MRG_RXBUF).
    pub mrg: bool,
    /// Whether indirect descriptors are offered (INDIRECT_DESC).
    pub indirect: bool,
    /// Whether the event index is offered (EVENT_IDX).
    pub event_idx: bool,
    /// Whether checksum and segmentation offloads (TCP, UDP) are offered in both directions (CSUM, HOST_TSO4,
    /// HOST_TSO6, HOST_ECN, HOST_USO, GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN, GUEST_USO4, GUEST_USO6).
    pub offloads: bool,
    /// Maximum memory of the guest in MiB; `None`: the memory of the machine.
    pub max_memory: Option<u32>,
    /// DMA channels of the virtqueues in the syntax of DPDK's vhost guide, without the brackets.
    pub dmas: Option<String>,
}

impl VhostSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (path, options) = first(fields, "the socket's path, as in vhost:/run/vm1.sock")?;
        let switches = ["packed", "in_order", "mrg", "indirect", "event_idx", "offloads"];
        let access = ["owner", "group", "mode"];
        let known = [&["queues", "client"], &access[..], &switches[..], &["max_memory", "dmas"]].concat();
        let options = Options::parse(options, &known)?;
        let dmas = match options.find("dmas") {
            None => None,
            Some(Some(text)) if !inner(text).is_empty() => Some(inner(text).to_string()),
            Some(_) => return Err("'dmas' has no value, expected dmas=[txq0@wq0.0;rxq0@wq0.1]".into()),
        };
        let client = options.switch("client", false)?;
        if let Some(key) = access.into_iter().find(|key| client && options.find(key).is_some()) {
            return Err(format!("{key}= is of a socket that the port makes, and with client it makes none"));
        }
        Ok(Self {
            path: socket_path(path)?,
            queues: options.queues()?,
            client,
            owner: options.user("owner")?,
            group: options.group("group")?,
            mode: mode(&options)?,
            packed: options.switch("packed", true)?,
            in_order: options.switch("in_order", true)?,
            mrg: options.switch("mrg", true)?,
            indirect: options.switch("indirect", true)?,
            event_idx: options.switch("event_idx", true)?,
            offloads: options.switch("offloads", true)?,
            max_memory: max_memory(&options)?,
            dmas,
        })
    }
}

/// Parses a size in MiB, or with the suffix M or G.
fn max_memory(options: &Options<'_>) -> Result<Option<u32>, String> {
    let Some(value) = options.find("max_memory") else { return Ok(None) };
    let found = value.unwrap_or_default();
    let (digits, mib) = match found.strip_suffix('G') {
        Some(digits) => (digits, 1024),
        None => (found.strip_suffix('M').unwrap_or(found), 1),
    };
    let digits = Some(digits).filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let size =
        digits.and_then(|digits| digits.parse::<u32>().ok()).and_then(|number| number.checked_mul(mib));
    match size.filter(|&size| size > 0) {
        Some(size) => Ok(Some(size)),
        None => Err(format!("max_memory={found}: expected MiB from 1 on, or such as 512M or 4G")),
    }
}

/// Parses permissions in octal digits, as in chmod(1).
fn mode(options: &Options<'_>) -> Result<Option<u32>, String> {
    let Some(value) = options.find("mode") else { return Ok(None) };
    let found = value.unwrap_or_default();
    let mode = u32::from_str_radix(found, 8).ok().filter(|mode| *mode <= 0o777 && !found.starts_with('+'));
    mode.map(Some).ok_or_else(|| format!("mode={found}: expected permissions in octal, such as 0660"))
}

impl fmt::Display for VhostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vhost:{}", self.path.display())?;
        unless(f, "queues", self.queues, 1)?;
        f.write_str(flag(self.client, ",client"))?;
        given(f, "owner", self.owner)?;
        given(f, "group", self.group)?;
        self.mode.map_or(Ok(()), |mode| write!(f, ",mode={mode:04o}"))?;
        f.write_str(flag(!self.packed, ",packed=off"))?;
        f.write_str(flag(!self.in_order, ",in_order=off"))?;
        f.write_str(flag(!self.mrg, ",mrg=off"))?;
        f.write_str(flag(!self.indirect, ",indirect=off"))?;
        f.write_str(flag(!self.event_idx, ",event_idx=off"))?;
        f.write_str(flag(!self.offloads, ",offloads=off"))?;
        given(f, "max_memory", self.max_memory)?;
        self.dmas.as_ref().map_or(Ok(()), |dmas| write!(f, ",dmas=[{dmas}]"))
    }
}
