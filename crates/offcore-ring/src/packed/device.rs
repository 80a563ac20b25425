//! The device side of a packed virtqueue: takes available chains and returns used ones.
//!
//! [`DeviceQueue::look`] copies available descriptors into a private window, which is then searched for chains.
//! [`DeviceQueue::push_used`] overwrites available descriptors by used ones, except for the first descriptor in a
//! burst. [`DeviceQueue::publish`] writes it last. The driver waits for it and sees the burst as a whole.

use std::ops::Range;
use std::sync::atomic::Ordering;

use offcore_mem::{GuestMemory, RegionCache};

use crate::RingError;
use crate::chain::{
    Buffer, Chain, Direction, MAX_SIZE, VIRTQ_DESC_F_INDIRECT, VIRTQ_DESC_F_NEXT, VIRTQ_DESC_F_WRITE, Walker,
    read_unaligned,
};
use crate::double::{Double, Order, Tables};
use crate::inflight::Inflight;
use crate::prefetch;
use crate::queue::DeviceQueue;
use crate::vector::{Entry, Level, Single, Wanted, Word, resolve};

use super::lines::{self, UsedMark};
use super::{Event, PackedDescriptor, PackedLayout, Position, Signal, WINDOW, full_barrier};

/// Maximum number of entries in an indirect table: chains may not be longer than the largest queue.
const MAX_INDIRECT: u32 = MAX_SIZE as u32;

/// The device side of one queue.
#[derive(Debug)]
pub struct PackedDevice {
    layout: PackedLayout,
    event_idx: bool,
    indirect: bool,
    /// The next available descriptor to take.
    next: Position,
    /// Number of descriptors from there on that are at the start of the window.
    known: u32,
    window: Box<[Entry; WINDOW]>,
    /// Singles of the window found by [`DeviceQueue::singles`], at the same indices.
    singles: Box<[Single; WINDOW]>,
    doubles: Box<[Double; WINDOW]>,
    level: Level,
    /// Position of the next used descriptor to write.
    used: Position,
    /// Position of the first descriptor that the driver has not seen.
    published: Position,
    /// The descriptor at this position, if any. It is written last.
    held: Word,
    signal: Signal,
    region: RegionCache,
    tables: RegionCache,
    /// The region for saving available descriptors for the next device.
    inflight: Option<Inflight>,
}

// SAFETY: the layout's memory may be used from any thread. The region cache belongs to the memory table that it is used
// with.
unsafe impl Send for PackedDevice {}

impl PackedDevice {
    /// Creates the device side of the queue in `layout`, which continues at `base`. Bits 0 to 14 are the index and bit
    /// 15 is the wrap counter of the next available descriptor: [`super::FRESH_BASE`] for a new queue, or the value of
    /// [`DeviceQueue::base`] when it was stopped. The next used descriptor is written at the same position, because
    /// nothing is in flight when a queue starts. The upper half, which not every front end sends, is ignored.
    ///
    /// # Errors
    /// [`RingError::Base`] if the position is not in the ring.
    pub fn new(layout: PackedLayout, base: u32, event_idx: bool, indirect: bool) -> Result<Self, RingError> {
        let next = Position::decode(base as u16, layout.size.into())
            .ok_or(RingError::Base { found: base as u16, size: layout.size })?;
        Ok(Self {
            layout,
            event_idx,
            indirect,
            next,
            known: 0,
            window: Box::new([Entry::default(); WINDOW]),
            singles: Box::new([Single::NONE; WINDOW]),
            doubles: Box::new([Double::NONE; WINDOW]),
            level: Level::detect(),
            used: next,
            published: next,
            held: Word::default(),
            signal: Signal { entries: 0, first: true },
            region: RegionCache::empty(),
            tables: RegionCache::empty(),
            inflight: None,
        })
    }

    /// Sets the level of the loops.
    #[cfg(test)]
    pub(crate) fn at_level(mut self, level: Level) -> Self {
        self.level = level;
        self
    }

    /// Starts to record in `inflight` the data needed to resume the queue after this device has terminated.
    pub fn track(&mut self, inflight: Inflight) {
        self.inflight = Some(inflight);
    }

