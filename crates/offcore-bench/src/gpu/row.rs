//! Rows of `offcore bench gpu`.

use offcore_gpu::device::Launch;
use offcore_gpu::kernel::SHARE;
use offcore_stats::tsc;

use super::published::{self, MODEL, Published, UNIT};
use super::rig::{Rig, Samples, Subject};
use super::{Case, Workload};
use crate::method::temperature::Temperature;
use crate::report::row::{self, Counts, GpuColumns, GpuSetup, GpuTimes, Latency, Row};
use crate::report::sample::Spread;

/// Share of the rate of the ends alone, from which the ends count as the bottleneck.
const AS_FAST: f64 = 0.9;
/// Threads per warp, the minimum size of a block on a GPU.
const WARP: u32 = 32;

/// The cell that a row describes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cell<'a> {
    pub case: Case,
    pub subject: &'a Subject,
    pub burst: usize,
}

/// Returns the minimum processing time of a burst whose packets take `ns` each. Threads wait at the same time, whereas
/// the rounds of a block, and all packets of a core, are sequential. With a kernel per burst each block has up to
/// [`SHARE`] packets. Blocks run in parallel, except on the replacement for a GPU.
pub(super) fn forced_ns_per_burst(
    workload: Workload,
    burst: usize,
    threads: u32,
    ns: u64,
    stand_in: bool,
) -> u64 {
    let rounds = |packets: usize| packets.div_ceil(threads.max(1) as usize);
    let times = match workload {
        Workload::None => 0,
        Workload::Cpu | Workload::Core => burst,
        Workload::Device(Launch::Kernel) if stand_in => burst / SHARE * rounds(SHARE) + rounds(burst % SHARE),
        Workload::Device(Launch::Kernel) => rounds(burst.min(SHARE)),
        Workload::Device(Launch::Persistent | Launch::Graph) => rounds(burst),
    };
    times as u64 * ns
}

/// Returns the effective number of threads per block if `asked` were requested.
fn threads_of(launch: Launch, asked: u32, stand_in: bool) -> u32 {
    match launch {
        _ if stand_in => asked,
        Launch::Kernel => asked.clamp(WARP, SHARE as u32),
        Launch::Persistent | Launch::Graph => asked.max(WARP),
    }
}

/// Returns the temperature of the buffers in the terms of the other benchmarks. More than a few buffers that a single
/// core uses sequentially fit none of these terms.
fn temperature(shared: bool, buffers: usize) -> &'static str {
    match shared {
        true => Temperature::Remote.name(),
        false if buffers <= Temperature::Hot.buffers() => Temperature::Hot.name(),
        false => "none",
    }
}

fn row(rig: &Rig<'_>, cell: Cell<'_>, samples: &Samples) -> Row {
    let Cell { case, subject, burst } = cell;
    let (options, device) = (rig.options, subject.workload.is_device());
    let slots = subject.on_their_way(burst, options);
    let seen = &samples.seen;
    let pipelines = if subject.workload == Workload::Core { 0 } else { options.pipelines };
    let two = rig.places[0].verifier.is_some() && pipelines > 0;
    let forced = (subject.forced_ns > 0).then(|| u64::from(subject.forced_ns));
    let (threads, blocks) = match subject.workload {
        Workload::Device(launch) => {
            let blocks = subject.blocks.min(subject.slots(options) as u32);
            let polls = launch == Launch::Persistent;
            (Some(threads_of(launch, options.threads, rig.is_simulated())), polls.then_some(blocks))
        }
        _ => (None, None),
    };
    let per_burst =
        |ns| forced_ns_per_burst(subject.workload, burst, threads.unwrap_or(1), ns, rig.is_simulated());
    let each = |ticks: u64, bursts: u64| (bursts > 0).then(|| tsc::to_ns(ticks) / bursts as f64);
    let name = match subject.workload {
        Workload::None => "none",
        Workload::Cpu | Workload::Core => "cpu",
        Workload::Device(_) => rig.device(),
    };
    let mut row = Row::new("gpu", case, "end-to-end");
    (row.head.frame, row.head.burst, row.head.window) = (subject.frame, burst, slots * burst);
    (row.head.mode, row.head.engine) = (if device { "offload" } else { "cpu" }.into(), name.into());
    row.head.temperature = temperature(device || two, subject.circulating(burst, options)).into();
    row.figures.simulated = device && rig.is_simulated();
    row.counts = Counts { received: seen.received, verified: seen.verified, lost: 0 };
    let setup = GpuSetup {
        workload: subject.workload.name(),
        work: subject.work.name(),
        memory: subject.memory.name(),
        device: if device { rig.device().into() } else { "none".into() },
        device_name: device.then(|| rig.device_name.clone()),
        pipelines,
        lcores_per_pipeline: if two { 2 } else { 1 },
        slots,
        blocks,
        threads,
    };
    let times = GpuTimes {
        submit_ns_per_burst: each(seen.submits.0, seen.submits.1),
        collect_ns_per_burst: each(seen.collects, seen.bursts),
        ..GpuTimes::default()
    };
    let forced_ns_per_burst = forced.map(per_burst);
    row.gpu = Some(GpuColumns {
        setup,
        times,
        forced_ns_per_packet: forced,
        forced_ns_per_burst,
        ..GpuColumns::default()
    });
    row
}

