//! The cases that measure rates: their cells, the subjects that take turns, and the resulting rows.

use offcore_gpu::device::{Launch, Memory};

use super::published::{self, BURST, BURSTS, FRAME};
use super::rig::{Group, Rig, Samples, Subject};
use super::row::{Cell, break_even as find_break_even, rate};
use super::{Case, Options, WorkKind, Workload, latency};
use crate::report::progress::Progress;
use crate::report::row::Row;
use crate::report::sample::Spread;

/// Artificial processing times per packet in nanoseconds.
const FORCED: [u32; 3] = [100, 1000, 10_000];
const QUICK_FORCED: [u32; 1] = [1000];
/// Burst sizes for artificial processing times.
const FORCED_BURSTS: [usize; 4] = [16, 64, 256, 1024];
const QUICK_FORCED_BURSTS: [usize; 2] = [64, 1024];
/// Burst sizes among which the break-even is determined.
const BREAK_EVEN_BURSTS: [usize; 7] = [1, 4, 16, 64, 256, 1024, 4096];
const QUICK_BREAK_EVEN_BURSTS: [usize; 2] = [64, 1024];
/// The most informative burst sizes of the second published table.
const QUICK_BURSTS: [usize; 2] = [16, 64];
/// Thread blocks per pipeline for long-running bursts, so that several bursts are processed concurrently.
const MANY_BLOCKS: u32 = 32;
/// Length of a frame with a payload of 1 KiB, including headers and FCS.
const PAYLOAD_FRAME: usize = 1024 + super::packets::SKIP + offcore_wire::ethernet::FCS_LEN;

/// Returns the groups of subjects that a case compares.
pub(super) fn groups(options: &Options, case: Case) -> Vec<Group> {
    match case {
        Case::Io => io_groups(options),
        Case::Workload => workload_groups(options),
        Case::Forced => forced_groups(options),
        Case::BreakEven => break_even_groups(options),
        Case::Latency => latency::groups(options),
    }
}

/// Returns a subject with the defaults of most cases.
fn subject(
    options: &Options,
    workload: Workload,
    memory: Memory,
    work: WorkKind,
    frame: usize,
    bursts: &[usize],
) -> Subject {
    let blocks = options.few_blocks();
    Subject { workload, memory, work, forced_ns: 0, frame, bursts: bursts.into(), blocks }
}

/// Returns the number of windows for cases with many cells.
fn fewer(options: &Options) -> usize {
    options.windows.count.div_ceil(2).max(2).min(options.windows.count)
}

fn io_groups(options: &Options) -> Vec<Group> {
    let bursts = options.bursts_or(&[BURST], &[BURST]);
    let group = |&frame: &usize| {
        let of = |workload, memory| subject(options, workload, memory, WorkKind::Nothing, frame, &bursts);
        let mut subjects = vec![of(Workload::None, Memory::Host)];
        if options.memories.contains(&Memory::Gpu) {
            // A device has to move the packets there.
            subjects.push(of(Workload::Device(Launch::Persistent), Memory::Gpu));
        }
        Group { name: format!("io, {frame} B"), subjects, each: 1, windows: options.windows.count }
    };
    options.sizes.iter().map(group).collect()
}

fn workload_groups(options: &Options) -> Vec<Group> {
    let group = |burst| {
        let of = |workload, memory| subject(options, workload, memory, WorkKind::Swap, FRAME, &[burst]);
        let mut subjects = vec![of(Workload::None, Memory::Host), of(Workload::Cpu, Memory::Host)];
        for &memory in &options.memories {
            subjects.extend(Workload::DEVICE.map(|workload| of(workload, memory)));
        }
        Group { name: format!("workload, burst {burst}"), subjects, each: 1, windows: options.windows.count }
    };
    options.bursts_or(&BURSTS, &QUICK_BURSTS).into_iter().map(group).collect()
}

fn forced_groups(options: &Options) -> Vec<Group> {
    let times = if options.quick { &QUICK_FORCED[..] } else { &FORCED[..] };
    let memory = options.first_memory();
    let group = |burst| {
        let of = |workload, memory| subject(options, workload, memory, WorkKind::Swap, FRAME, &[burst]);
        let mut subjects = vec![of(Workload::None, Memory::Host)];
        for &forced_ns in times {
            subjects.push(Subject { forced_ns, ..of(Workload::Cpu, Memory::Host) });
            let device = |workload| Subject { forced_ns, ..of(workload, memory) };
            subjects.extend(Workload::DEVICE.map(device));
        }
        Group { name: format!("forced, burst {burst}"), subjects, each: 1, windows: fewer(options) }
    };
    options.bursts_or(&FORCED_BURSTS, &QUICK_FORCED_BURSTS).into_iter().map(group).collect()
}

