//! The cases that measure rates: which cells they have, what takes turns, and the rows that come of it.

use anyhow::Result;
use offcore_gpu::device::{Launch, Memory};

use super::published::{self, BURST, BURSTS, FRAME};
use super::rig::{Group, Rig, Samples, Subject};
use super::row::{Cell, break_even as find_break_even, rate};
use super::{Case, Options, WorkKind, Workload, latency};
use crate::progress::Progress;
use crate::row::Row;
use crate::sample::Spread;

/// Forced nanoseconds a packet.
const FORCED: [u32; 3] = [100, 1000, 10_000];
const QUICK_FORCED: [u32; 1] = [1000];
/// Bursts of the forced times.
const FORCED_BURSTS: [usize; 4] = [16, 64, 256, 1024];
const QUICK_FORCED_BURSTS: [usize; 2] = [64, 1024];
/// Bursts among which the break-even is looked for.
const BREAK_EVEN_BURSTS: [usize; 7] = [1, 4, 16, 64, 256, 1024, 4096];
const QUICK_BREAK_EVEN_BURSTS: [usize; 3] = [16, 256, 4096];
/// A frame with a payload of 1 KiB: headers and FCS around it.
const PAYLOAD_FRAME: usize = 1024 + super::packets::SKIP + offcore_wire::ethernet::FCS_LEN;

/// Windows of a case, for the progress bar.
pub(super) fn steps(options: &Options, case: Case) -> usize {
    let windows = groups(options, case).iter().map(Group::steps).sum::<usize>();
    if case == Case::Latency { windows * latency::WINDOWS } else { windows }
}

/// What a case compares with each other.
pub(super) fn groups(options: &Options, case: Case) -> Vec<Group> {
    match case {
        Case::Io => io_groups(options),
        Case::Workload => workload_groups(options),
        Case::Forced => forced_groups(options),
        Case::BreakEven => break_even_groups(options),
        Case::Latency => latency::groups(options),
    }
}

fn subject(workload: Workload, memory: Memory, work: WorkKind, frame: usize, bursts: &[usize]) -> Subject {
    Subject { workload, memory, work, forced_ns: 0, frame, bursts: bursts.into() }
}

/// The two or three windows of cells that are many.
fn fewer(options: &Options) -> usize {
    options.windows.div_ceil(2).max(2).min(options.windows)
}

fn io_groups(options: &Options) -> Vec<Group> {
    let bursts = options.bursts_or(&[BURST]);
    let group = |&frame: &usize| {
        let mut subjects = vec![subject(Workload::None, Memory::Host, WorkKind::Nothing, frame, &bursts)];
        if options.memories.contains(&Memory::Gpu) {
            // Somebody has to take them there.
            let carrier = Workload::Device(Launch::Persistent);
            subjects.push(subject(carrier, Memory::Gpu, WorkKind::Nothing, frame, &bursts));
        }
        Group { name: format!("io, {frame} B"), subjects, windows: options.windows }
    };
    options.sizes.iter().map(group).collect()
}

fn workload_groups(options: &Options) -> Vec<Group> {
    let group = |burst| {
        let of = |workload, memory| subject(workload, memory, WorkKind::Swap, FRAME, &[burst]);
        let mut subjects = vec![of(Workload::None, Memory::Host), of(Workload::Cpu, Memory::Host)];
        for &memory in &options.memories {
            subjects.extend(Workload::DEVICE.map(|workload| of(workload, memory)));
        }
        Group { name: format!("workload, burst {burst}"), subjects, windows: options.windows }
    };
    options.bursts_or(&BURSTS).into_iter().map(group).collect()
}

fn forced_groups(options: &Options) -> Vec<Group> {
    let (times, bursts) = match options.quick {
        true => (&QUICK_FORCED[..], &QUICK_FORCED_BURSTS[..]),
        false => (&FORCED[..], &FORCED_BURSTS[..]),
    };
    let memory = options.first_memory();
    let group = |burst| {
        let mut subjects = vec![subject(Workload::None, Memory::Host, WorkKind::Swap, FRAME, &[burst])];
        for &forced_ns in times {
            for workload in [Workload::Cpu].into_iter().chain(Workload::DEVICE) {
                let memory = if workload.is_device() { memory } else { Memory::Host };
                subjects.push(Subject {
                    forced_ns,
                    ..subject(workload, memory, WorkKind::Swap, FRAME, &[burst])
                });
            }
        }
        Group { name: format!("forced, burst {burst}"), subjects, windows: fewer(options) }
    };
    options.bursts_or(bursts).into_iter().map(group).collect()
}

