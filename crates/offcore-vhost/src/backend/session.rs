//! The state that one front end has set up, and the handling of its requests.
//!
//! To change the memory of a running virtqueue, its worker drains it and continues at the same position with the new
//! table. Eventfds are changed while a virtqueue runs. A virtqueue starts as soon as its configuration is complete,
//! regardless of the order of the messages.

mod inflight;
mod log;
mod memory;
mod rings;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use offcore_mem::GuestMemory;
use offcore_ring::Inflight;
use rustix::net::AddressFamily;
use rustix::net::sockopt::socket_domain;

use super::device::{DeviceEvents, VhostDevice};
use super::ring::Ring;
use super::{BackendConfig, ControlError, MAX_SLOTS, MIN_MTU};
use crate::dirty::DirtyLog;
use crate::eventfd;
use crate::features::{
    PROTOCOL_OFFERED, STATUS_FEATURES_OK, VHOST_F_LOG_ALL, VHOST_USER_PROTOCOL_F_BACKEND_REQ,
    VHOST_USER_PROTOCOL_F_NET_MTU, VHOST_USER_PROTOCOL_F_REPLY_ACK, VHOST_USER_PROTOCOL_F_RESET_DEVICE,
    VHOST_USER_PROTOCOL_F_STATUS, VIRTIO_F_VERSION_1,
};
use crate::message::{Code, Reply, Request};
use crate::passed::PassedFd;

/// The state of a device as seen by one front end, during one connection.
#[derive(Debug)]
pub(super) struct FrontEndSession {
    device: VhostDevice,
    offered: u64,
    max_mtu: u16,
    max_memory: u64,
    features: Option<u64>,
    protocol: u64,
    status: u8,
    mtu: Option<u16>,
    /// A socket for requests by the back end. No request is ever sent, but holding it tells the front end that the back
    /// end is listening.
    back_channel: Option<PassedFd>,
    memory: Option<Arc<GuestMemory>>,
    /// The dirty log, if one was set. It is used only while the features enable logging.
    log: Option<Arc<DirtyLog>>,
    /// Shared records of descriptors in flight, by virtqueue. They survive this process.
    inflight: Vec<Inflight>,
    /// Number of regions created for these records.
    regions: usize,
    rings: Vec<Ring>,
    /// Whether the application was notified of the device.
    created: bool,
    /// The state of each virtqueue that was last reported to the application.
    announced: Vec<bool>,
}

impl FrontEndSession {
    pub(super) fn new(device: VhostDevice, config: &BackendConfig) -> Self {
        let rings: Vec<_> = device.cells().iter().map(|cell| Ring::new(cell.queue())).collect();
        let announced = vec![false; rings.len()];
        Self {
            device,
            offered: config.offered(),
            max_mtu: config.max_mtu,
            max_memory: config.max_memory,
            features: None,
            protocol: 0,
            status: 0,
            mtu: None,
            back_channel: None,
            memory: None,
            log: None,
            inflight: Vec::new(),
            regions: 0,
            rings,
            created: false,
            announced,
        }
    }

