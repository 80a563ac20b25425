//! State shared by all measurements: the device, the pool with its packets, and the expected results. Also runs the
//! subjects of a group in turns.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use offcore_gpu::cpu::CpuWork;
use offcore_gpu::device::{GpuDevice, Launch, Memory};
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::{Back, Front, PipelineWorker, Setup, pipeline};
use offcore_mem::{HEADROOM, Packet, Pool};
use offcore_wire::ethernet::FCS_LEN;

use super::ends::Known;
use super::pace::Pace;
use super::packets::{Check, Content, LONGEST, SKIP};
use super::session::{Place, Session, SessionSetup, places};
use super::window::{Plan, Seen, Traffic};
use super::{Options, Outcome, STAND_IN, WorkKind, Workload, baseline};
use crate::report::progress::Progress;

/// Size of a packet buffer in bytes, including headroom.
const BUFFER: usize = 2048;
/// Maximum number of packets in flight per pipeline if each of them takes an artificial processing time.
const FORCED_ON_THEIR_WAY: usize = 8192;
/// Additional bursts that the ends hold.
const IN_HAND: usize = 2;
/// Fixed seed of the patterns.
const SEED: u64 = 5000;
/// Number of patterns.
const PATTERNS: usize = 5000;
/// Minimum number of packets that are checked completely before the timed part.
const EVERY_ONE: u64 = 1024;

/// A subject that takes turns: pipelines, or a single core.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub workload: Workload,
    /// Memory in which a device processes packets.
    pub memory: Memory,
    pub work: WorkKind,
    /// Minimum processing time per packet in nanoseconds.
    pub forced_ns: u32,
    /// Frame length, including the FCS.
    pub frame: usize,
    /// Burst sizes in packets, each with a separate cell.
    pub bursts: Vec<usize>,
    /// Number of thread blocks of a polling device.
    pub blocks: u32,
}

impl Subject {
    /// Returns the maximum number of bursts of `burst` packets in flight.
    pub(super) fn on_their_way(&self, burst: usize, options: &Options) -> usize {
        let forced = if self.forced_ns == 0 { usize::MAX } else { FORCED_ON_THEIR_WAY };
        let most = (options.on_their_way.min(forced) / burst).max(2);
        options.slots.min(1 << most.ilog2())
    }

    /// Returns the number of packets that a pipeline uses.
    pub(super) fn circulating(&self, burst: usize, options: &Options) -> usize {
        (self.on_their_way(burst, options) + IN_HAND) * burst
    }

    /// Returns the number of slots of its pipelines, which suffices for each of its burst sizes.
    pub(super) fn slots(&self, options: &Options) -> usize {
        let each = self.bursts.iter().map(|&burst| self.on_their_way(burst, options));
        each.max().unwrap_or(options.slots)
    }

    fn longest_burst(&self) -> usize {
        self.bursts.iter().copied().max().unwrap_or(1)
    }

    /// Returns the plan of a window.
    pub(super) fn plan(&self, burst: usize, options: &Options, traffic: Traffic) -> Plan {
        Plan { burst, len: self.frame - FCS_LEN, circulating: self.circulating(burst, options), traffic }
    }
}

/// Subjects that are compared.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub name: String,
    pub subjects: Vec<Subject>,
    /// Number of windows of each cell in a turn.
    pub each: usize,
    /// Number of turns of each cell.
    pub windows: usize,
}

impl Group {
    /// Returns the total number of windows.
    pub(super) fn steps(&self) -> usize {
        self.windows * self.subjects.iter().map(|subject| self.turn(subject)).sum::<usize>()
    }

    /// Returns the number of windows of a turn of `subject`.
    fn turn(&self, subject: &Subject) -> usize {
        self.each * subject.bursts.len()
    }
}

/// Results of a subject at one burst size.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples {
    pub mpps: Vec<f64>,
    /// All other results, combined over all windows.
    pub seen: Seen,
}

impl Samples {
    /// Adds a window.
    pub(super) fn add(&mut self, seen: &Seen) {
        self.mpps.push(seen.mpps);
        self.seen.add(seen);
    }
}

