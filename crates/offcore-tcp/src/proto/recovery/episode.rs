//! State that only losses need. It is boxed and allocated at the first loss.

use std::ops::Range;

use offcore_stats::time::{Micros, Time};

use super::Stats;
use super::cc::Congestion;
use super::prr::Prr;

/// After this many recoveries without a DSACK, the reordering window narrows again (RFC 8985, section 6.2, step 4).
const PERSIST: u8 = 16;

/// The maximum number of separate retransmitted ranges. More are merged, and DSACKs cannot undo the reduction.
const RANGES: usize = 64;

/// State that only losses need.
#[derive(Debug, Default)]
pub(super) struct Episode {
    pub(super) stats: Stats,
    /// The part of the statistics that has been reported.
    pub(super) told: Stats,
    pub(super) prr: Prr,
    pub(super) undo: Undo,
    pub(super) reordering: Reordering,
    /// Extra delay of a probe beyond two round trips, after needless probes. 0 before.
    pub(super) probe_wait: Micros,
}

/// State for undoing a spurious reduction.
#[derive(Debug, Default)]
pub(super) struct Undo {
    /// The window before the reduction. `None` if there is nothing to undo.
    before: Option<Congestion>,
    /// The first unacknowledged byte at the reduction.
    una: u64,
    /// Time of the first retransmission; 0 before.
    first: Time,
    /// Retransmitted data without a DSACK so far.
    open: Vec<Range<u64>>,
    /// The end of the published data at the end of recovery. DSACKs of its retransmissions arrive before that is
    /// acknowledged.
    until: Option<u64>,
    /// An ACK has advanced since then, so timestamps have already decided.
    told: bool,
}

impl Undo {
    /// Begins a reduction because of data sent from `una` on.
    pub(super) fn begin(&mut self, before: Congestion, una: u64) {
        *self = Self { before: Some(before), una, ..Self::default() };
    }

    /// Handles a timeout in recovery: the window from before recovery is kept, and timestamps decide again.
    pub(super) fn go_on(&mut self) {
        (self.first, self.told) = (Time::ZERO, false);
    }

    /// Records retransmitted data.
    pub(super) fn on_repeat(&mut self, now: Time, range: Range<u64>) {
        if self.before.is_none() {
            return;
        }
        if self.first == Time::ZERO {
            self.first = now.max(Time::from_micros(1));
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
        if self.first == Time::ZERO || range.0 < self.una {
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

    /// Processes an advancing ACK that echoes a segment sent at `echo` or a little before. Returns whether that was
    /// before the first retransmission, so that the ACK is for the original (RFC 3522, section 3.2). The first such ACK
    /// decides.
    pub(super) fn on_echo(&mut self, echo: Option<Time>) -> bool {
        if self.first == Time::ZERO || self.told {
            return false;
        }
        self.told = true;
        echo.is_some_and(|echo| echo < self.first)
    }

    /// Records the end of recovery, with data up to `published` sent. Returns whether nothing was retransmitted.
    pub(super) fn on_recovered(&mut self, published: u64) -> bool {
        self.until = Some(published);
        self.before.is_some() && self.first == Time::ZERO
    }

    /// Returns the window from before the reduction and clears the state.
    pub(super) fn take(&mut self) -> Option<Congestion> {
        std::mem::take(self).before
    }
}

/// The reordering window (RFC 8985, section 6.2, step 4).
#[derive(Debug)]
pub(super) struct Reordering {
    /// In quarters of the minimum round-trip time: RACK.reo_wnd_mult.
    quarters: u32,
    persist: u8,
    /// Until ACKs reach this position, DSACKs belong to the round in which the window grew: RACK.dsack_round.
    round: Option<u64>,
}

impl Default for Reordering {
    fn default() -> Self {
        Self { quarters: 1, persist: PERSIST, round: None }
    }
}

impl Reordering {
    /// Processes an ACK up to `una`, with or without a DSACK. The round ends at `published`.
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

    /// Records the end of a recovery.
    pub(super) fn on_recovered(&mut self) {
        self.persist = self.persist.saturating_sub(1);
        if self.persist == 0 {
            self.quarters = 1;
        }
    }

    /// Returns the reordering window: the quarters of `least`, but at most `srtt`.
    pub(super) fn window(&self, least: Micros, srtt: Micros) -> Micros {
        (least * self.quarters.into() / 4).min(srtt)
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
        undo.on_repeat(Time::from_micros(1), 0..1_000_000);
        let mut most = 0;
        for byte in 0..1000 {
            assert!(!undo.on_duplicate((2 * byte, 2 * byte + 1), 0));
            most = most.max(undo.open.len());
        }
        assert_eq!(most, 64);
        assert!(undo.take().is_none());
    }
}
