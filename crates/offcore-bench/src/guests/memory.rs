//! The memory of a run: that of the guests and the packet buffers, on pages whose size is decided once, all of it touched
//! before anything is timed. Every variant of a cell, the peer included, works on the same guest memory and has its
//! virtqueues in the same region.
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
use offcore_vhost::frontend::{RingPlace, ring_parts};

use crate::guests::guest::{Traffic, buffers_len};
use crate::guests::workload::{Ring, Route, Workload};
use crate::machine::free_hugepage_mib;
use crate::method::temperature::Temperature;

/// Descriptors of every virtqueue.
pub const RING: u16 = 1024;
/// Packet buffers of the measured core, and their size in bytes.
const CHUNKS: (usize, usize) = (8192, 2048);
/// Variants of a cell, at most.
const SLOTS: usize = 16;
/// Bytes of a variant's slot.
const SLOT: usize = 128 << 10;
/// Where the tables of indirect descriptors begin in a slot.
const TABLES: usize = 64 << 10;
/// The smallest page of x86-64.
const SMALL_PAGE: usize = 4096;

/// The size of pages for `mib` MiB of memory altogether: what `wanted` says, or hugepages for everything when as many are
/// free, and for nothing when there are fewer.
///
/// # Errors
/// When fewer 2 MiB pages are free than were asked for.
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

/// The name of a page size in reports.
pub fn page_name(bytes: usize) -> &'static str {
    match bytes {
        0..=SMALL_PAGE => "4K",
        0x40_0000.. => "1G",
        _ => "2M",
    }
}

/// What a run needs memory for.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    pub route: Route,
    /// The coldest data, which takes most buffers.
    pub temperature: Temperature,
    /// MiB that a peer takes on the same pages.
    pub peer_mib: usize,
}

impl Need {
    /// For cells of these temperatures without a peer.
    pub fn of(route: Route, temperatures: &[Temperature]) -> Self {
        let coldest = temperatures.iter().copied().max_by_key(|temperature| temperature.buffers());
        Self { route, temperature: coldest.unwrap_or(Temperature::Hot), peer_mib: 0 }
    }

    /// Bytes of buffers of each guest.
    fn buffers(self) -> usize {
        let all = buffers_len(self.temperature) * if self.route == Route::Loop { 2 } else { 1 };
        // What comes behind them begins at a page.
        all.next_multiple_of(SMALL_PAGE)
    }

    /// MiB of the guests' memory.
    fn guests_mib(self) -> usize {
        let bytes = self.route.guests() * (self.buffers() + SLOTS * SLOT);
        // Each mapping is rounded up to whole pages.
        (bytes >> 20) + 2 * self.route.guests()
    }

    /// The guests that send and receive.
    fn guests(self, hugepages: Hugepages) -> Result<Vec<Arc<GuestSide>>> {
        (0..self.route.guests()).map(|_| GuestSide::new(self.buffers(), hugepages).map(Arc::new)).collect()
    }
}

/// The memory of a run.
#[derive(Debug)]
pub struct RunMemory {
    pub pool: &'static Pool,
    /// What it all is on; never [`Hugepages::Auto`].
    pub hugepages: Hugepages,
    /// The guest that sends and, unless it is the same, the one that receives.
    guests: Vec<Arc<GuestSide>>,
}

impl RunMemory {
    /// Memory for everything that `need` says, on the pages that `hugepages` says.
    ///
    /// # Errors
    /// When there is not so much of it.
    pub fn new(need: Need, hugepages: Hugepages) -> Result<Self> {
        // The least is made anew while it is still there.
        let anew = Need { temperature: Temperature::Remote, ..need };
        let pool_mib = ((CHUNKS.0 * CHUNKS.1) >> 20) + 2;
        let mib = need.guests_mib() + anew.guests_mib() + pool_mib + need.peer_mib;
        let hugepages = pages_for(hugepages, mib)?;
        let pool = Pool::new(CHUNKS.0, CHUNKS.1, hugepages)?;
        Ok(Self { pool, hugepages, guests: need.guests(hugepages)? })
    }

    /// Makes the guests' memory anew, as much as `workload` takes, so that what it costs is not that of one placement.
    /// Cold data stays where it is once it is there: its buffers are everywhere.
    ///
    /// # Errors
    /// When there is not so much memory any more.
    pub fn renew(&mut self, workload: &Workload) -> Result<()> {
        let need = Need::of(workload.route, &[workload.temperature]);
        if workload.temperature != Temperature::Cold || self.guests[0].buffers != need.buffers() {
            self.guests = need.guests(self.hugepages)?;
        }
        Ok(())
    }

