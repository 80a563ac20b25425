//! The `latency` case of `offcore bench vhost`: measures packet latency through a back end at a given packet rate.
//!
//! ```text
//! lcore                                  other lcore
//! VhostPort, mac, back where it came ──  one thread: sends when a packet is due, receives, notes the time,
//! from (Table 8's loop)                  steps the engine
//! ```
//! First a closed loop measures the capacity of the arrangement. Then packets are sent at 50, 80 and 95 % of the
//! capacity as an open loop: each packet is sent at its time, whether or not the previous one has come back. The
//! latency is the time from when a packet was *due* until it is back, so that queueing behind a stall is included.
//!
//! The engine of modes `offload` and `auto` is a helper core's loop. The front end's thread steps it between its own
//! work, because two cores leave no third core for it. The row's engine name says so. All arrangements take turns
//! several times, each time with new memory and threads.

pub(in crate::vhost) mod back_end;
mod front_end;

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use offcore_dma::Mode;
use offcore_mem::{Hugepages, Pool};
use offcore_stats::{Histogram, lcore, tsc};

use crate::guests::guest::Seen;
use crate::peer::tempdir::TempDir;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Load, Row};
use back_end::BackEnd;
use front_end::Paced;

/// Default frame lengths.
pub const FRAMES: [usize; 3] = [64, 512, 1518];
/// Offered loads as shares of the capacity.
pub const LOADS: [f64; 3] = [0.5, 0.8, 0.95];
/// Engine name in rows with an engine: a helper core's loop, which the front end's core runs between its own work.
pub const ENGINE: &str = "core:1-by-front-end";

/// Number of packet buffers of the back end.
const BUFFERS: usize = 8192;
/// Run-in time of the closed loop. It is long enough for the decision of mode `auto`.
const SETTLE: Duration = Duration::from_millis(150);

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct LatencyOptions {
    /// Frame lengths, including the FCS.
    pub frames: Vec<usize>,
    /// Copy modes. Mode `auto` is measured without and with a latency bound.
    pub modes: Vec<Mode>,
    /// The latency bound: maximum time of a packet through an engine, from submission to publication.
    pub max_latency: Duration,
    /// Number of restarts.
    pub restarts: usize,
    /// Length of a window. Each load has one window per restart.
    pub window: Duration,
    /// Page size of the back end and of the front end.
    pub hugepages: Hugepages,
    /// The back end's core.
    pub lcore: usize,
    /// The front end's core.
    pub other_lcore: Option<usize>,
}

impl LatencyOptions {
    /// Returns options with eight windows of 0.25 s for each row, or two with `quick`.
    pub fn new(frames: &[usize], quick: bool, lcore: usize, other_lcore: Option<usize>) -> Self {
        Self {
            frames: frames.into(),
            modes: vec![Mode::Cpu, Mode::Offload, Mode::Auto],
            max_latency: Duration::from_micros(20),
            restarts: if quick { 2 } else { 8 },
            window: Duration::from_millis(250),
            hugepages: Hugepages::Auto,
            lcore,
            other_lcore,
        }
    }

    /// Returns the arrangements that take turns.
    fn arrangements(&self) -> Vec<Arrangement> {
        let with = |mode| {
            let bounds = if mode == Mode::Auto { vec![None, Some(self.max_latency)] } else { vec![None] };
            bounds.into_iter().map(move |max_latency| Arrangement { mode, max_latency })
        };
        self.modes.iter().copied().flat_map(with).collect()
    }
}

/// Copy mode and latency bound.
#[derive(Clone, Copy, Debug)]
struct Arrangement {
    mode: Mode,
    max_latency: Option<Duration>,
}

/// Results at one load.
#[derive(Debug)]
struct AtLoad {
    latencies: Histogram,
    /// Million packets per second that were due, for each window.
    offered: Vec<f64>,
    /// Copies made by the core and by the engine.
    copies: [u64; 2],
    seen: Seen,
    lost: u64,
}

