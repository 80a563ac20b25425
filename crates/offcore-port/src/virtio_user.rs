//! The virtio-user port: a virtio-net driver over vhost-user, like DPDK's virtio-user device.
//!
//! The packet pool is the memory shared with the back end, so this side does not copy packets. The back end fills
//! packet buffers directly, with the virtio-net header (12 bytes) in the headroom and the packet behind it. A sent
//! packet stays in its buffer until the back end has processed it. A packet longer than a buffer is sent as a chain of
//! descriptors. When received, it takes several buffers: with mergeable buffers, as many as the back end needs;
//! otherwise as many as the port's MTU requires, made available as one chain.
//!
//! ```text
//! control thread: connect, negotiate, start rings, watch the connection ──> cells ──> RX and TX queues of the workers
//! ```
//! If the back end records in-flight descriptors, it may disconnect and reconnect: the rings stay as they are, and the
//! new back end continues with them. If another back end disconnects, or does not reconnect within 15 s, the rings are
//! discarded: the port drops packets to send, takes its packet buffers back after the connection is closed, and
//! connects again when a back end is available.
//!
//! All data that a back end writes into a ring is validated; invalid data at worst breaks that ring. But the whole pool
//! is shared with it: like any vhost-user back end, it is trusted not to access packet buffers that were not made
//! available to it.

mod cell;
mod link;
mod merging;
mod queue;
mod rx;
mod tx;

use std::path::PathBuf;
use std::sync::Arc;

use offcore_mem::Pool;
use offcore_ring::RingError;
use offcore_vhost::connection::Role;
use offcore_vhost::features::{self, VIRTIO_F_EVENT_IDX, VIRTIO_F_RING_PACKED, VIRTIO_NET_F_MRG_RXBUF};
use offcore_vhost::frontend::{FrontEndConfig, FrontEndError};
use offcore_wire::ethernet::{self};

use crate::base::PortBase;
use crate::spec::VirtioUserSpec;
use crate::{Port, PortError, QueueSetup, RxQueue, TxQueue, address};

use cell::Cell;
use link::{Link, LinkState};
use rx::VirtioRx;
use tx::VirtioTx;

/// Maximum length of a frame in bytes: an unsegmented packet of 64 KiB with its Ethernet header and two VLAN tags.
const MAX_FRAME: usize = u16::MAX as usize + ethernet::HEADER_LEN + 2 * VLAN_TAG;
/// Length of a VLAN tag in bytes, which the MTU does not include.
const VLAN_TAG: usize = 4;
/// Maximum number of buffers of a packet. A back end does not accept longer chains as one packet.
const MAX_SEGMENTS: usize = 64;
/// All feature bits for checksums and segmentation.
const OFFLOADS: u64 = features::VIRTIO_NET_F_CSUM
    | features::VIRTIO_NET_F_HOST_TSO4
    | features::VIRTIO_NET_F_HOST_TSO6
    | features::VIRTIO_NET_F_HOST_ECN
    | features::VIRTIO_NET_F_HOST_USO
    | features::VIRTIO_NET_F_GUEST_CSUM
    | features::VIRTIO_NET_F_GUEST_TSO4
    | features::VIRTIO_NET_F_GUEST_TSO6
    | features::VIRTIO_NET_F_GUEST_ECN
    | features::VIRTIO_NET_F_GUEST_USO4
    | features::VIRTIO_NET_F_GUEST_USO6;

/// A virtio-user port.
#[derive(Debug)]
pub struct VirtioUserPort {
    base: PortBase,
    path: PathBuf,
    role: Role,
    wants_packed: bool,
    pool: &'static Pool,
    /// Length of the longest frame, in bytes, that fits without mergeable buffers.
    longest: usize,
    link: Link,
}

