//! The dirty log of a session, for a guest that migrates.
//!
//! While the features enable logging, virtqueues run only with a log that covers all memory, so no write is missed.
//! When a request that switches logging on or off is answered, all workers have applied it.

use std::sync::Arc;

use offcore_mem::GuestMemory;

use super::super::{ControlError, memory};
use super::FrontEndSession;
use crate::dirty::DirtyLog;
use crate::features::{VHOST_F_LOG_ALL, VHOST_USER_PROTOCOL_F_LOG_SHMFD};
use crate::message::{Code, LogArea};
use crate::passed::PassedFd;

impl FrontEndSession {
    /// Replaces the current log. A front end sends a longer log before it adds memory.
    pub(super) fn set_log_base(&mut self, area: LogArea, fd: &PassedFd) -> Result<(), ControlError> {
        let code = Code::SET_LOG_BASE;
        self.needs(code, VHOST_USER_PROTOCOL_F_LOG_SHMFD, "LOG_SHMFD")?;
        // The current log stays mapped until the workers use the new one.
        let (mapping, offset) = memory::beside(code, area.size, area.offset, fd, self.non_guest_mapped())?;
        let log = DirtyLog::new(mapping, offset, usize::try_from(area.size).unwrap_or(usize::MAX));
        self.check_log(code, self.features.unwrap_or(0), Some(&log), self.memory.as_ref())?;
        if let Some(before) = self.log.replace(Arc::new(log)) {
            self.device.retire(before);
        }
        if self.logs() { self.adjust_all() } else { Ok(()) }
    }

    /// Returns the log while logging is enabled.
    pub(super) fn logging(&self) -> Option<&Arc<DirtyLog>> {
        self.log.as_ref().filter(|_| self.logs())
    }

    /// Whether virtqueues wait for a log.
    pub(super) fn lacks_log(&self) -> bool {
        self.logs() && self.log.is_none()
    }

    fn logs(&self) -> bool {
        self.features.is_some_and(|features| features & VHOST_F_LOG_ALL != 0)
    }

    /// Refuses a request if, with these features, a running virtqueue would write memory without logging: because no
    /// log is set, or because the log ends before the memory.
    pub(super) fn check_log(
        &self,
        code: Code,
        features: u64,
        log: Option<&DirtyLog>,
        memory: Option<&Arc<GuestMemory>>,
    ) -> Result<(), ControlError> {
        if features & VHOST_F_LOG_ALL == 0 {
            return Ok(());
        }
        let Some(log) = log else {
            let running = self.rings.iter().any(|ring| ring.running);
            return if running { Err(ControlError::NoLog { code }) } else { Ok(()) };
        };
        let Some(memory) = memory else { return Ok(()) };
        let regions = memory.regions().iter().map(|region| region.guest() + region.len());
        // The address at which a front end logs used rings may be outside of guest memory.
        let device_areas = self.rings.iter().filter_map(|ring| {
            let layout = ring.layout(memory, features).ok()??;
            Some(ring.addresses?.log?.saturating_add(layout.written()[0].1 as u64))
        });
        let expected = regions.chain(device_areas).max().unwrap_or(0);
        if expected > log.end() {
            return Err(ControlError::LogTooShort { code, log_end: log.end(), expected });
        }
        Ok(())
    }

    /// Lets the workers of all running virtqueues switch logging on or off.
    pub(super) fn adjust_all(&mut self) -> Result<(), ControlError> {
        (0..self.rings.len()).try_for_each(|queue| self.adjust(queue as u16))
    }
}
