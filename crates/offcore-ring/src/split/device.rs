//! The device side of a split virtqueue: takes available chains, returns used ones.
//!
//! Work is per burst: [`Queue::available`] reads the driver's index once, [`Queue::head`] and [`Queue::walk`] take
//! chains apart into host addresses without consuming them, [`Queue::consume`] moves on, [`Queue::push_used`] writes
//! elements that nobody sees until [`Queue::publish`].

use std::ptr::NonNull;
use std::sync::atomic::Ordering;

use offcore_mem::{GuestMemory, RegionCache};

use crate::prefetch;

use super::{
    AVAIL_NO_INTERRUPT, DESC_INDIRECT, DESC_NEXT, DESC_WRITE, Descriptor, Layout, RingError, USED_NO_NOTIFY,
    UsedElement, full_barrier, need_event, read_descriptor,
};

/// Longest indirect table we read: no chain may be longer than the largest queue.
const MAX_INDIRECT: u32 = super::MAX_SIZE as u32;

/// Which way the buffers of a chain go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The device reads them (the guest transmits).
    Readable,
    /// The device writes them (the guest receives).
    Writable,
}

impl Direction {
    #[inline(always)]
    fn fits(self, flags: u16) -> bool {
        (flags & DESC_WRITE != 0) == (self == Self::Writable)
    }
}

/// A buffer of a chain at its host address. The whole range is in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Buffer {
    /// First byte.
    pub addr: NonNull<u8>,
    /// Length in bytes.
    pub len: u32,
}

/// The device side of one queue.
#[derive(Debug)]
pub struct Queue {
    layout: Layout,
    event_idx: bool,
    indirect: bool,
    /// Next available entry to take.
    next_avail: u16,
    /// The driver's index as last read.
    avail_idx: u16,
    /// Next used entry to write. In 32 bits, of which 16 count: 16-bit fields are read by wider loads, which have to
    /// wait until the narrower store before them has reached the cache.
    next_used: u32,
    /// The used index as last published.
    published: u16,
    /// How far available entries are ahead of the used elements that return them: 0, unless the driver started the queue
    /// at an entry of its own choice.
    lead: u16,
    /// Used index at which the driver was last looked at for notification.
    signalled: u16,
    region: RegionCache,
}

// SAFETY: the layout's memory may be used from any thread; the region cache belongs to the table it is used with.
unsafe impl Send for Queue {}

impl Queue {
    /// The device side of the queue in `layout`, beginning at available entry `base` (0 for a fresh queue; what
    /// [`Queue::base`] said when it was stopped). The used index goes on where the ring says it is.
    pub fn new(layout: Layout, base: u16, event_idx: bool, indirect: bool) -> Self {
        let used = layout.used_idx().load(Ordering::Acquire);
        Self {
            layout,
            event_idx,
            indirect,
            next_avail: base,
            avail_idx: base,
            next_used: used.into(),
            published: used,
            lead: base.wrapping_sub(used),
            signalled: used,
            region: RegionCache::empty(),
        }
    }

    /// Queue size.
    #[inline(always)]
    pub fn size(&self) -> u16 {
        self.layout.size
    }

    /// The next available entry: where a later [`Queue::new`] goes on.
    pub fn base(&self) -> u16 {
        self.next_avail
    }

    /// How many chains are available, reading the driver's index only when fewer than `wanted` are known.
    ///
    /// # Errors
    /// [`RingError::Index`] when the driver claims more than the ring holds, the chains that it has not got back
    /// included: so no more chains are ever out than the queue has descriptors.
    #[inline(always)]
    pub fn available(&mut self, wanted: u16) -> Result<u16, RingError> {
        let known = self.avail_idx.wrapping_sub(self.next_avail);
        if known >= wanted {
            return Ok(known);
        }
        let found = self.layout.avail_idx().load(Ordering::Acquire);
        let oldest = self.published.wrapping_add(self.lead);
        // From the index as it was to as many as the queue has descriptors: this also finds one that went backwards.
        let room = oldest.wrapping_add(self.layout.size).wrapping_sub(self.avail_idx);
        if found.wrapping_sub(self.avail_idx) > room {
            return Err(self.bad_index(found, oldest));
        }
        self.avail_idx = found;
        Ok(found.wrapping_sub(self.next_avail))
    }

    #[cold]
    fn bad_index(&self, found: u16, oldest: u16) -> RingError {
        let size = self.layout.size;
        let backwards = found.wrapping_sub(oldest) <= size;
        let expected = if backwards { self.avail_idx } else { oldest };
        RingError::Index { ring: "available", found, expected, size }
    }

