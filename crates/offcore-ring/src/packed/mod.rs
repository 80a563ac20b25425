//! Packed virtqueues: virtio 1.2, section 2.8.
//!
//! ```text
//! descriptor ring   size × { addr u64, len u32, id u16, flags u16 }    aligned to 16   both sides write it
//! driver event      off_wrap u16, flags u16                            aligned to 4    driver → device
//! device event      off_wrap u16, flags u16                            aligned to 4    device → driver
//! ```
//! Both sides use the same ring. Two flag bits of a descriptor say whether it is available or used, and in which turn
//! around the ring. If a side finds the bits for its current turn, the rest of the descriptor is already written.
//! Length, ID and flags share eight bytes and are always read and written by a single access.

pub mod device;
pub(crate) mod driver;
mod lines;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use offcore_mem::GuestMemory;

use crate::RingError;
use crate::areas::Areas;
use crate::chain::{MAX_SIZE, VIRTQ_DESC_F_WRITE, WRAP};
use crate::inflight::Inflight;
use crate::queue::LOOK;
use crate::vector::Word;
use crate::{barrier::full_barrier, prefetch};

/// Descriptor flag: the turn in which it was made available (section 2.8.1).
pub const VIRTQ_DESC_F_AVAIL: u16 = 1 << 7;
/// Descriptor flag: equal to `VIRTQ_DESC_F_AVAIL` if the descriptor is used, different if it is available.
pub const VIRTQ_DESC_F_USED: u16 = 1 << 15;

/// Value of an event structure's flags: enable all notifications.
pub const RING_EVENT_FLAGS_ENABLE: u16 = 0;
/// Value of an event structure's flags: disable all notifications.
pub const RING_EVENT_FLAGS_DISABLE: u16 = 1;
/// Value of an event structure's flags: notify when the descriptor in `off_wrap` is reached.
pub const RING_EVENT_FLAGS_DESC: u16 = 2;

/// Start position of a new queue: descriptor 0 and wrap counter 1 for both sides.
pub const FRESH_BASE: u32 = WRAP as u32 | (WRAP as u32) << 16;

/// The two flag bits that contain the state of a descriptor.
const STATE: u16 = VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED;

/// Number of descriptors that each side keeps in private copies; a power of two.
const WINDOW: usize = LOOK;
const _: () = assert!(WINDOW.is_power_of_two());

/// Number of descriptors in a cache line.
const PER_LINE: u32 = (prefetch::LINE / size_of::<PackedDescriptor>()) as u32;

/// Number of cache lines to prefetch ahead.
const LINES_AHEAD: u32 = 4;

/// A descriptor as stored in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct PackedDescriptor {
    /// Guest physical address of the buffer. Undefined in a used descriptor.
    pub addr: u64,
    /// Length of the buffer in bytes. In a used descriptor, the number of bytes that the device has written.
    pub len: u32,
    /// The buffer ID of the chain. Only valid in the last descriptor of a chain, and in a used descriptor.
    pub id: u16,
    /// [`VIRTQ_DESC_F_AVAIL`], [`VIRTQ_DESC_F_USED`], and `split::DESC_*`.
    pub flags: u16,
}

impl Word {
    #[inline(always)]
    fn is(self, state: u16) -> bool {
        self.flags() & STATE == state
    }

    #[inline(always)]
    fn is_writable(self) -> bool {
        self.flags() & VIRTQ_DESC_F_WRITE != 0
    }
}

/// A position in the ring together with the wrap counter. While the wrap counter is 1, it is the index. While the wrap
/// counter is 0, it is the index plus the ring's size. It is always below twice the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position(u32);

impl Position {
    /// Descriptor 0 in the first turn.
    const FRESH: Self = Self(0);

    /// Converts the 16-bit form; returns `None` if the index is not below `size`.
    #[inline(always)]
    fn decode(off_wrap: u16, size: u32) -> Option<Self> {
        let index = u32::from(off_wrap & !WRAP);
        (index < size).then_some(Self(if off_wrap & WRAP != 0 { index } else { index + size }))
    }

