//! Alternating measurement: variants take turns within one run (A B B A), so that changes of the machine's state during
//! the run do not distort the ratio of two variants.
//!
//! A turn is long enough to overcome the cache state that the previous turn left behind: the first packets are not
//! timed, then at least [`TURN_BURSTS`] bursts are timed. In the first blocks of a cell, mode `auto` learns. These
//! blocks count for `auto` and for the modes that it is compared with, and are also reported separately; for all other
//! variants they are warm-up. The same holds for the first packets of each turn, because `auto` schedules its trials by
//! time, and time passes during the turns of the other variants.

use std::ops::AddAssign;
use std::time::{Duration, Instant};

use anyhow::Result;
use offcore_mem::Hugepages;

use crate::BURST;
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::{AutoRatios, Row};
use crate::report::sample::{Bounds, ClockCheck, Spread, Steadiness, SumRatio};

/// Minimum number of timed bursts per turn in every measurement; tests use shorter turns.
pub const TURN_BURSTS: usize = 256;
/// Untimed bursts at the start of a turn.
const START_BURSTS: usize = 8;
/// Settling blocks: about two thousand bursts of each variant. Within them, mode `auto` has tried the other way as
/// often as it does when it starts without knowledge.
const SETTLING: usize = 4;
/// Minimum number of blocks that are counted in a cell.
pub(crate) const FEWEST: usize = 10;

/// Cost of a number of packets, in TSC ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    pub packets: u64,
    pub core: u64,
    /// TSC ticks that the guests spent on their virtqueues and on writing and reading the packets.
    pub guest: u64,
}

impl Cost {
    /// Returns the TSC ticks of the measured core per packet.
    pub fn core_per_packet(self) -> f64 {
        self.core as f64 / self.packets.max(1) as f64
    }

    fn guest_per_packet(self) -> f64 {
        self.guest as f64 / self.packets.max(1) as f64
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.packets += other.packets;
        self.core += other.core;
        self.guest += other.guest;
    }
}

/// A variant that alternates with others.
pub trait Subject {
    /// Moves one window of packets.
    ///
    /// # Errors
    /// If a packet is lost, reordered or changed.
    fn window(&mut self, other: &OtherCore) -> Result<Cost>;
}

/// Cost of a turn.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// Cost of the first packets, which run with the cache contents that other variants left.
    start: Cost,
    pub(crate) timed: Cost,
}

impl Turn {
    /// Returns the cost of all packets of the turn.
    fn whole(self) -> Cost {
        let mut whole = self.start;
        whole += self.timed;
        whole
    }
}

impl AddAssign for Turn {
    fn add_assign(&mut self, other: Self) {
        self.start += other.start;
        self.timed += other.timed;
    }
}

/// Runs one turn of `subject` with at least `bursts` timed bursts.
pub(crate) fn turn(subject: &mut impl Subject, bursts: usize, other: &OtherCore) -> Result<Turn> {
    let mut windows = |bursts: usize| -> Result<Cost> {
        let mut cost = Cost::default();
        while cost.packets < (bursts * BURST) as u64 {
            cost += subject.window(other)?;
        }
        Ok(cost)
    };
    Ok(Turn { start: windows(START_BURSTS.min(bursts))?, timed: windows(bursts)? })
}

/// Cost of the blocks of a subject, in TSC ticks per packet.
#[derive(Clone, Debug, Default)]
pub(crate) struct Blocks {
    /// The core's cost in each settling block, including the starts of the turns.
    pub settling: Vec<f64>,
    /// The core's cost in each block after the settling blocks.
    pub core: Vec<f64>,
    /// The guests' cost in the blocks of `core`.
    pub guest: Vec<f64>,
    /// The core's cost in the blocks of `core`, including the starts of the turns.
    pub with_starts: Vec<f64>,
}

impl Blocks {
    /// Returns the core's cost in all blocks of the run.
    fn whole(&self) -> Vec<f64> {
        [&self.settling[..], &self.with_starts[..]].concat()
    }

    fn push(&mut self, turns: Turn) {
        self.core.push(turns.timed.core_per_packet());
        self.guest.push(turns.timed.guest_per_packet());
        self.with_starts.push(turns.whole().core_per_packet());
    }

    /// Returns the cost of core and guests together.
    pub(crate) fn both(&self) -> Vec<f64> {
        self.core.iter().zip(&self.guest).map(|(core, guest)| core + guest).collect()
    }

