//! What one front end has set up, and what each of its requests does.
//!
//! A running virtqueue is changed by stopping it, waiting for its worker to let go, and starting it again where it was:
//! only then is its position known. A virtqueue starts as soon as all of its parts are there, in whatever order they
//! came.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use offcore_mem::GuestMemory;
use offcore_ring::split::MAX_SIZE;

use super::device::{Device, DeviceEvents};
use super::ring::{Addresses, Ring, eventfd};
use super::{ControlError, memory};
use crate::features::{PROTOCOL_MQ, PROTOCOL_REPLY_ACK, RING_PACKED, VERSION_1};
use crate::message::{Code, MemoryRegion, Reply, Request, VringAddr, VringFd, VringState};

/// The protocol features that are offered.
const PROTOCOL_OFFERED: u64 = PROTOCOL_MQ | PROTOCOL_REPLY_ACK;

/// The state of a device as one front end sees it, from its connection to its end.
#[derive(Debug)]
pub(super) struct Session {
    device: Device,
    offered: u64,
    features: Option<u64>,
    protocol: u64,
    memory: Option<Arc<GuestMemory>>,
    rings: Vec<Ring>,
    /// Whether the application has been told of the device.
    created: bool,
    /// What the application has been told of each virtqueue.
    announced: Vec<bool>,
}

impl Session {
    pub(super) fn new(device: Device, offered: u64) -> Self {
        let rings: Vec<_> = device.cells().iter().map(|cell| Ring::new(cell.queue())).collect();
        let announced = vec![false; rings.len()];
        Self { device, offered, features: None, protocol: 0, memory: None, rings, created: false, announced }
    }

    /// Whether requests are acknowledged when the front end asks for it.
    pub(super) fn acknowledges(&self) -> bool {
        self.protocol & PROTOCOL_REPLY_ACK != 0
    }

    /// Carries out a request; the reply, when the request has one of its own.
    ///
    /// # Errors
    /// Whatever makes the request impossible. It then has changed nothing, except that a virtqueue which cannot start
    /// where its addresses say has lost them.
    pub(super) fn handle(&mut self, request: Request<OwnedFd>) -> Result<Option<Reply>, ControlError> {
        match request {
            Request::GetFeatures => return Ok(Some(Reply::Value(self.offered))),
            Request::GetProtocolFeatures => return Ok(Some(Reply::Value(PROTOCOL_OFFERED))),
            Request::GetQueueNum => return Ok(Some(Reply::Value(self.rings.len() as u64 / 2))),
            Request::GetVringBase(state) => return self.get_vring_base(state).map(Some),
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
        }
        self.start_rings()?;
        Ok(None)
    }

    fn set_features(&mut self, found: u64) -> Result<(), ControlError> {
        if let Some((ring, present)) = self.rings.iter().find(|ring| ring.running).zip(self.features)
            && present != found
        {
            return Err(ControlError::RunningFeatures { queue: ring.queue, found, present });
        }
        // What was negotiated before is no longer what the driver means.
        self.features = None;
        if found & VERSION_1 == 0 {
            return Err(ControlError::Legacy { found });
        }
        let offered = self.offered;
        if found & !offered != 0 {
            return Err(ControlError::NotOffered { code: Code::SET_FEATURES, found, offered });
        }
        self.features = Some(found);
        Ok(())
    }

    fn set_protocol_features(&mut self, found: u64) -> Result<(), ControlError> {
        if found & !PROTOCOL_OFFERED != 0 {
            let (code, offered) = (Code::SET_PROTOCOL_FEATURES, PROTOCOL_OFFERED);
            return Err(ControlError::NotOffered { code, found, offered });
        }
        self.protocol = found;
        Ok(())
    }

    fn set_mem_table(&mut self, regions: Vec<(MemoryRegion, OwnedFd)>) -> Result<(), ControlError> {
        let memory = Arc::new(memory::table(regions)?);
        for ring in self.rings.iter().filter(|ring| ring.running) {
            // A table that lacks a running virtqueue is refused as a whole.
            ring.layout(&memory, self.packed())?;
        }
        let stopped = self.stop(|ring| ring.running)?;
        // With every worker's consent: the last reference goes when the last copy has.
        self.memory = Some(memory);
        self.resume(stopped)
    }