impl AtLoad {
    fn new() -> Self {
        Self {
            latencies: Histogram::new(),
            offered: Vec::new(),
            copies: [0; 2],
            seen: Seen::default(),
            lost: 0,
        }
    }
}

/// Results of one arrangement.
#[derive(Debug)]
struct Gathered {
    /// Million packets per second in the closed loop, for each restart.
    capacity: Vec<f64>,
    loads: [AtLoad; LOADS.len()],
}

/// Measures everything that `options` selects and passes each finished row to `emit`.
///
/// # Errors
/// If two lcores are not available, something cannot be set up, or a packet comes back changed or out of order.
pub fn run(options: &LatencyOptions, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let Some(other_lcore) = options.other_lcore.filter(|&other| other != options.lcore) else {
        bail!("latency needs two lcores: one for the back end, one for the front end; see --lcores");
    };
    let pool = Pool::new(BUFFERS, 2048, options.hugepages)?;
    let arrangements = options.arrangements();
    progress.begin(options.frames.len() * options.restarts * arrangements.len());
    for &frame in &options.frames {
        progress.say(&format!("latency {frame} B"));
        let gathered = std::thread::scope(|scope| {
            let front_end = std::thread::Builder::new().name("bench-front-end".into());
            let thread = front_end.spawn_scoped(scope, || {
                lcore::pin(other_lcore)?;
                cell(options, frame, &arrangements, pool, progress)
            })?;
            thread.join().map_err(|_| anyhow!("the front end's thread has panicked"))?
        });
        let gathered = gathered.with_context(|| format!("{frame} B"))?;
        for (arrangement, gathered) in arrangements.iter().zip(&gathered) {
            for (load, at_load) in LOADS.iter().zip(&gathered.loads) {
                emit(row(frame, *arrangement, &gathered.capacity, *load, at_load));
            }
        }
    }
    progress.end();
    Ok(())
}

/// Measures one frame length.
fn cell(
    options: &LatencyOptions,
    frame: usize,
    arrangements: &[Arrangement],
    pool: &'static Pool,
    progress: &Progress,
) -> Result<Vec<Gathered>> {
    let new = |_| Gathered { capacity: Vec::new(), loads: std::array::from_fn(|_| AtLoad::new()) };
    let mut all: Vec<Gathered> = arrangements.iter().map(new).collect();
    for _ in 0..options.restarts {
        for (arrangement, gathered) in arrangements.iter().zip(&mut all) {
            let dir = TempDir::new()?;
            let windows = gathered.restart(options, frame, *arrangement, pool, &dir.file("vhost"));
            windows.with_context(|| format!("mode {}", arrangement.mode))?;
            progress.step();
        }
    }
    Ok(all)
}

impl Gathered {
    fn restart(
        &mut self,
        options: &LatencyOptions,
        frame: usize,
        arrangement: Arrangement,
        pool: &'static Pool,
        socket: &Path,
    ) -> Result<()> {
        let most = arrangement.max_latency.map(tsc::ticks);
        let mut back_end = BackEnd::start(&[socket.into()], options.lcore, pool, arrangement.mode, most)?;
        let mut front_end = Paced::connect(socket, frame, options.hugepages)?;
        front_end.closed(&mut back_end, SETTLE)?;
        let capacity = front_end.closed(&mut back_end, options.window)?;
        self.capacity.push(capacity * tsc::hz() as f64 / 1e6);
        for (load, at_load) in LOADS.iter().zip(&mut self.loads) {
            let (seen, lost, copies) = (front_end.seen(), front_end.lost(), back_end.copies()?);
            let interval = 1.0 / (capacity * load);
            front_end.open(&mut back_end, interval, options.window, &mut at_load.latencies)?;
            at_load.offered.push(tsc::hz() as f64 / interval / 1e6);
            at_load.lost += front_end.lost() - lost;
            let (now, copies_now) = (front_end.seen(), back_end.copies()?);
            at_load.seen.received += now.received - seen.received;
            at_load.seen.verified += now.verified - seen.verified;
            for (sum, (now, before)) in at_load.copies.iter_mut().zip(copies_now.into_iter().zip(copies)) {
                *sum += now - before;
            }
        }
        match back_end.stop()? {
            0 => Ok(()),
            left => bail!("{left} packets were never finished"),
        }
    }
}

