//! Measures the core's cost per packet on this machine, with core copies and with copies submitted to a DSA driver.

use anyhow::Result;
use offcore_dma::Mode;
use offcore_dsa::sim::Timing;
use offcore_mem::Hugepages;
use offcore_stats::tsc;

use super::{BATCH, DeviceRate, DsaGroups, Interval, Machine, auto, estimate, row};
use crate::guests::memory::{Need, RunMemory, Testbed};
use crate::guests::workload::{Route, Workload};
use crate::method::alternate::Subject;
use crate::method::copier::{Copier, Setup};
use crate::method::lockstep::OtherCore;
use crate::method::temperature::Temperature;
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::ClockCheck;
use crate::vhost::COPIES;
use crate::vhost::core_cost::OwnVariant;

/// Number of uncounted turns of each variant.
const WARM_UP: usize = 8;

/// Options of the prediction.
#[derive(Clone, Debug)]
pub struct Options {
    /// The predicted machine. Its cores are assumed to be like the measured one.
    pub machine: Machine,
    /// Frame lengths, including the FCS.
    pub frames: Vec<usize>,
    pub temperature: Temperature,
    /// Number of A B B A blocks per frame length.
    pub blocks: usize,
    /// Page size for guests and packet buffers.
    pub hugepages: Hugepages,
    pub lcore: usize,
    pub other_lcore: Option<usize>,
}

/// Measures the core costs that `options` needs and predicts the rates. Emits three rows for each frame length: cpu,
/// offload and auto.
///
/// # Errors
/// If something cannot be set up, or a packet is lost or changed.
pub fn run(options: &Options, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    offcore_stats::lcore::pin(options.lcore)?;
    let other = OtherCore::start(options.other_lcore)?;
    let memory = RunMemory::new(Need::of(Route::Loop, &[options.temperature]), options.hugepages)?;
    let mut clock = ClockCheck::new();
    progress.begin(options.frames.len() * options.blocks);
    for &frame in &options.frames {
        progress.say(&format!("{frame} B"));
        let groups = DsaGroups { count: 1, queues: 2, engines: options.machine.engines };
        let device = DeviceRate::of(frame, groups, BATCH)?;
        let [cpu, offload] = core_costs(options, frame, &memory, &other, &mut clock, progress)?;
        let offload = with_portal(offload);
        let of_cpu = estimate(&options.machine, frame, cpu, None);
        let of_offload = estimate(&options.machine, frame, offload, Some((device, COPIES)));
        for (mode, ns, estimate) in [
            (Mode::Cpu, Some(cpu), of_cpu),
            (Mode::Offload, Some(offload), of_offload),
            (Mode::Auto, None, auto(of_cpu, of_offload)),
        ] {
            let mut row = row("here", frame, mode, estimate);
            row.head.temperature = options.temperature.name().into();
            row.head.window = options.temperature.window();
            row.figures.tsc_hz = tsc::hz();
            if let Some(ns) = ns {
                row.figures.ns_per_packet = ns.mid;
                row.figures.cycles_per_packet = ns.mid * tsc::hz() as f64 / 1e9;
            }
            if mode != Mode::Cpu {
                row.core.engine_ns_per_copy = Some(1e3 / device.mcopies);
            }
            emit(row);
        }
    }
    progress.end();
    Ok(())
}

/// Adds the cost of the portal's instructions, one per batch, to the measured cost, because the simulator replaces them
/// by a store to a ring. MOVDIR64B is posted: a core that never waits for it pays next to nothing. The fence before the
/// next instruction waits at most until it has arrived. ENQCMD also waits for the answer.
fn with_portal(offload: Interval) -> Interval {
    let one_way = Timing::PUBLISHED.portal_ns * COPIES / BATCH as f64;
    Interval { low: offload.low, mid: offload.mid + one_way, high: offload.high + 2.0 * one_way }
}

/// Measures nanoseconds per packet without the first and the last tenth of the samples, with core copies and with
/// batched copies of the engine.
fn core_costs(
    options: &Options,
    frame: usize,
    memory: &RunMemory,
    other: &OtherCore,
    clock: &mut ClockCheck,
    progress: &Progress,
) -> Result<[Interval; 2]> {
    let dsa = Setup { mode: Mode::Offload, copier: Copier::DsaSim { batch: true } };
    let bed = Testbed::new(memory, &Workload::table8(options.temperature, frame))?;
    let variant = |setup: Setup| OwnVariant::new(&bed, setup.mode, setup.open()?);
    let (mut cpu, mut offload) = (variant(Setup::CPU)?, variant(dsa)?);
    for _ in 0..WARM_UP {
        cpu.window(other)?.core_per_packet();
        offload.window(other)?.core_per_packet();
    }
    let mut samples = [Vec::new(), Vec::new()];
    let mut rejected = 0;
    while samples[0].len() < options.blocks {
        let before = clock.holds();
        let a = cpu.window(other)?.core_per_packet();
        let b = offload.window(other)?.core_per_packet() + offload.window(other)?.core_per_packet();
        let block = [(a + cpu.window(other)?.core_per_packet()) / 2.0, b / 2.0];
        if clock.holds() && before || rejected >= options.blocks {
            for (samples, ticks) in samples.iter_mut().zip(block) {
                samples.push(ticks * 1e9 / tsc::hz() as f64);
            }
            progress.step();
        } else {
            rejected += 1;
        }
    }
    Ok(samples.map(interval))
}

/// Returns the median, and the range of the middle four fifths of the samples.
fn interval(mut samples: Vec<f64>) -> Interval {
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples[((samples.len() - 1) as f64 * share) as usize];
    Interval { low: at(0.1), mid: at(0.5), high: at(0.9) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_takes_one_portal_instruction() {
        let with = with_portal(Interval::exact(100.0));
        // Two copies per packet, 32 copies per batch, 136 ns one way.
        assert_eq!(with, Interval { low: 100.0, mid: 108.5, high: 117.0 });
    }

    #[test]
    fn interval_leaves_extremes_out() {
        let samples: Vec<f64> = (0..=100).map(f64::from).rev().collect();
        assert_eq!(interval(samples), Interval { low: 10.0, mid: 50.0, high: 90.0 });
    }
}
