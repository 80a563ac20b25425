//! Shares of a channel: the number of copies that a queue may have in flight while other queues also use the channel.
//!
//! A queue that is the only recently active one may use all of its channels. Otherwise, the ring of each channel is
//! divided among the recently active queues by their weights.

use super::{ChannelId, Mover};

/// Number of polls after which a queue without submissions counts as inactive.
pub(super) const IDLE_AFTER: u32 = 128;

/// A queue's share of its channels.
#[derive(Debug)]
pub(super) struct Share {
    weight: u16,
    /// Number of copies that may be in flight in channels.
    limit: usize,
    /// Whether the queue had work for its channels in the previous period, and in the present one.
    active: bool,
    worked: bool,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 1, limit: 0, active: false, worked: false }
    }
}

impl Share {
    pub(super) fn set_weight(&mut self, weight: u16) {
        self.weight = weight.max(1);
    }

    /// Returns the unused part of the share.
    #[inline(always)]
    pub(super) fn left(&self, outstanding: usize) -> usize {
        self.limit.saturating_sub(outstanding)
    }

    /// Records that the queue has work. Returns whether it was inactive.
    #[inline(always)]
    pub(super) fn note_work(&mut self) -> bool {
        self.worked = true;
        let inactive = !self.active;
        if inactive {
            self.active = true;
        }
        inactive
    }

    /// Ends a period. Returns whether the queue has become active or inactive.
    fn end_period(&mut self, outstanding: usize) -> bool {
        let active = self.worked || outstanding > 0;
        let changed = active != self.active;
        (self.active, self.worked) = (active, false);
        changed
    }
}

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
            changed |= queue.share.end_period(queue.outstanding);
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
            let channels = self.queues[index].channels.all();
            let limit = channels.iter().map(|&channel| self.share(index, channel)).sum();
            self.queues[index].share.limit = limit;
        }
    }

    /// Returns the number of copies that the queue at `index` may have in flight in `channel`.
    fn share(&self, index: usize, channel: ChannelId) -> usize {
        let ring_size = self.channels.slots[channel.index()].ring_size;
        let weight = |index: usize| usize::from(self.queues[index].share.weight);
        let others = (0..self.queues.len()).filter(|&other| {
            let queue = &self.queues[other];
            other != index && queue.share.active && queue.channels.all().contains(&channel)
        });
        let others: usize = others.map(weight).sum();
        if others == 0 || !self.shares {
            return ring_size;
        }
        (ring_size * weight(index) / (weight(index) + others)).max(1)
    }
}