/// Resources of a whole run.
#[derive(Debug)]
pub(super) struct Rig<'a> {
    pub options: &'a Options,
    device: Box<dyn GpuDevice>,
    /// Description of the device: a GPU's name and memory.
    pub device_name: String,
    /// Lcores of the ends of each pipeline.
    pub places: Vec<Place>,
    pool: &'static Pool,
    /// Packets that are not used by a session.
    packets: Vec<Packet>,
    content: Arc<Content>,
    works: HashMap<WorkKind, Arc<CpuWork>>,
    /// Result of the packet in each chunk, by work and packet length.
    results: HashMap<(WorkKind, usize), Arc<[u32]>>,
    notes: Vec<String>,
    /// Measurements that failed, with reasons.
    failures: Vec<String>,
    /// Time budget of the run.
    pub pace: Pace,
    /// An unused pipeline. While it exists, the pool stays registered with the device.
    keeper: Option<(Front, Back)>,
}

impl<'a> Rig<'a> {
    /// Creates the pool that `options` requires and fills its packets.
    pub(super) fn new(options: &'a Options, device: Box<dyn GpuDevice>, groups: Vec<Group>) -> Result<Self> {
        let device_threads = if device.name() == STAND_IN { options.pipelines } else { 1 };
        let places = places(&options.lcores, options.pipelines, device_threads)?;
        let steps = groups.iter().map(Group::steps).sum();
        let subjects = groups.into_iter().flat_map(|group| group.subjects);
        let each = subjects
            .flat_map(|s| s.bursts.clone().into_iter().map(move |burst| s.circulating(burst, options)))
            .max()
            .unwrap_or(1);
        let pool = Pool::new((each * options.pipelines).max(64), BUFFER, options.hugepages)?;
        let content = Arc::new(Content::new(Patterns::random(SEED, PATTERNS, 8..=32)?));
        let mut cache = pool.cache();
        let mut packets: Vec<_> = std::iter::from_fn(|| cache.take_sized(HEADROOM, LONGEST)).collect();
        for packet in &mut packets {
            content.fill(packet.chunk(), packet.bytes_mut());
        }
        let mut rig = Self {
            options,
            device_name: title(&*device),
            device,
            places,
            pool,
            packets,
            content,
            works: HashMap::new(),
            results: HashMap::new(),
            notes: Vec::new(),
            failures: Vec::new(),
            pace: Pace::new(steps, options.windows.limit),
            keeper: None,
        };
        if !rig.is_simulated() {
            rig.keeper = Some(rig.keep_pool()?);
        }
        Ok(rig)
    }

    /// Creates a pipeline that is never used. It holds the resources that all pipelines share.
    fn keep_pool(&mut self) -> Result<(Front, Back)> {
        let all = self.options.memories.contains(&Memory::Gpu);
        Ok(pipeline(Setup {
            burst: 1,
            slots: 2,
            worker: PipelineWorker::Device {
                device: &mut *self.device,
                launch: Launch::Kernel,
                blocks: 1,
                threads: 32,
                memory: if all { Memory::Gpu } else { Memory::Host },
            },
            work: WorkKind::Nothing.of_pipeline(0, self.content.patterns()),
            timeout: Duration::from_secs(1),
            pool: self.pool,
            hugepages: self.options.hugepages,
        })?)
    }

    /// Returns the device's name.
    pub(super) fn device(&self) -> &str {
        self.device.name()
    }

    /// Returns whether the device is a replacement for a GPU.
    pub(super) fn is_simulated(&self) -> bool {
        self.device() == STAND_IN
    }

    /// Returns the device's notes and the failures.
    pub(super) fn outcome(mut self) -> Outcome {
        Outcome { notes: std::mem::take(&mut self.notes), failures: std::mem::take(&mut self.failures) }
    }

    /// Measures the subjects of a group in turns. Returns the results of each subject at each burst size; they are
    /// empty after a failure.
    pub(super) fn alternate(&mut self, group: &Group, progress: &Progress) -> Vec<Vec<Samples>> {
        let mut all: Vec<_> =
            group.subjects.iter().map(|subject| vec![Samples::default(); subject.bursts.len()]).collect();
        self.by_turns(group, progress, |rig, round, index| {
            rig.turn(&group.subjects[index], round == 0, &mut all[index], progress)
        });
        all
    }

