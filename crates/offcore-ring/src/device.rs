//! The device side of a virtqueue of either format: see [`DeviceQueue`]. Code that uses a queue is generic over the
//! format, so that the format is selected once per burst.

pub use crate::chain::{Buffer, Chain, Direction};
pub use crate::double::Double;
pub use crate::queue::{DeviceQueue, LOOK};
pub use crate::vector::{Single, Wanted};
use crate::{Inflight, Layout, RingError, packed, split};

/// The device side of a queue of either format.
#[derive(Debug)]
pub enum RingDevice {
    /// A split queue.
    Split(split::device::SplitDevice),
    /// A packed queue.
    Packed(packed::device::PackedDevice),
}

impl RingDevice {
    /// Creates the device side of the queue in `layout`, which begins at `base`: see [`DeviceQueue::base`].
    ///
    /// # Errors
    /// Fails if the base is invalid for the queue.
    pub fn new(layout: Layout, base: u32, event_idx: bool, indirect: bool) -> Result<Self, RingError> {
        Ok(match layout {
            // The control side has checked that the base fits into 16 bits. Other bits are ignored.
            Layout::Split(layout) => {
                Self::Split(split::device::SplitDevice::new(layout, base as u16, event_idx, indirect))
            }
            Layout::Packed(layout) => {
                Self::Packed(packed::device::PackedDevice::new(layout, base, event_idx, indirect)?)
            }
        })
    }
}

/// Runs the same code for a queue of either format: `with_queue!(queue, q => work)`.
#[macro_export]
macro_rules! with_queue {
    ($queue:expr, $name:ident => $work:expr) => {
        match $queue {
            $crate::device::RingDevice::Split($name) => $work,
            $crate::device::RingDevice::Packed($name) => $work,
        }
    };
}

impl RingDevice {
    /// Records in `inflight` the state that the next device needs. A split queue needs no record.
    pub fn track(&mut self, inflight: Inflight) {
        if let Self::Packed(queue) = self {
            queue.track(inflight);
        }
    }

    /// See [`DeviceQueue::size`].
    pub fn size(&self) -> u16 {
        with_queue!(self, queue => queue.size())
    }

    /// See [`DeviceQueue::base`].
    pub fn base(&self) -> u32 {
        with_queue!(self, queue => queue.base())
    }

    /// See [`DeviceQueue::publish`].
    #[inline(always)]
    pub fn publish(&mut self) {
        with_queue!(self, queue => queue.publish());
    }

    /// See [`DeviceQueue::needs_notification`].
    #[inline(always)]
    pub fn needs_notification(&mut self) -> bool {
        with_queue!(self, queue => queue.needs_notification())
    }

    /// See [`DeviceQueue::set_notification`].
    pub fn set_notification(&mut self, wanted: bool) {
        with_queue!(self, queue => queue.set_notification(wanted));
    }
}
