//! A session: pipelines whose ends run on separate threads, and in which windows are measured.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use offcore_gpu::device::{GpuDevice, Memory};
use offcore_gpu::pipeline::{Back, Front, PipelineWorker, Setup, pipeline};
use offcore_mem::{Hugepages, Packet, Pool};
use offcore_ring::spsc;
use offcore_stats::lcore;

use super::ends::{Generator, Known, Verifier};
use super::window::{Plan, Seen, Traffic, Window};
use super::{WorkKind, Workload};

/// Timeout of a device. It covers all bursts in flight on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Minimum number of counted bursts in a window, per pipeline.
const FEWEST: u64 = 4;
/// Maximum factor of a window's extension to reach [`FEWEST`] bursts.
const LONGEST: u32 = 20;
/// Number of idle steps after which a thread yields, if that is enabled.
const IDLE: u32 = 64;
/// Number of idle steps after which a thread checks for a stall.
const VERY_IDLE: u32 = 4096;

/// The lcores of a pipeline's ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub generator: usize,
    /// Lcore of the verifier. If `None`, the generator's thread runs the verifier as well.
    pub verifier: Option<usize>,
}

/// Assigns lcores to the ends of `pipelines` pipelines. Each pipeline gets two lcores if at least one lcore remains for
/// each of the device's `device_threads` threads. Otherwise it gets one. The first lcores stay free.
pub(super) fn places(lcores: &[usize], pipelines: usize, device_threads: usize) -> Result<Vec<Place>> {
    ensure!(
        pipelines <= lcores.len(),
        "--pipelines {pipelines}: found {} lcores, expected one for each pipeline at least",
        lcores.len()
    );
    let two = 2 * pipelines + device_threads <= lcores.len();
    let used = &lcores[lcores.len() - if two { 2 * pipelines } else { pipelines }..];
    Ok(if two {
        used.chunks(2).map(|pair| Place { generator: pair[0], verifier: pair.get(1).copied() }).collect()
    } else {
        used.iter().map(|&generator| Place { generator, verifier: None }).collect()
    })
}

/// Parameters of a session.
#[derive(Debug)]
pub(super) struct SessionSetup<'a> {
    /// Unit that processes bursts.
    pub workload: Workload,
    /// Memory in which a device processes packets.
    pub memory: Memory,
    /// Work on the packets.
    pub work: WorkKind,
    /// Minimum processing time per packet in nanoseconds.
    pub forced_ns: u32,
    /// Maximum number of packets in a burst.
    pub burst: usize,
    /// Maximum number of bursts in flight.
    pub slots: usize,
    /// Number of thread blocks of a device, and threads per block.
    pub blocks_and_threads: (u32, u32),
    pub places: &'a [Place],
    /// Expected values for the verifiers.
    pub known: Arc<Known>,
    pub pool: &'static Pool,
    /// Page size of the burst rings.
    pub hugepages: Hugepages,
    /// Whether idle threads yield.
    pub yields: bool,
}

/// Running pipelines.
#[derive(Debug)]
pub(super) struct Session {
    threads: Vec<Thread>,
    pipelines: usize,
}

/// A thread of a session.
#[derive(Debug)]
struct Thread {
    windows: Sender<Arc<Window>>,
    seen: Receiver<Result<Seen>>,
    handle: JoinHandle<Vec<Packet>>,
}

