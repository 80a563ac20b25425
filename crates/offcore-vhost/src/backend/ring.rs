//! One virtqueue as its front end has set it up so far.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offcore_dma::mover::MoverError;
use offcore_mem::GuestMemory;
use offcore_ring::{Inflight, Layout, RingError};
use rustix::fs::OFlags;

use super::{ControlError, RingState, VringStatus};
use crate::cell::VringConfig;
use crate::dirty::{DirtyLog, RingLog};
use crate::eventfd;
use crate::features::{VHOST_USER_F_PROTOCOL_FEATURES, effective, is_packed};
use crate::message::Code;
use crate::passed::{EVENTFD, PassedFd};

/// Where the parts are, in the front end's addresses. Those of a packed ring are its descriptors, the driver's event
/// suppression in the place of the available ring, and the device's in that of the used ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) desc: u64,
    pub(super) avail: u64,
    pub(super) used: u64,
    /// Guest address under which the used ring is logged, when it is not its own.
    pub(super) log: Option<u64>,
}

/// A virtqueue's set-up. It can start when all of it is there: see [`Ring::is_complete`].
#[derive(Debug)]
pub(super) struct Ring {
    pub(super) queue: u16,
    pub(super) size: Option<u16>,
    pub(super) addresses: Option<Addresses>,
    /// What SET_VRING_BASE said, or where the ring last stopped: see [`Ring::check_base`].
    pub(super) base: Option<u32>,
    /// Where the ring was when the device was last reset. QEMU 7 resets the device first and asks for the base then.
    pub(super) last: u32,
    /// A kick descriptor, or word that there is none, has come: the ring may start.
    pub(super) started: bool,
    /// Where the driver kicks: a worker that sleeps waits for it.
    pub(super) kick: Option<Arc<OwnedFd>>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) err: Option<OwnedFd>,
    /// What SET_VRING_ENABLE said.
    pub(super) enable: Option<bool>,
    /// Published to the worker.
    pub(super) running: bool,
    /// Its parts are in memory that has not been added yet, or was removed: it starts when they are there.
    pub(super) waits: bool,
    pub(super) broken: Option<RingError>,
    /// What was said of its binding.
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

    /// Whether everything is there that a ring needs, but for memory and features.
    pub(super) fn is_complete(&self) -> bool {
        self.started && self.size.is_some() && self.addresses.is_some() && self.base.is_some()
    }

    /// Whether the ring is enabled, or would be if it ran: without the protocol features it is from the start.
    pub(super) fn is_enabled(&self, features: u64) -> bool {
        self.enable.unwrap_or(features & VHOST_USER_F_PROTOCOL_FEATURES == 0)
    }

    /// The ring's parts in host memory; `None` before size and addresses are known.
    ///
    /// # Errors
    /// A part that is not in guest memory as a whole, or not aligned, or a size that rings of this kind do not have.
    pub(super) fn layout(
        &self,
        memory: &Arc<GuestMemory>,
        features: u64,
    ) -> Result<Option<Layout>, ControlError> {
        let (Some(size), Some(addresses)) = (self.size, self.addresses) else { return Ok(None) };
        let parts = (addresses.desc, addresses.avail, addresses.used);
        let layout = Layout::in_memory(memory, parts, size.into(), is_packed(features));
        layout.map(Some).map_err(|source| ControlError::Layout { queue: self.queue, source })
    }

    /// Whether the base is one of a ring of this kind: for a split ring an index of 16 bits, for a packed one the next
    /// available descriptor and, in the upper half, the next used one, each with its wrap counter in the highest bit.
    /// Front ends that know only 16 bits leave the upper half 0.
    ///
    /// # Errors
    /// One that is not.
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

    /// What is marked in the log when the ring is written.
    pub(super) fn log(&self, memory: &GuestMemory, layout: &Layout, log: &Arc<DirtyLog>) -> RingLog {
        RingLog::new(log, memory, layout, self.addresses.and_then(|addresses| addresses.log))
    }

    /// What the worker gets; `None` when something is missing.
    ///
    /// # Errors
    /// As [`Ring::layout`] and [`Ring::check_base`].
    pub(super) fn config(
        &self,
        memory: &Arc<GuestMemory>,
        features: u64,
        log: Option<&Arc<DirtyLog>>,
        inflight: Option<&Inflight>,
    ) -> Result<Option<VringConfig>, ControlError> {
        let (Some(layout), Some(base)) = (self.layout(memory, features)?, self.base) else { return Ok(None) };
        self.check_base(features)?;
        // A front end whose back end died knows no base, and DPDK's virtio-user then says 0 for a ring that has long been
        // used. Nothing is in flight now, so the ring goes on where the last back end returned chains. A fresh ring has
        // a used index of 0. (DPDK begins packed rings anew.)
        let base = match &layout {
            Layout::Split(split) if base == 0 => split.used_index().into(),
            _ => base,
        };
        let taken_up = inflight.map_or(Ok(None), |inflight| layout.take_up(inflight, base));
        let taken_up = taken_up.map_err(|source| ControlError::Layout { queue: self.queue, source })?;
        if let (Some(_), Some(call)) = (taken_up, &self.call) {
            // The last back end may have returned chains and ended before it told.
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

    /// The ring as it is after a reset of the device.
    pub(super) fn after_reset(&mut self) -> Self {
        Self { err: self.err.take(), last: self.last_base(), ..Self::new(self.queue) }
    }

    /// What GET_VRING_BASE answers of a ring that is stopped.
    pub(super) fn last_base(&self) -> u32 {
        self.base.unwrap_or(self.last)
    }

    /// Forgets what belongs to one start: addresses are stale once a ring was stopped.
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

/// A file descriptor that workers write to or read from must be an eventfd, and not block.
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