    /// The 16-bit form: index in bits 0 to 14, wrap counter in bit 15.
    #[inline(always)]
    fn encode(self, size: u32) -> u16 {
        self.index(size) as u16 | if self.wrap(size) { WRAP } else { 0 }
    }

    /// Index of the descriptor, below `size`.
    #[inline(always)]
    fn index(self, size: u32) -> u32 {
        if self.wrap(size) { self.0 } else { self.0 - size }
    }

    /// The wrap counter.
    #[inline(always)]
    fn wrap(self, size: u32) -> bool {
        self.0 < size
    }

    /// The position `entries` further on. `entries` is limited to `size`.
    #[inline(always)]
    fn after(self, entries: u32, size: u32) -> Self {
        let at = self.0 + entries.min(size);
        Self(if at < 2 * size { at } else { at - 2 * size })
    }

    /// Number of descriptors from here to the end of the ring.
    #[inline(always)]
    fn before_wrap(self, size: u32) -> u32 {
        size - self.index(size)
    }

    /// Number of descriptors from `earlier` to here, modulo twice the size.
    #[inline(always)]
    fn since(self, earlier: Self, size: u32) -> u32 {
        if self.0 >= earlier.0 { self.0 - earlier.0 } else { self.0 + 2 * size - earlier.0 }
    }

    /// The state bits of a descriptor that is made available at this position.
    #[inline(always)]
    fn available(self, size: u32) -> u16 {
        if self.wrap(size) { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED }
    }

    /// The state bits of a descriptor that is used at this position.
    #[inline(always)]
    fn used(self, size: u32) -> u16 {
        if self.wrap(size) { STATE } else { 0 }
    }
}

/// An event structure (section 2.8.10). Its writer defines which notifications it requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Event(u32);

impl Event {
    /// Enables or disables all notifications.
    fn all(wanted: bool) -> Self {
        Self(u32::from(if wanted { RING_EVENT_FLAGS_ENABLE } else { RING_EVENT_FLAGS_DISABLE }) << 16)
    }

    /// Requests one notification when the descriptor at `position` is reached.
    fn at(position: Position, size: u32) -> Self {
        Self(u32::from(RING_EVENT_FLAGS_DESC) << 16 | u32::from(position.encode(size)))
    }

    fn flags(self) -> u16 {
        (self.0 >> 16) as u16 & 3
    }

    /// Whether a notification is requested after the last `entries` descriptors before `now` were published.
    #[inline(always)]
    fn is_due(self, now: Position, entries: u32, size: u32) -> bool {
        match self.flags() {
            RING_EVENT_FLAGS_DISABLE => false,
            RING_EVENT_FLAGS_DESC => match Position::decode(self.0 as u16, size) {
                // The last published descriptor is 1 before `now`, the first is `entries` before it.
                Some(event) => (1..=entries).contains(&now.since(event, size)),
                // The descriptor does not exist. An additional notification does no harm.
                None => true,
            },
            _ => true,
        }
    }
}

/// The descriptors that a side has published since its last check for a notification.
#[derive(Debug)]
struct Signal {
    entries: u32,
    /// Whether no check was made yet. The first notification is always due, because the other side may have been
    /// waiting since before this side was created.
    first: bool,
}

impl Signal {
    /// Records that `entries` more descriptors were published.
    #[inline(always)]
    fn add(&mut self, entries: u32) {
        self.entries = self.entries.saturating_add(entries);
    }

    /// Returns whether to notify of everything before `now`. `event` was written by the other side. It is read after a
    /// full barrier, and only if descriptors were published.
    #[inline(always)]
    fn is_due(&mut self, event: &AtomicU32, event_idx: bool, now: Position, size: u32) -> bool {
        if self.entries == 0 {
            return false;
        }
        full_barrier();
        let event = Event(event.load(Ordering::Relaxed));
        let entries = if self.first { u32::MAX } else { self.entries };
        (self.entries, self.first) = (0, false);
        if event_idx && entries < 2 * size {
            event.is_due(now, entries, size)
        } else {
            event.flags() != RING_EVENT_FLAGS_DISABLE
        }
    }
}

