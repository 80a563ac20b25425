//! The specification of a `virtio-user:` port.

use std::fmt;
use std::path::PathBuf;

use offcore_vhost::backend::MIN_MTU;
use offcore_wire::ethernet::MacAddr;

use super::{Options, first, flag, given, narrow, socket_path, unless};

/// `virtio-user:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtioUserSpec {
    pub path: PathBuf,
    pub queues: u16,
    /// Number of descriptors of a virtqueue.
    pub queue_size: u16,
    /// Whether to listen on the socket instead of connecting to it.
    pub server: bool,
    /// Whether packed virtqueues are accepted (VIRTIO_F_RING_PACKED).
    pub packed: bool,
    /// Whether mergeable buffers are accepted (MRG_RXBUF).
    pub mrg: bool,
    /// Whether the event index is accepted (EVENT_IDX).
    pub event_idx: bool,
    /// Whether checksum and segmentation offloads (TCP, UDP) of the back end are used, and such packets accepted from
    /// it (CSUM, HOST_TSO4, HOST_TSO6, HOST_ECN, HOST_USO, GUEST_CSUM; with mergeable buffers GUEST_TSO4, GUEST_TSO6,
    /// GUEST_ECN, GUEST_USO4, GUEST_USO6).
    pub offloads: bool,
    /// Longest payload of a frame in bytes, which is reported to the back end on request. Without mergeable buffers,
    /// the virtqueue has room for packets of this length, in chains of several packet buffers if one is too short.
    pub mtu: Option<u16>,
    /// Id of a user that the back end may run as, in addition to root and the user of this process.
    pub peer: Option<u32>,
    /// Ethernet address; `None`: derived from the port's specification.
    pub mac: Option<MacAddr>,
}

impl VirtioUserSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (path, options) = first(fields, "the socket's path, as in virtio-user:/run/vm1.sock")?;
        let known = [
            "queues",
            "queue_size",
            "server",
            "packed",
            "mrg",
            "event_idx",
            "offloads",
            "mtu",
            "mac",
            "peer",
        ];
        let options = Options::parse(options, &known)?;
        let queue_size: u16 = narrow(options.number("queue_size", 256, 2..=32768)?);
        // This also applies to packed virtqueues, because the back end may only support split ones.
        if !queue_size.is_power_of_two() {
            return Err(format!("queue_size={queue_size}: expected a power of two from 2 to 32768"));
        }
        let mac = options.find("mac").map(|value| value.unwrap_or_default().parse::<MacAddr>());
        let mac = mac.transpose().map_err(|e| format!("mac: {e}"))?;
        if let Some(mac) = mac.filter(|mac| !mac.is_unicast()) {
            return Err(format!("mac={mac}: expected the address of one station"));
        }
        Ok(Self {
            path: socket_path(path)?,
            queues: options.queues()?,
            queue_size,
            server: options.switch("server", false)?,
            packed: options.switch("packed", false)?,
            mrg: options.switch("mrg", true)?,
            event_idx: options.switch("event_idx", true)?,
            offloads: options.switch("offloads", true)?,
            mtu: options.optional_number("mtu", MIN_MTU.into()..=u16::MAX.into())?.map(narrow),
            peer: options.user("peer")?,
            mac,
        })
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
        f.write_str(flag(!self.offloads, ",offloads=off"))?;
        given(f, "mtu", self.mtu)?;
        given(f, "mac", self.mac)?;
        given(f, "peer", self.peer)
    }
}
