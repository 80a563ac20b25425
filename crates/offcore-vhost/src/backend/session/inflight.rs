//! Descriptors in flight, recorded for the next back end: see [`Inflight`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use offcore_mem::Mapping;
use offcore_mem::mapping::MemoryError;
use offcore_mem::sigbus::Guarded;
use offcore_ring::Inflight;
use offcore_ring::split::MAX_SIZE;

use super::super::{ControlError, REGIONS, memory};
use super::FrontEndSession;
use crate::features::VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD;
use crate::message::{Code, InflightArea, Reply};
use crate::passed::PassedFd;

impl FrontEndSession {
    /// Creates a region, which the front end receives and then passes back. The memory belongs to this process, so the
    /// memory of the previous region is freed: a front end that requests a new region no longer needs the old one.
    pub(super) fn get_inflight_fd(&mut self, found: InflightArea) -> Result<Reply<OwnedFd>, ControlError> {
        let code = Code::GET_INFLIGHT_FD;
        let len = self.check_inflight(code, &found)?;
        if let Some(ring) = self.rings.iter().find(|ring| ring.running) {
            return Err(ControlError::Running { code, queue: ring.queue });
        }
        if self.regions == REGIONS {
            return Err(ControlError::Regions);
        }
        self.regions += 1;
        let failed = |source| ControlError::Mapping { code, guest: 0, source };
        let (_mapping, fd) = Mapping::untouched_memfd("offcore-inflight", len).map_err(failed)?;
        let kept = rustix::io::fcntl_dupfd_cloexec(&fd, 0)
            .map_err(|source| failed(MemoryError::System { what: "dup", len, source }))?;
        self.inflight.clear();
        self.device.keep_inflight(kept);
        Ok(Reply::Inflight(InflightArea { size: len as u64, offset: 0, ..found }, fd))
    }

    /// Accepts a region, before virtqueues run.
    pub(super) fn set_inflight_fd(&mut self, area: InflightArea, fd: &PassedFd) -> Result<(), ControlError> {
        let code = Code::SET_INFLIGHT_FD;
        let len = self.check_inflight(code, &area)?;
        if let Some(ring) = self.rings.iter().find(|ring| ring.running) {
            return Err(ControlError::Running { code, queue: ring.queue });
        }
        if area.size < len as u64 || !area.offset.is_multiple_of(8) {
            let InflightArea { size, offset, .. } = area;
            return Err(ControlError::InflightArea { size, offset, expected: len });
        }
        self.inflight.clear();
        let (mapping, offset) = memory::beside(code, area.size, area.offset, fd, self.non_guest_mapped())?;
        let mapping = Arc::new(Guarded::new(mapping));
        let part = |queue| {
            let offset = offset + usize::from(queue) * Inflight::len(area.queue_size);
            Inflight::new(&mapping, offset, area.queue_size)
        };
        self.inflight = (0..area.queues).map(part).collect();
        Ok(())
    }

    /// Returns the length in bytes of a region for `area`.
    fn check_inflight(&self, code: Code, area: &InflightArea) -> Result<usize, ControlError> {
        self.needs(code, VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD, "INFLIGHT_SHMFD")?;
        let &InflightArea { queues, queue_size, .. } = area;
        let vrings = self.rings.len();
        if !(1..=vrings).contains(&queues.into()) || !(1..=MAX_SIZE).contains(&queue_size) {
            return Err(ControlError::InflightQueues { code, queues, queue_size, vrings });
        }
        Ok(usize::from(queues) * Inflight::len(queue_size))
    }
}