    /// Enters the cost of the blocks into `row`.
    pub(crate) fn enter(&self, row: &mut Row, tsc_hz: u64) {
        row.set_cycles(Spread::of(&self.core), tsc_hz);
        row.figures.mean = mean(&self.core);
    }
}

/// Returns the mean of `samples`, or `None` if the slice is empty.
pub(crate) fn mean(samples: &[f64]) -> Option<f64> {
    (!samples.is_empty()).then(|| samples.iter().sum::<f64>() / samples.len() as f64)
}

/// Extent of a measurement, and the resources of the machine that it uses.
#[derive(Clone, Debug)]
pub struct Extent {
    /// A B B A blocks per cell.
    pub blocks: usize,
    /// Minimum number of timed bursts per turn: [`TURN_BURSTS`].
    pub bursts: usize,
    /// Time limit of a cell. When it is reached, the cell ends with fewer blocks, but never with fewer than ten.
    pub timeout: Option<Duration>,
    /// Page size for guests and packet buffers.
    pub hugepages: Hugepages,
    /// The measured core.
    pub lcore: usize,
    /// The core of everything that is not measured: guests, network card, far host, applications and engine.
    pub other_lcore: Option<usize>,
}

impl Extent {
    /// Returns a short measurement for tests, without hugepages.
    #[cfg(test)]
    pub(crate) fn short(blocks: usize) -> Self {
        let lcores = offcore_stats::lcore::available().unwrap();
        let (lcore, other_lcore) = (lcores[0], lcores.get(1).copied());
        let (timeout, hugepages) = (Some(Duration::ZERO), Hugepages::None);
        Self { blocks, bursts: 1, timeout, hugepages, lcore, other_lcore }
    }

    /// Pins this thread to the measured core and starts the other core's thread.
    pub(crate) fn start(&self) -> Result<OtherCore> {
        offcore_stats::lcore::pin(self.lcore)?;
        OtherCore::start(self.other_lcore)
    }

    /// Returns the schedule of a cell. Blocks of cold data take longer, so half as many have to do.
    pub(crate) fn schedule(&self, temperature: Temperature) -> Schedule {
        let cold = temperature == Temperature::Cold;
        let blocks = if cold { self.blocks.div_ceil(2) } else { self.blocks };
        Schedule { blocks, bursts: self.bursts, limit: self.timeout, fewest: FEWEST }
    }
}

/// Extent of the measurement of a cell.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Schedule {
    /// Number of A B B A blocks, not counting the settling blocks.
    pub blocks: usize,
    /// Minimum number of timed bursts per turn.
    pub bursts: usize,
    /// Time limit. When it is reached, the measurement ends with fewer blocks.
    pub limit: Option<Duration>,
    /// Minimum number of blocks, even beyond the time limit.
    pub fewest: usize,
}

impl Schedule {
    /// Returns the schedule of each of `parts` parts of a cell. The subjects are created again for each part.
    pub(crate) fn part_of(self, parts: usize) -> Self {
        Self {
            blocks: self.blocks.div_ceil(parts),
            limit: self.limit.map(|limit| limit / parts as u32),
            fewest: self.fewest.div_ceil(parts),
            ..self
        }
    }
}

/// The subjects of a cell with the cost of their blocks, stored per block so that blocks can be paired.
#[derive(Debug)]
pub(crate) struct Alternating<S> {
    subjects: Vec<(S, Blocks)>,
    /// Index of the subject that has the first turn of the next block.
    first: usize,
    /// Number of blocks that were counted before the subjects were created again.
    half: usize,
    steadiness: Steadiness,
}

impl<S: Subject> Alternating<S> {
    /// Returns an empty cell.
    pub(crate) fn new() -> Self {
        Self { subjects: Vec::new(), first: 0, half: 0, steadiness: Steadiness::default() }
    }

    /// Adds a subject.
    pub(crate) fn add(&mut self, subject: S) {
        self.subjects.push((subject, Blocks::default()));
    }

    /// Returns the clock's stability.
    pub(crate) fn steadiness(&self) -> Steadiness {
        self.steadiness
    }

