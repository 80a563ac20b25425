//! The virtio-user port: a virtio-net driver over vhost-user, as DPDK's virtio-user device is one.
//!
//! The packet pool is the memory that the back end is given, so packets are not copied on this side: a buffer that the
//! back end fills is a packet buffer, with the virtio-net header (12 bytes) in the headroom and the packet behind it; a
//! packet that is sent stays in its buffer until the back end is done with it. A packet that is longer than a buffer is a
//! chain of descriptors when it is sent, and takes several buffers when it is received: as the back end needs them with
//! mergeable buffers, and otherwise as many as the port's MTU asks for, made available as one chain.
//!
//! ```text
//! control thread: connect, negotiate, start rings, watch the connection ──> cells ──> RX and TX queues of the workers
//! ```
//! A back end that notes what is in flight may go and come again: the rings stay as they are, and it goes on with them. Any other one
//! that goes away, or does not come again within 15 s, takes the rings with it: the port drops what is sent meanwhile, takes the
//! packet buffers back once the connection is gone, and connects anew when a back end is there again.
//!
//! What a back end writes into a ring is checked, and breaks that ring at worst. But it is given the whole pool: like
//! any vhost-user back end it is trusted not to touch packet buffers that it was not given.

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

/// Bytes of a frame, at most: a packet of 64 KiB that is to be segmented, with its Ethernet header and two VLAN tags.
const MAX_FRAME: usize = u16::MAX as usize + ethernet::HEADER_LEN + 2 * VLAN_TAG;
/// Bytes of a VLAN tag, which the MTU does not count.
const VLAN_TAG: usize = 4;
/// Buffers of a packet, at most: what longer ones have are none that a back end would take as one.
const MAX_SEGMENTS: usize = 64;
/// All about checksums and segmentation.
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
    /// Bytes of the longest frame for which there is room without mergeable buffers.
    longest: usize,
    link: Link,
}

impl VirtioUserPort {
    /// Opens the port. `pool`'s memory will be given to the back end, and packets will be chunks of it.
    ///
    /// A back end that is not there yet is waited for in the background; [`VirtioUserPort::is_connected`] tells.
    ///
    /// # Errors
    /// What waiting would not help: a back end that lacks what is needed, a socket that another process has, an MTU for
    /// which the virtqueue or the pool is too small.
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

    /// Bytes of the longest frame for which there is room when the back end has no mergeable buffers: what a packet buffer
    /// holds, or what the MTU says.
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

    /// Whether there is a back end, and the rings run.
    pub fn is_connected(&self) -> bool {
        matches!(self.link.state(), LinkState::Connected { .. })
    }

    /// Why virtqueues do not run although the port is connected, by index of the virtqueue.
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
