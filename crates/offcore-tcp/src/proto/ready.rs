//! Connections or sockets that may have something to send, by user.

use std::collections::VecDeque;

use super::addr::UserIndex;

/// A queue for each user.
#[derive(Debug, Default)]
pub(crate) struct Ready {
    queues: Vec<VecDeque<u32>>,
    len: usize,
}

impl Ready {
    /// Appends a connection or socket of a user.
    #[inline]
    pub(super) fn push(&mut self, user: UserIndex, index: u32) {
        if let Some(queue) = self.queues.get_mut(user.number()) {
            queue.push_back(index);
        } else {
            self.push_first(user, index);
        }
        self.len += 1;
    }

    #[cold]
    fn push_first(&mut self, user: UserIndex, index: u32) {
        self.queues.resize_with(user.number() + 1, VecDeque::new);
        self.queues[user.number()].push_back(index);
    }

    /// Removes and returns the first connection or socket of a user.
    #[inline]
    pub(super) fn pop(&mut self, user: UserIndex) -> Option<u32> {
        let index = self.queues.get_mut(user.number())?.pop_front()?;
        self.len -= 1;
        Some(index)
    }

    /// Returns the number of connections or sockets of a user.
    #[inline]
    pub(super) fn count(&self, user: UserIndex) -> usize {
        self.queues.get(user.number()).map_or(0, VecDeque::len)
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }
}
