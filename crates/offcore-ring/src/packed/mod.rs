//! Packed virtqueues: virtio 1.2, section 2.8.
//!
//! ```text
//! descriptor ring   size × { addr u64, len u32, id u16, flags u16 }    aligned to 16   both sides write it
//! driver event      off_wrap u16, flags u16                            aligned to 4    driver → device
//! device event      off_wrap u16, flags u16                            aligned to 4    device → driver
//! ```
//! Both sides go around the one ring. A descriptor says by two bits of its flags whether it is available or used, and in
//! which turn around the ring: a side that finds the bits of its own turn knows that everything before
//! them is written too. So length, id and flags, which share eight bytes, are always read and written by one access.

pub mod device;
pub(crate) mod driver;
mod lines;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use offcore_mem::GuestMemory;

use crate::RingError;
use crate::chain::{MAX_SIZE, VIRTQ_DESC_F_WRITE, WRAP};
use crate::inflight::Inflight;
use crate::queue::LOOK;
use crate::vector::Word;
use crate::{barrier::full_barrier, prefetch};

/// In a descriptor's flags: the turn in which it was made available (section 2.8.1).
pub const VIRTQ_DESC_F_AVAIL: u16 = 1 << 7;
/// In a descriptor's flags: equal to `VIRTQ_DESC_F_AVAIL` when it is used, different when it is available.
pub const VIRTQ_DESC_F_USED: u16 = 1 << 15;

/// In an event structure's flags: notify of everything.
pub const RING_EVENT_FLAGS_ENABLE: u16 = 0;
/// In an event structure's flags: notify of nothing.
pub const RING_EVENT_FLAGS_DISABLE: u16 = 1;
/// In an event structure's flags: notify when the descriptor that `off_wrap` names is reached.
pub const RING_EVENT_FLAGS_DESC: u16 = 2;

/// The value that a fresh queue starts from: descriptor 0, wrap counter 1, on both sides.
pub const FRESH_BASE: u32 = WRAP as u32 | (WRAP as u32) << 16;

/// Both of the bits that tell a descriptor's state.
const STATE: u16 = VIRTQ_DESC_F_AVAIL | VIRTQ_DESC_F_USED;

/// How many descriptors each side keeps in private copies; a power of two.
const WINDOW: usize = LOOK;
const _: () = assert!(WINDOW.is_power_of_two());

/// Descriptors in a cache line.
const PER_LINE: u32 = (prefetch::LINE / size_of::<Descriptor>()) as u32;

/// How many lines are asked for before they are read.
const LINES_AHEAD: u32 = 4;

/// A descriptor, as it is in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(16))]
pub struct Descriptor {
    /// Guest physical address of the buffer. Means nothing when the descriptor is used.
    pub addr: u64,
    /// Its length in bytes; of a used descriptor, how many bytes the device has written.
    pub len: u32,
    /// Which chain: counts in its last descriptor, and in a used one.
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

/// A place in the ring and the turn around it, of which every second one is the same: below the ring's size while the
/// wrap counter is 1, and as much further on while it is 0. Always below twice the size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position(u32);

impl Position {
    /// Descriptor 0 in the first turn.
    const FRESH: Self = Self(0);

    /// From the 16-bit form; `None` when it names no descriptor of a ring of `size`.
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

    /// Which descriptor: below `size`.
    #[inline(always)]
    fn index(self, size: u32) -> u32 {
        if self.wrap(size) { self.0 } else { self.0 - size }
    }

    /// The wrap counter.
    #[inline(always)]
    fn wrap(self, size: u32) -> bool {
        self.0 < size
    }

    /// The position `entries` (at most `size` of them) further on.
    #[inline(always)]
    fn after(self, entries: u32, size: u32) -> Self {
        let at = self.0 + entries.min(size);
        Self(if at < 2 * size { at } else { at - 2 * size })
    }

    /// How many descriptors there are from here to the end of the ring.
    #[inline(always)]
    fn before_wrap(self, size: u32) -> u32 {
        size - self.index(size)
    }

