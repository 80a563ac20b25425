//! Modes against each other: what is measured in turns inside one run (A B B A), so that a ratio between two of them
//! does not tell what the machine did meanwhile.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::lockstep::OtherCore;
use crate::progress::Progress;
use crate::row::Row;
use crate::sample::{ClockCheck, Ratio, paired_ratio};

/// Turns of each subject that are not counted.
const WARM_UP: usize = 4;
/// After so long mode `auto` looks at the other way as seldom as it will: in the beginning it does so more often.
const SETTLED: Duration = Duration::from_millis(400);
/// Blocks that are counted in any case.
const FEWEST: usize = 10;

/// One of the things that alternate.
pub(crate) trait Subject {
    /// Moves one window of packets; returns the ticks that each cost the core.
    fn turn(&mut self, other: &OtherCore) -> Result<f64>;

    /// Whether it is of mode `auto`, which has to learn before it is measured.
    fn is_auto(&self) -> bool;
}

/// The subjects of a cell, and the ticks a packet of each block that counts; by block, so that they can be paired.
#[derive(Debug)]
pub(crate) struct Alternating<S> {
    subjects: Vec<(S, Vec<f64>)>,
    /// Who has the first turn of the next block.
    first: usize,
    rejected: usize,
}

impl<S: Subject> Alternating<S> {
    /// No subjects yet.
    pub(crate) fn new() -> Self {
        Self { subjects: Vec::new(), first: 0, rejected: 0 }
    }

    /// One more.
    pub(crate) fn add(&mut self, subject: S) {
        self.subjects.push((subject, Vec::new()));
    }

    /// Blocks thrown away because the core's clock had changed.
    pub(crate) fn rejected(&self) -> usize {
        self.rejected
    }

    /// The subjects with their blocks, in the order in which they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&S, &[f64])> {
        self.subjects.iter().map(|(subject, blocks)| (subject, blocks.as_slice()))
    }

    /// As [`Alternating::iter`], for what is asked of a subject at the end.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&mut S, &[f64])> {
        self.subjects.iter_mut().map(|(subject, blocks)| (subject, blocks.as_slice()))
    }

    /// The blocks of the first subject that is `wanted`.
    pub(crate) fn blocks_of(&self, wanted: impl Fn(&S) -> bool) -> Option<&[f64]> {
        self.iter().find(|(subject, _)| wanted(subject)).map(|(_, blocks)| blocks)
    }

    /// Warms up and measures `blocks` blocks. Blocks during which the core's clock changed are thrown away and made
    /// anew, as long as that is not more often than they count. After `patience` fewer have to do, but never fewer than
    /// ten.
    ///
    /// # Errors
    /// When a packet is lost, reordered or changed.
    pub(crate) fn measure(
        &mut self,
        blocks: usize,
        patience: Option<Duration>,
        other: &OtherCore,
        clock: &mut ClockCheck,
        progress: &Progress,
    ) -> Result<()> {
        for _ in 0..WARM_UP {
            self.block(other)?;
        }
        for (subject, _) in &mut self.subjects {
            if subject.is_auto() {
                let started = Instant::now();
                while started.elapsed() < SETTLED {
                    subject.turn(other)?;
                }
            }
        }
        let (mut counted, started) = (0, Instant::now());
        while counted < blocks {
            if counted >= FEWEST && patience.is_some_and(|patience| started.elapsed() > patience) {
                progress.steps(blocks - counted);
                break;
            }
            let before = clock.holds();
            let ticks = self.block(other)?;
            if clock.holds() && before || self.rejected >= blocks {
                for ((_, samples), ticks) in self.subjects.iter_mut().zip(ticks) {
                    samples.push(ticks);
                }
                counted += 1;
                progress.step();
            } else {
                self.rejected += 1;
            }
        }
        Ok(())
    }

    /// Every subject forwards, then every subject backwards: A B B A. The next block begins with the next subject: who
    /// has two turns in a row finds what it left in the caches, and that shall be everybody in turn. Returns the ticks
    /// a packet of each.
    fn block(&mut self, other: &OtherCore) -> Result<Vec<f64>> {
        let count = self.subjects.len();
        let mut ticks = vec![0.0; count];
        let order = (0..count).map(|i| (self.first + i) % count);
        for i in order.clone().chain(order.rev()) {
            ticks[i] += self.subjects[i].0.turn(other)? / 2.0;
        }
        self.first = (self.first + 1) % count.max(1);
        Ok(ticks)
    }
}

