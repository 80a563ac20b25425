//! Share of copies in the cycles of a host's core, measured with the stage clock.

use offcore_stats::stage::Group;
use offcore_stats::{Stage, StageClock};

use super::wire::WIRE_STAGE;
use crate::report::sample::Spread;

/// Minimum number of segments per part of a cell: about a block. The clock samples about ten rounds of it.
const PART: u64 = 16 << 10;

/// Share of copies, or of their submission and completion, in each part of a cell. The median is robust against
/// preemption of the core during a sampled round.
#[derive(Clone, Debug, Default)]
pub(super) struct CopyShare {
    /// Ticks of copies and of all stages at the start of the current part.
    began: [u64; 2],
    now: [u64; 2],
    /// Number of segments of the current part.
    segments: u64,
    parts: Vec<f64>,
}

impl CopyShare {
    /// Begins a new cell.
    pub(super) fn begin(clock: &StageClock) -> Self {
        let ticks = ticks(clock);
        Self { began: ticks, now: ticks, segments: 0, parts: Vec::new() }
    }

    /// Records that `segments` segments have been moved.
    pub(super) fn note(&mut self, clock: &StageClock, segments: u64) {
        self.now = ticks(clock);
        self.segments += segments;
        if self.segments >= PART {
            self.parts.extend(self.present());
            (self.began, self.segments) = (self.now, 0);
        }
    }

    /// Returns the median over all complete parts, or the share of the current part if no part is complete. Returns
    /// `None` without samples.
    pub(super) fn median(&self) -> Option<f64> {
        match self.parts.is_empty() {
            true => self.present(),
            false => Some(Spread::of(&self.parts).median),
        }
    }

    /// Returns the share of the current part.
    fn present(&self) -> Option<f64> {
        let [copies, all] = [0, 1].map(|i| (self.now[i] - self.began[i]) as f64);
        (all > 0.0).then(|| copies / all)
    }
}

/// Returns the ticks of copies and of all work of the host, which includes the application's calls and rounds without
/// packets.
fn ticks(clock: &StageClock) -> [u64; 2] {
    let of = |wanted: &dyn Fn(Stage) -> bool| {
        Stage::ALL.into_iter().filter(|&stage| wanted(stage)).map(|stage| clock.ticks(stage)).sum()
    };
    [of(&|stage| stage.group() == Some(Group::Copy)), of(&|stage| stage != WIRE_STAGE)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_stats::stage::SAMPLE;
    use offcore_stats::tsc;

    /// Charges at least `ticks` ticks to `stage`.
    fn spend(clock: &mut StageClock, stage: Stage, ticks: u64) {
        let start = tsc::now();
        while tsc::now() - start < ticks {}
        clock.lap(stage);
    }

    #[test]
    fn copy_share_covers_host_time() {
        let mut clock = StageClock::private();
        let mut share = CopyShare::begin(&clock);
        assert_eq!(share.median(), None);
        for part in 0..5 {
            for _ in 0..SAMPLE {
                clock.begin();
                spend(&mut clock, WIRE_STAGE, 1000);
                spend(&mut clock, Stage::Copy, 2000);
                // A single disturbance that does not belong to the share.
                spend(&mut clock, Stage::Application, if part == 1 { 200_000 } else { 1000 });
                clock.end(Stage::Idle);
                share.note(&clock, PART / u64::from(SAMPLE));
            }
        }
        let median = share.median().unwrap();
        assert!((0.3..0.75).contains(&median), "{median}: two thirds");
        assert_eq!(share.parts.len(), 5);
    }
}