    /// How many descriptors, modulo twice the size, from `earlier` to here.
    #[inline(always)]
    fn since(self, earlier: Self, size: u32) -> u32 {
        if self.0 >= earlier.0 { self.0 - earlier.0 } else { self.0 + 2 * size - earlier.0 }
    }

    /// The state bits of a descriptor that is made available here.
    #[inline(always)]
    fn available(self, size: u32) -> u16 {
        if self.wrap(size) { VIRTQ_DESC_F_AVAIL } else { VIRTQ_DESC_F_USED }
    }

    /// The state bits of a descriptor that is used here.
    #[inline(always)]
    fn used(self, size: u32) -> u16 {
        if self.wrap(size) { STATE } else { 0 }
    }
}

/// An event structure (section 2.8.10): who writes it says which notifications it wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Event(u32);

impl Event {
    /// Every notification, or none.
    fn all(wanted: bool) -> Self {
        Self(u32::from(if wanted { RING_EVENT_FLAGS_ENABLE } else { RING_EVENT_FLAGS_DISABLE }) << 16)
    }

    /// One when the descriptor at `position` is reached.
    fn at(position: Position, size: u32) -> Self {
        Self(u32::from(RING_EVENT_FLAGS_DESC) << 16 | u32::from(position.encode(size)))
    }

    fn flags(self) -> u16 {
        (self.0 >> 16) as u16 & 3
    }

    /// Whether it asks for a notification when the last `entries` descriptors before `now` have been passed on.
    #[inline(always)]
    fn is_due(self, now: Position, entries: u32, size: u32) -> bool {
        match self.flags() {
            RING_EVENT_FLAGS_DISABLE => false,
            RING_EVENT_FLAGS_DESC => match Position::decode(self.0 as u16, size) {
                // The last descriptor passed on is 1 before `now`, the first is `entries` before it.
                Some(event) => (1..=entries).contains(&now.since(event, size)),
                // No such descriptor: one notification too many harms nobody.
                None => true,
            },
            _ => true,
        }
    }
}

/// What a side has passed on since it last looked whether to notify.
#[derive(Debug)]
struct Signal {
    entries: u32,
    /// This is the first time, and is due whatever descriptor the other side waits for: it may have begun to wait before
    /// this side was made.
    first: bool,
}

impl Signal {
    /// Notes that `entries` more descriptors are passed on.
    #[inline(always)]
    fn add(&mut self, entries: u32) {
        self.entries = self.entries.saturating_add(entries);
    }

    /// Whether to notify of everything before `now`. `event` is what the other side wrote, read only when there is
    /// something to tell, and after a full barrier.
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

/// The three parts of a queue in host memory: pointers, the size they were validated for, and the memory they are in,
/// kept together.
#[derive(Clone, Debug)]
pub struct Layout {
    ring: NonNull<u8>,
    driver_event: NonNull<u8>,
    device_event: NonNull<u8>,
    size: u16,
    _memory: Option<Arc<GuestMemory>>,
}

// SAFETY: a layout is three addresses; access goes through atomics and volatile accesses by whoever keeps the memory.
unsafe impl Send for Layout {}
// SAFETY: as above.
unsafe impl Sync for Layout {}

/// Bytes of the descriptor ring of a queue of `size`.
pub const fn ring_len(size: u16) -> usize {
    size as usize * size_of::<Descriptor>()
}

/// Bytes of an event structure.
pub const EVENT_LEN: usize = 4;

impl Layout {
    /// A queue of `size` (any from 1 to 32768) whose parts are at these addresses.
    ///
    /// # Errors
    /// A size out of range, or an address that is not aligned.
    ///
    /// # Safety
    /// The ring must be [`ring_len`] bytes long and the event structures [`EVENT_LEN`], and they must stay mapped as long
    /// as the layout (or a side made from it) is used.
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

