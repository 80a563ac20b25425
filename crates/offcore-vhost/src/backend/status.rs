//! Status of a back end.

use std::fmt;
use std::sync::Arc;

use offcore_ring::RingError;

use super::ControlError;
use crate::features::{VHOST_F_LOG_ALL, is_packed};

/// State of a virtqueue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingState {
    /// Not set up, or stopped.
    #[default]
    Stopped,
    /// Started and disabled: the guest receives no packets, and the packets it sends are discarded.
    Disabled,
    /// Started and enabled.
    Enabled,
}

/// Status of one virtqueue, as set up by its front end.
#[derive(Clone, Debug, Default)]
pub struct VringStatus {
    pub state: RingState,
    /// Queue size; 0 before it is known.
    pub size: u16,
    /// Whether the driver has an eventfd to kick the device. Otherwise, it relies on polling.
    pub kicks: bool,
    /// Whether the driver has an eventfd for notifications by the device.
    pub calls: bool,
    pub broken: Option<RingError>,
    /// Packets whose copies are in flight.
    pub in_flight: u64,
}

/// Status of a back end at one point in time.
#[derive(Clone, Debug, Default)]
pub struct Status {
    pub connected: bool,
    /// The negotiated virtio features; `None` before the negotiation.
    pub features: Option<u64>,
    pub protocol_features: u64,
    /// The virtio device status (virtio 1.2, section 2.1), if the front end sends it.
    pub virtio_status: u8,
    /// The MTU that the front end shows its guest, if the front end sends it.
    pub mtu: Option<u16>,
    /// Whether the front end accepts requests from the back end.
    pub back_channel: bool,
    pub regions: usize,
    pub vrings: Vec<VringStatus>,
    /// The last error, in this connection or an earlier one.
    pub last_error: Option<Arc<ControlError>>,
    /// Number of the connection in which the last error occurred, counted from 1.
    pub last_error_in: u64,
    pub connects: u64,
    /// Messages received, including refused ones.
    pub messages: u64,
    pub refused: u64,
}

/// One human-readable line: the link, the negotiated features, and errors.
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
