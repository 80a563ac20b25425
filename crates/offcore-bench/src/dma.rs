//! `offcore bench dma`: measures the cost of a copy on the submitting core, and the throughput and latency of the
//! engine.
//!
//! In each round, the other core (with `hot`, the measured core) writes the sources. The measured core submits `depth`
//! copies, `batch` at a time (timed). The engine is stepped until no work is pending, with its own clock (the TSC, or a
//! model's virtual clock). The measured core reaps the completions (timed), and every byte is compared. If the core
//! copies, the submission includes the copies.

pub mod copies;
pub mod sharing;
pub mod submit_reap;

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use offcore_dma::cpu::{CpuDevice, Routine};
use offcore_dma::{Channel, CopyDevice};
use offcore_mem::Hugepages;
use offcore_stats::tsc;

use crate::method::copier::{CHANNEL, Copier, Engine};
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Row};
use crate::report::sample::{ClockCheck, Spread};
use copies::{Copies, WARM};

/// Default copy sizes in bytes.
pub const SIZES: [usize; 8] = [64, 256, 1024, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Number of uncounted rounds.
const WARM_UP: usize = 4;
/// Minimum number of counted rounds.
const FEWEST: usize = 5;

/// The unit that copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// The core, with the routine that it selects, or an engine.
    Copier(Copier),
    /// The core, with this routine.
    Routine(Routine),
}

impl Subject {
    /// Returns the engine's name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Copier(copier) => copier.name(),
            Self::Routine(routine) => routine.name(),
        }
    }

    /// Returns all subjects that this machine can run.
    pub fn available() -> impl Iterator<Item = Self> {
        let copiers = Copier::ALL.into_iter().map(Self::Copier);
        copiers.chain(Routine::ALL.into_iter().filter(|routine| routine.is_available()).map(Self::Routine))
    }

    fn by_core(self) -> bool {
        !matches!(self, Self::Copier(Copier::Helper | Copier::DsaSim { .. }))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Subject {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::available().map(Self::name).collect::<Vec<_>>().join(", ");
        Self::available()
            .find(|subject| subject.name() == text)
            .ok_or_else(|| format!("engine '{text}': expected one that this machine has: {}", names()))
    }
}

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    /// Copy sizes in bytes.
    pub sizes: Vec<usize>,
    /// Numbers of copies per submission.
    pub batches: Vec<usize>,
    /// Numbers of copies in flight. They are reduced for large copies, so that warm data stays warm.
    pub depths: Vec<usize>,
    pub temperatures: Vec<Temperature>,
    pub subjects: Vec<Subject>,
    pub rounds: usize,
    /// Time limit of a cell. When it is reached, the cell ends with fewer rounds, but never with fewer than five.
    pub timeout: Duration,
    pub hugepages: Hugepages,
    pub lcore: usize,
    pub other_lcore: Option<usize>,
}

/// A valid combination of parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cell {
    size: usize,
    batch: usize,
    depth: usize,
    temperature: Temperature,
    subject: Subject,
}

impl Options {
    /// Returns the combinations. A depth that is too large for warm data is reduced, and a batch is never larger than
    /// the depth.
    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &temperature in &self.temperatures {
            for &subject in &self.subjects {
                for &size in &self.sizes {
                    for &depth in &self.depths {
                        let depth = depth.min((WARM / size).max(1));
                        for &batch in &self.batches {
                            let cell = Cell { size, batch: batch.min(depth), depth, temperature, subject };
                            if !cells.contains(&cell) {
                                cells.push(cell);
                            }
                        }
                    }
                }
            }
        }
        cells
    }
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If something cannot be set up, or a byte does not arrive.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    offcore_stats::lcore::pin(options.lcore)?;
    let other = OtherCore::start(options.other_lcore)?;
    let mut clock = ClockCheck::new();
    let cells = options.cells();
    progress.begin(cells.len());
    for cell in cells {
        progress.say(&format!("{} {} {} B", cell.subject, cell.temperature, cell.size));
        emit(cell.measure(options, &other, &mut clock).with_context(|| {
            format!(
                "{}, {} bytes, batches of {}, {} in flight",
                cell.subject, cell.size, cell.batch, cell.depth
            )
        })?);
        progress.step();
    }
    progress.end();
    Ok(())
}