    /// Gives the subjects of a group turns, alternately forwards and backwards. `turn` gets the round and the subject's
    /// index. A subject that fails gets no further turns.
    pub(super) fn by_turns(
        &mut self,
        group: &Group,
        progress: &Progress,
        mut turn: impl FnMut(&mut Self, usize, usize) -> Result<()>,
    ) {
        let count = group.subjects.len();
        let mut failed = vec![false; count];
        for round in 0..group.windows {
            if round > 0 && self.pace.is_late() {
                let rest = group.subjects.iter().zip(&failed).filter(|(_, failed)| !**failed);
                let each = rest.map(|(subject, _)| group.turn(subject)).sum::<usize>();
                self.skip(each * (group.windows - round), progress);
                return;
            }
            for index in (0..count).map(|turn| if round % 2 == 0 { turn } else { count - 1 - turn }) {
                let subject = &group.subjects[index];
                if failed[index] {
                    continue;
                }
                progress.say(&format!("{}, {}", group.name, subject.workload.name()));
                let before = self.pace.done();
                if let Err(error) = turn(self, round, index) {
                    failed[index] = true;
                    let measured = self.pace.done() - before;
                    self.skip(group.turn(subject) * (group.windows - round) - measured, progress);
                    self.failures.push(format!("{}, {}: {error:#}", group.name, describe(subject)));
                }
            }
        }
    }

    /// Records that `steps` windows are skipped.
    fn skip(&mut self, steps: usize, progress: &Progress) {
        self.pace.skip(steps);
        progress.steps(steps);
    }

    /// Records a measured window.
    pub(super) fn step(&mut self, progress: &Progress) {
        self.pace.step();
        progress.step();
    }

    /// Measures one window of each of the subject's cells.
    fn turn(
        &mut self,
        subject: &Subject,
        is_first: bool,
        samples: &mut [Samples],
        progress: &Progress,
    ) -> Result<()> {
        if subject.workload == Workload::Core {
            return self.core(subject, samples, progress);
        }
        self.in_session(subject, |rig, session| {
            for (&burst, samples) in subject.bursts.iter().zip(samples) {
                if is_first {
                    samples.seen.add(&rig.every_one(session, subject, burst)?);
                }
                let plan = subject.plan(burst, rig.options, Traffic::Closed);
                samples.add(&session.measure(
                    plan,
                    rig.options.windows.warm_up,
                    rig.options.windows.length,
                )?);
                rig.step(progress);
            }
            Ok(())
        })
    }

    /// Runs `measure` with the pipelines of a subject.
    pub(super) fn in_session<T>(
        &mut self,
        subject: &Subject,
        measure: impl FnOnce(&mut Self, &Session) -> Result<T>,
    ) -> Result<T> {
        let session = self.open(subject)?;
        let measured = measure(self, &session);
        session.close(&mut self.packets);
        measured
    }

    /// Starts the pipelines of a subject.
    fn open(&mut self, subject: &Subject) -> Result<Session> {
        let known = Arc::new(Known {
            content: Arc::clone(&self.content),
            swapped: subject.work == WorkKind::Swap && subject.workload != Workload::None,
            results: self.results(subject)?,
            work: if subject.workload == Workload::None { None } else { Some(self.work(subject.work)?) },
            #[cfg(test)]
            corrupted: self.options.corrupted,
        });
        let options = self.options;
        let setup = SessionSetup {
            workload: subject.workload,
            memory: subject.memory,
            work: subject.work,
            forced_ns: subject.forced_ns,
            burst: subject.longest_burst(),
            slots: subject.slots(options),
            blocks_and_threads: (subject.blocks, options.threads),
            places: &self.places,
            known,
            pool: self.pool,
            hugepages: options.hugepages,
            yields: self.is_simulated(),
        };
        let session = Session::open(&setup, Some(&mut *self.device), &mut self.packets)?;
        // Similar notes are kept only once. Notes of the same kind of service differ in their numbers of bytes and
        // blocks.
        let words = |note: &str| note.replace(|c: char| c.is_ascii_digit(), "");
        for note in self.device.notes() {
            if !self.notes.iter().any(|known| words(known) == words(&note)) {
                self.notes.push(note);
            }
        }
        Ok(session)
    }