    /// Saves `count` descriptors, starting at the one `ahead`, before they are overwritten.
    #[cold]
    fn keep(&self, ahead: u32, count: u32) {
        let Some(inflight) = &self.inflight else { return };
        let size = self.ring_size();
        for ahead in ahead..ahead + count {
            if let Some(entry) = self.entry(ahead) {
                inflight.keep(self.next.after(ahead, size).index(size), entry.word.0);
            }
        }
        inflight.kept();
    }

    #[inline(always)]
    fn ring_size(&self) -> u32 {
        self.layout.size.into()
    }

    /// Maximum number of available descriptors: all that the driver may have made available.
    #[inline(always)]
    fn room(&self) -> u32 {
        let size = self.ring_size();
        size - self.next.since(self.published, size).min(size)
    }

    /// Reads descriptors until the window contains `wanted` (at most [`WINDOW`]), or until one is not available.
    #[inline(always)]
    fn read_on(&mut self, wanted: u32) -> Result<(), RingError> {
        let (size, room) = (self.ring_size(), self.room());
        let most = wanted.min(room);
        while self.known < most {
            let from = self.next.after(self.known, size);
            let run = (most - self.known).min(from.before_wrap(size));
            let window = &mut self.window[self.known as usize..][..run as usize];
            let state = from.available(size);
            // SAFETY: `run` descriptors follow before the end of the ring, which stays mapped as long as the layout and
            // is aligned to 16. The CPU supports the level.
            let found = unsafe { lines::read_available(self.level, self.layout.at(from), state, window) };
            let found = found as u32;
            self.known += found;
            if self.inflight.is_some() {
                self.keep(self.known - found, found);
            }
            if found < run {
                return Ok(());
            }
        }
        if wanted > room { self.check_not_taken(room) } else { Ok(()) }
    }

    /// All `room` descriptors from the next one on are taken. Checks that the driver has not made the one behind them
    /// available, which was not returned yet.
    #[cold]
    fn check_not_taken(&self, room: u32) -> Result<(), RingError> {
        let size = self.ring_size();
        let at = self.next.after(room, size);
        if self.layout.load(at).is(at.available(size)) {
            return Err(RingError::Taken { index: at.index(size) as u16 });
        }
        Ok(())
    }

    /// Returns the entry `ahead` of the next one, from the window or the ring; `None` if it is not available.
    #[inline(always)]
    fn entry(&self, ahead: u32) -> Option<Entry> {
        if ahead < self.known {
            return Some(self.window[ahead as usize % WINDOW]);
        }
        self.entry_beyond(ahead)
    }

    /// Returns the range of up to `most` entries from `ahead` on in the window.
    #[inline(always)]
    fn in_window(&self, ahead: u16, most: u16) -> Range<usize> {
        let known = (self.known as usize).min(WINDOW);
        let from = usize::from(ahead).min(known);
        from..known.min(from + usize::from(most))
    }

    fn entry_beyond(&self, ahead: u32) -> Option<Entry> {
        let size = self.ring_size();
        if ahead >= self.room() {
            return None;
        }
        let at = self.next.after(ahead, size);
        let word = self.layout.load(at);
        let entry = word.is(at.available(size)).then(|| Entry { addr: self.layout.load_addr(at), word });
        if let (Some(entry), Some(inflight)) = (&entry, &self.inflight) {
            inflight.keep(at.index(size), entry.word.0);
            inflight.kept();
        }
        entry
    }

    /// Ring index of the entry `ahead` of the next one, for error messages.
    fn index(&self, ahead: u32) -> u16 {
        let size = self.ring_size();
        self.next.after(ahead, size).index(size) as u16
    }