    fn set_vring_num(&mut self, state: VringState) -> Result<(), ControlError> {
        let code = Code::SET_VRING_NUM;
        let ring = self.ring(code, state.index)?;
        let (queue, found) = (ring.queue, state.num);
        let valid = u16::try_from(found).ok().filter(|size| size.is_power_of_two() && *size <= MAX_SIZE);
        let size = valid.ok_or(ControlError::Size { queue, found })?;
        if ring.running && ring.size != Some(size) {
            return Err(ControlError::Running { code, queue });
        }
        ring.size = Some(size);
        Ok(())
    }

    fn set_vring_addr(&mut self, addr: VringAddr) -> Result<(), ControlError> {
        let code = Code::SET_VRING_ADDR;
        let (memory, packed) = (self.memory.clone(), self.packed());
        let ring = self.ring(code, addr.index)?;
        let queue = ring.queue;
        if addr.flags != 0 {
            return Err(ControlError::AddrFlags { queue, found: addr.flags });
        }
        let addresses = Addresses { desc: addr.desc, avail: addr.avail, used: addr.used };
        if ring.running && ring.addresses != Some(addresses) {
            return Err(ControlError::Running { code, queue });
        }
        let before = ring.addresses.replace(addresses);
        // Without memory or size they are checked when the ring starts.
        if let Some(memory) = &memory
            && let Err(error) = ring.layout(memory, packed)
        {
            ring.addresses = before;
            return Err(error);
        }
        Ok(())
    }

    fn set_vring_base(&mut self, state: VringState) -> Result<(), ControlError> {
        let (code, packed) = (Code::SET_VRING_BASE, self.packed());
        let ring = self.ring(code, state.index)?;
        let (queue, found) = (ring.queue, state.num);
        if !packed && found > u16::MAX.into() {
            return Err(ControlError::Base { queue, found });
        }
        if ring.running {
            return Err(ControlError::Running { code, queue });
        }
        ring.base = Some(found);
        Ok(())
    }

    fn get_vring_base(&mut self, state: VringState) -> Result<Reply, ControlError> {
        let queue = self.ring(Code::GET_VRING_BASE, state.index)?.queue;
        self.stop(|ring| ring.queue == queue)?;
        let ring = self.ring(Code::GET_VRING_BASE, state.index)?;
        ring.reset();
        let base = ring.base.unwrap_or(0);
        Ok(Reply::Vring(VringState { index: state.index, num: base }))
    }

    fn set_vring_kick(&mut self, event: VringFd<OwnedFd>) -> Result<(), ControlError> {
        let code = Code::SET_VRING_KICK;
        let ring = self.ring(code, event.index.into())?;
        ring.kick = event.fd.map(|fd| eventfd(code, ring.queue, fd)).transpose()?.map(Arc::new);
        ring.started = true;
        Ok(())
    }

    fn set_vring_call(&mut self, event: VringFd<OwnedFd>) -> Result<(), ControlError> {
        let code = Code::SET_VRING_CALL;
        let queue = self.ring(code, event.index.into())?.queue;
        let call = event.fd.map(|fd| eventfd(code, queue, fd)).transpose()?.map(Arc::new);
        self.change(queue, |ring| ring.call = call)
    }

    fn set_vring_err(&mut self, event: VringFd<OwnedFd>) -> Result<(), ControlError> {
        let code = Code::SET_VRING_ERR;
        let ring = self.ring(code, event.index.into())?;
        ring.err = event.fd.map(|fd| eventfd(code, ring.queue, fd)).transpose()?;
        Ok(())
    }

    fn set_vring_enable(&mut self, state: VringState) -> Result<(), ControlError> {
        let ring = self.ring(Code::SET_VRING_ENABLE, state.index)?;
        let (queue, found) = (ring.queue, state.num);
        let enable = match found {
            0 => Some(false),
            1 => Some(true),
            _ => return Err(ControlError::Enable { queue, found }),
        };
        if ring.enable == enable {
            return Ok(());
        }
        self.change(queue, |ring| ring.enable = enable)
    }

    /// Whether packed virtqueues were negotiated.
    fn packed(&self) -> bool {
        self.features.is_some_and(|features| features & RING_PACKED != 0)
    }