impl Session {
    /// Starts pipelines, which share `packets`. Only some workloads need `device`.
    pub(super) fn open(
        setup: &SessionSetup<'_>,
        mut device: Option<&mut (dyn GpuDevice + 'static)>,
        packets: &mut Vec<Packet>,
    ) -> Result<Self> {
        let pipelines = setup.places.len();
        let each = packets.len() / pipelines;
        let mut session = Self { threads: Vec::new(), pipelines };
        for (pipeline, place) in setup.places.iter().enumerate() {
            let (front, back) = one_pipeline(setup, device.as_deref_mut())?;
            let (checked, returned) = spsc::ring(each.next_power_of_two())?;
            let own = packets.split_off(packets.len() - each);
            let generator = Generator::new(front, returned, own, setup.burst, setup.pool);
            let verifier = Verifier::new(back, checked, Arc::clone(&setup.known), setup.pool);
            let (generator, verifier) = (Some(generator), Some(verifier));
            if let Some(lcore) = place.verifier {
                let ends = Ends { generator, verifier: None };
                session.spawn(place.generator, pipeline, setup.yields, ends)?;
                session.spawn(lcore, pipeline, setup.yields, Ends { generator: None, verifier })?;
            } else {
                session.spawn(place.generator, pipeline, setup.yields, Ends { generator, verifier })?;
            }
        }
        Ok(session)
    }

    fn spawn(&mut self, lcore: usize, pipeline: usize, yields: bool, ends: Ends) -> Result<()> {
        let (windows, to_do) = channel::<Arc<Window>>();
        let (report, seen) = channel();
        let work = move || {
            let mut ends = ends;
            let pinned = lcore::pin(lcore).map_err(|error| error.to_string());
            for window in to_do {
                let found = match &pinned {
                    Ok(()) => ends.run(&window, pipeline, yields),
                    Err(reason) => {
                        window.fail();
                        window.has_sent(pipeline, 0);
                        Err(anyhow!("{reason}"))
                    }
                };
                let found = found.with_context(|| format!("pipeline {pipeline}"));
                if report.send(found).is_err() {
                    break;
                }
            }
            ends.into_packets()
        };
        let handle = thread::Builder::new().name(format!("offcore-ends{pipeline}")).spawn(work)?;
        self.threads.push(Thread { windows, seen, handle });
        Ok(())
    }

    /// Measures a window of `length` after `warm_up`. Returns the combined results of all threads.
    pub(super) fn measure(&self, plan: Plan, warm_up: Duration, length: Duration) -> Result<Seen> {
        let window = Arc::new(Window::new(plan, self.pipelines));
        // Has a lower limit for short windows, because the threads may wait for CPU time on a busy machine.
        let longest = (length * LONGEST).max(TIMEOUT);
        for thread in &self.threads {
            thread.windows.send(Arc::clone(&window)).map_err(|_| anyhow!("a thread has ended"))?;
        }
        if !matches!(plan.traffic, Traffic::EveryOne(_)) {
            wait(warm_up, &window);
            window.begin_to_measure();
            wait(length, &window);
            let more = Instant::now();
            while window.counted() < FEWEST && !window.has_failed() && more.elapsed() < longest {
                thread::sleep(Duration::from_millis(5));
            }
            window.end();
        }
        let found: Vec<_> = self
            .threads
            .iter()
            .map(|thread| thread.seen.recv().unwrap_or_else(|_| Err(anyhow!("a thread has ended"))))
            .collect();
        let mut all = Seen::default();
        for seen in found {
            all.add(&seen?);
        }
        let counts = matches!(plan.traffic, Traffic::EveryOne(_)) || all.bursts > 0;
        ensure!(counts, "no burst has come back in {:.1} s", longest.as_secs_f64());
        Ok(all)
    }

    /// Ends the pipelines and appends their packets to `packets`.
    pub(super) fn close(self, packets: &mut Vec<Packet>) {
        let handles: Vec<_> = self.threads.into_iter().map(|thread| thread.handle).collect();
        for handle in handles {
            if let Ok(own) = handle.join() {
                packets.extend(own);
            }
        }
    }
}

/// Waits for `length`, or until an error occurs.
fn wait(length: Duration, window: &Window) {
    const STEP: Duration = Duration::from_millis(10);
    let since = Instant::now();
    while let Some(left) = length.checked_sub(since.elapsed()) {
        if window.has_failed() {
            return;
        }
        thread::sleep(left.min(STEP));
    }
}

fn one_pipeline(
    setup: &SessionSetup<'_>,
    device: Option<&mut (dyn GpuDevice + 'static)>,
) -> Result<(Front, Back)> {
    let (blocks, pipelines) = setup.blocks_and_threads;
    let worker = match setup.workload {
        Workload::None => PipelineWorker::None,
        Workload::Cpu | Workload::Core => PipelineWorker::Cpu,
        Workload::Device(launch) => PipelineWorker::Device {
            device: device.with_context(|| format!("workload {launch} needs a device"))?,
            launch,
            blocks,
            threads: pipelines,
            memory: setup.memory,
        },
    };
    let patterns = setup.known.content.patterns();
    Ok(pipeline(Setup {
        burst: setup.burst,
        slots: setup.slots,
        worker,
        work: setup.work.of_pipeline(setup.forced_ns, patterns),
        timeout: TIMEOUT,
        pool: setup.pool,
        hugepages: setup.hugepages,
    })?)
}

/// The ends that a thread runs: one end of a pipeline, or both.
struct Ends {
    generator: Option<Generator>,
    verifier: Option<Verifier>,
}

impl Ends {
    /// Runs the thread's part of a window.
    fn run(&mut self, window: &Window, pipeline: usize, yields: bool) -> Result<Seen> {
        let Self { generator, verifier } = self;
        generator.iter_mut().for_each(|generator| generator.begin(window));
        verifier.iter_mut().for_each(Verifier::begin);
        let (mut submits, mut idle) = (None, 0u32);
        loop {
            let mut busy = false;
            if let (Some(generator), None) = (&mut *generator, submits) {
                if generator.has_ended(window) {
                    let (sent, taken) = generator.finish();
                    window.has_sent(pipeline, sent);
                    submits = Some(taken);
                } else {
                    busy = generator.step(window);
                }
            }
            if let Some(verifier) = verifier {
                busy |= verifier.step(window, pipeline);
            }
            if busy {
                idle = 0;
                continue;
            }
            idle = idle.wrapping_add(1);
            let is_over = match (&mut *verifier, &mut *generator) {
                (Some(verifier), _) => {
                    verifier.is_through(window, pipeline)
                        || idle.is_multiple_of(VERY_IDLE) && verifier.is_stuck(window)
                }
                (None, Some(generator)) => submits.is_some() && (generator.settle() || window.has_failed()),
                (None, None) => true,
            };
            if is_over {
                break;
            }
            if yields && idle.is_multiple_of(IDLE) { thread::yield_now() } else { std::hint::spin_loop() }
        }
        let seen = verifier.as_mut().map(|verifier| verifier.finish(window)).transpose()?;
        Ok(Seen { submits: submits.unwrap_or_default(), ..seen.unwrap_or_default() })
    }

    /// Ends the pipeline and returns its packets.
    fn into_packets(self) -> Vec<Packet> {
        self.generator.map(Generator::into_packets).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pipeline_ends_get_separate_lcores() {
        let place = |generator, verifier| Place { generator, verifier };
        assert_eq!(places(&[0, 1], 1, 1).unwrap(), [place(1, None)]);
        assert_eq!(places(&[0, 1, 2], 1, 1).unwrap(), [place(1, Some(2))]);
        let sixteen: Vec<_> = (0..16).collect();
        let four = places(&sixteen, 4, 1).unwrap();
        assert_eq!((four.len(), four[0], four[3]), (4, place(8, Some(9)), place(14, Some(15))));
        assert_eq!(places(&sixteen, 8, 1).unwrap()[7], place(15, None));
        let error = places(&[0, 1], 3, 1).unwrap_err().to_string();
        assert!(error.contains("--pipelines 3: found 2 lcores"), "{error}");
    }
}
