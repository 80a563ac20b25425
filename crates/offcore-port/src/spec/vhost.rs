//! The specification of a `vhost:` port.

use std::fmt;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Account, Bracketed, Mebibytes, Permissions, Queues, SocketPath, Switch};
use super::{flag, given, one, unless, yes};

/// `vhost:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VhostSpec {
    /// Path of the vhost-user socket.
    #[serde(rename = "socket", deserialize_with = "SocketPath::read")]
    #[schemars(with = "SocketPath")]
    pub path: PathBuf,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
    /// Whether to connect to the socket instead of listening on it.
    #[serde(default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub client: bool,
    /// Owner of the socket's file, by name or number.
    #[serde(default, deserialize_with = "Account::user")]
    #[schemars(with = "Account")]
    pub owner: Option<u32>,
    /// Group of the socket's file, by name or number.
    #[serde(default, deserialize_with = "Account::group")]
    #[schemars(with = "Account")]
    pub group: Option<u32>,
    /// Permissions of the socket's file in octal.
    #[serde(default, deserialize_with = "Permissions::optional")]
    #[schemars(with = "Permissions")]
    pub mode: Option<u32>,
    /// Whether packed virtqueues are offered (VIRTIO_F_RING_PACKED).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub packed: bool,
    /// Whether in-order use of buffers is offered (IN_ORDER).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub in_order: bool,
    /// Whether mergeable buffers are offered (MRG_RXBUF).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub mrg: bool,
    /// Whether indirect descriptors are offered (INDIRECT_DESC).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub indirect: bool,
    /// Whether the event index is offered (EVENT_IDX).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub event_idx: bool,
    /// Whether checksum and segmentation offloads (TCP, UDP) are offered in both directions (CSUM, HOST_TSO4,
    /// HOST_TSO6, HOST_ECN, HOST_USO, GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN, GUEST_USO4, GUEST_USO6).
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub offloads: bool,
    /// Maximum memory of the guest in MiB. Default: the memory of the machine.
    #[serde(default, deserialize_with = "Mebibytes::optional")]
    #[schemars(with = "Mebibytes")]
    pub max_memory: Option<u32>,
    /// DMA channels of the virtqueues in the syntax of DPDK's vhost guide, without the brackets.
    #[serde(default, deserialize_with = "Bracketed::optional")]
    #[schemars(with = "Bracketed")]
    pub dmas: Option<String>,
}

impl VhostSpec {
    /// Refuses keys that contradict one another.
    pub(super) fn check(self) -> Result<Self, String> {
        let access = [("owner", self.owner), ("group", self.group), ("mode", self.mode)];
        match access.into_iter().find(|(_, given)| self.client && given.is_some()) {
            Some((key, _)) => {
                Err(format!("{key} is for a socket that the port creates, and a client port creates none"))
            }
            None => Ok(self),
        }
    }
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
