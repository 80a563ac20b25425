//! The device side of a split virtqueue: takes available chains and returns used ones.
//!
//! Bursts use the functions of [`DeviceQueue`]. The lower-level function [`SplitDevice::available`] reads the driver's
//! index, and [`SplitDevice::head`] reads an entry of the available ring.

use std::ops::Range;
use std::sync::atomic::Ordering;

use offcore_mem::{GuestMemory, RegionCache};

use super::{
    Descriptor, RingError, SplitLayout, UsedElement, VIRTQ_AVAIL_F_NO_INTERRUPT, VIRTQ_DESC_F_INDIRECT,
    VIRTQ_DESC_F_NEXT, VIRTQ_USED_F_NO_NOTIFY, lines, need_event,
};
use crate::barrier::full_barrier;
pub use crate::chain::{Buffer, Direction};
use crate::chain::{Chain, Walker, read_unaligned};
use crate::double::{Double, Order, Tables};
use crate::prefetch;
use crate::queue::{DeviceQueue, LOOK};
use crate::vector::{Entry, Level, Single, Wanted, resolve};

/// Maximum number of entries in an indirect table: chains may not be longer than the largest queue.
const MAX_INDIRECT: u32 = super::MAX_SIZE as u32;

/// The device side of one queue.
#[derive(Debug)]
pub struct SplitDevice {
    layout: SplitLayout,
    indirect: bool,
    /// Next available entry to take.
    next_avail: u16,
    /// The driver's index as last read.
    avail_idx: u16,
    /// Next used element to write. Stored in 32 bits, although only 16 are significant. The compiler reads 16-bit
    /// fields by wider loads, which have to wait until the preceding narrower store has reached the cache.
    next_used: u32,
    /// The used index as last published.
    published: u16,
    /// Difference between the positions of available entries and of the used elements that return them. It is 0, unless
    /// the driver started the queue at an entry of its choice.
    lead: u16,
    signals: Signals,
    region: RegionCache,
    tables: RegionCache,
    found: Found,
    level: Level,
}

/// The notifications of the driver.
#[derive(Debug)]
struct Signals {
    event_idx: bool,
    /// Used index at the last check for a notification.
    signalled: u16,
    /// Whether no check was made yet. The driver may have been waiting since before this device started the queue.
    first: bool,
}

impl Signals {
    /// Whether the driver wants a notification about the used index `new`.
    #[inline(always)]
    fn is_wanted(&mut self, layout: &SplitLayout, new: u16) -> bool {
        let old = self.signalled;
        if old == new {
            return false;
        }
        full_barrier();
        self.signalled = new;
        let first = std::mem::take(&mut self.first);
        if self.event_idx {
            first || need_event(layout.used_event().load(Ordering::Relaxed), new, old)
        } else {
            layout.avail_flags().load(Ordering::Relaxed) & VIRTQ_AVAIL_F_NO_INTERRUPT == 0
        }
    }
}

/// The chains that [`DeviceQueue::look`] has found.
#[derive(Debug)]
struct Found {
    /// Heads of the chains: `known` of them, from the next available entry on.
    heads: Box<[u16; LOOK]>,
    known: u16,
    /// Descriptors of these chains up to `read`, and the singles found among them, as read by [`DeviceQueue::singles`].
    /// Each descriptor is read once, even if runs are often interrupted by longer chains: 64 such interruptions would
    /// cause 2080 reads.
    read: u16,
    entries: Box<[Entry; LOOK]>,
    singles: Box<[Single; LOOK]>,
    doubles: Box<[Double; LOOK]>,
}

impl Found {
    fn new() -> Self {
        Self {
            heads: Box::new([0; LOOK]),
            known: 0,
            read: 0,
            entries: Box::new([Entry::default(); LOOK]),
            singles: Box::new([Single::NONE; LOOK]),
            doubles: Box::new([Double::NONE; LOOK]),
        }
    }

    /// Returns the range of up to `most` chains from `ahead` on.
    #[inline(always)]
    fn range(&self, ahead: u16, most: u16) -> Range<usize> {
        let known = usize::from(self.known).min(LOOK);
        let from = usize::from(ahead).min(known);
        from..known.min(from + usize::from(most))
    }
}

// SAFETY: the layout's memory may be used from any thread. The region cache belongs to the memory table that it is used
// with.
unsafe impl Send for SplitDevice {}

impl SplitDevice {
    /// Creates the device side of the queue in `layout`. It begins at available entry `base`: 0 for a new queue, or the
    /// value of [`DeviceQueue::base`] when it was stopped. The used index is read from the ring.
    pub fn new(layout: SplitLayout, base: u16, event_idx: bool, indirect: bool) -> Self {
        let used = layout.used_idx().load(Ordering::Acquire);
        Self {
            layout,
            indirect,
            next_avail: base,
            avail_idx: base,
            next_used: used.into(),
            published: used,
            lead: base.wrapping_sub(used),
            signals: Signals { event_idx, signalled: used, first: true },
            region: RegionCache::empty(),
            tables: RegionCache::empty(),
            found: Found::new(),
            level: Level::detect(),
        }
    }

