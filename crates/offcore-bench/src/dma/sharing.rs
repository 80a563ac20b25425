//! `offcore bench dma --sharing`: measures the cost of sharing a channel between workers: with a lock, with a shared
//! work queue, or without sharing, where each worker is bound to a separate channel.
//!
//! The workers submit and reap concurrently, each on its lcore. In between, the last worker to finish its submission
//! steps the simulated device, untimed.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow, bail, ensure};
use offcore_dma::share::{SharedChannel, Sharing};
use offcore_dma::{Channel, CopyDevice};
use offcore_dsa::WqMode;
use offcore_dsa::driver::{self, DsaDevice};
use offcore_dsa::sim::{Generation, Profile, SimDevice, SimOptions};
use offcore_mem::Hugepages;
use offcore_stats::{lcore, tsc};

use super::copies::Copies;
use crate::method::copier::{CHANNEL, Worked, virtual_step};
use crate::method::lockstep::lock;
use crate::method::temperature::Temperature;
use crate::model::load::layout;
use crate::report::progress::Progress;
use crate::report::row::{Counts, Row};

/// Total number of entries of all work queues of the simulated device.
const QUEUE_SPACE: u32 = 256;
/// Number of uncounted rounds.
const WARM_UP: usize = 20;
/// TSC ticks after which a missing worker counts as failed: about ten seconds.
const TIMEOUT: u64 = 20_000_000_000;

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct Options {
    pub sharings: Vec<Sharing>,
    pub lcores: Vec<usize>,
    /// Copy sizes in bytes.
    pub sizes: Vec<usize>,
    /// Numbers of copies per submission.
    pub batches: Vec<usize>,
    /// Number of copies in flight per worker.
    pub depth: usize,
    pub rounds: usize,
    pub hugepages: Hugepages,
}

/// Measures every combination. Each gives one row for all workers together.
///
/// # Errors
/// If something cannot be set up, or a byte does not arrive.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    let workers = options.lcores.len();
    ensure!(
        workers * options.depth <= QUEUE_SPACE as usize / 2,
        "{workers} workers of {} copies in flight: at most {} in all",
        options.depth,
        QUEUE_SPACE / 2
    );
    progress.begin(options.sharings.len() * options.sizes.len() * options.batches.len());
    for &sharing in &options.sharings {
        for &size in &options.sizes {
            for batch in options.batches.iter().map(|&batch| batch.min(options.depth)) {
                progress.say(&format!("{} {size} B", sharing.name()));
                emit(cell(options, sharing, size, batch)?);
                progress.step();
            }
        }
    }
    progress.end();
    Ok(())
}

/// A function that steps the engine.
type Step = Box<dyn FnMut() -> Worked + Send>;

/// Returns the workers' channels and the function that makes their copies.
fn channels(sharing: Sharing, workers: usize) -> Result<(Vec<Box<dyn Channel>>, Step)> {
    let (queues, mode) = match sharing {
        Sharing::Bound => (workers, WqMode::Dedicated),
        Sharing::Lock => (1, WqMode::Dedicated),
        Sharing::SharedQueue => (1, WqMode::Shared),
    };
    let options = SimOptions {
        profile: Profile::Layout(Box::new(layout(1, queues, 4, QUEUE_SPACE / queues as u32, mode))),
        generation: Generation::Dsa2,
        ..SimOptions::default()
    };
    let (device, engine) = SimDevice::stepped("dsa-sim0", options)?;
    let open = |queue: usize| {
        DsaDevice::simulated(&device, &format!("wq0.{queue}"), driver::Options::default())
            .with_context(|| format!("work queue {queue}"))
    };
    let channels = match sharing {
        Sharing::Bound => {
            let open = |worker| Ok(open(worker)?.open_channel(CHANNEL)?);
            (0..workers).map(open).collect::<Result<_>>()?
        }
        Sharing::Lock => {
            let shared = SharedChannel::new(open(0)?.open_channel(CHANNEL)?);
            (0..workers).map(|_| Box::new(shared.handle()) as Box<dyn Channel>).collect()
        }
        Sharing::SharedQueue => {
            let queue = open(0)?;
            (0..workers).map(|_| Ok(queue.open_channel(CHANNEL)?)).collect::<Result<_>>()?
        }
    };
    Ok((channels, Box::new(virtual_step(device, engine))))
}

/// TSC ticks per copy of each round: submission and reaping.
type Samples = Vec<(f64, f64)>;