    /// Returns the subjects with their blocks, in the order in which they were added.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&S, &Blocks)> {
        self.subjects.iter().map(|(subject, blocks)| (subject, blocks))
    }

    /// As [`Alternating::iter`], with mutable subjects, to query them at the end.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = (&mut S, &Blocks)> {
        self.subjects.iter_mut().map(|(subject, blocks)| (subject, &*blocks))
    }

    /// Returns the blocks of the first subject for which `wanted` returns true.
    pub(crate) fn blocks_of(&self, wanted: impl Fn(&S) -> bool) -> Option<&Blocks> {
        self.iter().find(|(subject, _)| wanted(subject)).map(|(_, blocks)| blocks)
    }

    /// Returns the subjects so that the caller can replace them. Later blocks are appended to the existing blocks.
    pub(crate) fn renew(&mut self) -> impl DoubleEndedIterator<Item = &mut S> + ExactSizeIterator {
        self.half = self.counted();
        self.subjects.iter_mut().map(|(subject, _)| subject)
    }

    fn counted(&self) -> usize {
        self.subjects.first().map_or(0, |(_, blocks)| blocks.core.len())
    }

    /// Returns the noise floor, measured with two identical subjects.
    pub(crate) fn noise(&self) -> Option<Bounds> {
        let [(_, a), (_, b)] = &self.subjects[..] else { return None };
        self.bounds(a, b)
    }

    /// Returns the bounds of the ratio of the core's cost in `a` to its cost in `b`.
    pub(crate) fn bounds(&self, a: &Blocks, b: &Blocks) -> Option<Bounds> {
        Bounds::of(&a.core, &b.core, self.half)
    }

    /// Runs the settling blocks and the counted blocks.
    pub(crate) fn measure(
        &mut self,
        schedule: Schedule,
        other: &OtherCore,
        clock: &mut ClockCheck,
        progress: &Progress,
    ) -> Result<()> {
        let Schedule { blocks, bursts, limit, fewest } = schedule;
        for _ in 0..SETTLING {
            let (turns, _) = self.block(bursts, other, clock)?;
            for ((_, blocks), turns) in self.subjects.iter_mut().zip(turns) {
                blocks.settling.push(turns.whole().core_per_packet());
            }
        }
        let (mut counted, started) = (0, Instant::now());
        let most = self.steadiness.rejected + blocks;
        while counted < blocks {
            let is_late = limit.is_some_and(|limit| started.elapsed() > limit);
            if counted >= fewest && is_late {
                progress.steps(blocks - counted);
                break;
            }
            let (turns, steady) = self.block(bursts, other, clock)?;
            // No block is repeated after the time limit.
            if !self.steadiness.counts(steady, if is_late { 0 } else { most }) {
                continue;
            }
            for ((_, blocks), turns) in self.subjects.iter_mut().zip(turns) {
                blocks.push(turns);
            }
            counted += 1;
            progress.step();
        }
        self.steadiness.note(clock);
        Ok(())
    }

    /// Runs one block: every subject in order, then every subject in reverse order (A B B A). Each block starts with
    /// another subject, because the subject with two consecutive turns finds its own data in the caches. Rotation
    /// distributes this advantage evenly. Returns both turns of each subject, and whether the clock was the same before
    /// and after every turn.
    fn block(
        &mut self,
        bursts: usize,
        other: &OtherCore,
        clock: &mut ClockCheck,
    ) -> Result<(Vec<Turn>, bool)> {
        let count = self.subjects.len();
        let mut turns = vec![Turn::default(); count];
        let order = (0..count).map(|i| (self.first + i) % count);
        let mut steady = clock.holds();
        for i in order.clone().chain(order.rev()) {
            turns[i] += turn(&mut self.subjects[i].0, bursts, other)?;
            steady &= clock.holds();
        }
        self.first = (self.first + 1) % count.max(1);
        Ok((turns, steady))
    }
}

