//! Configuration of one virtqueue, as received from the front end so far.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offcore_dma::mover::MoverError;
use offcore_mem::GuestMemory;
use offcore_ring::{Areas, Inflight, Layout, RingError};
use rustix::fs::OFlags;

use super::{ControlError, RingState, VringStatus};
use crate::cell::VringConfig;
use crate::dirty::{DirtyLog, RingLog};
use crate::eventfd;
use crate::features::{VHOST_USER_F_PROTOCOL_FEATURES, effective, is_packed};
use crate::message::Code;
use crate::passed::{EVENTFD, PassedFd};

/// Addresses of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) areas: Areas,
    /// Guest address for logging the used ring, if it differs from the address of the used ring.
    pub(super) log: Option<u64>,
}

/// Configuration of a virtqueue. It can start when the configuration is complete: see [`Ring::is_complete`].
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) queue: u16,
    pub(super) size: Option<u16>,
    pub(super) addresses: Option<Addresses>,
    /// The value of SET_VRING_BASE, or the position at which the ring last stopped: see [`Ring::check_base`].
    pub(super) base: Option<u32>,
    /// Position of the ring at the last reset of the device. QEMU 7 resets the device before it requests the base.
    pub(super) last: u32,
    /// Whether SET_VRING_KICK was received, with or without a descriptor. The ring may then start.
    pub(super) started: bool,
    /// Eventfd that the driver signals. An idle worker waits for it.
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) err: Option<OwnedFd>,
    /// The value of SET_VRING_ENABLE.
    pub(super) enable: Option<bool>,
    /// Whether the ring is published to the worker.
    pub(super) running: bool,
    /// Whether the ring waits for memory that was removed or not added yet. It starts when the memory is added.
    pub(super) waits: bool,
    pub(super) broken: Option<RingError>,
    /// The reported error of its binding.
    pub(super) refused: Option<MoverError>,
}

impl Ring {
    pub(super) fn new(queue: u16) -> Self {
        Self {
            queue,
            size: None,
            addresses: None,
            base: None,
            last: 0,
            started: false,
            kick: None,
            call: None,
            err: None,
            enable: None,
            running: false,
            waits: false,
            broken: None,
            refused: None,
        }
    }

    /// Whether the ring has all of its configuration, not counting memory and features.
    pub(super) fn is_complete(&self) -> bool {
        self.started && self.size.is_some() && self.addresses.is_some() && self.base.is_some()
    }

    /// Whether the ring is enabled, or would be if it was running. Without protocol features, rings are enabled from
    /// the start.
    pub(super) fn is_enabled(&self, features: u64) -> bool {
        self.enable.unwrap_or(features & VHOST_USER_F_PROTOCOL_FEATURES == 0)
    }

    /// Returns the parts of the ring in host memory; `None` before size and addresses are known.
    ///
    /// # Errors
    /// Fails if a part is not completely in guest memory or is not aligned, or if the size is invalid for this kind of
    /// ring.
    pub(super) fn layout(
        &self,
        memory: &Arc<GuestMemory>,
        features: u64,
    ) -> Result<Option<Layout>, ControlError> {
        let (Some(size), Some(addresses)) = (self.size, self.addresses) else { return Ok(None) };
        let layout = Layout::in_memory(memory, addresses.areas, size.into(), is_packed(features));
        layout.map(Some).map_err(|source| ControlError::Layout { queue: self.queue, source })
    }

    /// Checks that the base is valid for this kind of ring. For a split ring, it is an index of 16 bits. For a packed
    /// ring, the lower half is the next available descriptor and the upper half the next used one, each with its wrap
    /// counter in the highest bit. Front ends that support only 16 bits leave the upper half 0.
    ///
    /// # Errors
    /// Fails if the base is not valid.
    pub(super) fn check_base(&self, features: u64) -> Result<(), ControlError> {
        let (queue, Some(found)) = (self.queue, self.base) else { return Ok(()) };
        if !is_packed(features) {
            return if found > u16::MAX.into() { Err(ControlError::Base { queue, found }) } else { Ok(()) };
        }
        let Some(size) = self.size else { return Ok(()) };
        let outside = |half: u32| half & 0x7fff >= u32::from(size);
        if outside(found) || outside(found >> 16) {
            return Err(ControlError::PackedBase { queue, found, size });
        }
        Ok(())
    }