    /// First descriptor of the chain `ahead` entries after the next one. `ahead` must be below what
    /// [`Queue::available`] said.
    ///
    /// # Errors
    /// [`RingError::Descriptor`].
    #[inline(always)]
    pub fn head(&self, ahead: u16) -> Result<u16, RingError> {
        debug_assert!(ahead < self.avail_idx.wrapping_sub(self.next_avail));
        let head = self.layout.avail_entry(self.next_avail.wrapping_add(ahead)).load(Ordering::Relaxed);
        if head >= self.layout.size {
            return Err(RingError::Descriptor { found: head.into(), size: self.layout.size.into() });
        }
        Ok(head)
    }

    /// A private copy of the descriptor at `head`, for a chain of one buffer; `None` when it has more, or is indirect.
    /// `head` comes from [`Queue::head`].
    ///
    /// # Errors
    /// A buffer outside guest memory or of the wrong direction.
    #[inline(always)]
    pub fn single(
        &mut self,
        head: u16,
        memory: &GuestMemory,
        direction: Direction,
    ) -> Result<Option<Buffer>, RingError> {
        let desc = self.layout.descriptor(head);
        if desc.flags & (DESC_NEXT | DESC_INDIRECT) != 0 {
            return Ok(None);
        }
        if !direction.fits(desc.flags) {
            return Err(RingError::Direction { head });
        }
        match memory.translate(desc.addr, desc.len, &mut self.region) {
            Some(addr) => Ok(Some(Buffer { addr, len: desc.len })),
            // A buffer across two regions is taken apart by `walk`, which also says when it is in none.
            None => Ok(None),
        }
    }

    /// Calls `visit` with each buffer of the chain at `head`, in order; a buffer across regions comes in pieces.
    /// Buffers of length 0 are left out, but count: at most `max` descriptors are read, whatever the driver wrote.
    ///
    /// # Errors
    /// What is wrong with the chain; more than `max` descriptors or pieces are [`RingError::TooManyBuffers`].
    pub fn walk(
        &mut self,
        head: u16,
        memory: &GuestMemory,
        direction: Direction,
        max: usize,
        mut visit: impl FnMut(Buffer),
    ) -> Result<(), RingError> {
        let desc = self.layout.descriptor(head);
        let mut walker = Walker { head, memory, direction, max, region: &mut self.region, visited: 0 };
        if desc.flags & DESC_INDIRECT == 0 {
            // `chain` checks each index against the size before it asks for the descriptor.
            let layout = &self.layout;
            return walker.chain(desc, layout.size.into(), |i| Ok(layout.descriptor(i)), &mut visit);
        }
        let entries = desc.len / 16;
        if desc.flags & DESC_NEXT != 0
            || !desc.len.is_multiple_of(16)
            || entries == 0
            || entries > MAX_INDIRECT
        {
            return Err(RingError::IndirectTable { head, len: desc.len, flags: desc.flags });
        }
        if !self.indirect {
            return Err(RingError::IndirectNotAllowed { head });
        }
        let mut table_region = RegionCache::empty();
        let mut entry = |index: u16| {
            // Each entry is translated by itself, so a table may cross regions.
            let addr = desc.addr.wrapping_add(u64::from(index) * 16);
            let at =
                memory.translate(addr, 16, &mut table_region).ok_or(RingError::Address { addr, len: 16 })?;
            // SAFETY: translate found 16 bytes there, which stay mapped as long as `memory` lives.
            Ok(unsafe { read_unaligned(at) })
        };
        let first = entry(0)?;
        walker.chain(first, entries, entry, &mut visit)
    }

    /// Moves on over `chains` available entries.
    #[inline(always)]
    pub fn consume(&mut self, chains: u16) {
        debug_assert!(chains <= self.avail_idx.wrapping_sub(self.next_avail));
        self.next_avail = self.next_avail.wrapping_add(chains);
    }

    #[inline(always)]
    fn next_used(&self) -> u16 {
        self.next_used as u16
    }