    /// Bytes of a page of the guests' memory, and of the packet buffers.
    pub fn page_size(&self) -> usize {
        self.guests[0].memory.regions()[0].mapping().page_size()
    }
}

/// A guest's memory.
#[derive(Debug)]
pub struct GuestSide {
    /// The guest's own view. Its addresses in this process are its guest addresses and its front-end addresses, too.
    pub memory: Arc<GuestMemory>,
    /// The device's: a mapping of its own, as another process would have.
    pub device: Arc<GuestMemory>,
    fd: OwnedFd,
    buffers: usize,
}

impl GuestSide {
    fn new(buffers: usize, hugepages: Hugepages) -> Result<Self> {
        let (mapping, fd) =
            Mapping::memfd("bench-guest", buffers + SLOTS * SLOT, hugepages).context("memory of a guest")?;
        let other = Mapping::shared(fd.as_fd(), 0, mapping.len())?;
        // Mapped without its pages, as in the product: what touches them first would pay for a fault each.
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

    /// Offset of a variant's slot in the region.
    fn slot(&self, slot: usize) -> usize {
        self.buffers + slot * SLOT
    }

    /// A virtqueue of a variant as seen through `view`, where a front end in that slot would have it.
    ///
    /// # Errors
    /// None that could happen: the slot is in the memory.
    pub fn ring(&self, view: &Arc<GuestMemory>, slot: usize, queue: u16, ring: Ring) -> Result<Layout> {
        let packed = ring == Ring::Packed;
        let parts = ring_parts(self.address() + self.slot(slot) as u64, queue as u8, RING, packed);
        Ok(Layout::in_memory(view, parts, RING.into(), packed)?)
    }

    /// Where a front end in that slot has its virtqueues.
    pub fn ring_place(&self, slot: usize) -> RingPlace {
        let address = self.address() + self.slot(slot) as u64;
        RingPlace { memory: Arc::clone(&self.memory), address }
    }

    /// Offset in the region of the variant's tables of indirect descriptors.
    pub fn tables(&self, slot: usize) -> usize {
        self.slot(slot) + TABLES
    }

    /// The region, for a back end.
    pub fn shared(&self) -> MemoryFd<'_> {
        MemoryFd::new(self.memory.regions()[0].mapping(), self.fd.as_fd())
    }
}

/// What the variants of a cell share: the guests' memory, the packets in it, and what is done with them.
#[derive(Debug)]
pub struct Testbed {
    pub workload: Workload,
    /// Packet buffers of the measured core.
    pub pool: &'static Pool,
    pub from: Arc<GuestSide>,
    /// The guest that receives: the same, or another one.
    pub to: Arc<GuestSide>,
    pub traffic: Arc<Mutex<Traffic>>,
    slots: Cell<usize>,
}

impl Testbed {
    /// A testbed for `workload` over a run's memory.
    ///
    /// # Errors
    /// When the memory is not enough for it, or a frame length is impossible.
    pub fn new(memory: &RunMemory, workload: &Workload) -> Result<Self> {
        let guests = &memory.guests;
        ensure!(guests.len() == workload.route.guests(), "memory of {} guests for {workload}", guests.len());
        let (from, to) = (Arc::clone(&guests[0]), Arc::clone(&guests[guests.len() - 1]));
        let traffic = Traffic::new(&from.memory, &to.memory, workload)
            .with_context(|| format!("the guests' packets of {workload}"))?;
        let traffic = Arc::new(Mutex::new(traffic));
        Ok(Self { workload: *workload, pool: memory.pool, from, to, traffic, slots: Cell::new(0) })
    }

    /// A place for another variant's virtqueues.
    ///
    /// # Errors
    /// When all are taken.
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
    fn pages_are_decided_once_for_everything() {
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
                let (_, _, used) = ring_parts(0, 1, RING, ring == Ring::Packed);
                assert!(used as usize + 8 * usize::from(RING) < TABLES, "{ring}");
                assert!(bed.from.ring(&bed.from.device, slot, 1, ring).is_ok(), "{ring}");
            }
            assert!(bed.from.tables(slot) + 32 * usize::from(RING) <= bed.from.slot(slot + 1));
        }
    }
}