fn cell(options: &Options, sharing: Sharing, size: usize, batch: usize) -> Result<Row> {
    let workers = options.lcores.len();
    let (channels, step) = channels(sharing, workers)?;
    let step = Mutex::new(step);
    let meeting = Meeting::new(workers);
    let results: Vec<Result<Samples>> = std::thread::scope(|scope| {
        let threads: Vec<_> = channels
            .into_iter()
            .zip(&options.lcores)
            .map(|(channel, &lcore)| {
                let (step, meeting) = (&step, &meeting);
                scope.spawn(move || {
                    let result = worker(options, size, batch, channel, lcore, meeting, step);
                    if result.is_err() {
                        meeting.cancelled.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|result| result.unwrap_or_else(|_| Err(anyhow!("a worker's thread ended")))).collect()
    });
    let mut samples = Vec::new();
    for result in results {
        samples.append(&mut result?);
    }
    let both: Vec<_> = samples.iter().map(|(submit, reap)| submit + reap).collect();
    let (submits, reaps): (Vec<_>, Vec<_>) = samples.into_iter().unzip();
    let mut row = Row::new("dma", "sharing", "core-cost");
    (row.head.mode, row.head.engine) = ("offload".into(), "dsa-sim".into());
    (row.head.frame, row.head.burst, row.head.window) = (size, batch, options.depth);
    row.head.temperature = Temperature::Hot.name().into();
    row.figures.simulated = true;
    row.set_submit_and_reap(&both, [&submits, &reaps]);
    (row.dma.sharing, row.dma.workers) = (Some(sharing.name()), Some(workers));
    row.counts = Counts::all_of((both.len() * options.depth) as u64);
    Ok(row)
}

/// Runs the rounds of a worker.
fn worker(
    options: &Options,
    size: usize,
    batch: usize,
    channel: Box<dyn Channel>,
    lcore: usize,
    meeting: &Meeting,
    step: &Mutex<Step>,
) -> Result<Samples> {
    lcore::pin(lcore)?;
    let mut copies = Copies::new(size, options.depth, Temperature::Hot, options.hugepages)?;
    // Dropped before the copies, so that no copy is in flight when their memory is freed.
    let mut channel = channel;
    let mut samples = Vec::new();
    for round in 0..WARM_UP + options.rounds {
        copies.prepare();
        copies.describe();
        meeting.wait()?;
        let start = tsc::now();
        copies.submit(channel.as_mut(), batch)?;
        let submitted = tsc::now() - start;
        if meeting.wait()? {
            let mut step = lock(step);
            while step().copies > 0 {}
        }
        meeting.wait()?;
        let start = tsc::now();
        copies.reap(channel.as_mut())?;
        let reaped = tsc::now() - start;
        copies.verify()?;
        if round >= WARM_UP {
            let depth = options.depth as f64;
            samples.push((submitted as f64 / depth, reaped as f64 / depth));
        }
    }
    // Closing a channel withdraws it from the device, so no other worker may be using the device.
    meeting.wait()?;
    drop(channel);
    Ok(samples)
}

/// A spinning barrier for the workers.
#[derive(Debug)]
struct Meeting {
    workers: usize,
    arrived: AtomicUsize,
    cancelled: AtomicBool,
}

impl Meeting {
    fn new(workers: usize) -> Self {
        Self { workers, arrived: AtomicUsize::new(0), cancelled: AtomicBool::new(false) }
    }

    /// Waits for all workers. Returns `true` for the last worker.
    fn wait(&self) -> Result<bool> {
        let place = self.arrived.fetch_add(1, Ordering::AcqRel);
        let all = (place / self.workers + 1) * self.workers;
        let started = tsc::now();
        while self.arrived.load(Ordering::Acquire) < all {
            if self.cancelled.load(Ordering::Relaxed) || tsc::now() - started > TIMEOUT {
                bail!("another worker failed");
            }
            std::hint::spin_loop();
        }
        Ok(place + 1 == all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::golden;

    #[test]
    fn two_workers_share_in_every_way() {
        let lcores = lcore::available().unwrap();
        let options = Options {
            sharings: vec![Sharing::Lock, Sharing::SharedQueue, Sharing::Bound],
            lcores: vec![lcores[0], *lcores.get(1).unwrap_or(&lcores[0])],
            sizes: vec![512],
            batches: vec![1, 16],
            depth: 32,
            rounds: 20,
            hugepages: Hugepages::None,
        };
        let mut rows = Vec::new();
        run(&options, &Progress::hidden(), &mut |row| rows.push(row)).unwrap();
        rows.iter().for_each(|row| golden::check("dma, sharing", row));
        let names: Vec<_> = rows.iter().filter_map(|row| row.dma.sharing).collect();
        assert_eq!(names, ["lock", "lock", "swq", "swq", "bound", "bound"]);
        assert!(
            rows.iter().all(|row| row.counts.verified == 2 * 20 * 32 && row.figures.simulated),
            "{rows:?}"
        );
        let many = Options { depth: 128, ..options };
        assert!(
            run(&many, &Progress::hidden(), &mut |_| ()).unwrap_err().to_string().contains("at most 128")
        );
    }
}
