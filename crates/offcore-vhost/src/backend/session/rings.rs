//! Virtqueues of a session: their messages, and how they start, change and stop.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use offcore_ring::Areas;
use offcore_ring::split::MAX_SIZE;

use super::super::ControlError;
use super::super::ring::{Addresses, Ring, eventfd};
use super::FrontEndSession;
use crate::features::is_packed;
use crate::message::{Code, Reply, VHOST_VRING_F_LOG, VringAddr, VringFd, VringState};
use crate::passed::PassedFd;

impl FrontEndSession {
    pub(super) fn set_vring_num(&mut self, state: VringState) -> Result<(), ControlError> {
        let code = Code::SET_VRING_NUM;
        let features = self.features;
        let ring = self.ring(code, state.index)?;
        let (queue, found) = (ring.queue, state.num);
        // Before the features are known, any size is accepted. It is checked again when the virtqueue starts.
        let any = features.is_none_or(is_packed);
        let valid = |size: &u16| (1..=MAX_SIZE).contains(size) && (any || size.is_power_of_two());
        let size = u16::try_from(found).ok().filter(valid);
        let expected = if any { "a number" } else { "a power of two" };
        let size = size.ok_or(ControlError::Size { queue, found, expected })?;
        if ring.running && ring.size != Some(size) {
            return Err(ControlError::Running { code, queue });
        }
        ring.size = Some(size);
        Ok(())
    }

    pub(super) fn set_vring_addr(&mut self, addr: VringAddr) -> Result<(), ControlError> {
        let code = Code::SET_VRING_ADDR;
        let (memory, features) = (self.memory.clone(), self.features);
        let ring = self.ring(code, addr.index)?;
        let queue = ring.queue;
        if addr.flags & !VHOST_VRING_F_LOG != 0 {
            return Err(ControlError::AddrFlags { queue, found: addr.flags });
        }
        let log_at = (addr.flags & VHOST_VRING_F_LOG != 0).then_some(addr.log);
        let areas = Areas { descriptors: addr.desc, driver: addr.avail, device: addr.used };
        let addresses = Addresses { areas, log: log_at };
        // The log address may change while the virtqueue runs.
        let known = ring.addresses.map(|known| Addresses { log: log_at, ..known });
        if ring.running && known != Some(addresses) {
            return Err(ControlError::Running { code, queue });
        }
        let before = ring.addresses.replace(addresses);
        // Without memory, features or size, the addresses are checked when the ring starts.
        if let Some((memory, features)) = memory.as_ref().zip(features) {
            let laid_out = ring.layout(memory, features);
            let checked =
                laid_out.and_then(|_| self.check_log(code, features, self.log.as_deref(), Some(memory)));
            if let Err(error) = checked {
                self.rings[usize::from(queue)].addresses = before;
                return Err(error);
            }
        }
        if before == Some(addresses) { Ok(()) } else { self.adjust(queue) }
    }

    pub(super) fn set_vring_base(&mut self, state: VringState) -> Result<(), ControlError> {
        let code = Code::SET_VRING_BASE;
        let features = self.features;
        let ring = self.ring(code, state.index)?;
        if ring.running {
            return Err(ControlError::Running { code, queue: ring.queue });
        }
        let before = ring.base.replace(state.num);
        // Without features, the base is checked when the ring starts.
        if let Some(features) = features
            && let Err(error) = ring.check_base(features)
        {
            ring.base = before;
            return Err(error);
        }
        Ok(())
    }

    pub(super) fn get_vring_base(&mut self, state: VringState) -> Result<Reply<OwnedFd>, ControlError> {
        let queue = self.ring(Code::GET_VRING_BASE, state.index)?.queue;
        self.stop(|ring| ring.queue == queue)?;
        let ring = self.ring(Code::GET_VRING_BASE, state.index)?;
        ring.reset();
        let base = ring.last_base();
        if let Some(inflight) = self.inflight.get(usize::from(queue)) {
            inflight.end();
        }
        Ok(Reply::Vring(VringState { index: state.index, num: base }))
    }

    pub(super) fn set_vring_kick(&mut self, event: VringFd<PassedFd>) -> Result<(), ControlError> {
        let code = Code::SET_VRING_KICK;
        let ring = self.ring(code, event.index.into())?;
        // An idle worker waits for this eventfd and reads it.
        let kick = event.fd.map(|fd| eventfd(code, ring.queue, fd)).transpose()?.map(Arc::new);
        let before = std::mem::replace(&mut ring.kick, kick);
        ring.started = true;
        let queue = ring.queue;
        if let Some(before) = before {
            self.device.retire(before);
        }
        self.adjust(queue)
    }

    pub(super) fn set_vring_call(&mut self, event: VringFd<PassedFd>) -> Result<(), ControlError> {
        let code = Code::SET_VRING_CALL;
        let ring = self.ring(code, event.index.into())?;
        let call = event.fd.map(|fd| eventfd(code, ring.queue, fd)).transpose()?.map(Arc::new);
        let before = std::mem::replace(&mut ring.call, call);
        let queue = ring.queue;
        if let Some(before) = before {
            self.device.retire(before);
        }
        self.adjust(queue)
    }

