//! What all measurements have in common: the device, the pool and its packets, what results must be; and how what is
//! compared with each other takes turns.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use offcore_gpu::cpu::CpuWork;
use offcore_gpu::device::{Device, Launch, Memory};
use offcore_gpu::patterns::Patterns;
use offcore_gpu::pipeline::{Back, Front, Setup, Worker, pipeline};
use offcore_mem::{HEADROOM, Packet, Pool};
use offcore_wire::ethernet::FCS_LEN;

use super::ends::Known;
use super::pace::Pace;
use super::packets::{Check, Content, LONGEST, SKIP};
use super::session::{Place, Session, SessionSetup, places};
use super::window::{Plan, Seen, Traffic};
use super::{Options, Outcome, STAND_IN, WorkKind, Workload, baseline};
use crate::report::progress::Progress;

/// Bytes of a packet buffer, headroom included.
const BUFFER: usize = 2048;
/// Packets on their way in a pipeline, at most, where each of them takes a forced time.
const FORCED_ON_THEIR_WAY: usize = 8192;
/// Bursts that the ends have in hand besides.
const IN_HAND: usize = 2;
/// What patterns are made of: the same ones everywhere.
const SEED: u64 = 5000;
/// How many there are.
const PATTERNS: usize = 5000;
/// Packets that are looked at in full before anything is timed, at least.
const EVERY_ONE: u64 = 1024;

/// One of the things that take turns: pipelines, or a core by itself.
#[derive(Clone, Debug)]
pub(super) struct Subject {
    pub workload: Workload,
    /// Where a device works on packets.
    pub memory: Memory,
    pub work: WorkKind,
    /// Nanoseconds that each packet takes at least.
    pub forced_ns: u32,
    /// Frame length, FCS included.
    pub frame: usize,
    /// Packets of a burst: one cell for each.
    pub bursts: Vec<usize>,
    /// Blocks of a device that polls.
    pub blocks: u32,
}

impl Subject {
    /// Bursts of `burst` packets on their way at most.
    pub(super) fn on_their_way(&self, burst: usize, options: &Options) -> usize {
        let forced = if self.forced_ns == 0 { usize::MAX } else { FORCED_ON_THEIR_WAY };
        let most = (options.on_their_way.min(forced) / burst).max(2);
        options.slots.min(1 << most.ilog2())
    }

    /// Packets that a pipeline uses.
    pub(super) fn circulating(&self, burst: usize, options: &Options) -> usize {
        (self.on_their_way(burst, options) + IN_HAND) * burst
    }

    /// Slots of its pipelines: enough for each of its bursts.
    pub(super) fn slots(&self, options: &Options) -> usize {
        let each = self.bursts.iter().map(|&burst| self.on_their_way(burst, options));
        each.max().unwrap_or(options.slots)
    }

    fn longest_burst(&self) -> usize {
        self.bursts.iter().copied().max().unwrap_or(1)
    }

    /// What a window of it is.
    pub(super) fn plan(&self, burst: usize, options: &Options, traffic: Traffic) -> Plan {
        Plan { burst, len: self.frame - FCS_LEN, circulating: self.circulating(burst, options), traffic }
    }
}

/// What is compared with each other.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub name: String,
    pub subjects: Vec<Subject>,
    /// Windows of each cell in a turn.
    pub each: usize,
    /// Turns of each cell.
    pub windows: usize,
}

impl Group {
    /// Windows in all.
    pub(super) fn steps(&self) -> usize {
        self.windows * self.subjects.iter().map(|subject| self.turn(subject)).sum::<usize>()
    }

    /// Windows of a turn of `subject`.
    fn turn(&self, subject: &Subject) -> usize {
        self.each * subject.bursts.len()
    }
}

/// What was measured of one subject at one burst.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples {
    pub mpps: Vec<f64>,
    /// Everything else, of all windows together.
    pub seen: Seen,
}

impl Samples {
    /// One window more.
    pub(super) fn add(&mut self, seen: &Seen) {
        self.mpps.push(seen.mpps);
        self.seen.add(seen);
    }
}

/// Everything that is there for as long as there is something to measure.
#[derive(Debug)]
pub(super) struct Rig<'a> {
    pub options: &'a Options,
    device: Box<dyn Device>,
    /// What the device is, in words: a GPU's name, its memory.
    pub device_name: String,
    /// Where the ends of each pipeline go.
    pub places: Vec<Place>,
    pool: &'static Pool,
    /// Those that no session has.
    packets: Vec<Packet>,
    content: Arc<Content>,
    works: HashMap<WorkKind, Arc<CpuWork>>,
    /// By work and packet length: the result of the packet in each chunk.
    results: HashMap<(WorkKind, usize), Arc<[u32]>>,
    notes: Vec<String>,
    /// What could not be measured, and why.
    failures: Vec<String>,
    /// How long everything takes.
    pub pace: Pace,
    /// A pipeline that nobody uses: as long as it is there, the pool stays registered with the device.
    keeper: Option<(Front, Back)>,
}

