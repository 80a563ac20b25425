//! The inside of the device: a discrete-event simulation with a clock in picoseconds.
//!
//! ```text
//! portals --rings--> arriving --> work queues --arbiter--> DSA engines: front, read, data path, record
//!                                                            ^ members of batches
//! ```
//! [`super::Timing`] defines the duration of each step. A client's memory is only accessed at the simulated time of the
//! access: a batch's list is read when the DSA engine reads it, an operation executes at the instant of its completion,
//! and its record is written after it.
//!
//! All randomness comes from the seed, and every queue is first come, first served unless documented otherwise. A
//! stepped device is therefore deterministic.

mod batch;
mod clients;
mod complete;
mod pipeline;

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arbiter::Arbiter;
use super::checks::{self, Refused};
use super::execute::{Injected, Scratch};
use super::shared::{Client, Shared};
use super::stats::Counters;
use super::{DeviceState, Faults, SimOptions, Timing};
use crate::completion::Completed;
use crate::descriptor::{Descriptor, Flags, Opcode};
use offcore_stats::SplitMix;
use pipeline::DsaEngine;

/// Number of descriptors taken from a portal at once.
const INTAKE: usize = 64;

/// A descriptor inside the device.
#[derive(Debug)]
struct Job {
    descriptor: Descriptor,
    client: usize,
    queue: usize,
    /// For a member of a batch: the batch's job, and the member's index in the list.
    batch: Option<(usize, u32)>,
    refused: Option<Refused>,
    injected: Injected,
    /// The record to write when a page request has been answered.
    answered: Option<Completed>,
    /// Whether the CPU's late store overwrites the record.
    late_store: bool,
    /// Whether the record is not written.
    lost: bool,
}

/// The engine's state of a client.
#[derive(Debug)]
struct Served {
    client: Client,
    /// Whether the portal is closed: its descriptors must not access memory any more.
    dead: bool,
    /// Number of descriptors taken from the ring.
    taken: usize,
    jobs: u32,
}

/// A work queue.
#[derive(Debug, Default)]
struct WorkQueue {
    /// Descriptors in transit from the portal, with their arrival times.
    arriving: VecDeque<(u64, usize)>,
    /// Descriptors that wait for a DSA engine.
    waiting: VecDeque<usize>,
    /// Number of descriptors given to DSA engines and not completed.
    outstanding: u32,
}

/// A group of DSA engines and the work queues that they serve.
#[derive(Debug)]
struct SimGroup {
    /// Indices in [`SimEngine::queues`].
    queues: Vec<usize>,
    /// Indices in [`SimEngine::engines`].
    engines: Vec<usize>,
    arbiter: Arbiter,
}

/// The inside of the device, run by a single thread: a virtual clock and pending events.
#[derive(Debug)]
pub struct SimEngine {
    shared: Arc<Shared>,
    generation: u64,
    /// The virtual time in picoseconds.
    now: u64,
    random: SplitMix,
    timing: Timing,
    faults: Faults,
    /// Number of descriptors until the device halts, if a halt is injected.
    until_halt: Option<u64>,
    clients: Vec<Option<Served>>,
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
    queues: Vec<WorkQueue>,
    groups: Vec<SimGroup>,
    engines: Vec<DsaEngine>,
    scratch: Scratch,
    completed: usize,
    /// A descriptor has started to wait, or a slot has become free.
    changed: bool,
}

impl SimEngine {
    pub(super) fn new(shared: Arc<Shared>, options: &SimOptions) -> Self {
        let mut engine = Self {
            shared,
            generation: 0,
            now: 0,
            random: SplitMix::new(options.seed),
            timing: options.timing,
            faults: Faults::default(),
            until_halt: None,
            clients: Vec::new(),
            jobs: Vec::new(),
            free: Vec::new(),
            queues: Vec::new(),
            groups: Vec::new(),
            engines: Vec::new(),
            scratch: Scratch::default(),
            completed: 0,
            changed: false,
        };
        engine.set_faults(options.faults);
        engine.lay_out();
        engine
    }