fn break_even_groups(options: &Options) -> Vec<Group> {
    let mut bursts = options.bursts_or(&BREAK_EVEN_BURSTS, &QUICK_BREAK_EVEN_BURSTS);
    bursts.sort_unstable();
    let memories = if options.quick { &options.memories[..1] } else { &options.memories[..] };
    let group = |(&work, is_first): (&WorkKind, bool)| {
        let blocks = options.blocks.unwrap_or(MANY_BLOCKS);
        let of = |workload, memory| Subject {
            blocks,
            ..subject(options, workload, memory, work, PAYLOAD_FRAME, &bursts)
        };
        let mut subjects = vec![of(Workload::Core, Memory::Host)];
        if is_first {
            // Workload `none` does not depend on the kind of work.
            subjects.push(of(Workload::None, Memory::Host));
        }
        for &memory in memories {
            subjects.extend(Workload::DEVICE.map(|workload| of(workload, memory)));
        }
        Group { name: format!("break-even, {}", work.name()), subjects, each: 1, windows: fewer(options) }
    };
    let is_first = std::iter::once(true).chain(std::iter::repeat(false));
    options.works.iter().zip(is_first).map(group).collect()
}

/// Returns the median rate of the subject with this workload at burst index `at`.
fn of(group: &Group, measured: &[Vec<Samples>], workload: Workload, at: usize) -> Option<f64> {
    let index = group.subjects.iter().position(|subject| subject.workload == workload)?;
    let spread = Spread::of(&measured[index].get(at)?.mpps);
    (spread.runs > 0).then_some(spread.median)
}

/// Measures a case's groups. `enter` adds the columns that are specific to the case.
fn rates(
    rig: &mut Rig<'_>,
    case: Case,
    progress: &Progress,
    emit: &mut dyn FnMut(Row),
    enter: impl Fn(&mut Row, &Subject, usize),
) {
    for group in groups(rig.options, case) {
        let measured = rig.alternate(&group, progress);
        for (subject, samples) in group.subjects.iter().zip(&measured) {
            let cells = subject.bursts.iter().zip(samples).zip(0..);
            for ((&burst, samples), at) in cells.filter(|((_, samples), _)| !samples.mpps.is_empty()) {
                let ends = of(&group, &measured, Workload::None, at);
                let mut row = rate(rig, Cell { case, subject, burst }, samples, ends);
                enter(&mut row, subject, burst);
                emit(row);
            }
        }
    }
}

/// Measures the first published table.
pub(super) fn io(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) {
    rates(rig, Case::Io, progress, emit, |row, subject, burst| {
        if burst == BURST {
            row.set_published(published::io(subject.frame, subject.memory));
        }
    })
}

/// Measures the second published table.
pub(super) fn workload(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) {
    rates(rig, Case::Workload, progress, emit, |row, subject, burst| {
        row.set_published(published::workload(subject.workload, subject.memory, subject.frame, burst));
        row.set_model(published::model(subject.workload, subject.frame, burst, 0.0));
    })
}

/// Measures artificial processing times by burst.
pub(super) fn forced(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) {
    rates(rig, Case::Forced, progress, emit, |row, subject, burst| {
        let forced = f64::from(subject.forced_ns);
        row.set_model(published::model(subject.workload, subject.frame, burst, forced));
    })
}

/// Measures work by burst, compared with a core.
pub(super) fn break_even(rig: &mut Rig<'_>, progress: &Progress, emit: &mut dyn FnMut(Row)) {
    let mut ends = Vec::new();
    for group in groups(rig.options, Case::BreakEven) {
        let measured = rig.alternate(&group, progress);
        let of = |workload| (0..).map_while(|at| of(&group, &measured, workload, at)).collect::<Vec<_>>();
        if ends.is_empty() {
            ends = of(Workload::None);
        }
        // The core at its best burst size.
        let core = of(Workload::Core).into_iter().fold(0.0, f64::max);
        for (subject, samples) in group.subjects.iter().zip(&measured) {
            let rates: Vec<_> = samples.iter().map(|samples| Spread::of(&samples.mpps).median).collect();
            let found = find_break_even(&subject.bursts, &rates, rig.options.pipelines, core);
            let cells = subject.bursts.iter().zip(samples).zip(0..);
            for ((&burst, samples), at) in cells.filter(|((_, samples), _)| !samples.mpps.is_empty()) {
                let cell = Cell { case: Case::BreakEven, subject, burst };
                let mut row = rate(rig, cell, samples, ends.get(at).copied());
                row.set_baseline(subject, core, found);
                emit(row);
            }
        }
    }
}
