//! Case `latency`: measures packet latency at a fixed packet rate.
//!
//! First a closed loop measures the capacity of the pipelines. Then packets are due at 50, 80 and 95 % of the capacity,
//! each at its time. A due packet waits at most [`TIMEOUT`] for other packets of its burst. The latency is the time
//! from when a packet was *due* until it is back, so that gathering and queueing behind a stall are included.

use std::time::Duration;

use anyhow::Result;
use offcore_stats::tsc;

use super::published::FRAME;
use super::rig::{Group, Rig, Samples, Subject};
use super::row::{Cell, latency as row};
use super::window::Traffic;
use super::{Case, Options, WorkKind, Workload};
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::Spread;

/// Offered loads as shares of the capacity.
pub(super) const LOADS: [f64; 3] = [0.5, 0.8, 0.95];
/// Windows of a cell in each turn: one for the capacity, and one for each load.
const WINDOWS: usize = 1 + LOADS.len();
/// Maximum time that a packet waits for other packets of its burst.
const TIMEOUT: Duration = Duration::from_micros(100);
const BURSTS: [usize; 2] = [16, 64];
const QUICK_BURSTS: [usize; 1] = [64];

/// Returns the groups, one per burst size, each with a core and devices.
pub(super) fn groups(options: &Options) -> Vec<Group> {
    let group = |burst| {
        let workloads = [Workload::Cpu].into_iter().chain(Workload::DEVICE);
        let subject = |workload: Workload| Subject {
            workload,
            memory: if workload.is_device() { options.first_memory() } else { Default::default() },
            work: WorkKind::Swap,
            forced_ns: 0,
            frame: FRAME,
            bursts: vec![burst],
            blocks: options.few_blocks(),
        };
        let windows = options.windows.count.div_ceil(2);
        let subjects = workloads.map(subject).collect();
        Group { name: format!("latency, burst {burst}"), subjects, each: WINDOWS, windows }
    };
    options.bursts_or(&BURSTS, &QUICK_BURSTS).into_iter().map(group).collect()
}

/// Measures the case.
pub(super) fn measure(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) {
    for group in groups(rig.options) {
        let count = group.subjects.len();
        let mut all = vec![(Vec::new(), vec![Samples::default(); LOADS.len()]); count];
        rig.by_turns(&group, progress, |rig, _, index| {
            let (capacities, loads) = &mut all[index];
            capacities.push(one_turn(rig, &group.subjects[index], loads, progress)?);
            Ok(())
        });
        for (subject, (capacities, samples)) in group.subjects.iter().zip(&all) {
            let capacity = Spread::of(capacities).median;
            let cell = Cell { case: Case::Latency, subject, burst: subject.bursts[0] };
            let measured = LOADS.into_iter().zip(samples).filter(|(_, samples)| !samples.mpps.is_empty());
            for (load, samples) in measured {
                emit(row(rig, cell, samples, load, capacity));
            }
        }
    }
}

/// Measures the capacity and a window for each load. Returns the capacity in million packets per second.
fn one_turn(rig: &mut Rig<'_>, subject: &Subject, loads: &mut [Samples], progress: &Progress) -> Result<f64> {
    let options = rig.options;
    let burst = subject.bursts[0];
    rig.in_session(subject, |rig, session| {
        let every_one = rig.every_one(session, subject, burst)?;
        let closed = subject.plan(burst, options, Traffic::Closed);
        let capacity = session.measure(closed, options.windows.warm_up, options.windows.length)?.mpps;
        rig.step(progress);
        for (load, samples) in LOADS.into_iter().zip(&mut *loads) {
            let mpps = capacity * load / options.pipelines as f64;
            let interval = tsc::hz() as f64 / (mpps * 1e6);
            let traffic = Traffic::Paced { interval, timeout: tsc::ticks(TIMEOUT) };
            let plan = subject.plan(burst, options, traffic);
            samples.add(&session.measure(plan, options.windows.warm_up, options.windows.length)?);
            rig.step(progress);
        }
        if let Some(first) = loads.first_mut() {
            first.seen.add(&every_one);
        }
        Ok(capacity)
    })
}