    /// Creates the queues, groups and DSA engines, all of them empty.
    fn lay_out(&mut self) {
        let layout = &self.shared.layout;
        self.queues = layout.queues.iter().map(|_| WorkQueue::default()).collect();
        self.engines.clear();
        self.groups.clear();
        for (number, (group, engines)) in layout.groups.iter().enumerate() {
            let queues: Vec<usize> =
                (0..layout.queues.len()).filter(|&queue| layout.queues[queue].group == number).collect();
            let priorities = queues.iter().map(|&queue| layout.queues[queue].config.priority);
            let arbiter = Arbiter::new(priorities);
            let first = self.engines.len();
            self.engines.extend((0..*engines).map(|_| DsaEngine::new(group, *engines, layout)));
            self.groups.push(SimGroup { queues, engines: (first..first + engines).collect(), arbiter });
        }
    }

    /// Returns the virtual nanoseconds since the device was created.
    pub fn now(&self) -> u64 {
        self.now / 1000
    }

    /// Advances the clock to the next event and executes it. Returns `false` if no event is pending.
    pub fn step(&mut self) -> bool {
        self.begin();
        let stepped = self.step_once(u64::MAX);
        self.end();
        stepped
    }

    /// Executes all events up to `ns` and sets the clock to it. Returns the number of descriptors completed.
    pub fn run_until(&mut self, ns: u64) -> usize {
        self.begin();
        let limit = ns.saturating_mul(1000);
        while self.step_once(limit) {
            self.look();
        }
        self.advance(limit.max(self.now));
        self.end();
        mem::take(&mut self.completed)
    }

    /// Runs until no event is pending. Returns the number of descriptors completed.
    pub fn run_until_idle(&mut self) -> usize {
        self.begin();
        while self.step_once(u64::MAX) {
            self.look();
            self.accept_submissions();
        }
        self.end();
        mem::take(&mut self.completed)
    }

    /// Marks the beginning of a step, applies changes by other threads, and takes in descriptors.
    fn begin(&mut self) {
        self.shared.stepping.swap(true, Ordering::SeqCst);
        self.look();
        self.accept_submissions();
    }

    fn end(&self) {
        self.shared.stepping.store(false, Ordering::Release);
    }

    /// Applies changes by other threads.
    #[inline]
    fn look(&mut self) {
        let generation = self.shared.generation.load(Ordering::SeqCst);
        if generation != self.generation {
            self.take_note(generation);
        }
    }

    fn set_faults(&mut self, faults: Faults) {
        self.until_halt = (faults.halt_after > 0).then_some(faults.halt_after);
        self.faults = faults;
    }

    fn job(&self, job: usize) -> &Job {
        self.jobs[job].as_ref().expect("a job that is referred to is there")
    }

    fn job_mut(&mut self, job: usize) -> &mut Job {
        self.jobs[job].as_mut().expect("a job that is referred to is there")
    }

    fn is_dead(&self, job: usize) -> bool {
        self.clients[self.client_of(job)].as_ref().is_none_or(|served| served.dead)
    }

    fn add(&mut self, job: Job) -> usize {
        if let Some(served) = &mut self.clients[job.client] {
            served.jobs += 1;
        }
        match self.free.pop() {
            Some(place) => {
                self.jobs[place] = Some(job);
                place
            }
            None => {
                self.jobs.push(Some(job));
                self.jobs.len() - 1
            }
        }
    }

    fn remove(&mut self, job: usize) {
        let client = self.client_of(job);
        self.jobs[job] = None;
        self.free.push(job);
        if let Some(served) = &mut self.clients[client] {
            served.jobs -= 1;
        }
        self.forget_if_done(client);
    }

    /// Adds to a counter that only the engine writes.
    fn count(&self, counter: impl Fn(&Counters) -> &AtomicU64, n: u64) {
        let counter = counter(&self.shared.counters);
        counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
    }

