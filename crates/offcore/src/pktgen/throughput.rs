//! `offcore pktgen --rfc2544`: the throughput for each frame size and loss ratio.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::anyhow;
use offcore_bench::progress::Progress;
use offcore_bench::throughput_plot::{self, Point};
use offcore_flow::pktgen::Running;
use offcore_flow::pktgen::rate::{Rate, WIRE_OVERHEAD};
use offcore_flow::pktgen::report::{Figures, Latencies, Reporter};
use offcore_flow::pktgen::search::{SearchOptions, Throughput, expected_trials, search};
use offcore_flow::pktgen::trial::{Trial, TrialError, TrialPlan};
use serde::Serialize;

use super::args::PktgenArgs;
use super::interfaces::{Compared, Interfaces};
use crate::args::Format;
use crate::failure::Failure;
use crate::output::table::{columns, digits, or_dash, rate, us};
use crate::output::{say, write};
use crate::switch::ended;
use crate::switch::report::StoppedBy;

/// Frame sizes of RFC 2544 for Ethernet (9.1).
const FRAMES: [usize; 7] = [64, 128, 256, 512, 1024, 1280, 1518];
/// Default length of a trial. RFC 2544 (24) requires 60 s for a published result, which --duration can set.
const DURATION: Duration = Duration::from_secs(5);
/// Resolution in percent of the highest rate.
const RESOLUTION: f64 = 1.0;

/// The throughput for one size and loss ratio, in each direction.
#[derive(Debug, Serialize)]
// fields-ok: plain figures
struct Row {
    report: &'static str,
    /// Frame length in bytes, including FCS.
    frame: usize,
    /// Permitted loss in percent.
    loss: f64,
    /// Requested rate of the best trial in million packets per second and direction. `None` if no trial passed.
    mpps: Option<f64>,
    /// The rate in Gbit/s of frames, including FCS.
    gbps: Option<f64>,
    /// The rate in Gbit/s on the wire.
    gbps_l1: Option<f64>,
    /// The limiting factor: `loss`, `max_rate` or `sender`.
    limited_by: &'static str,
    /// The highest rate tried, in million packets per second.
    max_mpps: f64,
    /// Number of trials for this size so far.
    trials: usize,
    /// Length of a trial in seconds.
    trial_seconds: f64,
    /// Loss in the best trial in percent.
    lost: Option<f64>,
    /// Packets sent in the best trial, in all directions.
    sent: u64,
    /// Packets received.
    received: u64,
    /// Packets whose content was checked.
    verified: u64,
    reordered: u64,
    duplicates: u64,
    corrupt: u64,
    /// Latencies in the best trial.
    #[serde(flatten)]
    latencies: Latencies,
}

impl Row {
    fn new(frame: usize, max_rate: f64, duration: Duration, found: &Throughput<Trial>) -> Self {
        let best = found.best;
        let rate = best.map(|best| best.outcome.rate);
        let gbps = |bytes: usize| rate.map(|rate| rate * bytes as f64 * 8.0 / 1e9);
        let Figures { counts, latencies, .. } = best.map_or_else(Figures::default, |best| best.figures);
        Self {
            report: "throughput",
            frame,
            loss: found.loss * 100.0,
            mpps: rate.map(|rate| rate / 1e6),
            gbps: gbps(frame),
            gbps_l1: gbps(frame + WIRE_OVERHEAD),
            limited_by: found.limit.name(),
            max_mpps: max_rate / 1e6,
            trials: found.trials,
            trial_seconds: duration.as_secs_f64(),
            lost: best.map(|best| best.outcome.loss() * 100.0),
            sent: counts.sent,
            received: counts.received,
            verified: counts.verified,
            reordered: counts.reordered,
            duplicates: counts.duplicates,
            corrupt: counts.corrupt,
            latencies,
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.frame.to_string(),
            self.loss.to_string(),
            or_dash(self.mpps.map(|mpps| rate(mpps * 1e6, self.trial_seconds))),
            or_dash(self.gbps_l1.map(|gbps| rate(gbps * 1e9, self.trial_seconds))),
            digits(self.lost, 4),
            self.limited_by.replace('_', " "),
            self.trials.to_string(),
            us(self.latencies.p50_ns),
            us(self.latencies.p99_ns),
            us(self.latencies.max_ns),
        ]
    }
}

/// A trial, as reported during a search.
#[derive(Debug, Serialize)]
struct TrialLine {
    report: &'static str,
    frame: usize,
    /// Requested rate in million packets per second and direction.
    mpps: f64,
    /// Whether the sender reached the rate.
    offered: bool,
    /// Loss in percent.
    lost: f64,
}

impl TrialLine {
    fn new(frame: usize, trial: &Trial) -> Self {
        let Trial { outcome, .. } = trial;
        let (mpps, lost) = (outcome.rate / 1e6, outcome.loss() * 100.0);
        Self { report: "trial", frame, mpps, offered: outcome.offered, lost }
    }
}

/// The interfaces' counters, which follow the rows.
#[derive(Debug, Serialize)]
struct End<'a> {
    report: &'static str,
    interfaces: &'a [Compared],
    unfinished: usize,
}