impl AutoRatios {
    /// Computes the ratios from the blocks of `auto` and of those other modes that were measured.
    pub(crate) fn new(auto: &Blocks, cpu: Option<&Blocks>, offload: Option<&Blocks>) -> Self {
        let ratio = |theirs: Option<&Blocks>| SumRatio::of(&theirs?.whole(), &auto.whole());
        let settling = |theirs: Option<&Blocks>| Some(SumRatio::of(&theirs?.settling, &auto.settling)?.sums);
        let both = [(ratio(cpu), settling(cpu)), (ratio(offload), settling(offload))];
        // The better mode is the mode with the lower ratio of its cost to the cost of `auto`.
        let better = both.iter().filter_map(|(ratio, settling)| Some(((*ratio)?, *settling)));
        let better = better.min_by(|a, b| a.0.sums.total_cmp(&b.0.sums));
        Self {
            auto_over_cpu: both[0].0.map(|ratio| ratio.sums),
            auto_over_offload: both[1].0.map(|ratio| ratio.sums),
            auto_over_better: better.map(|(ratio, _)| ratio.sums),
            auto_over_better_median: better.map(|(ratio, _)| ratio.median),
            auto_over_better_lower: better.map(|(ratio, _)| ratio.lower),
            auto_settling_over_better: better.and_then(|(_, settling)| settling),
            ..Self::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the windows that it has moved.
    struct Noted {
        ticks: u64,
        windows: usize,
    }

    impl Subject for Noted {
        fn window(&mut self, _: &OtherCore) -> Result<Cost> {
            self.windows += 1;
            Ok(Cost { packets: 256, core: 256 * self.ticks, guest: 256 })
        }
    }

    fn blocks(settling: f64, core: f64, with_starts: f64) -> Blocks {
        let nine = |ticks| vec![ticks; 9];
        Blocks {
            settling: vec![settling; 4],
            core: nine(core),
            guest: nine(1.0),
            with_starts: nine(with_starts),
        }
    }

    #[test]
    fn first_window_of_each_turn_is_untimed() {
        let other = OtherCore::start(None).unwrap();
        let mut cell = Alternating::new();
        for ticks in [10, 20] {
            cell.add(Noted { ticks, windows: 0 });
        }
        let whole = Schedule { blocks: 12, bursts: TURN_BURSTS, limit: None, fewest: FEWEST };
        let (schedule, mut clock) = (whole.part_of(2), ClockCheck::new());
        cell.measure(schedule, &other, &mut clock, &Progress::hidden()).unwrap();
        // The new subjects are slower. The blocks of the second half show it.
        cell.renew().for_each(|noted| noted.ticks += 5);
        cell.measure(schedule, &other, &mut clock, &Progress::hidden()).unwrap();
        let turns = 2 * (2 * SETTLING + 12 + cell.steadiness.rejected);
        for (noted, blocks) in cell.iter() {
            let both = |each: usize| {
                let ticks = noted.ticks as f64;
                [vec![ticks - 5.0; each], vec![ticks; each]].concat()
            };
            assert_eq!(blocks.settling, both(SETTLING));
            assert_eq!((&blocks.core, &blocks.with_starts), (&both(6), &both(6)));
            assert_eq!(blocks.guest, [1.0; 12]);
            assert_eq!(noted.windows, turns * (1 + TURN_BURSTS * BURST / 256));
        }
        let noise = cell.noise().unwrap();
        assert_eq!((noise.lower, noise.upper), (0.5, 15.0 / 25.0), "a half, and then not a half");
        let mut row = Row::default();
        cell.iter().next().unwrap().1.enter(&mut row, 1_000_000_000);
        assert_eq!((row.figures.mean, row.figures.spread.median), (Some(12.5), 12.5));
    }

    #[test]
    fn time_limit_stops_repetitions() {
        let other = OtherCore::start(None).unwrap();
        let mut cell = Alternating::new();
        cell.add(Noted { ticks: 10, windows: 0 });
        let limit = Some(Duration::ZERO);
        let schedule = Schedule { blocks: 1000, bursts: TURN_BURSTS, limit, fewest: 100 };
        cell.measure(schedule, &other, &mut ClockCheck::new(), &Progress::hidden()).unwrap();
        let (_, blocks) = cell.iter().next().unwrap();
        assert_eq!((blocks.core.len(), cell.steadiness.rejected), (100, 0));
    }

    #[test]
    fn unsteady_clock_is_reported() {
        let mut steadiness = Steadiness::default();
        let counted = [true, false, false, false, true].map(|steady| steadiness.counts(steady, 2));
        assert_eq!(counted, [true, false, false, true, true], "the third that is unsteady has to do");
        assert_eq!((steadiness.rejected, steadiness.unsteady), (2, 1));
    }

    #[test]
    fn auto_is_compared_with_better_mode() {
        // The time that `auto` spends on trials at the starts of turns counts.
        let auto = blocks(19.0, 7.0, 10.0);
        let ratios = AutoRatios::new(&auto, Some(&blocks(20.0, 1.0, 20.0)), Some(&blocks(9.0, 1.0, 9.0)));
        let spent = 4.0 * 19.0 + 9.0 * 10.0;
        let near = |ratio: Option<f64>, expected: f64| assert!((ratio.unwrap() - expected).abs() < 1e-9);
        near(ratios.auto_over_cpu, 13.0 * 20.0 / spent);
        near(ratios.auto_over_better, 13.0 * 9.0 / spent);
        near(ratios.auto_over_better_median, 0.9);
        near(ratios.auto_settling_over_better, 9.0 / 19.0);
    }
}
