//! What is in flight, for a back end that comes after this one: see [`Inflight`].

use std::os::fd::OwnedFd;
use std::sync::Arc;

use offcore_mem::Mapping;
use offcore_mem::mapping::MemoryError;
use offcore_mem::sigbus::Guarded;
use offcore_ring::Inflight;
use offcore_ring::split::MAX_SIZE;

use super::super::{ControlError, REGIONS, memory};
use super::Session;
use crate::features::VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD;
use crate::message::{Code, InflightArea, Reply};
use crate::passed::PassedFd;

impl Session {
    /// Makes a region, which the front end is given and then gives back. Its memory is this process's, so the one that was made before
    /// loses its own: a front end that wants another one has no use for it.
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

    /// Takes a region, before virtqueues run.
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
        let (mapping, offset) = memory::beside(code, (area.size, area.offset), fd, self.mapped_beside())?;
        let mapping = Arc::new(Guarded::new(mapping));
        let part = |queue| {
            let offset = offset + usize::from(queue) * Inflight::len(area.queue_size);
            Inflight::new(&mapping, offset, area.queue_size)
        };
        self.inflight = (0..area.queues).map(part).collect();
        Ok(())
    }

    /// Bytes of a region for what a request describes.
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