/// Results of the rounds of a cell.
#[derive(Debug, Default)]
struct Samples {
    /// TSC ticks per copy.
    submit: Vec<f64>,
    reap: Vec<f64>,
    /// Bytes per nanosecond.
    bandwidth: Vec<f64>,
    latencies: Vec<f64>,
    verified: u64,
    rejected: usize,
}

impl Cell {
    fn measure(&self, options: &Options, other: &OtherCore, clock: &mut ClockCheck) -> Result<Row> {
        // Drop order: the channel ends the copies in flight before the buffers and the engine are dropped.
        let copies = Copies::new(self.size, self.depth, self.temperature, options.hugepages)?;
        let copies = Arc::new(Mutex::new(copies));
        let mut engine = match self.subject {
            Subject::Copier(copier) => copier.open()?,
            Subject::Routine(_) => None,
        };
        let mut channel = match &mut engine {
            Some(engine) => engine.take_channel().context("the engine has a channel")?,
            None => CpuDevice.open_channel(CHANNEL)?,
        };
        let engine = engine.map(|engine| Arc::new(Mutex::new(engine)));
        let mut samples = Samples::default();
        let (mut round, started) = (0, Instant::now());
        while round < WARM_UP + options.rounds {
            let steady = clock.holds();
            let counted = round >= WARM_UP && (steady || samples.rejected >= options.rounds);
            self.round(&copies, channel.as_mut(), engine.as_ref(), other, counted.then_some(&mut samples))?;
            samples.rejected += usize::from(!steady);
            round += usize::from(counted || round < WARM_UP);
            if round >= WARM_UP + FEWEST && started.elapsed() > options.timeout {
                break;
            }
        }
        drop(channel);
        Ok(self.row(&samples))
    }

    /// Runs one round and adds its results to `samples`.
    fn round(
        &self,
        copies: &Arc<Mutex<Copies>>,
        channel: &mut dyn Channel,
        engine: Option<&Arc<Mutex<Engine>>>,
        other: &OtherCore,
        samples: Option<&mut Samples>,
    ) -> Result<()> {
        other.run_on(self.temperature, copies, |copies| {
            copies.prepare();
            Ok(())
        })?;
        let mut mine = lock(copies);
        mine.describe();
        let (mut submitted, mut reaped, mut worked_ns, mut latencies) = (0, 0, 0.0, Vec::new());
        let ns = |ticks: u64| ticks as f64 * 1e9 / tsc::hz() as f64;
        if self.subject.by_core() {
            for from in (0..self.depth).step_by(self.batch) {
                let start = tsc::now();
                match self.subject {
                    Subject::Routine(routine) => mine.run(routine, from, self.batch),
                    Subject::Copier(_) => mine.submit_part(channel, from, self.batch)?,
                }
                let ticks = tsc::now() - start;
                submitted += ticks;
                latencies.push(ns(ticks));
            }
            worked_ns = ns(submitted);
            if let Subject::Copier(_) = self.subject {
                let start = tsc::now();
                mine.reap(channel)?;
                reaped = tsc::now() - start;
            }
        } else if let Some(engine) = engine {
            let start = tsc::now();
            mine.submit(channel, self.batch)?;
            submitted = tsc::now() - start;
            drop(mine);
            other.run_on(self.temperature, engine, |engine| {
                engine.run_timed();
                Ok(())
            })?;
            latencies.extend_from_slice(lock(engine).latencies());
            worked_ns = latencies.last().copied().unwrap_or_default();
            mine = lock(copies);
            let start = tsc::now();
            mine.reap(channel)?;
            reaped = tsc::now() - start;
        }
        drop(mine);
        other.run_on(self.temperature, copies, |copies| copies.verify().map(drop))?;
        if let Some(samples) = samples {
            let depth = self.depth as f64;
            samples.submit.push(submitted as f64 / depth);
            samples.reap.push(reaped as f64 / depth);
            ensure!(worked_ns > 0.0, "the engine's clock stood still");
            samples.bandwidth.push(self.size as f64 * depth / worked_ns);
            samples.latencies.append(&mut latencies);
            samples.verified += self.depth as u64;
        }
        Ok(())
    }

