//! Half-open connections: their SYN has been answered, and their handshake is not complete.

use offcore_stats::time::Time;

use super::handshake::{Half, SYN_ACK_RETRIES, SYN_TIMEOUT};
use super::wheel::Wheel;

/// The half-open connections of a stack, by number. Each has a timer for its SYN-ACK.
#[derive(Debug)]
pub(super) struct Halves {
    slots: Vec<Option<Half>>,
    free: Vec<u32>,
    timers: Wheel,
}

impl Halves {
    pub(super) fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), timers: Wheel::new(Time::ZERO) }
    }

    /// Returns the number of half-open connections.
    pub(super) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds a half-open connection and sets its timer.
    pub(super) fn insert(&mut self, half: Half) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.timers.reserve(self.slots.len() as u32);
            self.slots.len() as u32 - 1
        });
        self.timers.set(index, half.due);
        self.slots[index as usize] = Some(half);
        index
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<Half> {
        let half = self.slots.get_mut(index as usize)?.take()?;
        self.free.push(index);
        self.timers.cancel(index);
        Some(half)
    }

    pub(super) fn get(&self, index: u32) -> Option<&Half> {
        self.slots.get(index as usize)?.as_ref()
    }

    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Half> {
        self.slots.get_mut(index as usize)?.as_mut()
    }

    /// Returns the numbers of all half-open connections of `listener`.
    pub(super) fn of_listener(&self, listener: u32) -> impl Iterator<Item = u32> {
        let all = self.slots.iter().enumerate();
        all.filter(move |(_, half)| half.as_ref().is_some_and(|half| half.listener == listener))
            .map(|(index, _)| index as u32)
    }

    /// Starts the next, longer timeout of a SYN-ACK. Returns `None` after the last one.
    pub(super) fn back_off(&mut self, now: Time, index: u32) -> Option<&Half> {
        let half =
            self.slots.get_mut(index as usize)?.as_mut().filter(|half| half.tries < SYN_ACK_RETRIES)?;
        half.tries += 1;
        half.due = now + (SYN_TIMEOUT << half.tries);
        self.timers.set(index, half.due);
        Some(half)
    }

    /// Calls `expired` for up to `at_most` connections whose SYN-ACK was not acknowledged in time.
    pub(super) fn expire(&mut self, now: Time, at_most: usize, expired: impl FnMut(u32)) {
        self.timers.expire(now, at_most, expired);
    }

    /// Returns the time of the next timer.
    pub(super) fn deadline(&self) -> Option<Time> {
        self.timers.next_deadline()
    }
}