    /// The virtqueue of a message. The index is checked as it came, before it is narrowed.
    fn ring(&mut self, code: Code, index: u32) -> Result<&mut Ring, ControlError> {
        let vrings = self.rings.len();
        let ring = usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index));
        ring.ok_or(ControlError::VringIndex { code, index, vrings })
    }

    /// Changes a virtqueue, stopping it meanwhile.
    fn change(&mut self, queue: u16, change: impl FnOnce(&mut Ring)) -> Result<(), ControlError> {
        let stopped = self.stop(|ring| ring.queue == queue)?;
        change(&mut self.rings[usize::from(queue)]);
        self.resume(stopped)
    }

    /// Stops those of `which` that run and waits until their workers have let go of them; which ones did run.
    fn stop(&mut self, which: impl Fn(&Ring) -> bool) -> Result<Vec<usize>, ControlError> {
        let stopping: Vec<usize> =
            (0..self.rings.len()).filter(|&i| self.rings[i].running && which(&self.rings[i])).collect();
        let deadline = Instant::now() + self.device.patience();
        let left = || deadline.saturating_duration_since(Instant::now());
        let mut result = Ok(());
        for &i in &stopping {
            let (ring, cell) = (&mut self.rings[i], &self.device.cells()[i]);
            // A worker that has not yet seen the start would skip it, and then report the base of an earlier one.
            let started = cell.wait(left());
            ring.broken = ring.broken.or(cell.report().broken);
            ring.running = false;
            cell.publish(|wanted| wanted.vring = None);
            result = result.and(started.map(drop));
        }
        for &i in &stopping {
            match self.device.cells()[i].wait(left()) {
                Ok(report) => self.rings[i].base = Some(report.base),
                Err(error) => result = Err(error),
            }
        }
        result?;
        Ok(stopping)
    }

    /// Starts virtqueues that were stopped for a change, but for those that are broken: the front end has to begin them
    /// anew.
    fn resume(&mut self, stopped: Vec<usize>) -> Result<(), ControlError> {
        for i in stopped {
            if self.rings[i].broken.is_some() {
                self.rings[i].started = false;
            } else {
                self.start(i)?;
            }
        }
        Ok(())
    }

    /// Starts every virtqueue that has become complete.
    fn start_rings(&mut self) -> Result<(), ControlError> {
        let mut result = Ok(());
        for i in 0..self.rings.len() {
            if !self.rings[i].running
                && self.rings[i].is_complete()
                && let Err(error) = self.start(i)
            {
                self.rings[i].addresses = None;
                result = Err(error);
            }
        }
        result
    }

    fn start(&mut self, i: usize) -> Result<(), ControlError> {
        let (Some(memory), Some(features)) = (&self.memory, self.features) else { return Ok(()) };
        let ring = &mut self.rings[i];
        if let Some(config) = ring.config(memory, features)? {
            ring.running = true;
            ring.broken = None;
            tracing::debug!(queue = ring.queue, size = ?ring.size, base = ?ring.base, "virtqueue starts");
            self.device.cells()[i].publish(|wanted| wanted.vring = Some(Arc::new(config)));
        }
        Ok(())
    }

    /// Looks at what no message tells: memory that vanished, which ends the connection, and virtqueues that broke, which
    /// are returned.
    pub(super) fn look(&mut self) -> Result<Vec<ControlError>, ControlError> {
        if self.memory.as_ref().is_some_and(|memory| memory.vanished()) {
            return Err(ControlError::Vanished);
        }
        let mut broken = Vec::new();
        for (ring, cell) in self.rings.iter_mut().zip(self.device.cells()) {
            if !ring.running || ring.broken.is_some() {
                continue;
            }
            ring.broken = cell.report().broken;
            if let Some(source) = ring.broken {
                if let Some(err) = &ring.err {
                    // A counter that is full has told it already.
                    let _ = rustix::io::write(err, &1u64.to_ne_bytes());
                }
                broken.push(ControlError::Broken { queue: ring.queue, source });
            }
        }
        Ok(broken)
    }

    /// Tells the application what has changed since it was last told.
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

    /// Stops everything: the front end is gone.
    ///
    /// # Errors
    /// A worker that does not let go. It keeps the memory until it does.
    pub(super) fn tear_down(&mut self) -> Result<(), ControlError> {
        let stopped = self.stop(|_| true);
        self.rings.iter_mut().for_each(Ring::reset);
        self.memory = None;
        stopped.map(drop)
    }

    /// Lets the session be seen.
    pub(super) fn show(&self) {
        let mut status = self.device.state();
        status.features = self.features;
        status.protocol_features = self.protocol;
        status.regions = self.memory.as_ref().map_or(0, |memory| memory.regions().len());
        status.vrings = self.rings.iter().map(|ring| ring.status(self.features)).collect();
    }
}
