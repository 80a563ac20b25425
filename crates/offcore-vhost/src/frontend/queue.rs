//! The virtqueues of a front end and the memory they are in.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::split::{MAX_SIZE, avail_len, desc_len, used_len};
use offcore_ring::{Layout, RingError, packed};
use rustix::event::EventfdFlags;

use super::{FrontEndConfig, FrontEndError, MemoryFd};
use crate::backend::MAX_QUEUE_PAIRS;
use crate::eventfd;
use crate::features::is_packed;
use crate::message::VringAddr;

/// Ring parts do not share cache lines, nor the pairs of them that are fetched together.
const ALIGN: usize = 128;

/// One virtqueue of a front end: what a driver-side queue is made of.
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

    /// The ring's parts, split or packed as negotiated, zeroed when the front end connected. The layout keeps their
    /// memory.
    pub fn layout(&self) -> Layout {
        self.layout.clone()
    }

    /// The virtio features negotiated.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Eventfd to write to when the device wants to be kicked. Non-blocking.
    pub fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// Eventfd by which the device notifies. Non-blocking.
    pub fn call(&self) -> BorrowedFd<'_> {
        self.call.as_fd()
    }

    /// Empties [`call`](Self::call), without waiting even where the back end has made reads of it block.
    pub fn forget_calls(&self) {
        eventfd::empty(&self.call);
    }

    pub(super) fn addresses(&self) -> VringAddr {
        self.addresses
    }
}

/// Offsets of the parts in one virtqueue's piece of memory, and that piece's length. A packed ring has the driver's
/// event suppression in the place of the available ring and the device's in that of the used ring.
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

/// Where the parts of virtqueue `index` are when a front end's virtqueues of `size` descriptors begin at `address`:
/// descriptor area, driver area, device area.
pub fn ring_parts(address: u64, index: u8, size: u16, is_packed: bool) -> (u64, u64, u64) {
    let offsets = offsets(size, is_packed);
    let desc = address + u64::from(index) * offsets.len as u64;
    (desc, desc + offsets.avail as u64, desc + offsets.used as u64)
}

/// A place for the virtqueues in memory that packets are in, whose guest addresses are its front-end addresses.
#[derive(Clone, Debug)]
pub struct RingPlace {
    /// The memory; [`FrontEnd::connect_with`](super::FrontEnd::connect_with) gets its file, too.
    pub memory: Arc<GuestMemory>,
    /// The front-end address of the first virtqueue, aligned to 128 bytes.
    pub address: u64,
}

/// The virtqueues' memory, as the back end gets to see it.
#[derive(Debug)]
pub(super) struct RingMemory {
    place: RingPlace,
    /// The file of a region that holds nothing else.
    own: Option<OwnedFd>,
}

impl RingMemory {
    /// Memory for all virtqueues of a front end: `place`, or else a region of its own.
    pub(super) fn new(config: &FrontEndConfig, place: Option<RingPlace>) -> Result<Self, FrontEndError> {
        if config.queue_pairs == 0 || config.queue_pairs > MAX_QUEUE_PAIRS {
            return Err(FrontEndError::Pairs { found: config.queue_pairs });
        }
        // Whether rings are packed is known only when the back end has answered: there is room for either.
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

    /// The region of the memory table that holds nothing but the rings, if there is one.
    pub(super) fn region(&self) -> Option<MemoryFd<'_>> {
        let region = self.place.memory.regions().first()?;
        let fd = self.own.as_ref()?.as_fd();
        Some(MemoryFd { fd, address: region.user(), len: region.len() })
    }

    /// The virtqueues of the configuration that the memory was made for.
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
            let parts = ring_parts(self.place.address, index, config.queue_size, packed);
            let layout = Layout::in_memory(&self.place.memory, parts, config.queue_size.into(), packed)?;
            let (desc, avail, used) = parts;
            let addresses = VringAddr { index: index.into(), flags: 0, desc, used, avail, log: 0 };
            Ok(DriverQueue { index, layout, addresses, features, kick: eventfd()?, call: eventfd()? })
        };
        // At most 2 * MAX_QUEUE_PAIRS of them, which eight bits number.
        (0..=u8::MAX).take(usize::from(config.queue_pairs) * 2).map(queue).collect()
    }
}