/// The three parts of a queue in host memory: pointers, the size they were validated for, and the memory that contains
/// them.
#[derive(Clone, Debug)]
pub struct PackedLayout {
    ring: NonNull<u8>,
    driver_event: NonNull<u8>,
    device_event: NonNull<u8>,
    size: u16,
    _memory: Option<Arc<GuestMemory>>,
}

// SAFETY: a layout contains only addresses. They are accessed by atomic and volatile operations, while the memory is
// kept mapped.
unsafe impl Send for PackedLayout {}
// SAFETY: all threads access the addresses by atomic and volatile operations, while the memory is kept mapped.
unsafe impl Sync for PackedLayout {}

/// Length in bytes of the descriptor ring of a queue of `size`.
pub const fn ring_len(size: u16) -> usize {
    size as usize * size_of::<PackedDescriptor>()
}

/// Length in bytes of an event structure.
pub const EVENT_LEN: usize = 4;

impl PackedLayout {
    /// Describes a queue of `size` (1 to 32768) whose parts are at these addresses.
    ///
    /// # Errors
    /// Fails if the size is out of range, or if an address is not aligned.
    ///
    /// # Safety
    /// The ring must be [`ring_len`] bytes long and each event structure [`EVENT_LEN`] bytes. They must stay mapped as
    /// long as the layout (or a side created from it) is used.
    pub unsafe fn new(
        ring: NonNull<u8>,
        driver_event: NonNull<u8>,
        device_event: NonNull<u8>,
        size: u32,
    ) -> Result<Self, RingError> {
        let size = checked_size(size)?;
        for (part, address, align) in [
            ("descriptor ring", ring, 16),
            ("driver event structure", driver_event, 4),
            ("device event structure", device_event, 4),
        ] {
            let address = address.as_ptr() as usize;
            if !address.is_multiple_of(align) {
                return Err(RingError::Alignment { part, address, align });
            }
        }
        Ok(Self { ring, driver_event, device_event, size, _memory: None })
    }

    /// Describes a queue of `size` whose parts are at these addresses of `memory`. The layout keeps the memory mapped.
    ///
    /// # Errors
    /// The same as for [`PackedLayout::new`], and [`RingError::Part`] if a part is not completely in the memory.
    pub fn in_memory(memory: &Arc<GuestMemory>, areas: Areas, size: u32) -> Result<Self, RingError> {
        let queue_size = checked_size(size)?;
        let find = |part, address, len| {
            memory.translate_user(address, len).ok_or(RingError::Part { part, address, len })
        };
        let ring = find("descriptor ring", areas.descriptors, ring_len(queue_size))?;
        let driver_event = find("driver event structure", areas.driver, EVENT_LEN)?;
        let device_event = find("device event structure", areas.device, EVENT_LEN)?;
        // SAFETY: each part is completely in `memory`, which the layout keeps mapped.
        let layout = unsafe { Self::new(ring, driver_event, device_event, size) }?;
        Ok(Self { _memory: Some(Arc::clone(memory)), ..layout })
    }

    /// See [`crate::Layout::written`]: the device event structure and the descriptor ring.
    pub(crate) fn written(&self) -> [(NonNull<u8>, usize); 2] {
        [(self.device_event, EVENT_LEN), (self.ring, ring_len(self.size))]
    }

    /// Returns the position, in the 16-bit form, of the first chain that a terminated device did not return. Restores
    /// used descriptors from there on, which the driver has not seen, to available ones.
    ///
    /// # Errors
    /// [`RingError::Base`] if the recorded position is not in the ring.
    pub(crate) fn recover(&self, inflight: &Inflight) -> Result<u16, RingError> {
        let size = u32::from(self.size);
        let position =
            |found| Position::decode(found, size).ok_or(RingError::Base { found, size: self.size });
        let (old, new) = inflight.last_burst();
        let (old, new) = (position(old)?, position(new)?);
        // The first descriptor of a burst is written last. After that, the driver may have made it available again.
        let published = !self.load(old).is(old.available(size));
        let first = if published { new } else { old };
        for ahead in 1..size {
            let at = first.after(ahead, size);
            let was = Word(inflight.kept_word(at.index(size)));
            if self.load(at).is(at.used(size)) && was.is(at.available(size)) {
                self.publish(at, was);
            }
        }
        Ok(first.encode(size))
    }