    fn row(&self, samples: &Samples) -> Row {
        let both: Vec<_> = samples.submit.iter().zip(&samples.reap).map(|(a, b)| a + b).collect();
        let mut sorted = samples.latencies.clone();
        sorted.sort_by(f64::total_cmp);
        let mut row = Row::new("dma", "copy", "core-cost");
        (row.head.frame, row.head.burst, row.head.window) = (self.size, self.batch, self.depth);
        row.head.mode = if self.subject.by_core() { "cpu" } else { "offload" }.into();
        row.head.engine = self.subject.name().into();
        row.head.temperature = self.temperature.name().into();
        row.figures.simulated = matches!(self.subject, Subject::Copier(copier) if copier.simulated());
        (row.clock.rejected, row.counts) = (samples.rejected, Counts::all_of(samples.verified));
        row.set_submit_and_reap(&both, [&samples.submit, &samples.reap]);
        row.dma.gigabytes_per_s = Some(Spread::of(&samples.bandwidth).median);
        row.latency.p50_ns = percentile(&sorted, 0.5);
        row.latency.p90_ns = percentile(&sorted, 0.9);
        row.latency.p99_ns = percentile(&sorted, 0.99);
        row
    }
}

/// Returns the sample at quantile `share` of the sorted samples.
pub(crate) fn percentile(sorted: &[f64], share: f64) -> Option<f64> {
    let last = sorted.len().checked_sub(1)?;
    sorted.get((last as f64 * share).round() as usize).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    fn options(subjects: Vec<Subject>) -> Options {
        Options {
            sizes: vec![64, 4096, 1 << 20],
            batches: vec![1, 32],
            depths: vec![64],
            temperatures: vec![Temperature::Remote],
            subjects,
            rounds: 6,
            timeout: Duration::ZERO,
            hugepages: Hugepages::None,
            lcore: offcore_stats::lcore::available().unwrap()[0],
            other_lcore: None,
        }
    }

    /// Takes some seconds: up to fourteen engines and routines in four arrangements, with every byte compared.
    #[test]
    fn every_engine_copies_every_size() {
        let options = Options { sizes: vec![64, 5000], ..options(Subject::available().collect()) };
        let mut rows = Vec::new();
        run(&options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
        assert_eq!(rows.len(), options.subjects.len() * 4);
        for row in rows {
            golden::check("dma", &row);
            assert!(row.counts.verified >= (row.head.window * FEWEST) as u64, "{row:?}");
            assert!(
                row.dma.gigabytes_per_s > Some(0.0) && row.latency.p50_ns <= row.latency.p99_ns,
                "{row:?}"
            );
            assert_eq!(row.figures.simulated, row.head.engine.starts_with("dsa-sim"), "{row:?}");
        }
    }

    #[test]
    fn large_copies_have_lower_depth() {
        let cells = options(vec![Subject::Copier(Copier::Core)]).cells();
        let depths: Vec<_> = cells.iter().map(|cell| (cell.size, cell.batch, cell.depth)).collect();
        assert_eq!(depths[..2], [(64, 1, 64), (64, 32, 64)]);
        assert_eq!(depths[4..], [(1 << 20, 1, 16), (1 << 20, 16, 16)]);
    }

    #[test]
    fn percentiles_come_from_sorted_samples() {
        let sorted: Vec<f64> = (0..=100).map(f64::from).collect();
        assert_eq!((percentile(&sorted, 0.5), percentile(&sorted, 0.99)), (Some(50.0), Some(99.0)));
        assert_eq!(percentile(&[], 0.5), None);
    }
}
