//! The driver side of a split virtqueue: makes chains available and collects used ones.
//!
//! Each chain carries a token of its owner. The device is not trusted: everything it writes is checked.

use std::sync::atomic::Ordering;

use crate::prefetch;

use super::{
    Descriptor, RingError, SplitLayout, UsedElement, VIRTQ_AVAIL_F_NO_INTERRUPT, VIRTQ_DESC_F_NEXT,
    VIRTQ_USED_F_NO_NOTIFY, need_event,
};
use crate::barrier::full_barrier;
use crate::chain::Used;

/// The driver side of one queue: see [`crate::driver::RingDriver`].
#[derive(Debug)]
pub struct SplitDriver<T> {
    layout: SplitLayout,
    event_idx: bool,
    /// First free descriptor of the list that is linked by `next`.
    free_head: u16,
    free: u16,
    next: Box<[u16]>,
    /// Tokens by the first descriptor of the chain; `None` if the chain is not in flight.
    tokens: Box<[Option<T>]>,
    /// Number of descriptors in the chain, by its first descriptor.
    lengths: Box<[u16]>,
    written: Box<[Descriptor]>,
    /// Stored in 32 bits, although only 16 are significant, like `next_used`. The compiler reads 16-bit fields by wider
    /// loads, which have to wait until the preceding store has left the core.
    next_avail: u32,
    next_used: u32,
    published: u16,
    kicked: u16,
    used_idx: u16,
}

impl<T> SplitDriver<T> {
    /// Zeroes both rings.
    pub(crate) fn new(layout: SplitLayout, event_idx: bool) -> Self {
        let size = layout.size;
        for index in [layout.avail_idx(), layout.avail_flags(), layout.used_event(), layout.used_idx()] {
            index.store(0, Ordering::Relaxed);
        }
        layout.used_flags().store(0, Ordering::Relaxed);
        layout.avail_event().store(0, Ordering::Release);
        Self {
            layout,
            event_idx,
            free_head: 0,
            free: size,
            next: (1..=size).collect(),
            tokens: (0..size).map(|_| None).collect(),
            lengths: vec![0; usize::from(size)].into(),
            // These flags are never used in a descriptor, so that each is written the first time.
            written: vec![Descriptor { flags: u16::MAX, ..Descriptor::default() }; usize::from(size)].into(),
            next_avail: 0,
            next_used: 0,
            published: 0,
            kicked: 0,
            used_idx: 0,
        }
    }

    pub(crate) fn size(&self) -> u16 {
        self.layout.size
    }

    #[inline(always)]
    pub(crate) fn free(&self) -> u16 {
        self.free
    }

    pub(crate) fn in_flight(&self) -> u16 {
        self.next_avail.wrapping_sub(self.next_used) as u16
    }

    /// Position of the next available entry to write.
    #[inline(always)]
    fn next_avail(&self) -> u16 {
        self.next_avail as u16
    }

    /// Position of the next used element to read.
    #[inline(always)]
    fn next_used(&self) -> u16 {
        self.next_used as u16
    }

    /// Makes a chain available. Every descriptor gets `flags`.
    #[inline(always)]
    pub(crate) fn add_with(&mut self, buffers: &[(u64, u32)], flags: u16, token: T) -> Result<(), T> {
        if buffers.is_empty() || buffers.len() > usize::from(self.free) {
            return Err(token);
        }
        let head = self.free_head;
        let mut index = head;
        for (i, &(addr, len)) in buffers.iter().enumerate() {
            let following = self.next[usize::from(index)];
            let more = i + 1 < buffers.len();
            let flags = flags | if more { VIRTQ_DESC_F_NEXT } else { 0 };
            let desc = Descriptor { addr, len, flags, next: if more { following } else { 0 } };
            self.write(index, desc);
            index = following;
        }
        self.free_head = index;
        self.free -= buffers.len() as u16;
        self.tokens[usize::from(head)] = Some(token);
        self.lengths[usize::from(head)] = buffers.len() as u16;
        self.layout.avail_entry(self.next_avail()).store(head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(())
    }

    /// Writes a descriptor unless its content is unchanged, so that the device can keep its cache line.
    #[inline(always)]
    fn write(&mut self, index: u16, desc: Descriptor) {
        let written = &mut self.written[usize::from(index)];
        if *written != desc {
            *written = desc;
            // SAFETY: `desc_at` masks the index, so it points into the descriptor table, which stays mapped.
            unsafe { self.layout.desc_at(index).write_volatile(desc) };
        }
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        let next = self.next_avail();
        if self.published != next {
            self.published = next;
            self.layout.avail_idx().store(next, Ordering::Release);
        }
    }

    #[inline(always)]
    pub(crate) fn needs_kick(&mut self) -> bool {
        let (old, new) = (self.kicked, self.published);
        if old == new {
            return false;
        }
        full_barrier();
        self.kicked = new;
        if self.event_idx {
            need_event(self.layout.avail_event().load(Ordering::Relaxed), new, old)
        } else {
            self.layout.used_flags().load(Ordering::Relaxed) & VIRTQ_USED_F_NO_NOTIFY == 0
        }
    }

    pub(crate) fn set_notification(&mut self, wanted: bool) {
        if self.event_idx {
            let next = self.next_used();
            let event = if wanted { next } else { next.wrapping_sub(1) };
            self.layout.used_event().store(event, Ordering::Relaxed);
        } else {
            self.layout
                .avail_flags()
                .store(if wanted { 0 } else { VIRTQ_AVAIL_F_NO_INTERRUPT }, Ordering::Relaxed);
        }
        full_barrier();
    }

    /// # Errors
    /// [`RingError::Index`] if the device returns more chains than are in flight.
    #[inline(always)]
    pub(crate) fn used(&mut self) -> Result<u16, RingError> {
        let known = self.used_idx.wrapping_sub(self.next_used());
        if known > 0 {
            return Ok(known);
        }
        let found = self.layout.used_idx().load(Ordering::Acquire);
        let ready = found.wrapping_sub(self.next_used());
        if ready > self.in_flight() {
            let (expected, size) = (self.next_used(), self.layout.size);
            return Err(RingError::Index { ring: "used", found, expected, size });
        }
        self.used_idx = found;
        for ahead in (0..ready).step_by(prefetch::LINE / size_of::<UsedElement>()) {
            prefetch::read(self.layout.used_element(self.next_used().wrapping_add(ahead)));
        }
        Ok(ready)
    }

    /// # Errors
    /// [`RingError::NotInFlight`] if the device returns a chain that is not in flight.
    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Result<Option<Used<T>>, RingError> {
        if self.used_idx == self.next_used() {
            return Ok(None);
        }
        // SAFETY: `used_element` masks the position, so it points into the used ring, which stays mapped.
        let UsedElement { id, len } = unsafe { self.layout.used_element(self.next_used()).read_volatile() };
        let token = usize::try_from(id)
            .ok()
            .and_then(|head| self.tokens.get_mut(head)?.take())
            .ok_or(RingError::NotInFlight(id))?;
        self.next_used = self.next_used.wrapping_add(1);
        self.release(id as u16);
        Ok(Some(Used { token, len }))
    }

    #[inline(always)]
    fn release(&mut self, head: u16) {
        let length = self.lengths[usize::from(head)];
        let mut last = head;
        for _ in 1..length {
            last = self.next[usize::from(last)];
        }
        self.next[usize::from(last)] = self.free_head;
        self.free_head = head;
        self.free += length;
    }

    pub(crate) fn take_in_flight(&mut self) -> impl Iterator<Item = T> + '_ {
        self.tokens.iter_mut().filter_map(Option::take)
    }
}