    /// Sends packets through the pipelines and checks each completely.
    pub(super) fn every_one(&self, session: &Session, subject: &Subject, burst: usize) -> Result<Seen> {
        // Artificial processing times would add up.
        let least = if subject.forced_ns == 0 { EVERY_ONE } else { 1 };
        let packets = least.max(2 * burst as u64);
        let traffic = Traffic::EveryOne(packets.next_multiple_of(burst as u64));
        let plan = subject.plan(burst, self.options, traffic);
        let seen = session.measure(plan, Duration::ZERO, Duration::ZERO)?;
        // Only the packet counters of an untimed window count.
        Ok(Seen { received: seen.received, verified: seen.verified, ..Seen::default() })
    }

    /// Measures the same work on a dedicated core.
    fn core(&mut self, subject: &Subject, samples: &mut [Samples], progress: &Progress) -> Result<()> {
        let (results, lcore) = (self.results(subject)?, self.places[0].generator);
        let work = match subject.work {
            WorkKind::Swap => Arc::new(CpuWork::new(subject.work.kind(), true, SKIP as u32, 0, None)?),
            other => self.work(other)?,
        };
        for (&burst, samples) in subject.bursts.iter().zip(samples) {
            let plan = subject.plan(burst, self.options, Traffic::Closed);
            let used = self.packets.len() - plan.circulating.min(self.packets.len());
            let swapped = subject.work == WorkKind::Swap;
            let check = Check { content: &self.content, len: plan.len, swapped, results: &results };
            let seen = baseline::measure(
                &work,
                check,
                self.pool,
                &mut self.packets[used..],
                plan,
                lcore,
                self.options.windows.length,
            )?;
            samples.add(&seen);
            self.step(progress);
        }
        Ok(())
    }

    /// Returns the work without the swap, for the verifier.
    fn work(&mut self, kind: WorkKind) -> Result<Arc<CpuWork>> {
        if let Some(work) = self.works.get(&kind) {
            return Ok(Arc::clone(work));
        }
        let patterns = Some(self.content.patterns());
        let work = Arc::new(CpuWork::new(kind.kind(), false, SKIP as u32, 0, patterns)?);
        self.works.insert(kind, Arc::clone(&work));
        Ok(work)
    }

    /// Returns the result of the packet in each chunk as computed by the CPU. Empty if all results are 0.
    fn results(&mut self, subject: &Subject) -> Result<Arc<[u32]>> {
        let (kind, len) = (subject.work, subject.frame - FCS_LEN);
        if subject.workload == Workload::None || matches!(kind, WorkKind::Nothing | WorkKind::Swap) {
            return Ok(Arc::new([]));
        }
        if let Some(known) = self.results.get(&(kind, len)) {
            return Ok(Arc::clone(known));
        }
        let work = self.work(kind)?;
        let mut by_chunk = vec![0; self.pool.chunks()];
        let mut results = [0; 64];
        for packets in self.packets.chunks_mut(results.len()) {
            packets.iter_mut().for_each(|packet| packet.set_range(self.pool, HEADROOM, len));
            work.run(self.pool, packets, &mut results);
            packets.iter().zip(results).for_each(|(packet, found)| by_chunk[packet.chunk() as usize] = found);
        }
        let known: Arc<[u32]> = by_chunk.into();
        self.results.insert((kind, len), Arc::clone(&known));
        Ok(known)
    }
}

/// Returns the description of a device: the common prefix of its notes, without its name in the options.
fn title(device: &dyn GpuDevice) -> String {
    let notes = device.notes();
    let first = notes.first().map_or("", String::as_str);
    let title = first.split_once(": ").map_or(first, |(title, _)| title);
    title.strip_prefix(device.name()).unwrap_or(title).trim().to_owned()
}

/// Describes a subject for error messages.
fn describe(subject: &Subject) -> String {
    let Subject { workload, memory, work, .. } = subject;
    match workload {
        Workload::Device(launch) => format!("{launch}, memory {memory}, work {}", work.name()),
        _ => format!("{}, work {}", workload.name(), work.name()),
    }
}
