//! What only losses need: boxed, and made at the first of them.

use std::ops::Range;

use super::Stats;
use super::cc::Congestion;
use super::prr::Prr;

/// So many recoveries without a DSACK narrow the reordering window again (RFC 8985, section 6.2, step 4).
const PERSIST: u8 = 16;

/// The maximum number of separate retransmitted ranges. More are merged, and DSACKs cannot undo the reduction.
const RANGES: usize = 64;

/// What only losses need.
#[derive(Debug, Default)]
pub(super) struct Episode {
    pub(super) stats: Stats,
    /// What of them has been told.
    pub(super) told: Stats,
    pub(super) prr: Prr,
    pub(super) undo: Undo,
    pub(super) reordering: Reordering,
    /// How long a probe waits beyond two round trips, after needless ones; 0 before.
    pub(super) probe_wait: u64,
}

/// How to take back a reduction that was for nothing.
#[derive(Debug, Default)]
pub(super) struct Undo {
    /// The window from before; none when there is nothing to undo.
    before: Option<Congestion>,
    /// The first unacknowledged byte when it was reduced.
    una: u64,
    /// When the first retransmission was published; 0 before.
    first: u64,
    /// Retransmitted data without a DSACK so far.
    open: Vec<Range<u64>>,
    /// What was published when recovery ended: DSACKs of its retransmissions come before that is acknowledged.
    until: Option<u64>,
    /// An ACK has advanced since: what timestamps tell they have told.
    told: bool,
}

impl Undo {
    /// A reduction is made, for what was sent from `una` on.
    pub(super) fn begin(&mut self, before: Congestion, una: u64) {
        *self = Self { before: Some(before), una, ..Self::default() };
    }

    /// A timeout in recovery: the window from before it counts, and timestamps decide anew.
    pub(super) fn go_on(&mut self) {
        (self.first, self.told) = (0, false);
    }

    /// Records retransmitted data.
    pub(super) fn on_repeat(&mut self, now: u64, range: Range<u64>) {
        if self.before.is_none() {
            return;
        }
        if self.first == 0 {
            self.first = now.max(1);
        }
        let full = self.open.len() >= RANGES;
        match self.open.last_mut() {
            Some(last) if last.end == range.start || full => {
                last.end = last.end.max(range.end);
            }
            _ => self.open.push(range),
        }
    }

    /// Records a DSACK. Returns whether DSACKs have now reported all retransmitted data (RFC 3708). A DSACK for data
    /// that was sent once does not count: the network has duplicated the segment.
    pub(super) fn on_duplicate(&mut self, range: (u64, u64), una: u64) -> bool {
        if self.until.is_some_and(|until| una > until) {
            *self = Self::default();
        }
        if self.first == 0 || range.0 < self.una {
            return false;
        }
        let meets = |open: &Range<u64>| open.start < range.1 && range.0 < open.end;
        let Some(at) = self.open.iter().position(meets) else { return false };
        let open = self.open.swap_remove(at);
        let rest = [open.start..range.0, range.1..open.end];
        self.open.extend(rest.into_iter().filter(|rest| !rest.is_empty()));
        if self.open.len() > RANGES {
            // The peer reports retransmitted data in parts of segments.
            *self = Self::default();
            return false;
        }
        self.open.is_empty()
    }

    /// An ACK advanced that echoes a segment sent at `echo` or a little before. True when that was before the first
    /// retransmission: it is the original's (RFC 3522, section 3.2). The first such ACK decides.
    pub(super) fn on_echo(&mut self, echo: Option<u64>) -> bool {
        if self.first == 0 || self.told {
            return false;
        }
        self.told = true;
        echo.is_some_and(|echo| echo < self.first)
    }

    /// Recovery ended, and `published` was sent by then. True when nothing was retransmitted in it.
    pub(super) fn on_recovered(&mut self, published: u64) -> bool {
        self.until = Some(published);
        self.before.is_some() && self.first == 0
    }

    /// The window from before, which is not to be undone twice.
    pub(super) fn take(&mut self) -> Option<Congestion> {
        std::mem::take(self).before
    }
}

/// How long reordered segments are waited for (RFC 8985, section 6.2, step 4).
#[derive(Debug)]
pub(super) struct Reordering {
    /// Quarters of the least round-trip time: RACK.reo_wnd_mult.
    quarters: u32,
    persist: u8,
    /// Until ACKs reach it, a DSACK is of the round in which the window grew: RACK.dsack_round.
    round: Option<u64>,
}

impl Default for Reordering {
    fn default() -> Self {
        Self { quarters: 1, persist: PERSIST, round: None }
    }
}

impl Reordering {
    /// An ACK up to `una` came, with or without a DSACK; the round ends at `published`.
    pub(super) fn on_ack(&mut self, una: u64, published: u64, duplicate: bool) {
        if self.round.is_some_and(|round| una >= round) {
            self.round = None;
        }
        if duplicate && self.round.is_none() {
            self.round = Some(published);
            self.quarters = self.quarters.saturating_add(1);
            self.persist = PERSIST;
        }
    }

    /// A recovery ended.
    pub(super) fn on_recovered(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.quarters = 1;
        }
    }

    /// The time that reordered segments are given: so many quarters of `least`, but not more than `srtt`.
    pub(super) fn window(&self, least: u64, srtt: u64) -> u64 {
        (u64::from(self.quarters) * least / 4).min(srtt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::recovery::Algorithm;

    #[test]
    fn duplicate_ranges_are_bounded() {
        let mut undo = Undo::default();
        undo.begin(Congestion::new(1000, Algorithm::Cubic), 0);
        undo.on_repeat(1, 0..1_000_000);
        for byte in 0..1000 {
            assert!(!undo.on_duplicate((2 * byte, 2 * byte + 1), 0));
            assert!(undo.open.len() <= RANGES);
        }
        assert!(undo.take().is_none());
    }
}
