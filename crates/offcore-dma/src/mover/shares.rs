//! Shares of a channel: the number of copies that a queue may have in flight while other queues also use the channel.
//!
//! A queue that is the only recently active one may use all of its channels. Otherwise, the ring of each channel is
//! divided among the recently active queues by their weights.

use super::queue::Queue;
use super::{ChannelId, Mover};

/// Number of polls after which a queue without submissions counts as inactive.
pub(super) const IDLE_AFTER: u32 = 128;

impl Mover {
    /// Test switch: every queue may fill a channel, even if other queues need it.
    #[cfg(any(test, feature = "testing"))]
    pub fn switch_off_shares(&mut self) {
        self.shares = false;
        self.distribute();
    }

    /// Updates which queues were active since the last check.
    #[cold]
    pub(super) fn check_idle_queues(&mut self) {
        self.until_idle_check = IDLE_AFTER;
        let mut changed = false;
        for queue in &mut self.queues {
            let active = queue.worked || queue.outstanding > 0;
            changed |= active != queue.active;
            (queue.active, queue.worked) = (active, false);
        }
        if changed {
            self.distribute();
        }
    }

    /// Recalculates every queue's share.
    #[cold]
    pub(super) fn distribute(&mut self) {
        self.channels.shares_stale = false;
        for index in 0..self.queues.len() {
            let queue = &self.queues[index];
            let share = queue.channels.iter().map(|&channel| self.share(queue, channel)).sum();
            self.queues[index].share = share;
        }
    }

    /// Returns the number of copies that `queue` may have in flight in `channel`.
    fn share(&self, queue: &Queue, channel: ChannelId) -> usize {
        let slot = &self.channels.slots[channel.index()];
        let others = self.queues.iter().filter(|other| {
            other.active && !std::ptr::eq(*other, queue) && other.channels.contains(&channel)
        });
        let others: usize = others.map(|other| usize::from(other.weight)).sum();
        let weight = usize::from(queue.weight);
        if others == 0 || !self.shares {
            return slot.ring_size;
        }
        (slot.ring_size * weight / (weight + others)).max(1)
    }
}