/// Searches and prints the rows. A failed or interrupted search prints its finished rows first, and then the error.
pub(super) fn run(
    args: &PktgenArgs,
    mut running: Running,
    mut interfaces: Interfaces,
    interrupted: &Arc<AtomicBool>,
) -> Result<(), Failure> {
    let duration = args.run.duration.unwrap_or(DURATION);
    interfaces.begin(&running);
    let (mut rows, progress) = (Vec::new(), Progress::visible());
    let searched = search_all(args, &mut running, interrupted, &progress, &mut rows);
    progress.end();
    if rows.is_empty() {
        searched?;
        return Ok(());
    }
    let compared = interfaces.compare(&running);
    let unfinished = running.stop();
    match args.run.format {
        Format::Json => tell(args, &End { report: "final", interfaces: &compared, unfinished })?,
        Format::Table => {
            write(&table(&rows, duration))?;
            compared.iter().filter_map(Compared::difference).for_each(|difference| say(&difference));
        }
    }
    if let Some(path) = &args.plot {
        let points: Vec<_> = rows
            .iter()
            .map(|row| Point { frame: row.frame, loss: row.loss, mpps: row.mpps.unwrap_or(0.0) })
            .collect();
        throughput_plot::draw(&points, path)?;
        say(&format!("drawn: {}", path.display()));
    }
    searched?;
    Ok(ended(StoppedBy::Count, unfinished, running.ports())?)
}

/// Searches for each size and loss ratio, and adds each row to `rows` immediately.
fn search_all(
    args: &PktgenArgs,
    running: &mut Running,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
    rows: &mut Vec<Row>,
) -> Result<(), Failure> {
    let frames = if args.frame.is_empty() { &FRAMES[..] } else { &args.frame };
    let mut losses: Vec<f64> = args.loss.iter().map(|percent| percent / 100.0).collect();
    losses.sort_by(f64::total_cmp);
    losses.dedup();
    if losses.is_empty() {
        losses.push(0.0);
    }
    let resolution = args.resolution.unwrap_or(RESOLUTION) / 100.0;
    let duration = args.run.duration.unwrap_or(DURATION);
    let mut reporter = Reporter::new(running);
    let mut tick = |running: &mut Running| {
        running.tend();
        !interrupted.load(Ordering::Relaxed)
    };
    let steps =
        |rate: f64| expected_trials(&SearchOptions { losses: Vec::new(), max_rate: rate, resolution });
    progress.begin(frames.len() * (steps(1.0) + losses.len() - 1));
    for (index, &size) in frames.iter().enumerate() {
        let plan = TrialPlan { size, duration, wait: args.wait };
        progress.say(&format!("{size} bytes: learning"));
        running.learn(size, args.wait, &mut tick).map_err(refused)?;
        let burst = args.burst as u32;
        running.change(|settings| settings.burst = burst)?;
        let max_rate = match args.rate {
            Some(Rate::Packets(rate)) => rate,
            _ => running.sending_rate(&plan, &mut tick).map_err(refused)?,
        };
        let options = SearchOptions { losses: losses.clone(), max_rate, resolution };
        let found = search(&options, |rate| -> Result<Trial, Failure> {
            progress.say(&format!("{size} bytes: {:.4} Mpps", rate / 1e6));
            let trial = running.patient_trial(&mut reporter, &plan, rate, &mut tick).map_err(refused)?;
            progress.step();
            tell(args, &TrialLine::new(size, &trial))?;
            Ok(trial)
        });
        for found in found? {
            let row = Row::new(size, max_rate, duration, &found);
            tell(args, &row)?;
            rows.push(row);
        }
        // Searches for lower loss ratios share their trials, so the progress bar advances by sizes.
        progress.at((index + 1) * (steps(1.0) + losses.len() - 1));
    }
    Ok(())
}

/// Writes an object if the format is JSON.
fn tell(args: &PktgenArgs, line: &impl Serialize) -> Result<(), Failure> {
    if args.run.format == Format::Json
        && !write(&(serde_json::to_string(line).map_err(anyhow::Error::new)? + "\n"))?
    {
        return Err(anyhow!("the reader of the results has closed the output").into());
    }
    Ok(())
}

fn refused(error: TrialError) -> Failure {
    match error {
        TrialError::Switch(error) => error.into(),
        error => Failure::Failed(anyhow::Error::new(error)),
    }
}

fn table(rows: &[Row], duration: Duration) -> String {
    let seconds = duration.as_secs_f64();
    let mut text = format!("throughput by RFC 2544, per direction, trials of {seconds} s\n");
    text += &columns(
        "bytes|loss allowed, %|packets/s|bit/s (L1)|lost, %|<limited by|trials|µs: p50|p99|max",
        rows.iter().map(Row::cells),
    );
    let sum = |of: fn(&Row) -> u64| rows.iter().map(of).sum::<u64>();
    for (count, what) in [
        (sum(|row| row.reordered), "packets were reordered"),
        (sum(|row| row.duplicates), "packets were duplicated"),
        (sum(|row| row.corrupt), "packets were corrupted"),
    ] {
        if count > 0 {
            text += &format!("  {count} {what} in these trials\n");
        }
    }
    text
}
