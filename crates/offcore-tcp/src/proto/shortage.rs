//! Connections that wait for memory: for a receive window, or for an application that writes.
//!
//! Who can write nothing for want of memory is looked after now and then: of a connection that has nothing under way no
//! acknowledgement comes that would do it.

use std::collections::VecDeque;

use super::addr::ConnId;

/// Microseconds until they are looked after again.
pub(super) const AGAIN: u64 = 10_000;

/// Connections and sockets whose application waits for memory to write to, in order.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    waiting: VecDeque<ConnId>,
}

impl Shortage {
    /// The application waits; `waits` is whether it did before.
    #[cold]
    pub(super) fn wait(&mut self, id: ConnId, waits: &mut bool) {
        if !std::mem::replace(waits, true) {
            self.waiting.push_back(id);
        }
    }

    /// Who waits longest, who then waits no more.
    pub(super) fn next(&mut self) -> Option<ConnId> {
        self.waiting.pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The turn of a connection that has not waited: it has one only if no other waits.
    #[inline]
    pub(super) fn turn(&self) -> Option<usize> {
        self.waiting.is_empty().then_some(0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}
