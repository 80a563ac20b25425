//! Paired end-to-end windows of our back end and the peer (ours theirs, theirs ours) over several restarts, and their
//! summary in a row.
//!
//! The measured object is a back end, loaded by a front end on the other core. The caller supplies both.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use offcore_stats::tsc;

use super::back_end::{BackEnd, Ours};
use crate::guests::guest::Seen;
use crate::report::progress::Progress;
use crate::report::row::{Counts, PeerRatio, Row};
use crate::report::sample::Spread;

/// Run-in time of a window before it is counted.
pub(crate) const SETTLE: Duration = Duration::from_millis(50);
/// If the front end is busy for a larger share of the time, it is the bottleneck.
const FE_BOUND: f64 = 0.9;

/// A front end: sends to a back end, or counts the packets that come from it.
pub(crate) trait Load {
    /// Loads the running `back_end` for `settle` and then for `length`. Returns the result of the latter period.
    fn window(&mut self, settle: Duration, length: Duration, back_end: &mut dyn BackEnd) -> Result<Window>;

    /// Returns the packet counters so far.
    fn seen(&self) -> Seen;

    /// Returns the number of lost packets if every packet has to come back.
    fn lost(&self) -> u64;
}

/// Result of a timed window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Window {
    pub(crate) received: u64,
    /// Duration in TSC ticks.
    pub(crate) ticks: u64,
    /// Ticks in which the front end was busy and the back end waited for it.
    pub(crate) busy: u64,
}

impl Window {
    /// Returns million packets per second.
    pub(crate) fn mpps(&self) -> f64 {
        self.received as f64 * 1e3 / tsc::to_ns(self.ticks)
    }

    /// Returns the share of the time in which the front end was busy, from 0 to 1.
    pub(crate) fn busy_share(&self) -> f64 {
        self.busy as f64 / self.ticks.max(1) as f64
    }
}

/// A back end and its front end.
#[derive(Debug)]
pub(crate) struct Variant<B, L> {
    // The back end is dropped first: a front end that disconnects waits for the worker, which may be paused.
    back_end: B,
    load: L,
    /// Million packets per second of each counted window.
    mpps: Vec<f64>,
    /// Ticks per packet as counted by the back end itself, for each restart.
    cycles: Vec<f64>,
    fe_busy: Vec<f64>,
}

impl<B: BackEnd, L: Load> Variant<B, L> {
    /// Creates a variant whose back end is paused.
    pub(crate) fn new(back_end: B, load: L) -> Self {
        Self { back_end, load, mpps: Vec::new(), cycles: Vec::new(), fe_busy: Vec::new() }
    }

    fn window(&mut self, length: Duration) -> Result<Window> {
        self.back_end.resume()?;
        let window = self.load.window(SETTLE, length, &mut self.back_end)?;
        self.back_end.pause()?;
        Ok(window)
    }

    fn keep(&mut self, window: Window) {
        self.mpps.push(window.mpps());
        self.fe_busy.push(window.busy_share());
    }

    /// Runs an additional window whose rate is not counted, because counting cycles takes time itself.
    fn cycles(&mut self, length: Duration) -> Result<()> {
        self.back_end.count_cycles(true)?;
        self.back_end.resume()?;
        self.load.window(SETTLE, length, &mut self.back_end)?;
        let cycles = self.back_end.pause()?;
        self.cycles.extend(cycles);
        self.back_end.count_cycles(false)
    }
}

/// Number and length of the windows of each side between two restarts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    pub(crate) pairs: usize,
    pub(crate) window: Duration,
}

/// Results of a cell over all restarts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gathered {
    peer: &'static str,
    ours: Vec<f64>,
    theirs: Vec<f64>,
    our_cycles: Vec<f64>,
    their_cycles: Vec<f64>,
    fe_busy: Vec<f64>,
    their_fe_busy: Vec<f64>,
    received: u64,
    verified: u64,
    lost: u64,
    rejected: usize,
}

impl Gathered {
    /// Returns empty results with the peer name `peer`.
    pub(crate) fn beside(peer: &'static str) -> Self {
        Self { peer, ..Self::default() }
    }