    pub(super) fn set_vring_err(&mut self, event: VringFd<PassedFd>) -> Result<(), ControlError> {
        let code = Code::SET_VRING_ERR;
        let ring = self.ring(code, event.index.into())?;
        ring.err = event.fd.map(|fd| eventfd(code, ring.queue, fd)).transpose()?;
        Ok(())
    }

    pub(super) fn set_vring_enable(&mut self, state: VringState) -> Result<(), ControlError> {
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
        ring.enable = enable;
        self.adjust(queue)
    }

    /// Returns the virtqueue of a message. The index is checked before it is narrowed.
    fn ring(&mut self, code: Code, index: u32) -> Result<&mut Ring, ControlError> {
        let vrings = self.rings.len();
        let ring = usize::try_from(index).ok().and_then(|index| self.rings.get_mut(index));
        ring.ok_or(ControlError::VringIndex { code, index, vrings })
    }

    /// Passes changed eventfds, memory and enabled state of a running virtqueue to its worker. The worker drains the
    /// virtqueue and continues at the same position. The virtqueue is not stopped, so its position need not be known.
    pub(super) fn adjust(&mut self, queue: u16) -> Result<(), ControlError> {
        let (ring, cell) = (&self.rings[usize::from(queue)], &self.device.cells()[usize::from(queue)]);
        // A broken virtqueue stays stopped until the front end restarts it.
        let Some(features) = self.features.filter(|_| ring.running && cell.report().broken.is_none()) else {
            return Ok(());
        };
        let Some(memory) = &self.memory else { return Ok(()) };
        let Some(layout) = ring.layout(memory, features)? else { return Ok(()) };
        let log = self.logging();
        cell.publish(|wanted| {
            if let Some(vring) = &mut wanted.vring {
                let vring = Arc::make_mut(vring);
                vring.log = log.map(|log| ring.log(memory, &layout, log));
                (vring.memory, vring.layout) = (Arc::clone(memory), layout);
                vring.call = ring.call.clone();
                vring.kick = ring.kick.clone();
                vring.enabled = ring.is_enabled(features);
            }
        });
        cell.wait(self.device.timeout())?;
        Ok(())
    }

    /// Stops the running virtqueues selected by `which`, and waits until their workers have released them. Returns the
    /// indices of the stopped virtqueues.
    pub(super) fn stop(&mut self, which: impl Fn(&Ring) -> bool) -> Result<Vec<usize>, ControlError> {
        let stopping: Vec<usize> =
            (0..self.rings.len()).filter(|&i| self.rings[i].running && which(&self.rings[i])).collect();
        let deadline = Instant::now() + self.device.timeout();
        let left = || deadline.saturating_duration_since(Instant::now());
        let mut result = Ok(());
        for &i in &stopping {
            let (ring, cell) = (&mut self.rings[i], &self.device.cells()[i]);
            // A worker that has not seen the start yet would skip it, and then report the base of an earlier start.
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

    /// Restarts virtqueues that were stopped for a change. Virtqueues without memory keep waiting, and broken ones must
    /// be restarted by the front end.
    pub(super) fn resume(&mut self, stopped: Vec<usize>) -> Result<(), ControlError> {
        for i in stopped {
            if self.rings[i].broken.is_some() {
                self.rings[i].started = false;
            } else if !self.rings[i].waits {
                self.start(i)?;
            }
        }
        Ok(())
    }

    /// Starts every virtqueue whose configuration has become complete.
    pub(super) fn start_rings(&mut self) -> Result<(), ControlError> {
        let mut result = Ok(());
        for i in 0..self.rings.len() {
            let ring = &self.rings[i];
            let waits = self.lacks_log() || ring.waits && !self.has_memory_for(ring);
            if ring.running || !ring.is_complete() || waits {
                continue;
            }
            if let Err(error) = self.start(i) {
                self.rings[i].addresses = None;
                result = Err(error);
            }
        }
        result
    }

    /// Whether the parts of a virtqueue are in guest memory.
    pub(super) fn has_memory_for(&self, ring: &Ring) -> bool {
        let (Some(memory), Some(features)) = (&self.memory, self.features) else { return false };
        ring.layout(memory, features).is_ok()
    }

    fn start(&mut self, i: usize) -> Result<(), ControlError> {
        let (Some(memory), Some(features)) = (&self.memory, self.features) else { return Ok(()) };
        let (log, inflight) = (self.logging(), self.inflight.get(i));
        if let Some(config) = self.rings[i].config(memory, features, log, inflight)? {
            let ring = &mut self.rings[i];
            ring.running = true;
            ring.waits = false;
            ring.broken = None;
            tracing::debug!(queue = ring.queue, size = ?ring.size, base = config.base, "virtqueue starts");
            self.device.cells()[i].publish(|wanted| wanted.vring = Some(Arc::new(config)));
        }
        Ok(())
    }
}