    /// Queue size.
    #[inline(always)]
    pub fn size(&self) -> u16 {
        self.size
    }

    #[inline(always)]
    fn at(&self, position: Position) -> *mut PackedDescriptor {
        // SAFETY: the index of a position is below the size, so the descriptor is inside the ring.
        unsafe {
            self.ring.as_ptr().cast::<PackedDescriptor>().add(position.index(self.size.into()) as usize)
        }
    }

    /// Length, ID and flags of the descriptor at `position`.
    #[inline(always)]
    fn word(&self, position: Position) -> &AtomicU64 {
        // SAFETY: this is the second half of a descriptor in the ring, aligned to 8. The caller of `new` keeps it
        // mapped. The reference is not used outside this module.
        unsafe { AtomicU64::from_ptr(self.at(position).cast::<u64>().add(1)) }
    }

    /// Reads length, ID and flags. Everything that the other side wrote before them is visible afterwards.
    #[inline(always)]
    fn load(&self, position: Position) -> Word {
        Word(self.word(position).load(Ordering::Acquire))
    }

    #[inline(always)]
    fn load_addr(&self, position: Position) -> u64 {
        // SAFETY: this is the first half of a descriptor in the ring, mapped and aligned. Volatile, so that the value
        // is read exactly once, even if the other side changes it.
        unsafe { self.at(position).cast::<u64>().read_volatile() }
    }

    #[inline(always)]
    fn store_addr(&self, position: Position, addr: u64) {
        // SAFETY: this is the first half of a descriptor in the ring, mapped and aligned. Volatile, because the other
        // side accesses the same memory.
        unsafe { self.at(position).cast::<u64>().write_volatile(addr) };
    }

    /// Writes length, ID and flags of a descriptor that the other side does not read yet, because it waits for an
    /// earlier one.
    #[inline(always)]
    fn store(&self, position: Position, word: Word) {
        self.word(position).store(word.0, Ordering::Relaxed);
    }

    /// Writes length, ID and flags, and makes all earlier writes visible with them.
    #[inline(always)]
    fn publish(&self, position: Position, word: Word) {
        self.word(position).store(word.0, Ordering::Release);
    }

    /// See [`fetch_ahead`].
    #[inline(always)]
    fn fetch_ahead(&self, position: Position, first: bool) {
        fetch_ahead(self.at(position), first, prefetch::read);
    }

    #[inline(always)]
    fn driver_event(&self) -> &AtomicU32 {
        // SAFETY: the structure has four bytes, aligned to 4, and the caller of `new` keeps it mapped. The reference is
        // not used outside this module.
        unsafe { AtomicU32::from_ptr(self.driver_event.as_ptr().cast()) }
    }

    #[inline(always)]
    fn device_event(&self) -> &AtomicU32 {
        // SAFETY: the structure has four bytes, aligned to 4, and the caller of `new` keeps it mapped. The reference is
        // not used outside this module.
        unsafe { AtomicU32::from_ptr(self.device_event.as_ptr().cast()) }
    }
}

/// Prefetches lines behind the descriptor at `at` while a burst is processed. `first` says whether it is the first
/// descriptor of the burst. This is only called for a descriptor with the expected state. Otherwise, the other side is
/// about to write to the line, and would have to fetch it back.
#[inline(always)]
fn fetch_ahead(at: *const PackedDescriptor, first: bool, fetch: fn(*const PackedDescriptor)) {
    let line = |line: u32| fetch(at.wrapping_add((line * PER_LINE) as usize));
    if first {
        (0..LINES_AHEAD).for_each(line);
    }
    if (at as usize).is_multiple_of(prefetch::LINE) {
        line(LINES_AHEAD);
    }
}

fn checked_size(size: u32) -> Result<u16, RingError> {
    let fits = u16::try_from(size).ok().filter(|size| (1..=MAX_SIZE).contains(size));
    fits.ok_or(RingError::PackedSize(size))
}

#[cfg(test)]
mod tests;
