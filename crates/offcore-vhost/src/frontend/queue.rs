//! The virtqueues of a front end and their memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::split::{MAX_SIZE, avail_len, desc_len, used_len};
use offcore_ring::{Areas, Layout, RingError, packed};
use rustix::event::EventfdFlags;

use super::{FrontEndConfig, FrontEndError, MemoryFd};
use crate::backend::MAX_QUEUE_PAIRS;
use crate::eventfd;
use crate::features::is_packed;
use crate::message::VringAddr;

/// Ring parts share neither cache lines nor the pairs of lines that are prefetched together.
const ALIGN: usize = 128;

/// One virtqueue of a front end. It contains everything needed to create a driver-side queue.
#[derive(Clone, Debug)]
pub struct DriverQueue {
    index: u8,
    layout: Layout,
    addresses: VringAddr,
    features: u64,
    kick: Arc<OwnedFd>,
    call: Arc<OwnedFd>,
}

impl DriverQueue {
    /// Index of the virtqueue: even ones receive, odd ones transmit.
    pub fn index(&self) -> u8 {
        self.index
    }

    /// The parts of the ring, split or packed as negotiated. They were zeroed when the front end connected. The layout
    /// keeps their memory mapped.
    pub fn layout(&self) -> Layout {
        self.layout.clone()
    }

    /// Returns the negotiated virtio features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The eventfd to signal if the device needs a kick. Non-blocking.
    pub fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// The eventfd that the device signals to notify the driver. Non-blocking.
    pub fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Clears [`call`](Self::call). Never blocks, even if the back end has made the eventfd blocking.
    pub fn forget_calls(&self) {
        eventfd::empty(&self.call);
    }

    pub(super) fn addresses(&self) -> VringAddr {
        self.addresses
    }
}

/// Offsets of the ring parts in the memory of one virtqueue, and its length. In a packed ring, the event suppression
/// areas of driver and device take the places of the available ring and the used ring.
struct Offsets {
    avail: usize,
    used: usize,
    len: usize,
}

fn offsets(size: u16, is_packed: bool) -> Offsets {
    let (desc, avail, used) = if is_packed {
        (packed::ring_len(size), packed::EVENT_LEN, packed::EVENT_LEN)
    } else {
        (desc_len(size), avail_len(size), used_len(size))
    };
    let avail_at = desc.next_multiple_of(ALIGN);
    let used_at = (avail_at + avail).next_multiple_of(ALIGN);
    Offsets { avail: avail_at, used: used_at, len: (used_at + used).next_multiple_of(ALIGN) }
}

/// Returns the addresses of the parts of virtqueue `index` if a front end's virtqueues of `size` descriptors begin at
/// `address`.
pub fn ring_areas(address: u64, index: u8, size: u16, is_packed: bool) -> Areas {
    let offsets = offsets(size, is_packed);
    let descriptors = address + u64::from(index) * offsets.len as u64;
    let (driver, device) = (descriptors + offsets.avail as u64, descriptors + offsets.used as u64);
    Areas { descriptors, driver, device }
}

/// A place for the virtqueues within packet memory, whose guest addresses are equal to its front-end addresses.
#[derive(Clone, Debug)]
pub struct RingPlace {
    /// The memory. [`FrontEnd::connect_with`](super::FrontEnd::connect_with) also needs its file.
    pub memory: Arc<GuestMemory>,
    /// The front-end address of the first virtqueue, aligned to 128 bytes.
    pub address: u64,
}

/// The memory of the virtqueues, shared with the back end.
#[derive(Debug)]
pub(super) struct RingMemory {
    place: RingPlace,
    /// The file of a region that contains only the rings.
    own: Option<OwnedFd>,
}

impl RingMemory {
    /// Uses `place` for all virtqueues of a front end, or else allocates a region for them.
    pub(super) fn new(config: &FrontEndConfig, place: Option<RingPlace>) -> Result<Self, FrontEndError> {
        if config.queue_pairs == 0 || config.queue_pairs > MAX_QUEUE_PAIRS {
            return Err(FrontEndError::Pairs { found: config.queue_pairs });
        }
        // Whether the rings are packed is known only after the back end has answered. The region has room for both
        // layouts.
        let (size, packed) = (config.queue_size, is_packed(config.features));
        if !(size.is_power_of_two() || packed && (1..=MAX_SIZE).contains(&size)) {
            return Err(RingError::Size(size.into()).into());
        }
        if let Some(place) = place {
            return Ok(Self { place, own: None });
        }
        let each = offsets(size, false).len.max(offsets(size, packed).len);
        let len = each * usize::from(config.queue_pairs) * 2;
        let (mapping, fd) = Mapping::memfd("offcore-rings", len, Hugepages::None)?;
        let (address, len) = (mapping.base().as_ptr() as u64, mapping.len() as u64);
        let region = GuestRegion::new(address, address, len, mapping, 0)?;
        let memory = Arc::new(GuestMemory::new(vec![region])?);
        Ok(Self { place: RingPlace { memory, address }, own: Some(fd) })
    }

    /// The region of the memory table that contains only the rings, if one was allocated.
    pub(super) fn region(&self) -> Option<MemoryFd<'_>> {
        let region = self.place.memory.regions().first()?;
        let fd = self.own.as_ref()?.as_fd();
        Some(MemoryFd { fd, address: region.user(), len: region.len() })
    }

    /// Returns the virtqueues. `config` must be the configuration that the memory was created for.
    pub(super) fn queues(
        &self,
        config: &FrontEndConfig,
        features: u64,
    ) -> Result<Vec<DriverQueue>, FrontEndError> {
        let packed = is_packed(features);
        let eventfd = || {
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map(Arc::new)
                .map_err(|source| FrontEndError::System { what: "eventfd", source: source.into() })
        };
        let queue = |index: u8| {
            let areas = ring_areas(self.place.address, index, config.queue_size, packed);
            let layout = Layout::in_memory(&self.place.memory, areas, config.queue_size.into(), packed)?;
            let Areas { descriptors: desc, driver: avail, device: used } = areas;
            let addresses = VringAddr { index: index.into(), flags: 0, desc, used, avail, log: 0 };
            Ok(DriverQueue { index, layout, addresses, features, kick: eventfd()?, call: eventfd()? })
        };
        // The number is limited to 2 * MAX_QUEUE_PAIRS, which fits into eight bits.
        (0..=u8::MAX).take(usize::from(config.queue_pairs) * 2).map(queue).collect()
    }
}