/// `auto` against the modes that alternated with it: ratios of speed.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Against {
    cpu: Option<Ratio>,
    offload: Option<Ratio>,
    better: Option<Ratio>,
}

impl Against {
    /// The blocks of `auto`, and those of the other two where they were measured.
    pub(crate) fn new(auto: &[f64], cpu: Option<&[f64]>, offload: Option<&[f64]>) -> Self {
        let ratio = |theirs: Option<&[f64]>| {
            let pairs: Vec<_> = theirs.into_iter().flatten().copied().zip(auto.iter().copied()).collect();
            paired_ratio(&pairs)
        };
        let (over_cpu, over_offload) = (ratio(cpu), ratio(offload));
        // The better one is the one that `auto` is less far ahead of.
        let better =
            [over_cpu, over_offload].into_iter().flatten().min_by(|a, b| a.median.total_cmp(&b.median));
        Self { cpu: over_cpu, offload: over_offload, better }
    }

    /// Tells `row`.
    pub(crate) fn enter(self, row: &mut Row) {
        row.auto_over_cpu = self.cpu.map(|ratio| ratio.median);
        row.auto_over_offload = self.offload.map(|ratio| ratio.median);
        row.auto_over_better = self.better.map(|ratio| ratio.median);
        row.auto_over_better_lower = self.better.map(|ratio| ratio.lower);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Notes whose turn it was.
    struct Noted {
        ticks: f64,
        auto: bool,
        turns: usize,
    }

    impl Subject for Noted {
        fn turn(&mut self, _: &OtherCore) -> Result<f64> {
            self.turns += 1;
            Ok(self.ticks)
        }

        fn is_auto(&self) -> bool {
            self.auto
        }
    }

    #[test]
    fn everyone_has_two_turns_a_block_and_auto_learns_first() {
        let other = OtherCore::start(None).unwrap();
        let mut cell = Alternating::new();
        for (ticks, auto) in [(10.0, false), (20.0, true)] {
            cell.add(Noted { ticks, auto, turns: 0 });
        }
        cell.measure(12, None, &other, &mut ClockCheck::new(), &Progress::hidden()).unwrap();
        let blocks = |auto| cell.blocks_of(|noted: &Noted| noted.auto == auto).unwrap();
        assert_eq!((blocks(false), blocks(true)), (&[10.0; 12][..], &[20.0; 12][..]));
        let turns: Vec<_> = cell.iter().map(|(noted, _)| noted.turns).collect();
        let counted = 2 * (WARM_UP + 12 + cell.rejected());
        assert!(turns[0] == counted && turns[1] > counted, "{turns:?}, {counted} of them counted");
    }

    #[test]
    fn the_better_mode_is_the_one_that_auto_is_less_far_ahead_of() {
        let against = Against::new(&[10.0; 9], Some(&[20.0; 9]), Some(&[9.0; 9]));
        let mut row = Row::default();
        against.enter(&mut row);
        assert_eq!((row.auto_over_cpu, row.auto_over_offload), (Some(2.0), Some(0.9)));
        assert_eq!((row.auto_over_better, row.auto_over_better_lower), (Some(0.9), Some(0.9)));
        let mut row = Row::default();
        Against::default().enter(&mut row);
        assert_eq!(row.auto_over_better, None);
    }
}
