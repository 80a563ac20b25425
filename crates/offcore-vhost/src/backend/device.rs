//! The device: what applications see of a back end, and how they are told about it.

use offcore_dma::Binding;
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::FallocateFlags;

use super::{BackendConfig, Status};
use crate::cell::{Unanswered, VringCell, Wanted};

/// What an application wants to be told. Callbacks are made on the back end's control thread, holding no lock: every
/// call of [`Device`] can be made from inside them as well as from outside. The front end's next message waits until
/// the callback returns.
///
/// The order is always: `new_device`, any number of `vring_state_changed`, `destroy_device`.
pub trait DeviceEvents: Send {
    /// The first queue pair is ready and enabled: packets can flow. In DPDK: `new_device`.
    fn new_device(&mut self, device: &Device) {
        let _ = device;
    }

    /// The front end has stopped the first queue pair or is gone. The virtqueues are drained; those that were enabled
    /// have been reported as no longer so. In DPDK: `destroy_device`.
    fn destroy_device(&mut self, device: &Device) {
        let _ = device;
    }

    /// Virtqueue `queue` has become usable (ready and enabled), or has ceased to be. In DPDK: `vring_state_changed`.
    fn vring_state_changed(&mut self, device: &Device, queue: u16, enabled: bool) {
        let _ = (device, queue, enabled);
    }
}

/// Nothing is told.
impl DeviceEvents for () {}

/// Why a call was not carried out. After [`Unanswered`] it is still wanted, and happens when the worker gets to it.
#[derive(Clone, Debug, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum DeviceError {
    /// virtqueue {queue}: the device has {vrings}, numbered from 0
    NoQueue { queue: u16, vrings: usize },
    /// {path}: the port was not made for asynchronous copies
    Synchronous { path: PathBuf },
    /// {0}
    Unanswered(#[from] Unanswered),
}

/// The device that a back end shows to front ends: a handle, to be cloned freely.
///
/// Each call takes effect between two bursts of the virtqueue's worker, after what is in flight has completed, and
/// returns when it is in force; with no worker attached that is at once. Calls may be made from any thread but the
/// worker's own, which would wait for itself.
#[derive(Clone)]
pub struct Device(Arc<Shared>);

struct Shared {
    path: PathBuf,
    cells: Vec<Arc<VringCell>>,
    asynchronous: bool,
    timeout: Duration,
    status: Mutex<Status>,
    /// What front ends have taken back, while workers may still use it. To close the last reference of somebody else's file may take
    /// long: a worker's is never the last.
    retired: Mutex<Vec<Arc<dyn Any + Send + Sync>>>,
    /// The region of what is in flight that was made last.
    inflight: Mutex<Option<OwnedFd>>,
}

impl Device {
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

    /// The socket's path, which is the device's name.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The virtqueues, by index: even ones the guest receives from, odd ones it transmits to.
    pub fn cells(&self) -> &[Arc<VringCell>] {
        &self.0.cells
    }

    /// The device at this moment.
    pub fn status(&self) -> Status {
        let mut status = self.state().clone();
        for (vring, cell) in status.vrings.iter_mut().zip(self.cells()) {
            vring.in_flight = cell.in_flight();
            vring.broken = vring.broken.or(cell.report().broken);
        }
        status
    }

    /// From now on the copies of virtqueue `queue` are made as `binding` says: any virtqueue by any channels of its
    /// worker. In DPDK: `rte_vhost_async_channel_register` (and `_thread_unsafe`; here there is no difference).
    ///
    /// # Errors
    /// A virtqueue that there is not, a port made without `asynchronous`, a worker that does not answer.
    pub fn register_async(&self, queue: u16, binding: Binding) -> Result<(), DeviceError> {
        if !self.0.asynchronous {
            return Err(DeviceError::Synchronous { path: self.0.path.clone() });
        }
        self.change(queue, |wanted| wanted.binding = binding)
    }

    /// From now on the core makes the copies of virtqueue `queue`; none is left in flight in a channel. In DPDK:
    /// `rte_vhost_async_channel_unregister` (and `_thread_unsafe`), which fails while copies are in flight; this waits.
    ///
    /// # Errors
    /// A virtqueue that there is not, a worker that does not answer.
    pub fn unregister_async(&self, queue: u16) -> Result<(), DeviceError> {
        self.change(queue, |wanted| wanted.binding = Binding::core())
    }

    /// Completes and publishes all packets of virtqueue `queue` that were in flight when this was called. In DPDK:
    /// `rte_vhost_clear_queue` (and `_thread_unsafe`), which hands the packets to the caller.
    ///
    /// # Errors
    /// A virtqueue that there is not, a worker that does not answer.
    pub fn clear_queue(&self, queue: u16) -> Result<(), DeviceError> {
        self.change(queue, |_| {})
    }

    /// Packets of virtqueue `queue` whose copies are in flight. In DPDK: `rte_vhost_async_get_inflight` (and
    /// `_thread_unsafe`).
    ///
    /// # Errors
    /// A virtqueue that there is not.
    pub fn in_flight(&self, queue: u16) -> Result<u64, DeviceError> {
        Ok(self.cell(queue)?.in_flight())
    }

    /// What the control thread lets be seen. Held for a few stores only, never over a callback or a wait.
    pub(super) fn state(&self) -> MutexGuard<'_, Status> {
        self.0.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps what a front end has taken back until no worker has it any more.
    pub(super) fn retire(&self, what: Arc<dyn Any + Send + Sync>) {
        self.0.retired.lock().unwrap_or_else(PoisonError::into_inner).push(what);
    }

    /// Drops what no worker has any more; whether there is more.
    pub(super) fn let_go(&self) -> bool {
        let mut retired = self.0.retired.lock().unwrap_or_else(PoisonError::into_inner);
        retired.retain(|what| Arc::strong_count(what) > 1);
        !retired.is_empty()
    }

    /// Keeps a region of what is in flight; the one before has no memory any more.
    pub(super) fn keep_inflight(&self, region: OwnedFd) {
        let mut kept = self.0.inflight.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = kept.replace(region) {
            let holes = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // It is ours, so nothing can fail.
            let _ = rustix::fs::fallocate(before, holes, 0, i64::MAX as u64);
        }
    }

    pub(super) fn timeout(&self) -> Duration {
        self.0.timeout
    }

    fn change(&self, queue: u16, change: impl FnOnce(&mut Wanted)) -> Result<(), DeviceError> {
        let cell = self.cell(queue)?;
        cell.publish(change);
        cell.wait(self.0.timeout)?;
        Ok(())
    }

    fn cell(&self, queue: u16) -> Result<&VringCell, DeviceError> {
        let cell = self.0.cells.get(usize::from(queue));
        cell.map(Arc::as_ref).ok_or(DeviceError::NoQueue { queue, vrings: self.0.cells.len() })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("path", &self.0.path).field("vrings", &self.0.cells.len()).finish()
    }
}
