//! Connections that wait for memory: for a receive window, or for an application that writes.
//!
//! Applications that cannot write because memory is short are checked periodically. A connection without data in flight
//! gets no acknowledgement that would trigger the check.

use std::collections::VecDeque;

use offcore_stats::time::Micros;

use super::addr::ConnId;

/// Time until the next check.
pub(super) const AGAIN: Micros = Micros::from_millis(10);

/// Connections and sockets that wait for memory, in order.
#[derive(Debug, Default)]
pub(super) struct MemoryWaiters {
    waiting: VecDeque<ConnId>,
}

impl MemoryWaiters {
    /// Adds a connection or socket. `waits` is whether it is already waiting.
    #[cold]
    pub(super) fn wait(&mut self, id: ConnId, waits: &mut bool) {
        if !std::mem::replace(waits, true) {
            self.waiting.push_back(id);
        }
    }

    /// Removes and returns the entry that has waited longest.
    pub(super) fn next(&mut self) -> Option<ConnId> {
        self.waiting.pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the turn of a connection that has not waited. It has one only if no other connection waits.
    #[inline]
    pub(super) fn turn(&self) -> Option<usize> {
        self.waiting.is_empty().then_some(0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}