    /// Sets the level of the loops.
    #[cfg(test)]
    pub(crate) fn at_level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// Returns the number of available chains. Reads the driver's index only if fewer than `wanted` are known.
    ///
    /// # Errors
    /// [`RingError::Index`] if the driver makes more chains available than the ring holds, including chains not
    /// returned yet. So the number of chains in flight never exceeds the queue size.
    #[inline(always)]
    pub fn available(&mut self, wanted: u16) -> Result<u16, RingError> {
        let known = self.avail_idx.wrapping_sub(self.next_avail);
        if known >= wanted {
            return Ok(known);
        }
        let found = self.layout.avail_idx().load(Ordering::Acquire);
        let oldest = self.published.wrapping_add(self.lead);
        // The index may advance from its last value until the queue is full. This also detects an index that moved
        // backwards.
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

    /// Returns the first descriptor of the chain `ahead` entries after the next one. `ahead` must be below the result
    /// of [`SplitDevice::available`].
    ///
    /// # Errors
    /// [`RingError::Descriptor`] if it is not below the queue size.
    #[inline(always)]
    pub fn head(&self, ahead: u16) -> Result<u16, RingError> {
        debug_assert!(ahead < self.avail_idx.wrapping_sub(self.next_avail));
        let head = self.layout.avail_entry(self.next_avail.wrapping_add(ahead)).load(Ordering::Relaxed);
        if head >= self.layout.size {
            return Err(RingError::Descriptor { found: head.into(), size: self.layout.size.into() });
        }
        Ok(head)
    }

    /// Like [`SplitDevice::head`], but uses the value read by `look` if possible.
    #[inline(always)]
    fn looked_at(&self, ahead: u16) -> Result<u16, RingError> {
        if ahead < self.found.known {
            Ok(self.found.heads[usize::from(ahead) % LOOK])
        } else {
            self.head(ahead)
        }
    }

    #[inline(always)]
    fn next_used(&self) -> u16 {
        self.next_used as u16
    }
}

impl DeviceQueue for SplitDevice {
    #[inline(always)]
    fn size(&self) -> u16 {
        self.layout.size
    }

    fn base(&self) -> u32 {
        self.next_avail.into()
    }

    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<usize, RingError> {
        let wanted = wanted.min(LOOK);
        let known = usize::from(self.available(wanted as u16)?).min(wanted);
        (self.found.known, self.found.read) = (0, 0);
        let mut done = 0;
        while done < known {
            let position = self.next_avail.wrapping_add(done as u16);
            let run = (known - done).min(self.layout.before_wrap(position));
            let heads = &mut self.found.heads[done..done + run];
            // SAFETY: `run` entries follow before the end of the available ring, which stays mapped as long as the
            // layout and is aligned to 2. The CPU supports the level.
            let found = unsafe {
                lines::read_heads(self.level, self.layout.avail_at(position), self.layout.size, heads)
            };
            if found < run {
                let found = heads[found].into();
                return Err(RingError::Descriptor { found, size: self.layout.size.into() });
            }
            heads.iter().for_each(|&head| prefetch::read(self.layout.desc_at(head)));
            done += run;
        }
        self.found.known = known as u16;
        Ok(known)
    }

    #[inline(always)]
    fn has(&mut self, ahead: u16) -> Result<bool, RingError> {
        Ok(ahead < self.available(ahead.saturating_add(1))?)
    }

    #[inline(always)]
    fn singles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &mut [Single] {
        let Self { found, region, level, .. } = self;
        let Range { start: from, end: to } = found.range(ahead, most);
        // Until the next look, `ahead` only increases, so all entries below `read` were read.
        let unread = usize::from(found.read).clamp(from, to);
        found.read = found.read.max(to as u16);
        let heads = &found.heads[unread..to];
        // SAFETY: `look` has compared the heads with the size, so each descriptor is in the table, which is aligned to
        // 16 and stays mapped as long as the layout. The CPU supports the level.
        unsafe {
            let unread = &mut found.entries[unread..to];
            lines::read_descriptors(*level, self.layout.desc_at(0), heads, unread);
        }
        let entries = &found.entries[from..to];
        let singles = &mut found.singles[from..to];
        let resolved = resolve(*level, entries, singles, memory, wanted, region);
        &mut singles[..resolved]
    }

    fn doubles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &[Double] {
        if !self.indirect {
            return &[];
        }
        // Uses the entries that `singles` has read, beginning where it stopped.
        let Self { region: buffers, tables, found, .. } = self;
        let Range { start: from, end: to } = found.range(ahead, most);
        let to = to.min(found.read.into()).max(from);
        let mut tables = Tables { order: Order::Linked, memory, wanted, buffers, tables };
        let doubles = &mut found.doubles[from..to];
        let resolved = tables.resolve(&found.entries[from..to], &mut found.singles[from..to], doubles);
        &doubles[..resolved]
    }