    /// Visits the buffers of the indirect table of `entry`.
    fn table(
        &self,
        entry: Entry,
        walker: &mut Walker<'_>,
        visit: &mut impl FnMut(Buffer),
    ) -> Result<(), RingError> {
        let (head, len, flags) = (walker.head, entry.word.len(), entry.word.flags());
        let entries = len / size_of::<PackedDescriptor>() as u32;
        if flags & VIRTQ_DESC_F_NEXT != 0 || !len.is_multiple_of(16) || entries == 0 || entries > MAX_INDIRECT
        {
            return Err(RingError::IndirectTable { head, len, flags });
        }
        if !self.indirect {
            return Err(RingError::IndirectNotAllowed { head });
        }
        let mut region = RegionCache::empty();
        for index in 0..entries {
            if index as usize == walker.max {
                return Err(walker.too_many());
            }
            // Each entry is translated separately, so a table may cross regions.
            let addr = entry.addr.wrapping_add(u64::from(index) * 16);
            let at = walker.memory.translate(addr, 16, &mut region);
            let at = at.ok_or(RingError::Address { addr, len: 16 })?;
            // SAFETY: `translate` found 16 bytes there, which stay mapped as long as the walker's memory exists.
            let found = unsafe { read_unaligned(at) };
            // The flags are at the position of the `next` field of a split queue's descriptor. Only WRITE is
            // significant here. For chains that a driver transmits, even WRITE is ignored, because DPDK's driver
            // (22.11) sets it for the virtio-net header.
            let flags = match walker.direction {
                Direction::Readable => 0,
                Direction::Writable => found.next & VIRTQ_DESC_F_WRITE,
            };
            walker.descriptor(found.addr, found.len, flags, visit)?;
        }
        Ok(())
    }
}

impl DeviceQueue for PackedDevice {
    #[inline(always)]
    fn size(&self) -> u16 {
        self.layout.size
    }

    fn base(&self) -> u32 {
        let size = self.ring_size();
        u32::from(self.next.encode(size)) | u32::from(self.used.encode(size)) << 16
    }

    #[inline(always)]
    fn look(&mut self, wanted: usize) -> Result<usize, RingError> {
        let wanted = wanted.min(WINDOW) as u32;
        if self.known < wanted {
            self.read_on(wanted)?;
        }
        Ok(self.known.min(wanted) as usize)
    }

    #[inline(always)]
    fn singles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &mut [Single] {
        let range = self.in_window(ahead, most);
        let singles = &mut self.singles[range.clone()];
        let found = resolve(self.level, &self.window[range], singles, memory, wanted, &mut self.region);
        &mut singles[..found]
    }

    fn doubles(&mut self, ahead: u16, most: u16, memory: &GuestMemory, wanted: Wanted) -> &[Double] {
        if !self.indirect {
            return &[];
        }
        let range = self.in_window(ahead, most);
        let Self { region: buffers, tables, .. } = self;
        let mut tables = Tables { order: Order::Placed, memory, wanted, buffers, tables };
        let doubles = &mut self.doubles[range.clone()];
        let found = tables.resolve(&self.window[range.clone()], &mut self.singles[range], doubles);
        &doubles[..found]
    }

    fn walk(
        &mut self,
        ahead: u16,
        memory: &GuestMemory,
        direction: Direction,
        max: &mut usize,
        mut visit: impl FnMut(Buffer),
    ) -> Result<Chain, RingError> {
        let ahead = u32::from(ahead);
        let head = self.index(ahead);
        let mut region = self.region;
        let mut walker =
            Walker { head, memory, direction, max: *max, region: &mut region, visited: 0, read: 0 };
        let mut entries = 0;
        let last = loop {
            let Some(entry) = self.entry(ahead + entries) else {
                return Err(if ahead + entries < self.room() {
                    RingError::PartialChain { head }
                } else {
                    RingError::Loop { head, size: self.ring_size() }
                });
            };
            if entries as usize == *max {
                return Err(walker.too_many());
            }
            entries += 1;
            let flags = entry.word.flags();
            if flags & VIRTQ_DESC_F_INDIRECT != 0 {
                if entries > 1 {
                    return Err(RingError::IndirectNotAllowed { head });
                }
                self.table(entry, &mut walker, &mut visit)?;
                break entry;
            }
            walker.descriptor(entry.addr, entry.word.len(), flags, &mut visit)?;
            if flags & VIRTQ_DESC_F_NEXT == 0 {
                break entry;
            }
        };
        *max -= walker.read;
        self.region = region;
        Ok(Chain { id: last.word.id(), entries: entries as u16 })
    }

    #[inline(always)]
    fn has(&mut self, ahead: u16) -> Result<bool, RingError> {
        let ahead = u32::from(ahead);
        if ahead < self.known {
            return Ok(true);
        }
        if ahead < WINDOW as u32 {
            self.read_on(ahead + 1)?;
            return Ok(ahead < self.known);
        }
        let room = self.room();
        if ahead >= room {
            self.check_not_taken(room)?;
        }
        Ok(self.entry_beyond(ahead).is_some())
    }

