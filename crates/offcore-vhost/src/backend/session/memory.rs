//! Memory of a session. Regions can be added and removed while virtqueues run.
//!
//! Each change creates a new table, which shares unchanged regions. Running virtqueues are drained, get the new table,
//! and continue at the same position. Meanwhile, packets wait. An unchanged table is ignored.

use std::sync::Arc;

use offcore_mem::{GuestMemory, GuestRegion};
use offcore_ring::Inflight;

use super::super::ring::Ring;
use super::super::{ControlError, MAX_SLOTS, memory};
use super::FrontEndSession;
use crate::features::VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS;
use crate::message::{Code, MemoryRegion};
use crate::passed::PassedFd;

impl FrontEndSession {
    /// Replaces the whole table. An unchanged table is ignored, because front ends repeat it under traffic. A table
    /// that does not contain a running virtqueue is refused.
    pub(super) fn set_mem_table(
        &mut self,
        regions: Vec<(MemoryRegion, PassedFd)>,
    ) -> Result<(), ControlError> {
        let present = self.memory.as_ref().map_or(&[][..], |memory| memory.regions());
        let memory = Arc::new(memory::table(regions, present, self.max_memory)?);
        if present.len() == memory.regions().len()
            && present.iter().zip(memory.regions()).all(|(a, b)| Arc::ptr_eq(a, b))
        {
            return Ok(());
        }
        let features = self.features.unwrap_or(0);
        self.check_log(Code::SET_MEM_TABLE, features, self.log.as_deref(), Some(&memory))?;
        for ring in self.rings.iter().filter(|ring| ring.running) {
            ring.layout(&memory, features)?;
        }
        self.exchange(Some(memory), false)
    }

    /// Adds a region. If a region with the same addresses and length exists, it is mapped again: a front end may
    /// describe its memory once more after a reset.
    pub(super) fn add_mem_reg(&mut self, region: &MemoryRegion, fd: &PassedFd) -> Result<(), ControlError> {
        let code = Code::ADD_MEM_REG;
        self.needs(code, VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
        let (_, mut regions) = self.partition_regions(region);
        if regions.len() >= MAX_SLOTS {
            return Err(ControlError::Slots { guest: region.guest });
        }
        let added = memory::region(code, region, fd, &regions, self.max_memory)?;
        regions.push(Arc::new(added));
        let memory = GuestMemory::sharing(regions).map_err(|source| ControlError::Table { code, source })?;
        let memory = Arc::new(memory);
        self.check_log(code, self.features.unwrap_or(0), self.log.as_deref(), Some(&memory))?;
        self.exchange(Some(memory), true)
    }

    /// Removes a region. A virtqueue in this region stops, and continues at the same position when the memory is added
    /// again. QEMU replaces a region by a longer one this way.
    pub(super) fn rem_mem_reg(&mut self, region: &MemoryRegion) -> Result<(), ControlError> {
        let code = Code::REM_MEM_REG;
        self.needs(code, VHOST_USER_PROTOCOL_F_CONFIGURE_MEM_SLOTS, "CONFIGURE_MEM_SLOTS")?;
        let (found, regions) = self.partition_regions(region);
        if found == 0 {
            let &MemoryRegion { guest, size, user, .. } = region;
            return Err(ControlError::NoRegion { guest, size, user });
        }
        let memory = GuestMemory::sharing(regions).map_err(|source| ControlError::Table { code, source })?;
        self.exchange(Some(Arc::new(memory)).filter(|memory| !memory.regions().is_empty()), true)
    }

    /// Number of bytes mapped that are not guest memory.
    pub(super) fn non_guest_mapped(&self) -> u64 {
        let log = self.log.as_ref().map_or(0, |log| log.mapped());
        log.saturating_add(self.inflight.first().map_or(0, Inflight::mapped))
    }

    /// Returns how many regions are equal to `region`, and all others.
    fn partition_regions(&self, region: &MemoryRegion) -> (usize, Vec<Arc<GuestRegion>>) {
        let all = self.memory.as_ref().map_or(&[][..], |memory| memory.regions());
        let is_it = |other: &GuestRegion| {
            (other.guest(), other.len(), other.user()) == (region.guest, region.size, region.user)
        };
        let others: Vec<_> = all.iter().filter(|other| !is_it(other)).cloned().collect();
        (all.len() - others.len(), others)
    }

    /// Replaces the current table after all workers have applied the change. The last reference to the old table is
    /// dropped after the last copy. If memory is changed `piecewise`, virtqueues outside of the new table wait for
    /// further regions.
    fn exchange(&mut self, memory: Option<Arc<GuestMemory>>, piecewise: bool) -> Result<(), ControlError> {
        let features = self.features.unwrap_or(0);
        let is_in_it =
            |ring: &Ring| memory.as_ref().is_some_and(|memory| ring.layout(memory, features).is_ok());
        // A broken virtqueue would keep the old memory mapped until the front end restarts it.
        let broken: Vec<_> = self.device.cells().iter().map(|cell| cell.report().broken.is_some()).collect();
        let stopped = self.stop(|ring| broken[usize::from(ring.queue)] || !is_in_it(ring))?;
        self.memory = memory;
        for i in 0..self.rings.len() {
            let ring = &self.rings[i];
            self.rings[i].waits =
                (piecewise || ring.waits) && ring.is_complete() && !self.has_memory_for(ring);
        }
        self.adjust_all()?;
        self.resume(stopped)
    }
}
