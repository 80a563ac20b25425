//! What part of a host's core copies take, by the stage clock.

use offcore_stats::stage::Group;
use offcore_stats::{Stage, StageClock};

use super::wire::NOT_THE_HOSTS;
use crate::report::sample::Spread;

/// Segments of a part of a cell, at least: about a block. The clock samples some ten rounds of it.
const PART: u64 = 16 << 10;

/// The share of copies, or of handing them over and collecting them, in each part of a cell: the median does not notice
/// when the core was taken away for a while in a round that was sampled.
#[derive(Clone, Debug, Default)]
pub(super) struct CopyShare {
    /// Ticks of copies and of everything when the present part began.
    began: [u64; 2],
    now: [u64; 2],
    /// Segments of the present part.
    segments: u64,
    parts: Vec<f64>,
}

impl CopyShare {
    /// A new cell begins.
    pub(super) fn begin(clock: &StageClock) -> Self {
        let ticks = ticks(clock);
        Self { began: ticks, now: ticks, segments: 0, parts: Vec::new() }
    }

    /// So many segments have been moved.
    pub(super) fn note(&mut self, clock: &StageClock, segments: u64) {
        self.now = ticks(clock);
        self.segments += segments;
        if self.segments >= PART {
            self.parts.extend(self.present());
            (self.began, self.segments) = (self.now, 0);
        }
    }

    /// The median over all parts; of the only one where none is complete. `None` when nothing was sampled.
    pub(super) fn median(&self) -> Option<f64> {
        match self.parts.is_empty() {
            true => self.present(),
            false => Some(Spread::of(&self.parts).median),
        }
    }

    /// That of the present part.
    fn present(&self) -> Option<f64> {
        let [copies, all] = [0, 1].map(|i| (self.now[i] - self.began[i]) as f64);
        (all > 0.0).then(|| copies / all)
    }
}

/// Ticks of copies, and of all that the host did: the application's calls and rounds in vain are timed, too.
fn ticks(clock: &StageClock) -> [u64; 2] {
    let of = |wanted: &dyn Fn(Stage) -> bool| {
        Stage::ALL.into_iter().filter(|&stage| wanted(stage)).map(|stage| clock.ticks(stage)).sum()
    };
    [of(&|stage| stage.group() == Some(Group::Copy)), of(&|stage| stage != NOT_THE_HOSTS)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use offcore_stats::stage::SAMPLE;
    use offcore_stats::tsc;

    /// Charges so many ticks at least.
    fn spend(clock: &mut StageClock, stage: Stage, ticks: u64) {
        let start = tsc::now();
        while tsc::now() - start < ticks {}
        clock.lap(stage);
    }

    #[test]
    fn shares_are_of_all_that_the_host_did() {
        let mut clock = StageClock::private();
        let mut share = CopyShare::begin(&clock);
        assert_eq!(share.median(), None);
        for part in 0..5 {
            for _ in 0..SAMPLE {
                clock.begin();
                spend(&mut clock, NOT_THE_HOSTS, 1000);
                spend(&mut clock, Stage::Copy, 2000);
                // Something that is no part of it, once.
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
