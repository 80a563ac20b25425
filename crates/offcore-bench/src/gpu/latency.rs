//! Case `latency`: how long packets take when they come at a pace of their own.
//!
//! First a closed loop tells how much the pipelines can carry. Then packets are due at 50, 80 and 95 % of that, each at its
//! time. One that is due waits for others of its burst, at most for [`TIMEOUT`]. A latency is the time from when a packet
//! was *due* until it is back, so gathering counts, and so does what waits behind a stall.

use std::time::Duration;

use anyhow::{Context, Result};
use offcore_stats::tsc;

use super::published::FRAME;
use super::rig::{Group, Rig, Samples, Subject};
use super::row::{Cell, latency as row};
use super::window::Traffic;
use super::{Case, Options, WorkKind, Workload, cases};
use crate::progress::Progress;
use crate::row::Row;
use crate::sample::Spread;

/// Shares of the capacity that are offered.
pub(super) const LOADS: [f64; 3] = [0.5, 0.8, 0.95];
/// Windows of a cell: the capacity's, and one for each load.
pub(super) const WINDOWS: usize = 1 + LOADS.len();
/// How long a packet waits for others of its burst, at most.
const TIMEOUT: Duration = Duration::from_micros(100);
const BURSTS: [usize; 2] = [16, 64];
const QUICK_BURSTS: [usize; 1] = [64];

/// By burst: a core and a device.
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
            blocks: cases::few_blocks(options),
        };
        let windows = options.windows.div_ceil(2);
        Group { name: format!("latency, burst {burst}"), subjects: workloads.map(subject).collect(), windows }
    };
    cases::bursts(options, &BURSTS, &QUICK_BURSTS).into_iter().map(group).collect()
}

/// Measures it.
pub(super) fn measure(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    for group in groups(rig.options) {
        let count = group.subjects.len();
        let mut all = vec![(Vec::new(), vec![Samples::default(); LOADS.len()]); count];
        for round in 0..group.windows {
            if round > 0 && rig.pace.is_late() {
                rig.skip(count * WINDOWS * (group.windows - round), progress);
                break;
            }
            for turn in 0..count {
                let index = if round % 2 == 0 { turn } else { count - 1 - turn };
                let subject = &group.subjects[index];
                progress.say(&format!("{}, {}", group.name, subject.workload.name()));
                let (capacities, loads) = &mut all[index];
                let capacity = one_turn(rig, subject, loads, progress)
                    .with_context(|| format!("{}, {}", group.name, subject.workload.name()))?;
                capacities.push(capacity);
            }
        }
        for (subject, (capacities, samples)) in group.subjects.iter().zip(&all) {
            let capacity = Spread::of(capacities).median;
            let cell = Cell { case: Case::Latency, subject, burst: subject.bursts[0] };
            for (load, samples) in LOADS.into_iter().zip(samples) {
                emit(row(rig, cell, samples, (load, capacity)));
            }
        }
    }
    Ok(())
}

/// The capacity, and a window for each load. Returns the capacity in million packets a second.
fn one_turn(rig: &mut Rig<'_>, subject: &Subject, loads: &mut [Samples], progress: &Progress) -> Result<f64> {
    let options = rig.options;
    let burst = subject.bursts[0];
    let session = rig.open(subject)?;
    let every_one = rig.every_one(&session, subject, burst)?;
    let closed = subject.plan(burst, options, Traffic::Closed);
    let capacity = session.measure(closed, options.warm_up, options.window)?.mpps;
    rig.step(progress);
    for (load, samples) in LOADS.into_iter().zip(&mut *loads) {
        let mpps = capacity * load / options.pipelines as f64;
        let interval = tsc::hz() as f64 / (mpps * 1e6);
        let traffic = Traffic::Paced { interval, timeout: tsc::ticks(TIMEOUT) };
        let plan = subject.plan(burst, options, traffic);
        let seen = session.measure(plan, options.warm_up, options.window)?;
        samples.mpps.push(seen.mpps);
        samples.seen.add(&seen);
        rig.step(progress);
    }
    if let Some(first) = loads.first_mut() {
        first.seen.add(&every_one);
    }
    rig.close(session);
    Ok(capacity)
}