    /// A queue of `size` whose parts are at these front-end addresses of `memory`, which the layout keeps.
    ///
    /// # Errors
    /// As for [`Layout::new`], and [`RingError::Part`] when a part is not in the memory as a whole.
    pub fn in_memory(
        memory: &Arc<GuestMemory>,
        (ring, driver_event, device_event): (u64, u64, u64),
        size: u32,
    ) -> Result<Self, RingError> {
        let queue_size = checked_size(size)?;
        let find = |part, address, len| {
            memory.translate_user(address, len).ok_or(RingError::Part { part, address, len })
        };
        let ring = find("descriptor ring", ring, ring_len(queue_size))?;
        let driver_event = find("driver event structure", driver_event, EVENT_LEN)?;
        let device_event = find("device event structure", device_event, EVENT_LEN)?;
        // SAFETY: the parts are in `memory` as whole ranges, and the layout keeps it.
        let layout = unsafe { Self::new(ring, driver_event, device_event, size) }?;
        Ok(Self { _memory: Some(Arc::clone(memory)), ..layout })
    }

    /// See [`crate::Layout::written`]: the device event structure, and the descriptor ring.
    pub(crate) fn written(&self) -> [(NonNull<u8>, usize); 2] {
        [(self.device_event, EVENT_LEN), (self.ring, ring_len(self.size))]
    }

    /// Where the first chain begins that a device that has ended did not return, in the 16-bit form. Used descriptors from there on,
    /// which the driver has not seen, are made what they were.
    ///
    /// # Errors
    /// [`RingError::Base`] when the ring has no such descriptor.
    pub(crate) fn recover(&self, inflight: &Inflight) -> Result<u16, RingError> {
        let size = u32::from(self.size);
        let position =
            |found| Position::decode(found, size).ok_or(RingError::Base { found, size: self.size });
        let (old, new) = inflight.last_burst();
        let (old, new) = (position(old)?, position(new)?);
        // The first descriptor of a burst is written last. Once it was, the driver may have made it available again.
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
    fn at(&self, position: Position) -> *mut Descriptor {
        // SAFETY: a position's index is below the size, so the descriptor is inside the ring.
        unsafe { self.ring.as_ptr().cast::<Descriptor>().add(position.index(self.size.into()) as usize) }
    }

    /// Length, id and flags of the descriptor at `position`.
    #[inline(always)]
    fn word(&self, position: Position) -> &AtomicU64 {
        // SAFETY: the second half of a descriptor of the ring, aligned to 8, which `new`'s caller keeps mapped. The
        // reference does not leave this module.
        unsafe { AtomicU64::from_ptr(self.at(position).cast::<u64>().add(1)) }
    }

    /// Reads length, id and flags; whatever the other side wrote before them is visible after this.
    #[inline(always)]
    fn load(&self, position: Position) -> Word {
        Word(self.word(position).load(Ordering::Acquire))
    }

    #[inline(always)]
    fn load_addr(&self, position: Position) -> u64 {
        // SAFETY: the first half of a descriptor of the ring, mapped and aligned. Volatile: read once, whatever the other
        // side does.
        unsafe { self.at(position).cast::<u64>().read_volatile() }
    }

    #[inline(always)]
    fn store_addr(&self, position: Position, addr: u64) {
        // SAFETY: as in `load_addr`.
        unsafe { self.at(position).cast::<u64>().write_volatile(addr) };
    }

    /// Writes length, id and flags of a descriptor that the other side does not look at yet, because it waits for one
    /// before it.
    #[inline(always)]
    fn store(&self, position: Position, word: Word) {
        self.word(position).store(word.0, Ordering::Relaxed);
    }

    /// Writes length, id and flags, and makes everything written before visible with them.
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
        // SAFETY: four bytes, aligned to 4, which `new`'s caller keeps mapped. The reference does not leave this module.
        unsafe { AtomicU32::from_ptr(self.driver_event.as_ptr().cast()) }
    }

    #[inline(always)]
    fn device_event(&self) -> &AtomicU32 {
        // SAFETY: as in `driver_event`.
        unsafe { AtomicU32::from_ptr(self.device_event.as_ptr().cast()) }
    }
}

/// Asks for lines that follow the descriptor at `at`, while a burst is gone through of which it is the first, or is not.
/// Called only for one that was found as it should be: where nothing is, the other side is about to write, and would have
/// to get its line back.
#[inline(always)]
fn fetch_ahead(at: *const Descriptor, first: bool, fetch: fn(*const Descriptor)) {
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