    /// Measures both sides in turns, or ours alone without `theirs`. Both must have been restarted for this call. A
    /// pair during which the core's clock changes is rejected, until `pairs` pairs have been rejected. From then on
    /// every pair counts.
    pub(crate) fn restart<L: Load, B: BackEnd, M: Load>(
        &mut self,
        mut ours: Variant<Ours, L>,
        mut theirs: Option<Variant<B, M>>,
        Schedule { pairs, window }: Schedule,
        progress: &Progress,
    ) -> Result<()> {
        let (mut counted, mut rejected) = (0, 0);
        while counted < pairs {
            let before = ours.back_end.clock_holds()?;
            let theirs_first = counted % 2 == 1;
            let their_window = |theirs: &mut Option<Variant<B, M>>| {
                theirs.as_mut().map(|variant| variant.window(window).context(self.peer)).transpose()
            };
            let early = if theirs_first { their_window(&mut theirs)? } else { None };
            let our_window = ours.window(window)?;
            let late = if theirs_first { None } else { their_window(&mut theirs)? };
            if !(before && ours.back_end.clock_holds()?) && rejected < pairs {
                rejected += 1;
                continue;
            }
            ours.keep(our_window);
            if let (Some(variant), Some(window)) = (&mut theirs, early.or(late)) {
                variant.keep(window);
            }
            counted += 1;
            progress.step();
        }
        self.rejected += rejected;
        ours.cycles(window / 2)?;
        if let Some(variant) = &mut theirs {
            variant.cycles(window / 2).context(self.peer)?;
            ensure!(variant.load.lost() == 0, "{} has lost {} packets", self.peer, variant.load.lost());
            self.theirs.append(&mut variant.mpps);
            self.their_cycles.append(&mut variant.cycles);
            self.their_fe_busy.append(&mut variant.fe_busy);
        }
        let seen = ours.load.seen();
        self.received += seen.received;
        self.verified += seen.verified;
        self.lost += ours.load.lost();
        self.ours.append(&mut ours.mpps);
        self.our_cycles.append(&mut ours.cycles);
        self.fe_busy.append(&mut ours.fe_busy);
        Ok(())
    }

    /// Enters the results into `row`, which already describes the measurement.
    pub(crate) fn enter(&self, row: &mut Row) -> Result<()> {
        ensure!(
            !self.ours.is_empty(),
            "no window was measured: at least one restart and one pair are needed"
        );
        let median = |samples: &[f64]| (!samples.is_empty()).then(|| Spread::of(samples).median);
        let fe_busy = [&self.fe_busy, &self.their_fe_busy].into_iter().filter_map(|busy| median(busy));
        let &Self { received, verified, lost, .. } = self;
        row.counts = Counts { received, verified, lost };
        row.clock.rejected = self.rejected;
        row.ends.busy_cycles_per_packet = median(&self.our_cycles);
        // The maximum of both sides: a peer that waits for its front end looks slower than it is.
        row.ends.fe_bound = Some(fe_busy.fold(0.0, f64::max) > FE_BOUND);
        row.set_rate(Spread::of(&self.ours), tsc::hz());
        if !self.theirs.is_empty() {
            row.peer = PeerRatio::of_windows(self.peer, &self.ours, &self.theirs);
            row.ends.peer_cycles_per_packet = median(&self.their_cycles);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn rows_compare_paired_windows() {
        let alone = Gathered { ours: vec![2.0; 4], our_cycles: vec![100.0], ..Gathered::beside("testpmd") };
        let beside = Gathered { theirs: vec![1.0; 4], their_cycles: vec![200.0], ..alone.clone() };
        let rows = [alone, beside].map(|gathered| {
            let mut row = Row::new("vhost", "loop", "end-to-end");
            gathered.enter(&mut row).unwrap();
            row
        });
        golden::check("rates, alone", &rows[0]);
        golden::check("rates, peer", &rows[1]);
        assert_eq!((rows[1].peer.peer_ratio, rows[1].ends.peer_cycles_per_packet), (Some(2.0), Some(200.0)));
    }
}