/// Returns a row with the packet rate. `ends` is the rate of the ends alone, in million packets per second.
pub(super) fn rate(rig: &Rig<'_>, cell: Cell<'_>, samples: &Samples, ends: Option<f64>) -> Row {
    let mut row = row(rig, cell, samples);
    row.set_rate(Spread::of(&samples.mpps), tsc::hz());
    let workload = cell.subject.workload;
    if workload == Workload::Core {
        row.head.arrangement = "core-cost";
    } else {
        row.latency = Latency::of(&samples.seen.latencies);
    }
    row.core.bound = Some(match workload {
        Workload::Core | Workload::Cpu => "core",
        Workload::None => "generator",
        Workload::Device(_) if ends.is_some_and(|ends| row.figures.mpps >= AS_FAST * ends) => "generator",
        Workload::Device(_) => "device",
    });
    let mpps = row.figures.mpps;
    row.set_gpu(|gpu| {
        gpu.times.ends_mpps = ends.filter(|_| workload != Workload::Core);
        gpu.times.kbursts_per_s = mpps * 1e3 / cell.burst as f64;
    });
    row
}

/// Returns a row with latencies at a share of the capacity, which is in million packets per second.
pub(super) fn latency(rig: &Rig<'_>, cell: Cell<'_>, samples: &Samples, load: f64, capacity: f64) -> Row {
    let mut row = row(rig, cell, samples);
    row.set_mpps(Spread::of(&samples.mpps).median);
    row.set_latency(&samples.seen.latencies);
    row.head.arrangement = "open-loop";
    (row.load.load, row.load.capacity_mpps) = (Some(load), Some(capacity));
    let (mpps, bursts) = (row.figures.mpps, samples.seen.bursts.max(1));
    // Bursts that were sent because of the timeout had fewer packets.
    let per_burst = samples.seen.latencies.values() as f64 / bursts as f64;
    row.set_gpu(|gpu| gpu.times.kbursts_per_s = mpps * 1e3 / per_burst.max(1.0));
    row
}

/// Returns the smallest of `bursts` from which each of several pipelines, which together reach `mpps`, is faster than
/// `core`.
pub(super) fn break_even(bursts: &[usize], mpps: &[f64], pipelines: usize, core: f64) -> Option<usize> {
    let slower = mpps.iter().rposition(|&mpps| mpps / pipelines as f64 <= core);
    bursts.get(slower.map_or(0, |at| at + 1)).copied()
}

impl Row {
    fn set_gpu(&mut self, enter: impl FnOnce(&mut GpuColumns)) {
        enter(self.gpu.get_or_insert_default());
    }

