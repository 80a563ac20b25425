//! What can be seen of a back end from outside.

use std::fmt;
use std::sync::Arc;

use offcore_ring::RingError;

use super::ControlError;
use crate::features::{VHOST_F_LOG_ALL, is_packed};

/// Whether a virtqueue is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingState {
    /// Not set up, or stopped.
    #[default]
    Stopped,
    /// Started and disabled: nothing is given to the guest, what the guest sends is discarded.
    Disabled,
    /// Started and enabled.
    Enabled,
}

/// One virtqueue as its front end has set it up.
#[derive(Clone, Debug, Default)]
pub struct VringStatus {
    pub state: RingState,
    /// Queue size; 0 before it is known.
    pub size: u16,
    /// Whether the driver has an eventfd to kick; otherwise it relies on polling.
    pub kicks: bool,
    /// Whether the driver has an eventfd to be notified by.
    pub calls: bool,
    pub broken: Option<RingError>,
    /// Packets whose copies are in flight.
    pub in_flight: u64,
}

/// A back end at one moment.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub connected: bool,
    /// The virtio features negotiated; `None` before they are.
    pub features: Option<u64>,
    pub protocol_features: u64,
    /// The virtio device status (virtio 1.2, section 2.1), when the front end tells it.
    pub virtio_status: u8,
    /// The MTU that the front end shows its guest, when it tells it.
    pub mtu: Option<u16>,
    /// Whether the front end listens to requests of the back end.
    pub back_channel: bool,
    pub regions: usize,
    pub vrings: Vec<VringStatus>,
    /// What last went wrong, in this connection or an earlier one.
    pub last_error: Option<Arc<ControlError>>,
    /// In which connection, from 1.
    pub last_error_in: u64,
    pub connects: u64,
    /// Messages received, the refused ones included.
    pub messages: u64,
    pub refused: u64,
}

/// One line for a person: the link, what was negotiated, and what is wrong.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.connected {
            f.write_str("waiting for a front end")?;
        } else {
            let enabled = self.vrings.iter().filter(|v| v.state == RingState::Enabled).count();
            write!(f, "connected, {enabled} of {} virtqueues enabled", self.vrings.len())?;
            if let Some(features) = self.features {
                let format = if is_packed(features) { "packed" } else { "split" };
                write!(f, ", {format} rings, features {features:#x}")?;
                f.write_str(if features & VHOST_F_LOG_ALL != 0 { ", written pages are logged" } else { "" })?;
            }
            if let Some(mtu) = self.mtu {
                write!(f, ", MTU {mtu}")?;
            }
            if self.virtio_status != 0 {
                write!(f, ", virtio status {:#x}", self.virtio_status)?;
            }
        }
        for (queue, vring) in self.vrings.iter().enumerate() {
            if let Some(broken) = &vring.broken {
                write!(f, "; virtqueue {queue} is broken: {broken}")?;
            }
        }
        match &self.last_error {
            Some(error) if self.last_error_in < self.connects => {
                write!(f, "; last error, of an earlier front end: {error}")
            }
            Some(error) => write!(f, "; last error: {error}"),
            None => Ok(()),
        }
    }
}