impl<'a> Rig<'a> {
    /// Makes the pool that `options` needs and fills its packets.
    pub(super) fn new(options: &'a Options, device: Box<dyn Device>, groups: Vec<Group>) -> Result<Self> {
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
            pace: Pace::new(steps, options.limit),
            keeper: None,
        };
        if !rig.is_simulated() {
            rig.keeper = Some(rig.keep_pool()?);
        }
        Ok(rig)
    }

    /// A pipeline whose device serves nothing, and has what all of them have in common.
    fn keep_pool(&mut self) -> Result<(Front, Back)> {
        let all = self.options.memories.contains(&Memory::Gpu);
        Ok(pipeline(Setup {
            burst: 1,
            slots: 2,
            worker: Worker::Device {
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

    /// The device's name.
    pub(super) fn device(&self) -> &str {
        self.device.name()
    }

    /// Whether the device stands in for a GPU.
    pub(super) fn is_simulated(&self) -> bool {
        self.device() == STAND_IN
    }

    /// What the device had to say, and what could not be measured.
    pub(super) fn outcome(mut self) -> Outcome {
        Outcome { notes: std::mem::take(&mut self.notes), failures: std::mem::take(&mut self.failures) }
    }

    /// Measures a group by turns. What was measured of each subject at each burst; nothing where that failed.
    pub(super) fn alternate(&mut self, group: &Group, progress: &Progress) -> Vec<Vec<Samples>> {
        let mut all: Vec<_> =
            group.subjects.iter().map(|subject| vec![Samples::default(); subject.bursts.len()]).collect();
        self.by_turns(group, progress, |rig, round, index| {
            rig.turn(&group.subjects[index], round == 0, &mut all[index], progress)
        });
        all
    }

    /// Lets the subjects of a group have turns, forwards, then backwards, and so on: `turn` is told which round it is
    /// and whose turn. Who fails has no more turns, and takes no more time.
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

    /// So many windows will not be measured.
    fn skip(&mut self, steps: usize, progress: &Progress) {
        self.pace.skip(steps);
        progress.steps(steps);
    }

    /// A window was measured.
    pub(super) fn step(&mut self, progress: &Progress) {
        self.pace.step();
        progress.step();
    }

    /// One window of each of the subject's cells.
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
                samples.add(&session.measure(plan, rig.options.warm_up, rig.options.window)?);
                rig.step(progress);
            }
            Ok(())
        })
    }

    /// Has something done with the pipelines of a subject.
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
        // Once for all services of a kind, whose numbers of bytes and blocks are not the same.
        let words = |note: &str| note.replace(|c: char| c.is_ascii_digit(), "");
        for note in self.device.notes() {
            if !self.notes.iter().any(|known| words(known) == words(&note)) {
                self.notes.push(note);
            }
        }
        Ok(session)
    }

    /// Sends packets round and looks at each in full.
    pub(super) fn every_one(&self, session: &Session, subject: &Subject, burst: usize) -> Result<Seen> {
        // Forced times would add up.
        let least = if subject.forced_ns == 0 { EVERY_ONE } else { 1 };
        let packets = least.max(2 * burst as u64);
        let traffic = Traffic::EveryOne(packets.next_multiple_of(burst as u64));
        let plan = subject.plan(burst, self.options, traffic);
        let seen = session.measure(plan, Duration::ZERO, Duration::ZERO)?;
        // Of what is not timed, only the packets count.
        Ok(Seen { received: seen.received, verified: seen.verified, ..Seen::default() })
    }

    /// The same work by a core that does nothing else.
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
                (&work, check),
                (self.pool, &mut self.packets[used..]),
                plan,
                (lcore, self.options.window),
            )?;
            samples.add(&seen);
            self.step(progress);
        }
        Ok(())
    }

    /// The work without the swap, for who checks.
    fn work(&mut self, kind: WorkKind) -> Result<Arc<CpuWork>> {
        if let Some(work) = self.works.get(&kind) {
            return Ok(Arc::clone(work));
        }
        let patterns = Some(self.content.patterns());
        let work = Arc::new(CpuWork::new(kind.kind(), false, SKIP as u32, 0, patterns)?);
        self.works.insert(kind, Arc::clone(&work));
        Ok(work)
    }

    /// The result of the packet in each chunk, as the CPU has it; nothing where all are 0.
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

/// What a device is, in words: what all of its notes begin with, without the name that options have for it.
fn title(device: &dyn Device) -> String {
    let notes = device.notes();
    let first = notes.first().map_or("", String::as_str);
    let title = first.split_once(": ").map_or(first, |(title, _)| title);
    title.strip_prefix(device.name()).unwrap_or(title).trim().to_owned()
}

/// A subject in words, for errors.
fn describe(subject: &Subject) -> String {
    let Subject { workload, memory, work, .. } = subject;
    match workload {
        Workload::Device(launch) => format!("{launch}, memory {memory}, work {}", work.name()),
        _ => format!("{}, work {}", workload.name(), work.name()),
    }
}
