//! Shares of a channel: how much of it a queue may have in flight while others have work for it, too.
//!
//! A queue that alone has had work lately may use all of its channels. Otherwise its share of each is the channel's
//! ring divided by the weights of the queues that have had work for it lately.

use super::queue::Queue;
use super::{ChannelId, Mover};

/// Polls after which a queue that has submitted nothing no longer counts.
pub(super) const IDLE_AFTER: u32 = 128;

impl Mover {
    /// Test switch: every queue may fill a channel, whoever else needs it.
    #[cfg(any(test, feature = "testing"))]
    pub fn switch_off_shares(&mut self) {
        self.shares = false;
        self.share_out();
    }

    /// Notes which queues had work since the last time.
    #[cold]
    pub(super) fn look_for_idle(&mut self) {
        self.until_idle_check = IDLE_AFTER;
        let mut changed = false;
        for queue in &mut self.queues {
            let active = queue.worked || queue.outstanding > 0;
            changed |= active != queue.active;
            (queue.active, queue.worked) = (active, false);
        }
        if changed {
            self.share_out();
        }
    }

    /// Computes every queue's share anew.
    #[cold]
    pub(super) fn share_out(&mut self) {
        self.channels.shares_stale = false;
        for index in 0..self.queues.len() {
            let queue = &self.queues[index];
            let share = queue.channels.iter().map(|&channel| self.share(queue, channel)).sum();
            self.queues[index].share = share;
        }
    }

    /// How many copies `queue` may have in flight in `channel`.
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