    /// Returns the parts of the dirty log to mark when the ring is written.
    pub(super) fn log(&self, memory: &GuestMemory, layout: &Layout, log: &Arc<DirtyLog>) -> RingLog {
        RingLog::new(log, memory, layout, self.addresses.and_then(|addresses| addresses.log))
    }

    /// Returns the configuration for the worker; `None` if it is incomplete.
    ///
    /// # Errors
    /// The same as for [`Ring::layout`] and [`Ring::check_base`].
    pub(super) fn config(
        &self,
        memory: &Arc<GuestMemory>,
        features: u64,
        log: Option<&Arc<DirtyLog>>,
        inflight: Option<&Inflight>,
    ) -> Result<Option<VringConfig>, ControlError> {
        let (Some(layout), Some(base)) = (self.layout(memory, features)?, self.base) else { return Ok(None) };
        self.check_base(features)?;
        // After the death of its back end, a front end does not know the base. DPDK's virtio-user then sends 0 for a
        // ring that is already in use. Nothing is in flight now, so the ring continues where the last back end returned
        // chains. In a new ring, the used index is 0. (DPDK restarts packed rings from the beginning.)
        let base = match &layout {
            Layout::Split(split) if base == 0 => split.used_index().into(),
            _ => base,
        };
        let taken_up = inflight.map_or(Ok(None), |inflight| layout.take_up(inflight, base));
        let taken_up = taken_up.map_err(|source| ControlError::Layout { queue: self.queue, source })?;
        if let (Some(_), Some(call)) = (taken_up, &self.call) {
            // The last back end may have returned chains and terminated before it notified the driver.
            eventfd::signal(call.as_fd());
        }
        let base = taken_up.unwrap_or(base);
        Ok(Some(VringConfig {
            log: log.map(|log| self.log(memory, &layout, log)),
            inflight: inflight.cloned(),
            memory: Arc::clone(memory),
            layout,
            start: VringConfig::next_start(),
            base,
            features: effective(features),
            call: self.call.clone(),
            kick: self.kick.clone(),
            enabled: self.is_enabled(features),
        }))
    }

    /// Returns the state of the ring after a reset of the device.
    pub(super) fn after_reset(&mut self) -> Self {
        Self { err: self.err.take(), last: self.last_base(), ..Self::new(self.queue) }
    }

    /// Returns the answer to GET_VRING_BASE for a stopped ring.
    pub(super) fn last_base(&self) -> u32 {
        self.base.unwrap_or(self.last)
    }

    /// Clears the state that belongs to one start. After a stop, the addresses are stale.
    pub(super) fn reset(&mut self) {
        self.addresses = None;
        self.started = false;
        self.waits = false;
        self.kick = None;
        self.call = None;
        self.broken = None;
    }

    pub(super) fn status(&self, features: Option<u64>) -> VringStatus {
        let state = match (self.running, features) {
            (true, Some(features)) if self.is_enabled(features) => RingState::Enabled,
            (true, _) => RingState::Disabled,
            (false, _) => RingState::Stopped,
        };
        VringStatus {
            state,
            size: self.size.unwrap_or(0),
            kicks: self.kick.is_some(),
            calls: self.call.is_some(),
            broken: self.broken,
            in_flight: 0,
        }
    }
}

/// Checks that a file descriptor is an eventfd, because workers read or write it, and makes it non-blocking.
pub(super) fn eventfd(code: Code, queue: u16, fd: PassedFd) -> Result<OwnedFd, ControlError> {
    let found = fd.kind().unwrap_or_else(|error| format!("of unknown kind (/proc/self/fd: {error})"));
    let non_blocking = || {
        rustix::fs::fcntl_getfl(&fd).and_then(|flags| rustix::fs::fcntl_setfl(&fd, flags | OFlags::NONBLOCK))
    };
    let is_one = found == EVENTFD && non_blocking().is_ok();
    match if is_one { fd.into_checked() } else { None } {
        Some(fd) => Ok(fd),
        None => Err(ControlError::NotAnEventfd { code, queue, found }),
    }
}