    #[inline(always)]
    fn consume(&mut self, entries: u16) {
        let entries = u32::from(entries);
        debug_assert!(entries <= self.room());
        if entries == 0 {
            // The window is left unchanged. A receiver without buffers calls this in every round.
            return;
        }
        self.next = self.next.after(entries, self.ring_size());
        if entries < self.known {
            // copy-ok: descriptors that were read and not taken
            self.window.copy_within(entries as usize..self.known as usize, 0);
        }
        self.known = self.known.saturating_sub(entries);
    }

    #[inline(always)]
    fn push_used(&mut self, chain: Chain, written: u32) {
        let size = self.ring_size();
        let flags = self.used.used(size) | if written > 0 { VIRTQ_DESC_F_WRITE } else { 0 };
        let word = Word::new(written, chain.id, flags);
        if self.used == self.published {
            self.held = word;
        } else {
            self.layout.store(self.used, word);
        }
        debug_assert!(
            self.used.since(self.published, size) + u32::from(chain.entries) <= size,
            "more returned than the ring holds"
        );
        self.used = self.used.after(chain.entries.into(), size);
    }

    #[inline(always)]
    fn push_used_singles(&mut self, ahead: u16, count: u16, direction: Direction) {
        let size = self.ring_size();
        let found = self.singles.get(usize::from(ahead)..).unwrap_or_default();
        let mut singles = &found[..usize::from(count)];
        // The next back end may have to restore these descriptors until they are published, so they keep their
        // addresses.
        let level = if self.inflight.is_some() { Level::Plain } else { self.level };
        while !singles.is_empty() {
            // Up to the end of the ring, the flags are the same.
            let (run, rest) = singles.split_at(singles.len().min(self.used.before_wrap(size) as usize));
            let used = used_of(direction, self.used.used(size));
            let held = usize::from(self.used == self.published);
            if held > 0 {
                self.held = used.word(&run[0]);
            }
            if let [_, ..] = run[held..] {
                let at = self.layout.at(self.used.after(held as u32, size));
                // SAFETY: the descriptors of `run` are before the end of the ring, which stays mapped as long as the
                // layout and is aligned to 16. The CPU supports the level.
                unsafe { lines::write_used(level, at, &run[held..], used) };
            }
            self.used = self.used.after(run.len() as u32, size);
            singles = rest;
        }
    }

    #[inline(always)]
    fn publish(&mut self) {
        if self.used != self.published {
            if let Some(inflight) = &self.inflight {
                let size = self.ring_size();
                inflight.publish(self.published.encode(size), self.used.encode(size));
            }
            self.layout.publish(self.published, self.held);
            self.signal.add(self.used.since(self.published, self.ring_size()));
            self.published = self.used;
        }
    }

    #[inline(always)]
    fn needs_notification(&mut self) -> bool {
        let size = self.ring_size();
        self.signal.is_due(self.layout.driver_event(), self.event_idx, self.published, size)
    }

    fn set_notification(&mut self, wanted: bool) {
        let size = self.ring_size();
        let event = if wanted && self.event_idx {
            // The first descriptor that the caller does not know.
            Event::at(self.next.after(self.known, size), size)
        } else {
            Event::all(wanted)
        };
        self.layout.device_event().store(event.0, Ordering::Relaxed);
        full_barrier();
    }

    #[inline(always)]
    fn prefetch_used(&self, chains: usize) {
        if self.used == self.next {
            // The descriptors are used at the positions where they were available, so their lines are already in the
            // cache.
            return;
        }
        let at = self.layout.at(self.used);
        for descriptor in (0..chains).step_by(prefetch::LINE / size_of::<PackedDescriptor>()) {
            prefetch::write(at.wrapping_add(descriptor));
        }
    }
}

/// Returns how to write used descriptors for chains of this direction, with the state bits of the current turn. For
/// writable chains, the length is taken from the single. For readable chains, it is 0.
#[inline(always)]
fn used_of(direction: Direction, state: u16) -> UsedMark {
    match direction {
        Direction::Readable => UsedMark { keep: Word::new(0, u16::MAX, 0).0, mark: Word::new(0, 0, state).0 },
        Direction::Writable => UsedMark {
            keep: Word::new(u32::MAX, u16::MAX, 0).0,
            mark: Word::new(0, 0, state | VIRTQ_DESC_F_WRITE).0,
        },
    }
}