    fn walk(
        &mut self,
        ahead: u16,
        memory: &GuestMemory,
        direction: Direction,
        max: &mut usize,
        mut visit: impl FnMut(Buffer),
    ) -> Result<Chain, RingError> {
        let head = self.looked_at(ahead)?;
        let desc = self.layout.descriptor(head);
        let region = &mut self.region;
        let mut walker = Walker { head, memory, direction, max: *max, region, visited: 0, read: 0 };
        if desc.flags & VIRTQ_DESC_F_INDIRECT == 0 {
            // `chain` compares each index with the size before it calls this.
            let layout = &self.layout;
            chain(&mut walker, desc, layout.size.into(), |i| Ok(layout.descriptor(i)), &mut visit)?;
            *max -= walker.read;
            return Ok(Chain::one(head));
        }
        let entries = desc.len / 16;
        if desc.flags & VIRTQ_DESC_F_NEXT != 0
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
            // Each entry is translated separately, so a table may cross regions.
            let addr = desc.addr.wrapping_add(u64::from(index) * 16);
            let at =
                memory.translate(addr, 16, &mut table_region).ok_or(RingError::Address { addr, len: 16 })?;
            // SAFETY: `translate` found 16 bytes there, which stay mapped as long as `memory` exists.
            Ok(unsafe { read_unaligned(at) })
        };
        let first = entry(0)?;
        chain(&mut walker, first, entries, entry, &mut visit)?;
        *max -= walker.read;
        Ok(Chain::one(head))
    }

    #[inline(always)]
    fn consume(&mut self, entries: u16) {
        debug_assert!(entries <= self.avail_idx.wrapping_sub(self.next_avail));
        self.next_avail = self.next_avail.wrapping_add(entries);
        self.found.known = 0;
    }

    #[inline(always)]
    fn push_used(&mut self, chain: Chain, written: u32) {
        let element = UsedElement { id: chain.id.into(), len: written };
        // SAFETY: `used_element` masks the position, so it points into the used ring, which stays mapped.
        unsafe { self.layout.used_element(self.next_used()).write_volatile(element) };
        self.next_used = self.next_used.wrapping_add(1);
    }

    #[inline(always)]
    fn push_used_singles(&mut self, ahead: u16, count: u16, direction: Direction) {
        let written = match direction {
            Direction::Readable => 0,
            Direction::Writable => u32::MAX,
        };
        let found = self.found.singles.get(usize::from(ahead)..).unwrap_or_default();
        let mut singles = &found[..usize::from(count)];
        while !singles.is_empty() {
            let room = self.layout.before_wrap(self.next_used());
            let (run, rest) = singles.split_at(singles.len().min(room));
            // SAFETY: the elements of `run` are before the end of the used ring, which stays mapped as long as the
            // layout and is aligned to 4. The CPU supports the level.
            unsafe {
                lines::write_used(self.level, self.layout.used_element(self.next_used()), run, written)
            };
            self.next_used = self.next_used.wrapping_add(run.len() as u32);
            singles = rest;
        }
    }

    #[inline(always)]
    fn publish(&mut self) {
        if self.published != self.next_used() {
            self.published = self.next_used();
            self.layout.used_idx().store(self.published, Ordering::Release);
        }
    }

    #[inline(always)]
    fn needs_notification(&mut self) -> bool {
        self.signals.is_wanted(&self.layout, self.published)
    }

    fn set_notification(&mut self, wanted: bool) {
        if self.signals.event_idx {
            // The preceding index is almost 65536 entries ahead, so a busy driver kicks only once per 65536 chains.
            let event = if wanted { self.next_avail } else { self.next_avail.wrapping_sub(1) };
            self.layout.avail_event().store(event, Ordering::Relaxed);
        } else {
            self.layout
                .used_flags()
                .store(if wanted { 0 } else { VIRTQ_USED_F_NO_NOTIFY }, Ordering::Relaxed);
        }
        full_barrier();
    }

    #[inline(always)]
    fn prefetch_used(&self, chains: usize) {
        for element in (0..chains).step_by(prefetch::LINE / size_of::<UsedElement>()) {
            prefetch::write(self.layout.used_element(self.next_used().wrapping_add(element as u16)));
        }
    }
}

/// Visits the buffers of the chain that begins with `desc`, in a table of `size` descriptors that `entry` reads.
fn chain(
    walker: &mut Walker<'_>,
    mut desc: Descriptor,
    size: u32,
    mut entry: impl FnMut(u16) -> Result<Descriptor, RingError>,
    visit: &mut impl FnMut(Buffer),
) -> Result<(), RingError> {
    let head = walker.head;
    for read in 0..size {
        if read as usize == walker.max {
            return Err(walker.too_many());
        }
        if desc.flags & VIRTQ_DESC_F_INDIRECT != 0 {
            return Err(RingError::IndirectNotAllowed { head });
        }
        walker.descriptor(desc.addr, desc.len, desc.flags, visit)?;
        if desc.flags & VIRTQ_DESC_F_NEXT == 0 {
            return Ok(());
        }
        if u32::from(desc.next) >= size {
            return Err(RingError::Descriptor { found: desc.next.into(), size });
        }
        desc = entry(desc.next)?;
    }
    Err(RingError::Loop { head, size })
}