    fn ps(ns: f64) -> u64 {
        (ns * 1000.0) as u64
    }

    /// Returns the time in `ns` nanoseconds. Saturates, because an injected delay can exceed the clock's range.
    fn after(&self, ns: f64) -> u64 {
        self.now.saturating_add(Self::ps(ns))
    }

    /// Executes the next event, unless it is after `limit`.
    fn step_once(&mut self, limit: u64) -> bool {
        // At the end of the clock's range (213 days), no further event happens.
        if self.shared.state() == DeviceState::Halted || self.now == u64::MAX {
            return false;
        }
        let Some(at) = self.next_event().filter(|&at| at <= limit) else { return false };
        self.advance(at.max(self.now));
        self.arrive();
        self.work();
        // Data movement alone does not allow waiting descriptors to proceed.
        if mem::take(&mut self.changed) {
            for group in 0..self.groups.len() {
                self.dispatch(group);
            }
        }
        true
    }

    /// Returns the time of the next event.
    fn next_event(&self) -> Option<u64> {
        let arrivals = self.queues.iter().filter_map(|queue| queue.arriving.front().map(|&(at, _)| at));
        let active = self.active();
        let engines =
            self.engines.iter().filter_map(|engine| engine.next_event(self.now, &self.timing, active));
        arrivals.chain(engines).min()
    }

    /// Returns the number of DSA engines that are moving data.
    fn active(&self) -> u32 {
        self.engines.iter().filter(|engine| engine.is_moving()).count() as u32
    }

    /// Sets the clock and moves data for the elapsed time.
    fn advance(&mut self, to: u64) {
        if self.shared.state() == DeviceState::Enabled {
            let active = self.active();
            for engine in &mut self.engines {
                engine.move_data(to - self.now, &self.timing, active);
            }
        }
        self.now = to;
    }

    /// Moves descriptors that have arrived to their queues.
    fn arrive(&mut self) {
        for queue in 0..self.queues.len() {
            while let Some(&(at, job)) = self.queues[queue].arriving.front()
                && at <= self.now
            {
                self.queues[queue].arriving.pop_front();
                self.accept(queue, job);
            }
        }
    }

    /// Performs the checks of section 5.3: a full dedicated queue drops the descriptor.
    fn accept(&mut self, queue: usize, job: usize) {
        let full = self.queues[queue].waiting.len() >= self.shared.layout.queues[queue].info.size as usize;
        if self.random.happens(self.faults.drop) {
            self.count(|counters| &counters.injected_drops, 1);
            self.leave_queue(job);
        } else if full {
            // Portals also update this counter.
            self.shared.counters.overflowed.fetch_add(1, Ordering::Relaxed);
            self.leave_queue(job);
        } else {
            self.count(|counters| &counters.arrived, 1);
            self.queues[queue].waiting.push_back(job);
            self.changed = true;
        }
    }

    /// Dispatches descriptors to the DSA engines of a group that have free slots, one per engine in turn.
    fn dispatch(&mut self, group: usize) {
        while self.has_pending(group) {
            let mut dispatched = false;
            for position in self.engines_by_load(group) {
                let engine = self.groups[group].engines[position];
                let members_first = mem::take(&mut self.engines[engine].members_turn);
                dispatched |= (members_first && self.dispatch_member(engine))
                    || self.dispatch_queued(group, engine)
                    || (!members_first && self.dispatch_member(engine));
            }
            if !dispatched {
                break;
            }
        }
    }

    fn has_pending(&self, group: usize) -> bool {
        let SimGroup { queues, engines, .. } = &self.groups[group];
        queues.iter().any(|&queue| !self.queues[queue].waiting.is_empty())
            || engines.iter().any(|&engine| !self.engines[engine].batches.is_empty())
    }

