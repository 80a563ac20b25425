//! The memory of a run: guest memory and packet buffers on pages of one size. All memory is touched before the timed
//! part. All variants of a cell, including the peer, use the same guest memory and have their virtqueues in the same
//! region.
//!
//! ```text
//! a guest's region:  | buffers to be sent | buffers to be received in | slot 0 | slot 1 | ... |
//! a variant's slot:  | RX virtqueue | TX virtqueue | ... | tables of indirect descriptors |
//! ```

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail, ensure};
use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping, Pool};
use offcore_ring::Layout;
use offcore_vhost::MemoryFd;
use offcore_vhost::frontend::{RingPlace, ring_areas};

use crate::guests::guest::{Traffic, buffers_len};
use crate::guests::workload::{Ring, Route, Workload};
use crate::machine::free_hugepage_mib;
use crate::method::temperature::Temperature;

/// Number of descriptors of every virtqueue.
pub const RING: u16 = 1024;
/// Number of packet buffers of the measured core, and their size in bytes.
const CHUNKS: (usize, usize) = (8192, 2048);
/// Maximum number of variants in a cell.
const SLOTS: usize = 16;
/// Size of a variant's slot in bytes.
const SLOT: usize = 128 << 10;
/// Offset of the tables of indirect descriptors in a slot.
const TABLES: usize = 64 << 10;
/// The smallest page size of x86-64.
const SMALL_PAGE: usize = 4096;

/// Returns the page size for `mib` MiB of memory in total. `wanted` determines it; [`Hugepages::Auto`] selects
/// hugepages if enough of them are free, and ordinary pages otherwise.
///
/// # Errors
/// If 2 MiB pages were requested and too few of them are free.
pub fn pages_for(wanted: Hugepages, mib: usize) -> Result<Hugepages> {
    let free = free_hugepage_mib() as usize;
    match wanted {
        Hugepages::Auto if free >= mib => Ok(Hugepages::Size2M),
        Hugepages::Auto => Ok(Hugepages::None),
        Hugepages::Size2M if free < mib => bail!(
            "--hugepages 2M: {free} MiB are free in 2 MiB pages, {mib} MiB are needed for guests, packet buffers and \
             peers: reserve more (sysctl -w vm.nr_hugepages=N), or measure on ordinary pages (--hugepages none)"
        ),
        chosen => Ok(chosen),
    }
}

/// Returns the name of a page size in reports.
pub fn page_name(bytes: usize) -> &'static str {
    match bytes {
        0..=SMALL_PAGE => "4K",
        0x40_0000.. => "1G",
        _ => "2M",
    }
}

/// Memory requirements of a run.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    pub route: Route,
    /// The coldest data, which needs the most buffers.
    pub temperature: Temperature,
    /// MiB that a peer needs on pages of the same size.
    pub peer_mib: usize,
}

impl Need {
    /// Returns the requirements of cells with these temperatures, without a peer.
    pub fn of(route: Route, temperatures: &[Temperature]) -> Self {
        let coldest = temperatures.iter().copied().max_by_key(|temperature| temperature.buffers());
        Self { route, temperature: coldest.unwrap_or(Temperature::Hot), peer_mib: 0 }
    }

    /// Returns the size of each guest's buffers in bytes.
    fn buffers(self) -> usize {
        let all = buffers_len(self.temperature) * if self.route == Route::Loop { 2 } else { 1 };
        // The following part begins at a page boundary.
        all.next_multiple_of(SMALL_PAGE)
    }

    /// Returns the size of the guests' memory in MiB.
    fn guests_mib(self) -> usize {
        let bytes = self.route.guests() * (self.buffers() + SLOTS * SLOT);
        // Each mapping is rounded up to whole pages.
        (bytes >> 20) + 2 * self.route.guests()
    }

    /// Creates the sending and the receiving guest.
    fn guests(self, hugepages: Hugepages) -> Result<Vec<Arc<GuestSide>>> {
        (0..self.route.guests()).map(|_| GuestSide::new(self.buffers(), hugepages).map(Arc::new)).collect()
    }
}