    /// Whether requests are acknowledged if the front end asks for it.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol & VHOST_USER_PROTOCOL_F_REPLY_ACK != 0
    }

    /// Carries out a request. Returns the reply if the request has its own kind of reply.
    ///
    /// # Errors
    /// Fails if the request cannot be carried out. In this case, it has changed nothing, except that a virtqueue which
    /// cannot start at its addresses loses them.
    pub(super) fn handle(
        &mut self,
        request: Request<PassedFd>,
    ) -> Result<Option<Reply<OwnedFd>>, ControlError> {
        match request {
            Request::GetFeatures => return Ok(Some(Reply::Value(self.offered))),
            Request::GetProtocolFeatures => return Ok(Some(Reply::Value(PROTOCOL_OFFERED))),
            Request::GetQueueNum => return Ok(Some(Reply::Value(self.rings.len() as u64 / 2))),
            Request::GetMaxMemSlots => return Ok(Some(Reply::Value(MAX_SLOTS as u64))),
            Request::GetStatus => return Ok(Some(Reply::Value(self.status.into()))),
            Request::GetVringBase(state) => return self.get_vring_base(state).map(Some),
            Request::SetLogBase(area, fd) => {
                self.set_log_base(area, &fd)?;
                self.start_rings()?;
                return Ok(Some(Reply::Value(0)));
            }
            Request::GetInflightFd(area) => return self.get_inflight_fd(area).map(Some),
            Request::SetInflightFd(area, fd) => self.set_inflight_fd(area, &fd)?,
            Request::SetOwner | Request::ResetOwner => {}
            Request::SetFeatures(features) => self.set_features(features)?,
            Request::SetProtocolFeatures(features) => self.set_protocol_features(features)?,
            Request::SetMemTable(regions) => self.set_mem_table(regions)?,
            Request::SetVringNum(state) => self.set_vring_num(state)?,
            Request::SetVringAddr(addr) => self.set_vring_addr(addr)?,
            Request::SetVringBase(state) => self.set_vring_base(state)?,
            Request::SetVringKick(event) => self.set_vring_kick(event)?,
            Request::SetVringCall(event) => self.set_vring_call(event)?,
            Request::SetVringErr(event) => self.set_vring_err(event)?,
            Request::SetVringEnable(state) => self.set_vring_enable(state)?,
            Request::NetSetMtu(mtu) => self.net_set_mtu(mtu)?,
            Request::SetBackendReqFd(fd) => self.set_backend_req_fd(fd)?,
            Request::ResetDevice => self.reset_device()?,
            Request::AddMemReg(region, fd) => self.add_mem_reg(&region, &fd)?,
            // The descriptor is closed.
            Request::RemMemReg(region, _) => self.rem_mem_reg(&region)?,
            Request::SetStatus(status) => self.set_status(status)?,
        }
        self.start_rings()?;
        Ok(None)
    }

    fn set_features(&mut self, found: u64) -> Result<(), ControlError> {
        let before = self.features;
        // Logging can be switched on and off while virtqueues run.
        if let Some((ring, present)) = self.rings.iter().find(|ring| ring.running).zip(before)
            && (present ^ found) & !VHOST_F_LOG_ALL != 0
        {
            return Err(ControlError::RunningFeatures { queue: ring.queue, found, present });
        }
        self.check_log(Code::SET_FEATURES, found, self.log.as_deref(), self.memory.as_ref())?;
        // The features negotiated before are no longer valid.
        self.features = None;
        let status = self.status;
        self.status &= !STATUS_FEATURES_OK;
        if found & VIRTIO_F_VERSION_1 == 0 {
            return Err(ControlError::Legacy { found });
        }
        offered(Code::SET_FEATURES, found, self.offered)?;
        (self.features, self.status) = (Some(found), status);
        if before == Some(found) { Ok(()) } else { self.adjust_all() }
    }

    fn set_protocol_features(&mut self, found: u64) -> Result<(), ControlError> {
        offered(Code::SET_PROTOCOL_FEATURES, found, PROTOCOL_OFFERED)?;
        self.protocol = found;
        Ok(())
    }

    /// Refuses a request whose protocol feature was not negotiated.
    fn needs(&self, code: Code, feature: u64, name: &'static str) -> Result<(), ControlError> {
        match self.protocol & feature {
            0 => Err(ControlError::NotNegotiated { code, name, bit: feature.trailing_zeros() }),
            _ => Ok(()),
        }
    }

    fn net_set_mtu(&mut self, found: u64) -> Result<(), ControlError> {
        self.needs(Code::NET_SET_MTU, VHOST_USER_PROTOCOL_F_NET_MTU, "NET_MTU")?;
        let max = self.max_mtu;
        let mtu = u16::try_from(found).ok().filter(|mtu| (MIN_MTU..=max).contains(mtu));
        self.mtu = Some(mtu.ok_or(ControlError::Mtu { found, max })?);
        Ok(())
    }

    fn set_backend_req_fd(&mut self, fd: PassedFd) -> Result<(), ControlError> {
        let code = Code::SET_BACKEND_REQ_FD;
        self.needs(code, VHOST_USER_PROTOCOL_F_BACKEND_REQ, "BACKEND_REQ")?;
        if socket_domain(&fd) != Ok(AddressFamily::UNIX) {
            return Err(ControlError::NotASocket { code });
        }
        self.back_channel = Some(fd);
        Ok(())
    }

    fn set_status(&mut self, found: u64) -> Result<(), ControlError> {
        self.needs(Code::SET_STATUS, VHOST_USER_PROTOCOL_F_STATUS, "STATUS")?;
        let status = u8::try_from(found).map_err(|_| ControlError::Status { found })?;
        if status == 0 {
            return self.reset();
        }
        // The driver reads the status. If the device did not accept the features, the driver finds this bit cleared.
        self.status = if self.features.is_none() { status & !STATUS_FEATURES_OK } else { status };
        Ok(())
    }

    fn reset_device(&mut self) -> Result<(), ControlError> {
        self.needs(Code::RESET_DEVICE, VHOST_USER_PROTOCOL_F_RESET_DEVICE, "RESET_DEVICE")?;
        self.reset()
    }

    /// Stops all virtqueues and discards the driver's configuration. State that belongs to the connection is kept: the
    /// protocol features, the memory (QEMU does not describe its regions again), and the descriptors for errors and for
    /// the back end's requests, which are sent only once.
    fn reset(&mut self) -> Result<(), ControlError> {
        self.stop(|_| true)?;
        for ring in &mut self.rings {
            *ring = ring.after_reset();
        }
        self.inflight.iter().for_each(Inflight::end);
        (self.features, self.status, self.mtu) = (None, 0, None);
        Ok(())
    }

    /// Checks for events without a message. Loss of memory is an error and ends the connection. Errors of virtqueues
    /// are returned.
    pub(super) fn look(&mut self) -> Result<Vec<ControlError>, ControlError> {
        self.device.drop_retired();
        let log_vanished = self.log.as_ref().is_some_and(|log| log.has_vanished());
        let inflight_vanished = self.inflight.first().is_some_and(Inflight::has_vanished);
        if log_vanished || inflight_vanished || self.memory.as_ref().is_some_and(|memory| memory.vanished()) {
            return Err(ControlError::Vanished);
        }
        let mut found = Vec::new();
        for (ring, cell) in self.rings.iter_mut().zip(self.device.cells()) {
            if !ring.running || ring.broken.is_some() {
                continue;
            }
            let report = cell.report();
            if std::mem::replace(&mut ring.refused, report.refused) != report.refused {
                found
                    .extend(report.refused.map(|source| ControlError::Refused { queue: ring.queue, source }));
            }
            ring.broken = report.broken;
            if let Some(source) = ring.broken {
                if let Some(err) = &ring.err {
                    eventfd::signal(err.as_fd());
                }
                found.push(ControlError::Broken { queue: ring.queue, source });
            }
        }
        Ok(found)
    }

    /// Notifies the application of all changes since the last call.
    pub(super) fn announce(&mut self, events: &mut dyn DeviceEvents) {
        let features = self.features.unwrap_or(0);
        let usable = |ring: &Ring| ring.running && ring.is_enabled(features);
        if self.created && !self.rings[..2].iter().all(|ring| ring.running) {
            for (ring, told) in self.rings.iter().zip(&mut self.announced) {
                if std::mem::take(told) {
                    events.vring_state_changed(&self.device, ring.queue, false);
                }
            }
            self.created = false;
            events.destroy_device(&self.device);
        }
        if !self.created && self.rings[..2].iter().all(usable) {
            self.created = true;
            events.new_device(&self.device);
        }
        if !self.created {
            return;
        }
        for (ring, told) in self.rings.iter().zip(&mut self.announced) {
            let now = usable(ring);
            if std::mem::replace(told, now) != now {
                events.vring_state_changed(&self.device, ring.queue, now);
            }
        }
    }

    /// Stops everything after the front end has disconnected.
    ///
    /// # Errors
    /// Fails if a worker does not release its virtqueue. The worker then keeps the memory until it does.
    pub(super) fn tear_down(&mut self) -> Result<(), ControlError> {
        let stopped = self.stop(|_| true);
        // A worker that has not answered releases them later.
        let device = &self.device;
        for ring in &mut self.rings {
            ring.kick.take().into_iter().chain(ring.call.take()).for_each(|event| device.retire(event));
            ring.reset();
        }
        self.memory.take().into_iter().for_each(|memory| device.retire(memory));
        self.log.take().into_iter().for_each(|log| device.retire(log));
        self.inflight.clear();
        self.back_channel = None;
        device.drop_retired();
        stopped.map(drop)
    }

    /// Publishes the state of the session in the status of the device.
    pub(super) fn show(&self) {
        let mut status = self.device.state();
        status.features = self.features;
        status.protocol_features = self.protocol;
        status.virtio_status = self.status;
        status.mtu = self.mtu;
        status.back_channel = self.back_channel.is_some();
        status.regions = self.memory.as_ref().map_or(0, |memory| memory.regions().len());
        status.vrings = self.rings.iter().map(|ring| ring.status(self.features)).collect();
    }
}

/// Refuses features that were not offered.
fn offered(code: Code, found: u64, offered: u64) -> Result<(), ControlError> {
    let extra = found & !offered;
    if extra == 0 { Ok(()) } else { Err(ControlError::NotOffered { code, found, offered, extra }) }
}
