//! Accounting of the work queue's entries. A descriptor holds an entry from its submission until its completion record
//! has been read or a reset has proved that the device no longer has it.

use crate::driver::way::Share;

/// Accounting of work queue entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credits {
    /// Number of entries that this channel may use at present.
    pub limit: usize,
    pub used: usize,
}

/// The entries that the channel uses.
#[derive(Debug)]
pub(super) struct Entries {
    /// Number of units, pieces and drains that the device has.
    used: usize,
    limit: usize,
    share: Share,
}

impl Entries {
    pub(super) fn new(share: Share) -> Self {
        Self { used: 0, limit: share.places(), share }
    }

    /// Applies the present number of channels to the limit.
    #[inline(always)]
    pub(super) fn update_limit(&mut self) {
        self.limit = self.share.places();
    }

    #[inline(always)]
    pub(super) fn is_full(&self) -> bool {
        self.used >= self.limit
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Returns the number of free entries. The queue must not be full.
    #[inline(always)]
    pub(super) fn free(&self) -> usize {
        self.limit - self.used
    }

    #[inline(always)]
    pub(super) fn take(&mut self, n: usize) {
        self.used += n;
    }

    #[inline(always)]
    pub(super) fn release(&mut self, n: usize) {
        self.used -= n;
    }

    pub(super) fn release_all(&mut self) {
        self.used = 0;
    }

    pub(super) fn credits(&self) -> Credits {
        Credits { limit: self.share.places(), used: self.used }
    }
}