    /// Returns the DSA engines of a group, the least busy first.
    fn engines_by_load(&mut self, group: usize) -> impl Iterator<Item = usize> + use<> {
        let engines = &self.groups[group].engines;
        let mut order = [0, 1, 2, 3, 4, 5, 6, 7];
        let n = engines.len().min(order.len());
        if n > 1 {
            order[..n].rotate_left(self.random.below(n as u64) as usize);
            order[..n].sort_by_key(|&position| self.engines[engines[position]].in_progress);
        }
        order.into_iter().take(n)
    }

    /// Dispatches a descriptor of a work queue to the DSA engine.
    fn dispatch_queued(&mut self, group: usize, engine: usize) -> bool {
        let Self { groups, queues, jobs, engines, timing, .. } = self;
        let place = |queue: &WorkQueue| {
            let head = queue.waiting.front().and_then(|&job| jobs[job].as_ref());
            head.is_some_and(|job| match job.descriptor.opcode() {
                Some(Opcode::Batch) => engines[engine].has_batch_place(),
                // A drain waits for all earlier descriptors, and all later descriptors wait for the drain.
                Some(Opcode::Drain) => queue.outstanding == 0 && engines[engine].has_place(timing),
                _ => engines[engine].has_place(timing),
            })
        };
        let SimGroup { queues: numbers, arbiter, .. } = &mut groups[group];
        let Some(turn) = arbiter.next(|turn| place(&queues[numbers[turn]])) else { return false };
        let queue = numbers[turn];
        let Some(job) = queues[queue].waiting.pop_front() else { return false };
        queues[queue].outstanding += 1;
        engines[engine].members_turn = true;
        self.free_entry(job);
        self.judge(job);
        let batch = self.job(job).descriptor.opcode() == Some(Opcode::Batch);
        if batch && self.job(job).refused.is_none() {
            self.begin_batch(engine, job);
        } else {
            self.enter(engine, job);
        }
        true
    }

    /// Checks a descriptor and draws the faults to inject into it.
    fn judge(&mut self, job: usize) {
        let (descriptor, queue) = (self.job(job).descriptor, self.job(job).queue);
        let limits = &self.shared.layout.queues[queue].limits;
        let refused = checks::check(&descriptor, limits, self.job(job).batch.is_some()).err();
        let overlap = limits.gen_cap & crate::wq::gen_cap::OVERLAP != 0;
        let mut injected = Injected::Nothing;
        let size = u64::from(descriptor.size).max(1);
        let has_data =
            !matches!(descriptor.opcode(), Some(Opcode::Noop | Opcode::Batch | Opcode::Drain) | None);
        if refused.is_none() && has_data {
            if self.random.happens(self.faults.page) {
                injected = Injected::Page {
                    after: self.random.below(size),
                    backwards: self.random.below(2) == 1 && overlap,
                    write: self.random.below(2) == 1,
                };
            } else if self.random.happens(self.faults.hardware) {
                injected = Injected::Hardware { after: self.random.below(size) };
            }
        }
        let lost = self.random.happens(self.faults.lost);
        let job = self.job_mut(job);
        (job.refused, job.injected, job.lost) = (refused, injected, lost);
    }
}

impl Drop for SimEngine {
    fn drop(&mut self) {
        // The flag is also cleared after a panic in a step.
        self.shared.stepping.store(false, Ordering::Release);
        self.shared.alive.store(false, Ordering::Release);
    }
}

/// Returns the bytes that an operation moves on the data path: the larger of its bytes read and written.
fn traffic(descriptor: &Descriptor) -> f64 {
    let size = f64::from(descriptor.size);
    match descriptor.opcode() {
        Some(Opcode::Compare | Opcode::CreateDelta | Opcode::Dualcast) => 2.0 * size,
        Some(Opcode::ApplyDelta) => f64::from(descriptor.specific[0] as u32),
        Some(Opcode::Noop | Opcode::Batch | Opcode::Drain | Opcode::TranslationFetch) | None => 0.0,
        Some(_) => size,
    }
}

/// Whether a descriptor asks the device to wait for page faults.
fn blocks(descriptor: &Descriptor) -> bool {
    descriptor.flags().contains(Flags::BLOCK_ON_FAULT)
}
