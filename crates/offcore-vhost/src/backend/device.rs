//! The device: the application's view of a back end, and callbacks about it.

use offcore_dma::Binding;
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::FallocateFlags;

use super::{BackendConfig, Status};
use crate::cell::{VringCell, Wanted, WorkerTimeout};

/// Callbacks for applications. They run on the back end's control thread, which holds no lock: all functions of
/// [`VhostDevice`] can be called inside and outside callbacks. The front end's next message waits until the callback
/// returns.
///
/// The order is always `new_device`, any number of `vring_state_changed`, `destroy_device`.
pub trait DeviceEvents: Send {
    /// The first queue pair is ready and enabled: packets can flow. In DPDK: `new_device`.
    fn new_device(&mut self, device: &VhostDevice) {
        let _ = device;
    }

    /// The front end has stopped the first queue pair or has disconnected. The virtqueues are drained, and every
    /// enabled one has been reported as disabled. In DPDK: `destroy_device`.
    fn destroy_device(&mut self, device: &VhostDevice) {
        let _ = device;
    }

    /// Virtqueue `queue` has become usable (ready and enabled), or is no longer usable. In DPDK: `vring_state_changed`.
    fn vring_state_changed(&mut self, device: &VhostDevice, queue: u16, enabled: bool) {
        let _ = (device, queue, enabled);
    }
}

/// Ignores all events.
impl DeviceEvents for () {}

/// Why a call was not carried out. After [`WorkerTimeout`] it is still wanted, and happens when the worker gets to it.
#[derive(Clone, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum VhostDeviceError {
    /// virtqueue {queue}: the device has {vrings}, numbered from 0
    NoQueue { queue: u16, vrings: usize },
    /// {path}: the port was not made for asynchronous copies
    Synchronous { path: PathBuf },
    /// {0}
    WorkerTimeout(#[from] WorkerTimeout),
}

/// A handle for the device that a back end provides to front ends. It can be cloned freely.
///
/// Each call takes effect between two bursts of the virtqueue's worker, after the packets in flight have completed. The
/// call returns after the change has taken effect. If no worker is attached, it takes effect at once. Calls may be made
/// from any thread except the worker's own, which would wait for itself.
#[derive(Clone)]
pub struct VhostDevice(Arc<Shared>);

struct Shared {
    path: PathBuf,
    cells: Vec<Arc<VringCell>>,
    asynchronous: bool,
    timeout: Duration,
    status: Mutex<Status>,
    /// Objects that front ends have replaced or removed, but workers may still use. Dropping the last reference to a
    /// peer's file may take long. This list makes sure that a worker never drops the last one.
    retired: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    /// The region for descriptors in flight that was created last.
    inflight: Mutex<Option<OwnedFd>>,
}

impl VhostDevice {
    pub(super) fn new(config: &BackendConfig) -> Self {
        let cells: Vec<_> =
            (0..config.queue_pairs * 2).map(|queue| Arc::new(VringCell::new(queue))).collect();
        let vrings = vec![super::VringStatus::default(); cells.len()];
        Self(Arc::new(Shared {
            path: config.path.clone(),
            cells,
            asynchronous: config.asynchronous,
            timeout: config.timeout,
            status: Mutex::new(Status { vrings, ..Status::default() }),
            retired: Mutex::default(),
            inflight: Mutex::default(),
        }))
    }

    /// The path of the socket, which is the name of the device.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The virtqueues by index. The guest receives from even ones and transmits to odd ones.
    pub fn cells(&self) -> &[Arc<VringCell>] {
        &self.0.cells
    }

    /// Returns the current status of the device.
    pub fn status(&self) -> Status {
        let mut status = self.state().clone();
        for (vring, cell) in status.vrings.iter_mut().zip(self.cells()) {
            vring.in_flight = cell.in_flight();
            vring.broken = vring.broken.or(cell.report().broken);
        }
        status
    }

    /// Binds the copies of virtqueue `queue` to `binding`. Any virtqueue may use any channels of its worker. In DPDK:
    /// `rte_vhost_async_channel_register` (and `_thread_unsafe`, which is equivalent here).
    ///
    /// # Errors
    /// Fails if the virtqueue does not exist, the port was created without `asynchronous`, or the worker does not
    /// answer.
    pub fn register_async(&self, queue: u16, binding: Binding) -> Result<(), VhostDeviceError> {
        if !self.0.asynchronous {
            return Err(VhostDeviceError::Synchronous { path: self.0.path.clone() });
        }
        self.change(queue, |wanted| wanted.binding = binding)
    }

    /// Lets the core make the copies of virtqueue `queue`. No copies are left in flight in a channel. In DPDK:
    /// `rte_vhost_async_channel_unregister` (and `_thread_unsafe`), which fails while copies are in flight. This
    /// function waits.
    ///
    /// # Errors
    /// Fails if the virtqueue does not exist, or the worker does not answer.
    pub fn unregister_async(&self, queue: u16) -> Result<(), VhostDeviceError> {
        self.change(queue, |wanted| wanted.binding = Binding::core())
    }

    /// Completes and publishes all packets of virtqueue `queue` that are in flight at the time of the call. In DPDK:
    /// `rte_vhost_clear_queue` (and `_thread_unsafe`), which hands the packets to the caller.
    ///
    /// # Errors
    /// Fails if the virtqueue does not exist, or the worker does not answer.
    pub fn clear_queue(&self, queue: u16) -> Result<(), VhostDeviceError> {
        self.change(queue, |_| {})
    }

    /// Returns the number of packets of virtqueue `queue` whose copies are in flight. In DPDK:
    /// `rte_vhost_async_get_inflight` (and `_thread_unsafe`).
    ///
    /// # Errors
    /// Fails if the virtqueue does not exist.
    pub fn in_flight(&self, queue: u16) -> Result<u64, VhostDeviceError> {
        Ok(self.cell(queue)?.in_flight())
    }

    /// The status published by the control thread. The lock is held only for a few stores, never during a callback or a
    /// wait.
    pub(super) fn state(&self) -> MutexGuard<'_, Status> {
        self.0.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an object that a front end has replaced or removed until no worker uses it any more.
    pub(super) fn retire(&self, what: Arc<dyn Any + Send + Sync>) {
        self.0.retired.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// Drops the objects that no worker uses any more. Returns whether others are left.
    pub(super) fn drop_retired(&self) -> bool {
        let mut retired = self.0.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|what| Arc::strong_count(what) > 1);
        !retired.is_empty()
    }

    /// Keeps a new region for descriptors in flight, and frees the memory of the previous one.
    pub(super) fn keep_inflight(&self, region: OwnedFd) {
        let mut kept = self.0.inflight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = kept.replace(region) {
            let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // The file was created by this process, so this cannot fail.
            let _ = rustix::fs::fallocate(before, holes, 0, i64::MAX as u64);
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    fn change(&self, queue: u16, change: impl FnOnce(&mut Wanted)) -> Result<(), VhostDeviceError> {
        let cell = self.cell(queue)?;
        cell.publish(change);
        cell.wait(self.0.timeout)?;
        Ok(())
    }

    fn cell(&self, queue: u16) -> Result<&VringCell, VhostDeviceError> {
        let cell = self.0.cells.get(usize::from(queue));
        cell.map(Arc::as_ref).ok_or(VhostDeviceError::NoQueue { queue, vrings: self.0.cells.len() })
    }
}

impl fmt::Debug for VhostDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VhostDevice")
            .field("path", &self.0.path)
            .field("vrings", &self.0.cells.len())
            .finish()
    }
}
