//! The specification of a `virtio-user:` port.

use std::fmt;
use std::path::PathBuf;

use offcore_vhost::backend::MIN_MTU;
use offcore_wire::ethernet::MacAddr;

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Account, Number, Queues, SocketPath, Station, Switch};
use super::{flag, given, one, unless, yes};

/// Default number of descriptors. The power of two also applies to packed virtqueues, because the back end may only
/// support split ones.
const QUEUE_SIZE: u16 = 256;
type QueueSize = Number<2, 32768>;
type Mtu = Number<{ MIN_MTU as u64 }, { u16::MAX as u64 }>;

const fn queue_size() -> u16 {
    QUEUE_SIZE
}

/// `virtio-user:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VirtioUserSpec {
    /// Path of the vhost-user socket.
    #[serde(rename = "socket", deserialize_with = "SocketPath::read")]
    #[schemars(with = "SocketPath")]
    pub path: PathBuf,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
    /// Number of descriptors of a virtqueue.
    #[serde(default = "queue_size", deserialize_with = "QueueSize::power_of_two")]
    #[schemars(with = "QueueSize")]
    pub queue_size: u16,
    /// Whether to listen on the socket instead of connecting to it.
    #[serde(default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub server: bool,
    /// Whether packed virtqueues are accepted (VIRTIO_F_RING_PACKED).
    #[serde(default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub packed: bool,
    /// Whether mergeable buffers are accepted (MRG_RXBUF).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub mrg: bool,
    /// Whether the event index is accepted (EVENT_IDX).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub event_idx: bool,
    /// Whether checksum and segmentation offloads (TCP, UDP) of the back end are used, and such packets accepted from
    /// it (CSUM, HOST_TSO4, HOST_TSO6, HOST_ECN, HOST_USO, GUEST_CSUM; with mergeable buffers GUEST_TSO4, GUEST_TSO6,
    /// GUEST_ECN, GUEST_USO4, GUEST_USO6).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub offloads: bool,
    /// Longest payload of a frame in bytes, which is reported to the back end on request. Without mergeable buffers,
    /// the virtqueue has room for packets of this length, in chains of several packet buffers if one is too short.
    #[serde(default, deserialize_with = "Mtu::optional")]
    #[schemars(with = "Mtu")]
    pub mtu: Option<u16>,
    /// Id of a user that the back end may run as, in addition to root and the user of this process.
    #[serde(default, deserialize_with = "Account::user")]
    #[schemars(with = "Account")]
    pub peer: Option<u32>,
    /// Ethernet address. Default: derived from the port's specification.
    #[serde(default, deserialize_with = "Station::optional")]
    #[schemars(with = "Station")]
    pub mac: Option<MacAddr>,
}

impl fmt::Display for VirtioUserSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "virtio-user:{}", self.path.display())?;
        unless(f, "queues", self.queues, 1)?;
        unless(f, "queue_size", self.queue_size, QUEUE_SIZE)?;
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