impl VirtioUserPort {
    /// Opens the port. `pool`'s memory is shared with the back end, and packets are chunks of it.
    ///
    /// If the back end is not available yet, the port waits for it in the background; see
    /// [`VirtioUserPort::is_connected`].
    ///
    /// # Errors
    /// Errors that waiting would not resolve: a back end that lacks required features, a socket that another process
    /// uses, an MTU for which the virtqueue or the pool is too small.
    pub fn open(spec: &VirtioUserSpec, pool: &'static Pool) -> Result<Self, PortError> {
        let name = spec.to_string();
        let longest = Self::longest(spec, pool)
            .map_err(|expected| PortError::Syntax { found: name.clone(), expected })?;
        let wanted = |wanted, feature| if wanted { feature } else { 0 };
        let config = FrontEndConfig {
            role: if spec.server { Role::Server } else { Role::Client },
            queue_pairs: spec.queues,
            queue_size: spec.queue_size,
            features: wanted(spec.packed, VIRTIO_F_RING_PACKED)
                | wanted(spec.mrg, VIRTIO_NET_F_MRG_RXBUF)
                | wanted(spec.event_idx, VIRTIO_F_EVENT_IDX)
                | wanted(spec.offloads, OFFLOADS),
            mtu: spec.mtu,
            peer: spec.peer,
            ..FrontEndConfig::new(&spec.path)
        };
        let role = config.role;
        let link = Link::open(config, pool).map_err(|error| Self::refused(&name, error))?;
        let mac = spec.mac.unwrap_or_else(|| address::derived(&name));
        Ok(Self {
            base: PortBase::new(name, mac, spec.queues),
            path: spec.path.clone(),
            role,
            wants_packed: spec.packed,
            pool,
            longest,
            link,
        })
    }

    /// Returns the length of the longest frame that fits without mergeable buffers, in bytes: the room in one packet
    /// buffer or the length that the MTU requires.
    fn longest(spec: &VirtioUserSpec, pool: &Pool) -> Result<usize, String> {
        let room = pool.data_room();
        let Some(mtu) = spec.mtu else { return Ok(room) };
        let frame = usize::from(mtu) + ethernet::HEADER_LEN + 2 * VLAN_TAG;
        let buffers = frame.div_ceil(room);
        let most = usize::from(spec.queue_size).min(MAX_SEGMENTS);
        if buffers > most {
            return Err(format!(
                "mtu={mtu}: packets take {buffers} buffers of {room} bytes, expected at most {most}: use larger ones \
                 (--mbuf-size) or a larger queue_size"
            ));
        }
        Ok(frame.max(room))
    }

    fn refused(name: &str, error: FrontEndError) -> PortError {
        PortError::Other { port: name.into(), reason: error.to_string() }
    }

    /// Whether a back end is connected and the rings are running.
    pub fn is_connected(&self) -> bool {
        matches!(self.link.state(), LinkState::Connected { .. })
    }

    /// Returns the errors of virtqueues that are stopped although the port is connected, by virtqueue index.
    pub fn broken(&self) -> Vec<(usize, RingError)> {
        let cells = self.link.cells().iter().enumerate();
        cells.filter_map(|(index, cell)| Some((index, cell.broken()?))).collect()
    }

    fn cell(&self, virtqueue: u16) -> Arc<Cell> {
        Arc::clone(&self.link.cells()[usize::from(virtqueue)])
    }
}

impl Port for VirtioUserPort {
    fn base(&self) -> &PortBase {
        &self.base
    }

    fn rx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn RxQueue>, PortError> {
        let counters = self.base.take_rx(index, &setup)?;
        Ok(Box::new(VirtioRx::new(self.cell(2 * index), self.pool, self.longest, counters)))
    }

    fn tx_queue(&mut self, index: u16, setup: QueueSetup<'_>) -> Result<Box<dyn TxQueue>, PortError> {
        let counters = self.base.take_tx(index, &setup)?;
        Ok(Box::new(VirtioTx::new(self.cell(2 * index + 1), self.pool, counters)))
    }

    fn status(&self) -> String {
        let path = self.path.display();
        let mut status = match self.link.state() {
            LinkState::Connected { features } => {
                let split = self.wants_packed && features & VIRTIO_F_RING_PACKED == 0;
                let note = if split { ", split virtqueues: the back end has no packed ones" } else { "" };
                format!("connected to {path} with features {features:#x}{note}")
            }
            LinkState::Waiting { why } => {
                let waiting = match self.role {
                    Role::Client => format!("waiting for a back end at {path}"),
                    Role::Server => format!("waiting for a back end to connect to {path}"),
                };
                match why {
                    None => waiting,
                    Some(why) => format!("{waiting} ({why})"),
                }
            }
        };
        for (virtqueue, error) in self.broken() {
            status.push_str(&format!(", virtqueue {virtqueue} is broken: {error}"));
        }
        status
    }
}