/// The memory of a run.
#[derive(Debug)]
pub struct RunMemory {
    pub pool: &'static Pool,
    /// Page size of all memory; never [`Hugepages::Auto`].
    pub hugepages: Hugepages,
    /// The sending guest and, unless it is the same, the receiving guest.
    guests: Vec<Arc<GuestSide>>,
}

impl RunMemory {
    /// Allocates memory for `need` on pages of the size that `hugepages` selects.
    ///
    /// # Errors
    /// If too little memory is available.
    pub fn new(need: Need, hugepages: Hugepages) -> Result<Self> {
        // Room for a second allocation of warm data while the first still exists.
        let anew = Need { temperature: Temperature::Remote, ..need };
        let pool_mib = ((CHUNKS.0 * CHUNKS.1) >> 20) + 2;
        let mib = need.guests_mib() + anew.guests_mib() + pool_mib + need.peer_mib;
        let hugepages = pages_for(hugepages, mib)?;
        let pool = Pool::new(CHUNKS.0, CHUNKS.1, hugepages)?;
        Ok(Self { pool, hugepages, guests: need.guests(hugepages)? })
    }

    /// Allocates the guests' memory again, in the size that `workload` needs, so that the results do not depend on a
    /// single placement. Existing cold data keeps its memory, because its buffers are spread over many pages anyway.
    ///
    /// # Errors
    /// If too little memory is available.
    pub fn renew(&mut self, workload: &Workload) -> Result<()> {
        let need = Need::of(workload.route, &[workload.temperature]);
        if workload.temperature != Temperature::Cold || self.guests[0].buffers != need.buffers() {
            self.guests = need.guests(self.hugepages)?;
        }
        Ok(())
    }

    /// Returns the page size of the guests' memory and the packet buffers in bytes.
    pub fn page_size(&self) -> usize {
        self.guests[0].memory.regions()[0].mapping().page_size()
    }
}

/// A guest's memory.
#[derive(Debug)]
pub struct GuestSide {
    /// The guest's view. Addresses in this process are also the guest addresses and the front-end addresses.
    pub memory: Arc<GuestMemory>,
    /// The device's view: a separate mapping, as in another process.
    pub device: Arc<GuestMemory>,
    fd: OwnedFd,
    buffers: usize,
}

impl GuestSide {
    fn new(buffers: usize, hugepages: Hugepages) -> Result<Self> {
        let (mapping, fd) =
            Mapping::memfd("bench-guest", buffers + SLOTS * SLOT, hugepages).context("memory of a guest")?;
        let other = Mapping::shared(fd.as_fd(), 0, mapping.len())?;
        // A new mapping has no pages yet, as in the product. Touching them here avoids page faults in the measured
        // code.
        for offset in (0..other.len()).step_by(SMALL_PAGE) {
            other.write_at(offset, &[0]);
        }
        let address = mapping.base().as_ptr() as u64;
        let table = |mapping: Mapping| -> Result<_> {
            let region = GuestRegion::new(address, address, mapping.len() as u64, mapping, 0)?;
            Ok(Arc::new(GuestMemory::new(vec![region])?))
        };
        Ok(Self { memory: table(mapping)?, device: table(other)?, fd, buffers })
    }

    fn address(&self) -> u64 {
        self.memory.regions()[0].guest()
    }

    /// Returns the offset of a variant's slot in the region.
    fn slot(&self, slot: usize) -> usize {
        self.buffers + slot * SLOT
    }

    /// Returns a virtqueue of a variant as seen through `view`, at the position that a front end with that slot uses.
    ///
    /// # Errors
    /// Not expected, because the slot lies in the memory.
    pub fn ring(&self, view: &Arc<GuestMemory>, slot: usize, queue: u16, ring: Ring) -> Result<Layout> {
        let packed = ring == Ring::Packed;
        let areas = ring_areas(self.address() + self.slot(slot) as u64, queue as u8, RING, packed);
        Ok(Layout::in_memory(view, areas, RING.into(), packed)?)
    }

