//! The driver side of a packed virtqueue: makes chains available, and collects used ones in any order.
//!
//! The first descriptor of a burst is written last, so that the device sees the burst as a whole. The device is not
//! trusted: everything it writes is read once and checked.

use std::sync::atomic::Ordering;

use crate::RingError;
use crate::chain::{Used, VIRTQ_DESC_F_NEXT};

use super::{Event, PackedLayout, Position, Signal, WINDOW, Word, full_barrier};

/// State of a buffer ID.
#[derive(Clone, Copy, Debug)]
struct Id {
    /// Number of descriptors in its chain; 0 unless the device has the chain.
    entries: u16,
    /// The next free ID, if this one is free.
    next: u16,
}

/// A used descriptor as read from the ring, and the number of descriptors it returns.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    word: Word,
    entries: u16,
}

/// The driver side of one queue: see [`crate::driver::RingDriver`].
#[derive(Debug)]
pub struct PackedDriver<T> {
    layout: PackedLayout,
    event_idx: bool,
    /// Tokens by ID; `None` if no chain with this ID is in flight.
    tokens: Box<[Option<T>]>,
    ids: Box<[Id]>,
    /// First free ID of the list that is linked by `next`. It exists whenever a descriptor is free.
    free_id: u16,
    free: u16,
    in_flight: u16,
    /// Position of the next available descriptor to write.
    next: Position,
    /// Position of the first descriptor that the device has not seen.
    published: Position,
    /// The descriptor at this position, if any. It is written last.
    held: Word,
    signal: Signal,
    /// Position at which the device writes the next used descriptor that was not found yet.
    used: Position,
    /// Descriptors that were found and not taken: `ready` of them from `first` on, which increases without limit and is
    /// used modulo [`WINDOW`].
    window: Box<[Found; WINDOW]>,
    first: u32,
    ready: u32,
}

impl<T> PackedDriver<T> {
    /// Zeroes the ring and both event structures.
    pub(crate) fn new(layout: PackedLayout, event_idx: bool) -> Self {
        let size = layout.size;
        let mut at = Position::FRESH;
        for _ in 0..size {
            layout.store_addr(at, 0);
            layout.store(at, Word::default());
            at = at.after(1, size.into());
        }
        layout.driver_event().store(0, Ordering::Relaxed);
        layout.device_event().store(0, Ordering::Release);
        Self {
            layout,
            event_idx,
            tokens: (0..size).map(|_| None).collect(),
            ids: (1..=size).map(|next| Id { entries: 0, next }).collect(),
            free_id: 0,
            free: size,
            in_flight: 0,
            next: Position::FRESH,
            published: Position::FRESH,
            held: Word::default(),
            signal: Signal { entries: 0, first: false },
            used: Position::FRESH,
            window: Box::new([Found::default(); WINDOW]),
            first: 0,
            ready: 0,
        }
    }

    #[inline(always)]
    fn ring_size(&self) -> u32 {
        self.layout.size.into()
    }

    pub(crate) fn size(&self) -> u16 {
        self.layout.size
    }

    #[inline(always)]
    pub(crate) fn free(&self) -> u16 {
        self.free
    }