    /// Sets a published figure, if given.
    pub(super) fn set_published(&mut self, published: Option<Published>) {
        let Some(Published { gbps, v100 }) = published else { return };
        self.published = row::Published::new(Some(gbps), UNIT);
        self.set_gpu(|gpu| gpu.model.published_v100 = v100);
    }

    /// Sets the result of the model, if given.
    pub(super) fn set_model(&mut self, gbps: Option<f64>) {
        self.set_gpu(|gpu| (gpu.model.model_gbps, gpu.model.model) = (gbps, gbps.map(|_| MODEL)));
    }

    /// Sets the baseline, `core` million packets per second, and the burst size from which a pipeline is faster.
    pub(super) fn set_baseline(&mut self, subject: &Subject, core: f64, burst: Option<usize>) {
        let (device, mpps) = (subject.workload.is_device(), self.figures.mpps);
        self.set_gpu(|gpu| {
            if core > 0.0 && (device || subject.workload == Workload::Core) {
                gpu.break_even.baseline = Some(subject.work.baseline());
                gpu.break_even.baseline_mpps = Some(core);
                gpu.break_even.over_baseline = Some(mpps / core);
            }
            if core > 0.0 && device {
                gpu.break_even.break_even_burst = burst;
                gpu.break_even.model_break_even_burst =
                    published::model_break_even(subject.workload, 1e3 / core);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pitfall 6 of l2fwd-nv: its option `-t` is a time per packet on a core, but a time per burst on a GPU.
    #[test]
    fn pitfall_6_forced_time_is_stated() {
        let per_burst = |workload, burst, threads| {
            [true, false].map(|stand_in| forced_ns_per_burst(workload, burst, threads, 1000, stand_in))
        };
        let [kernel, persistent, graph] = Workload::DEVICE;
        assert_eq!(per_burst(Workload::None, 64, 256), [0, 0]);
        // A core processes all packets one after the other.
        assert_eq!(per_burst(Workload::Cpu, 64, 256), [64_000, 64_000]);
        // A block needs several rounds if it has fewer threads than packets.
        for workload in [persistent, graph] {
            assert_eq!(per_burst(workload, 64, 256), [1000, 1000]);
            assert_eq!(per_burst(workload, 1000, 256), [4000, 4000]);
            assert_eq!(per_burst(workload, 64, 32), [2000, 2000]);
        }
        // A kernel has a block for each 256 packets. The blocks wait at the same time, but on the replacement for a GPU
        // one after the other.
        assert_eq!(per_burst(kernel, 64, 256), [1000, 1000]);
        assert_eq!(per_burst(kernel, 1000, 256), [4000, 1000]);
        assert_eq!(per_burst(kernel, 1000, 128), [8000, 2000]);
    }

    #[test]
    fn thread_count_matches_launch() {
        let of = |asked| Launch::ALL.map(|launch| threads_of(launch, asked, false));
        assert_eq!(of(1), [32, 32, 32]);
        assert_eq!(of(1024), [256, 1024, 1024]);
        assert_eq!(Launch::ALL.map(|launch| threads_of(launch, 1, true)), [1, 1, 1]);
    }

    #[test]
    fn temperature_names_match_buffer_reuse() {
        let of = |shared, buffers| temperature(shared, buffers);
        assert_eq!(
            [of(true, 8), of(true, 4096), of(false, 32), of(false, 33)],
            ["remote", "remote", "hot", "none"]
        );
    }

    #[test]
    fn break_even_is_lasting() {
        let bursts = [1, 16, 64, 256];
        assert_eq!(break_even(&bursts, &[1.0, 5.0, 9.0, 20.0], 1, 4.0), Some(16));
        assert_eq!(break_even(&bursts, &[1.0, 5.0, 9.0, 20.0], 4, 4.0), Some(256));
        assert_eq!(break_even(&bursts, &[1.0, 5.0, 3.0, 20.0], 1, 4.0), Some(256));
        assert_eq!(break_even(&bursts, &[5.0; 4], 1, 4.0), Some(1));
        assert_eq!(break_even(&bursts, &[5.0; 4], 1, 5.0), None);
    }
}