    /// Returns the position of a front end's virtqueues in that slot.
    pub fn ring_place(&self, slot: usize) -> RingPlace {
        let address = self.address() + self.slot(slot) as u64;
        RingPlace { memory: Arc::clone(&self.memory), address }
    }

    /// Returns the offset of the variant's tables of indirect descriptors in the region.
    pub fn tables(&self, slot: usize) -> usize {
        self.slot(slot) + TABLES
    }

    /// Returns the region for a back end.
    pub fn shared(&self) -> MemoryFd<'_> {
        MemoryFd::new(self.memory.regions()[0].mapping(), self.fd.as_fd())
    }
}

/// State shared by the variants of a cell: the guests' memory, the packets in it, and the workload.
#[derive(Debug)]
pub struct Testbed {
    pub workload: Workload,
    /// Packet buffers of the measured core.
    pub pool: &'static Pool,
    pub from: Arc<GuestSide>,
    /// The receiving guest: the same as `from`, or another one.
    pub to: Arc<GuestSide>,
    pub traffic: Arc<Mutex<Traffic>>,
    slots: Cell<usize>,
}

impl Testbed {
    /// Creates a testbed for `workload` in a run's memory.
    ///
    /// # Errors
    /// If the memory is too small, or a frame length is invalid.
    pub fn new(memory: &RunMemory, workload: &Workload) -> Result<Self> {
        let guests = &memory.guests;
        ensure!(guests.len() == workload.route.guests(), "memory of {} guests for {workload}", guests.len());
        let (from, to) = (Arc::clone(&guests[0]), Arc::clone(&guests[guests.len() - 1]));
        let traffic = Traffic::new(&from.memory, &to.memory, workload)
            .with_context(|| format!("the guests' packets of {workload}"))?;
        let traffic = Arc::new(Mutex::new(traffic));
        Ok(Self { workload: *workload, pool: memory.pool, from, to, traffic, slots: Cell::new(0) })
    }

    /// Takes a slot for the virtqueues of another variant.
    ///
    /// # Errors
    /// If all slots are in use.
    pub fn take_slot(&self) -> Result<usize> {
        let slot = self.slots.get();
        ensure!(slot < SLOTS, "{SLOTS} variants of a cell at most: choose fewer modes and engines");
        self.slots.set(slot + 1);
        Ok(slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_hugepages_fall_back_or_fail() {
        let none = |wanted| pages_for(wanted, 1 << 30);
        assert_eq!(none(Hugepages::Auto).unwrap(), Hugepages::None);
        assert_eq!(none(Hugepages::None).unwrap(), Hugepages::None);
        let error = none(Hugepages::Size2M).unwrap_err().to_string();
        assert!(error.contains("1073741824 MiB are needed") && error.contains("--hugepages none"), "{error}");
        assert_eq!([4096, 2 << 20, 1 << 30].map(page_name), ["4K", "2M", "1G"]);
    }

    #[test]
    fn variants_share_buffers_not_virtqueues() {
        let need = Need::of(Route::Loop, &[Temperature::Hot, Temperature::Remote]);
        assert_eq!(need.temperature, Temperature::Remote);
        let memory = RunMemory::new(need, Hugepages::None).unwrap();
        let bed = Testbed::new(&memory, &Workload::table8(Temperature::Hot, 64)).unwrap();
        assert!(Arc::ptr_eq(&bed.from, &bed.to));
        let slots: Vec<_> = std::iter::from_fn(|| bed.take_slot().ok()).collect();
        assert_eq!(slots, (0..SLOTS).collect::<Vec<_>>());
        for &slot in &slots {
            for ring in Ring::ALL {
                let used = ring_areas(0, 1, RING, ring == Ring::Packed).device;
                assert!(used as usize + 8 * usize::from(RING) < TABLES, "{ring}");
                assert!(bed.from.ring(&bed.from.device, slot, 1, ring).is_ok(), "{ring}");
            }
            assert!(bed.from.tables(slot) + 32 * usize::from(RING) <= bed.from.slot(slot + 1));
        }
    }
}
