//! The virtqueues of a front end and the memory they are in.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use offcore_mem::{GuestMemory, GuestRegion, Hugepages, Mapping};
use offcore_ring::split::{avail_len, desc_len, used_len};
use offcore_ring::{Layout, RingError};
use rustix::event::EventfdFlags;

use super::{FrontEndConfig, FrontEndError, MemoryFd};
use crate::backend::MAX_QUEUE_PAIRS;
use crate::features::RING_PACKED;
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

    /// The ring's parts, zeroed when the front end connected. The layout keeps their memory.
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

    pub(super) fn addresses(&self) -> VringAddr {
        self.addresses
    }
}

/// Offsets of the parts in one virtqueue's piece of memory, and that piece's length.
struct Offsets {
    avail: usize,
    used: usize,
    len: usize,
}

fn offsets(size: u16) -> Offsets {
    let avail = desc_len(size).next_multiple_of(ALIGN);
    let used = (avail + avail_len(size)).next_multiple_of(ALIGN);
    Offsets { avail, used, len: (used + used_len(size)).next_multiple_of(ALIGN) }
}

/// The virtqueues' own memory, as the back end gets to see it.
#[derive(Debug)]
pub(super) struct RingMemory {
    memory: Arc<GuestMemory>,
    fd: OwnedFd,
}

impl RingMemory {
    /// Memory for all virtqueues of a front end.
    pub(super) fn new(config: &FrontEndConfig) -> Result<Self, FrontEndError> {
        if config.queue_pairs == 0 || config.queue_pairs > MAX_QUEUE_PAIRS {
            return Err(FrontEndError::Pairs { found: config.queue_pairs });
        }
        if !config.queue_size.is_power_of_two() {
            return Err(RingError::Size(config.queue_size.into()).into());
        }
        let len = offsets(config.queue_size).len * usize::from(config.queue_pairs) * 2;
        let (mapping, fd) = Mapping::memfd("offcore-rings", len, Hugepages::None)?;
        let (address, len) = (mapping.base().as_ptr() as u64, mapping.len() as u64);
        let region = GuestRegion::new(address, address, len, mapping, 0)?;
        Ok(Self { memory: Arc::new(GuestMemory::new(vec![region])?), fd })
    }

    /// The region of the memory table that holds the rings.
    pub(super) fn region(&self) -> MemoryFd<'_> {
        let region = &self.memory.regions()[0];
        MemoryFd { fd: self.fd.as_fd(), address: region.user(), len: region.len() }
    }

    /// The virtqueues of the configuration that the memory was made for.
    pub(super) fn queues(
        &self,
        config: &FrontEndConfig,
        features: u64,
    ) -> Result<Vec<DriverQueue>, FrontEndError> {
        let offsets = offsets(config.queue_size);
        let eventfd = || {
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map(Arc::new)
                .map_err(|source| FrontEndError::System { what: "eventfd", source: source.into() })
        };
        let queue = |index: u8| {
            let desc = self.region().address + u64::from(index) * offsets.len as u64;
            let (avail, used) = (desc + offsets.avail as u64, desc + offsets.used as u64);
            let parts = (desc, avail, used);
            let layout = Layout::in_memory(
                &self.memory,
                parts,
                config.queue_size.into(),
                features & RING_PACKED != 0,
            )?;
            let addresses = VringAddr { index: index.into(), flags: 0, desc, used, avail, log: 0 };
            Ok(DriverQueue { index, layout, addresses, features, kick: eventfd()?, call: eventfd()? })
        };
        // At most 2 * MAX_QUEUE_PAIRS of them, which eight bits number.
        (0..=u8::MAX).take(usize::from(config.queue_pairs) * 2).map(queue).collect()
    }
}
