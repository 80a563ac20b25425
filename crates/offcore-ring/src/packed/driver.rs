//! The driver side of a packed virtqueue: makes chains available, collects used ones in whatever order they come.
//!
//! The first descriptor of a burst is written last, so that the device sees the burst as a whole. The device is another
//! party too: what it writes is read once and checked.

use std::sync::atomic::Ordering;

use crate::RingError;
use crate::chain::{Used, VIRTQ_DESC_F_NEXT};

use super::{Event, Layout, Position, Signal, WINDOW, Word, full_barrier};

/// What is known of an id.
#[derive(Clone, Copy, Debug)]
struct Id {
    /// Descriptors of its chain; 0 unless the device has it.
    entries: u16,
    /// The next free id, while this one is free.
    next: u16,
}

/// A used descriptor, as it was read, and what it gives back.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    word: Word,
    entries: u16,
}

/// The driver side of one queue: see [`crate::driver::Queue`].
#[derive(Debug)]
pub struct Queue<T> {
    layout: Layout,
    event_idx: bool,
    /// By id; `None` when no such chain is in flight.
    tokens: Box<[Option<T>]>,
    ids: Box<[Id]>,
    /// First free id of the list that `next` links. There is one as long as there is a free descriptor.
    free_id: u16,
    free: u16,
    in_flight: u16,
    /// Where the next available descriptor goes.
    next: Position,
    /// Where the first goes that the device has not seen.
    published: Position,
    /// That one, when there is one: it is written last.
    held: Word,
    signal: Signal,
    /// Where the device writes the next used descriptor that was not found yet.
    used: Position,
    /// Those that were found and not taken: `ready` of them from `first` on, which counts on, modulo [`WINDOW`].
    window: Box<[Found; WINDOW]>,
    first: u32,
    ready: u32,
}

impl<T> Queue<T> {
    /// Zeroes the ring and both event structures.
    pub(crate) fn new(layout: Layout, event_idx: bool) -> Self {
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

    /// Makes a chain available, every descriptor of which gets `flags`.
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
    /// [`RingError::NotInFlight`] when the device names a chain that it does not have.
    #[inline(always)]
    pub(crate) fn used(&mut self) -> Result<u16, RingError> {
        if self.ready == 0 {
            self.look()?;
        }
        Ok(self.ready as u16)
    }

    /// Reads used descriptors: each is as many further on as the chain has descriptors that the one before returns.
    #[inline(always)]
    fn look(&mut self) -> Result<(), RingError> {
        let size = self.ring_size();
        let (mut at, mut ready) = (self.used, 0);
        // What the device has: it returns no more.
        let mut left = self.published.since(at, size);
        while left > 0 && ready < WINDOW as u32 {
            let word = self.layout.load(at);
            if !word.is(at.used(size)) {
                break;
            }
            self.layout.fetch_ahead(at, ready == 0);
            let entries = match self.ids.get_mut(usize::from(word.id())) {
                Some(id) if (1..=left).contains(&id.entries.into()) => std::mem::take(&mut id.entries),
                // What came before it is good, and is taken first.
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

    /// The length is 0 unless the device says that it has written.
    ///
    /// # Errors
    /// [`RingError::NotInFlight`] when every chain was taken back by [`Queue::take_in_flight`].
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

/// The position after a chain of several descriptors. A call of its own, so that the place of the next used descriptor
/// is guessed to be the next one and read at once, not when the length of this one's chain is known.
#[inline(never)]
fn after_chain(at: Position, entries: u16, size: u32) -> Position {
    at.after(entries.into(), size)
}