    pub(crate) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Makes a chain available. Every descriptor gets `flags`.
    #[inline(always)]
    pub(crate) fn add_with(&mut self, buffers: &[(u64, u32)], flags: u16, token: T) -> Result<(), T> {
        if buffers.is_empty() || buffers.len() > usize::from(self.free) {
            return Err(token);
        }
        let size = self.ring_size();
        let id = self.free_id;
        for (i, &(addr, len)) in buffers.iter().enumerate() {
            let more = if i + 1 < buffers.len() { VIRTQ_DESC_F_NEXT } else { 0 };
            let word = Word::new(len, id, flags | more | self.next.available(size));
            self.layout.store_addr(self.next, addr);
            if self.next == self.published {
                self.held = word;
            } else {
                self.layout.store(self.next, word);
            }
            self.next = self.next.after(1, size);
        }
        let entries = buffers.len() as u16;
        let known = &mut self.ids[usize::from(id)];
        self.free_id = known.next;
        known.entries = entries;
        self.tokens[usize::from(id)] = Some(token);
        self.free -= entries;
        self.in_flight += 1;
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn publish(&mut self) {
        if self.next != self.published {
            self.layout.publish(self.published, self.held);
            self.signal.add(self.next.since(self.published, self.ring_size()));
            self.published = self.next;
        }
    }

    #[inline(always)]
    pub(crate) fn needs_kick(&mut self) -> bool {
        let size = self.ring_size();
        self.signal.is_due(self.layout.device_event(), self.event_idx, self.published, size)
    }

    pub(crate) fn set_notification(&mut self, wanted: bool) {
        let size = self.ring_size();
        let event = if wanted && self.event_idx { Event::at(self.used, size) } else { Event::all(wanted) };
        self.layout.driver_event().store(event.0, Ordering::Relaxed);
        full_barrier();
    }

    /// # Errors
    /// [`RingError::NotInFlight`] if the device returns a chain that is not in flight.
    #[inline(always)]
    pub(crate) fn used(&mut self) -> Result<u16, RingError> {
        if self.ready == 0 {
            self.look()?;
        }
        Ok(self.ready as u16)
    }

    /// Reads used descriptors. The next one follows after as many descriptors as the returned chain has.
    #[inline(always)]
    fn look(&mut self) -> Result<(), RingError> {
        let size = self.ring_size();
        let (mut at, mut ready) = (self.used, 0);
        // Number of descriptors that the device has. It cannot return more.
        let mut left = self.published.since(at, size);
        while left > 0 && ready < WINDOW as u32 {
            let word = self.layout.load(at);
            if !word.is(at.used(size)) {
                break;
            }
            self.layout.fetch_ahead(at, ready == 0);
            let entries = match self.ids.get_mut(usize::from(word.id())) {
                Some(id) if (1..=left).contains(&id.entries.into()) => std::mem::take(&mut id.entries),
                // The descriptors before it are valid and are taken first.
                _ if ready > 0 => break,
                _ => return Err(RingError::NotInFlight(word.id().into())),
            };
            self.window[self.first.wrapping_add(ready) as usize % WINDOW] = Found { word, entries };
            ready += 1;
            left -= u32::from(entries);
            at = if entries == 1 { at.after(1, size) } else { after_chain(at, entries, size) };
        }
        (self.used, self.ready) = (at, ready);
        Ok(())
    }

    /// The length is 0 unless the device has set WRITE.
    ///
    /// # Errors
    /// [`RingError::NotInFlight`] if all chains were taken back by [`PackedDriver::take_in_flight`].
    #[inline(always)]
    pub(crate) fn pop(&mut self) -> Result<Option<Used<T>>, RingError> {
        if self.ready == 0 {
            return Ok(None);
        }
        let Found { word, entries } = self.window[self.first as usize % WINDOW];
        let id = word.id();
        let token = self.tokens.get_mut(usize::from(id)).and_then(Option::take);
        let token = token.ok_or(RingError::NotInFlight(id.into()))?;
        self.ready -= 1;
        self.first = self.first.wrapping_add(1);
        self.free += entries;
        self.in_flight -= 1;
        self.ids[usize::from(id)].next = self.free_id;
        self.free_id = id;
        Ok(Some(Used { token, len: if word.is_writable() { word.len() } else { 0 } }))
    }

    pub(crate) fn take_in_flight(&mut self) -> impl Iterator<Item = T> + '_ {
        self.tokens.iter_mut().filter_map(Option::take)
    }
}

/// Returns the position after a chain of several descriptors. This is a separate function, so that the CPU predicts a
/// chain of one descriptor and reads the next used descriptor at once, before the length of this chain is known.
#[inline(never)]
fn after_chain(at: Position, entries: u16, size: u32) -> Position {
    at.after(entries.into(), size)
}