    /// Writes a used element for the chain at `head` of which `len` bytes were written. Not visible before
    /// [`Queue::publish`].
    #[inline(always)]
    pub fn push_used(&mut self, head: u16, len: u32) {
        // SAFETY: `used_element` masks the position, so it points into the used ring, which stays mapped.
        unsafe {
            self.layout.used_element(self.next_used()).write_volatile(UsedElement { id: head.into(), len })
        };
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes the used elements written so far visible to the driver.
    #[inline(always)]
    pub fn publish(&mut self) {
        if self.published != self.next_used() {
            self.published = self.next_used();
            self.layout.used_idx().store(self.published, Ordering::Release);
        }
    }

    /// Whether the driver wants to be notified of what was published since this last said so.
    #[inline(always)]
    pub fn needs_notification(&mut self) -> bool {
        let (old, new) = (self.signalled, self.published);
        if old == new {
            return false;
        }
        full_barrier();
        self.signalled = new;
        if self.event_idx {
            need_event(self.layout.used_event().load(Ordering::Relaxed), new, old)
        } else {
            self.layout.avail_flags().load(Ordering::Relaxed) & AVAIL_NO_INTERRUPT == 0
        }
    }

    /// Asks the driver for notifications of new available chains, or (when `wanted` is false) for none.
    pub fn set_notification(&mut self, wanted: bool) {
        if self.event_idx {
            // Half the index space behind: not reached before the next call.
            let event = if wanted { self.next_avail } else { self.next_avail.wrapping_sub(1) };
            self.layout.avail_event().store(event, Ordering::Relaxed);
        } else {
            self.layout.used_flags().store(if wanted { 0 } else { USED_NO_NOTIFY }, Ordering::Relaxed);
        }
        full_barrier();
    }

    /// The first descriptors of the next `heads.len()` chains, which must be available; their descriptors are fetched
    /// ahead.
    ///
    /// # Errors
    /// [`RingError::Descriptor`].
    #[inline(always)]
    pub fn heads(&self, heads: &mut [u16]) -> Result<(), RingError> {
        for (ahead, slot) in heads.iter_mut().enumerate() {
            *slot = self.head(ahead as u16)?;
            prefetch::read(self.layout.desc_at(*slot));
        }
        Ok(())
    }

    /// Fetches ahead, for writing, the lines of the next `elements` used elements.
    #[inline(always)]
    pub fn prefetch_used(&self, elements: usize) {
        for element in (0..elements).step_by(prefetch::LINE / size_of::<UsedElement>()) {
            prefetch::write(self.layout.used_element(self.next_used().wrapping_add(element as u16)));
        }
    }

    /// Forgets the cached region: the table of memory has changed.
    pub fn forget_region(&mut self) {
        self.region = RegionCache::empty();
    }
}

/// A private copy of a descriptor in an indirect table, which may stand at any address.
///
/// # Safety
/// `at` must point to 16 mapped bytes.
unsafe fn read_unaligned(at: NonNull<u8>) -> Descriptor {
    if (at.as_ptr() as usize).is_multiple_of(8) {
        // SAFETY: 16 mapped bytes, as the caller promises, and aligned.
        return unsafe { read_descriptor(at.as_ptr().cast()) };
    }
    // SAFETY: 16 mapped bytes; an array of bytes needs no alignment.
    let bytes = unsafe { at.cast::<[u8; 16]>().read_volatile() };
    let raw = u128::from_le_bytes(bytes);
    Descriptor {
        addr: raw as u64,
        len: (raw >> 64) as u32,
        flags: (raw >> 96) as u16,
        next: (raw >> 112) as u16,
    }
}

struct Walker<'a> {
    head: u16,
    memory: &'a GuestMemory,
    direction: Direction,
    max: usize,
    region: &'a mut RegionCache,
    visited: usize,
}

impl Walker<'_> {
    fn chain(
        &mut self,
        mut desc: Descriptor,
        size: u32,
        mut entry: impl FnMut(u16) -> Result<Descriptor, RingError>,
        visit: &mut impl FnMut(Buffer),
    ) -> Result<(), RingError> {
        for read in 0..size {
            if read as usize == self.max {
                return Err(self.too_many());
            }
            if desc.flags & DESC_INDIRECT != 0 {
                return Err(RingError::IndirectNotAllowed { head: self.head });
            }
            if !self.direction.fits(desc.flags) {
                return Err(RingError::Direction { head: self.head });
            }
            self.buffer(desc, visit)?;
            if desc.flags & DESC_NEXT == 0 {
                return Ok(());
            }
            if u32::from(desc.next) >= size {
                return Err(RingError::Descriptor { found: desc.next.into(), size });
            }
            desc = entry(desc.next)?;
        }
        Err(RingError::Loop { head: self.head, size })
    }

    fn too_many(&self) -> RingError {
        RingError::TooManyBuffers { head: self.head, max: self.max }
    }

    fn buffer(&mut self, desc: Descriptor, visit: &mut impl FnMut(Buffer)) -> Result<(), RingError> {
        let outside = RingError::Address { addr: desc.addr, len: desc.len };
        let (mut addr, mut left) = (desc.addr, desc.len);
        while left > 0 {
            let (host, room) = self.memory.translate_some(addr, self.region).ok_or(outside)?;
            let len = left.min(u32::try_from(room).unwrap_or(u32::MAX));
            if self.visited == self.max {
                return Err(self.too_many());
            }
            self.visited += 1;
            visit(Buffer { addr: host, len });
            left -= len;
            addr = addr.checked_add(len.into()).ok_or(outside)?;
        }
        Ok(())
    }
}