fn row(frame: usize, arrangement: Arrangement, capacity: &[f64], load: f64, at_load: &AtLoad) -> Row {
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len().max(1) as f64;
    let [by_core, by_engine] = at_load.copies;
    let engine = if arrangement.mode == Mode::Cpu { "cpu" } else { ENGINE };
    let mut row = Row::new("vhost", "latency", "open-loop");
    (row.head.mode, row.head.engine) = (arrangement.mode.to_string(), engine.into());
    (row.head.frame, row.head.ring, row.head.temperature) = (frame, "split", "remote".into());
    row.set_latency(&at_load.latencies);
    row.load = Load {
        load: Some(load),
        capacity_mpps: Some(mean(capacity)),
        max_latency_us: arrangement.max_latency.map(|most| most.as_secs_f64() * 1e6),
        engine_share: (by_core + by_engine > 0).then(|| by_engine as f64 / (by_core + by_engine) as f64),
        ..Load::default()
    };
    let Seen { received, verified, .. } = at_load.seen;
    row.counts = Counts { received, verified, lost: at_load.lost };
    row.set_mpps(mean(&at_load.offered));
    row
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn rows_have_percentiles() {
        let mut at_load = AtLoad { offered: vec![1.0], copies: [1, 1], ..AtLoad::new() };
        at_load.latencies.record(1000);
        for (max_latency, kind) in [(None, ""), (Some(Duration::from_micros(20)), ", bounded")] {
            let arrangement = Arrangement { mode: Mode::Auto, max_latency };
            let row = row(64, arrangement, &[2.0], 0.5, &at_load);
            golden::check(&format!("vhost, latency{kind}"), &row);
        }
    }

    #[test]
    fn every_arrangement_counts_packets() {
        let lcores = lcore::available().unwrap();
        let options = LatencyOptions {
            restarts: 1,
            window: Duration::from_millis(20),
            hugepages: Hugepages::None,
            ..LatencyOptions::new(&[64], true, lcores[0], lcores.get(1).copied())
        };
        let mut rows = Vec::new();
        let result = run(&options, &Progress::hidden(), &mut |row| rows.push(row));
        if options.other_lcore.is_none() {
            assert!(result.unwrap_err().to_string().contains("two lcores"));
            return;
        }
        result.unwrap();
        let named: Vec<_> =
            rows.iter().map(|row| (row.head.mode.as_str(), row.load.max_latency_us, row.load.load)).collect();
        let expected = [("cpu", None), ("offload", None), ("auto", None), ("auto", Some(20.0))];
        let expected: Vec<_> = expected
            .into_iter()
            .flat_map(|(mode, most)| LOADS.map(|load| (mode, most, Some(load))))
            .collect();
        assert_eq!(named, expected);
        for row in &rows {
            assert_eq!(
                (row.figures.metric, row.figures.unit, row.head.arrangement),
                ("latency", "ns", "open-loop")
            );
            assert!(
                row.counts.received > 0
                    && row.counts.verified > 0
                    && row.counts.verified <= row.counts.received,
                "{row:?}"
            );
            let [p50, p99, p999] =
                [row.latency.p50_ns, row.latency.p99_ns, row.latency.p999_ns].map(Option::unwrap);
            assert!(
                row.figures.spread.min <= p50 && p50 <= p99 && p99 <= p999 && p999 <= row.figures.spread.max,
                "{row:?}"
            );
            assert!(
                row.figures.spread.min > 0.0
                    && row.figures.mpps > 0.0
                    && row.figures.mpps < row.load.capacity_mpps.unwrap(),
                "{row:?}"
            );
        }
    }
}