fn break_even_groups(options: &Options) -> Vec<Group> {
    let otherwise = if options.quick { &QUICK_BREAK_EVEN_BURSTS[..] } else { &BREAK_EVEN_BURSTS[..] };
    let mut bursts = options.bursts_or(otherwise);
    bursts.sort_unstable();
    let group = |&work: &WorkKind| {
        let of = |workload, memory| subject(workload, memory, work, PAYLOAD_FRAME, &bursts);
        let mut subjects = vec![of(Workload::Core, Memory::Host), of(Workload::None, Memory::Host)];
        for &memory in &options.memories {
            subjects.extend(Workload::DEVICE.map(|workload| of(workload, memory)));
        }
        Group { name: format!("break-even, {}", work.name()), subjects, windows: fewer(options) }
    };
    options.works.iter().map(group).collect()
}

/// What was measured of the subject of this workload at the burst of index `at`.
fn of(group: &Group, measured: &[Vec<Samples>], workload: Workload, at: usize) -> Option<f64> {
    let index = group.subjects.iter().position(|subject| subject.workload == workload)?;
    Some(Spread::of(&measured[index].get(at)?.mpps).median)
}

/// Measures a case's groups; `enter` says in each row what only this case knows.
fn rates(
    rig: &mut Rig<'_>,
    case: Case,
    progress: &Progress,
    emit: &mut dyn FnMut(Row),
    enter: impl Fn(&mut Row, &Subject, usize),
) -> Result<()> {
    for group in groups(rig.options, case) {
        let measured = rig.alternate(&group, progress)?;
        for (subject, samples) in group.subjects.iter().zip(&measured) {
            for ((&burst, samples), at) in subject.bursts.iter().zip(samples).zip(0..) {
                let ends = of(&group, &measured, Workload::None, at);
                let mut row = rate(rig, Cell { case, subject, burst }, samples, ends);
                enter(&mut row, subject, burst);
                emit(row);
            }
        }
    }
    Ok(())
}

/// The first published table.
pub(super) fn io(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    rates(rig, Case::Io, progress, emit, |row, subject, burst| {
        if burst == BURST {
            row.set_published(published::io(subject.frame, subject.memory));
        }
    })
}

/// The second published table.
pub(super) fn workload(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    rates(rig, Case::Workload, progress, emit, |row, subject, burst| {
        row.set_published(published::workload(subject.workload, subject.frame, burst));
        row.set_model(published::model(subject.workload, subject.frame, burst, 0.0));
    })
}

/// Forced times by bursts.
pub(super) fn forced(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    rates(rig, Case::Forced, progress, emit, |row, subject, burst| {
        let forced = row.gpu.as_ref().and_then(|gpu| gpu.forced_ns_per_burst).unwrap_or_default();
        row.set_model(published::model(subject.workload, subject.frame, burst, forced as f64));
    })
}

/// Work by bursts, beside a core.
pub(super) fn break_even(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) -> Result<()> {
    for group in groups(rig.options, Case::BreakEven) {
        let measured = rig.alternate(&group, progress)?;
        // The core at the burst that suits it best.
        let core = (0..).map_while(|at| of(&group, &measured, Workload::Core, at)).fold(0.0, f64::max);
        for (subject, samples) in group.subjects.iter().zip(&measured) {
            let rates: Vec<_> = samples.iter().map(|samples| Spread::of(&samples.mpps).median).collect();
            let found = find_break_even(&subject.bursts, &rates, rig.options.pipelines, core);
            for ((&burst, samples), at) in subject.bursts.iter().zip(samples).zip(0..) {
                let ends = of(&group, &measured, Workload::None, at);
                let cell = Cell { case: Case::BreakEven, subject, burst };
                let mut row = rate(rig, cell, samples, ends);
                row.set_baseline(subject, core, found);
                emit(row);
            }
        }
    }
    Ok(())
}
