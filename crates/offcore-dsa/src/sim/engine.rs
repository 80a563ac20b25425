//! The engine: the device's inside, as discrete events on a clock in picoseconds.
//!
//! ```text
//! portals --rings--> arriving --> work queues --arbiter--> DSA engines: front, read, data path, record
//!                                                            ^ members of batches
//! ```
//! [`super::Timing`] says how long each step takes. Nothing touches a client's memory before its time: a batch's list is
//! read when the DSA engine reads it, an operation is made at the instant of its completion, its record after it.
//!
//! Everything that is random comes from the seed, and every queue is first come first served where nothing else is said,
//! so a stepped device does the same every time.

mod batch;
mod clients;
mod complete;
mod pipeline;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::arbiter::Arbiter;
use super::checks::{self, Refused};
use super::execute::{Injected, Scratch};
use super::shared::{Client, Shared, this_thread};
use super::stats::Counters;
use super::{DeviceState, Faults, SimOptions, SoftwareError, Timing};
use crate::completion::Completed;
use crate::descriptor::{Descriptor, Flags, Opcode};
use offcore_stats::SplitMix;
use pipeline::DsaEngine;

/// Descriptors taken from a portal at a time.
const INTAKE: usize = 64;

/// A descriptor inside the device.
#[derive(Debug)]
struct Job {
    descriptor: Descriptor,
    client: usize,
    queue: usize,
    /// For a batch's member: the batch's job, and its place in the list.
    batch: Option<(usize, u32)>,
    refused: Option<Refused>,
    injected: Injected,
    /// The record that is to be written when a page request has been answered.
    answered: Option<Completed>,
    /// The record is overwritten by the CPU's late store.
    late_store: bool,
    /// The record is not written.
    lost: bool,
}

/// A client as the engine knows it.
#[derive(Debug)]
struct Served {
    client: Client,
    /// The portal is closed: nothing of it may touch memory.
    dead: bool,
    /// Descriptors taken from the ring.
    taken: usize,
    jobs: u32,
}

/// A work queue.
#[derive(Debug, Default)]
struct WorkQueue {
    /// On their way from the portal: when they arrive.
    arriving: VecDeque<(u64, usize)>,
    /// Waiting for a DSA engine.
    waiting: VecDeque<usize>,
    /// Given to DSA engines and not completed.
    outstanding: u32,
}

/// DSA engines and the work queues they serve.
#[derive(Debug)]
struct Group {
    /// Numbers in [`SimEngine::queues`].
    queues: Vec<usize>,
    /// Numbers in [`SimEngine::engines`].
    engines: Vec<usize>,
    arbiter: Arbiter,
}

/// The device's inside, for the one thread that runs it: a virtual clock and what happens next.
#[derive(Debug)]
pub struct SimEngine {
    shared: Arc<Shared>,
    generation: u64,
    /// Picoseconds.
    now: u64,
    random: SplitMix,
    timing: Timing,
    faults: Faults,
    /// Descriptors until the device halts, when it is to.
    until_halt: Option<u64>,
    clients: Vec<Option<Served>>,
    jobs: Vec<Option<Job>>,
    free: Vec<usize>,
    queues: Vec<WorkQueue>,
    groups: Vec<Group>,
    engines: Vec<DsaEngine>,
    scratch: Scratch,
    completed: usize,
    /// Something has come to wait, or a place has become free.
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

    /// Queues, groups and DSA engines, all of them empty.
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
            self.groups.push(Group { queues, engines: (first..first + engines).collect(), arbiter });
        }
    }

    /// Virtual nanoseconds since the device was made.
    pub fn now(&self) -> u64 {
        self.now / 1000
    }

    /// Advances the clock to the next event and makes it happen; `false` when there is none.
    pub fn step(&mut self) -> bool {
        self.begin();
        let stepped = self.step_once(u64::MAX);
        self.end();
        stepped
    }

    /// Makes everything happen up to `ns` and sets the clock to it; returns the descriptors completed.
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

    /// Runs until nothing is left to happen; returns the descriptors completed.
    pub fn run_until_idle(&mut self) -> usize {
        self.begin();
        while self.step_once(u64::MAX) {
            self.look();
            self.take_in();
        }
        self.end();
        mem::take(&mut self.completed)
    }

    /// Says that we are in a step, takes note of what has changed, and takes descriptors in.
    fn begin(&mut self) {
        self.shared.stepping.swap(true, Ordering::SeqCst);
        self.shared.stepper.store(this_thread(), Ordering::Relaxed);
        self.look();
        self.take_in();
    }

    fn end(&self) {
        self.shared.stepping.store(false, Ordering::Release);
    }

    /// Takes note of what has changed.
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

    /// The time in `ns` nanoseconds. The clock may be near its end: a completion can be injected to be that late.
    fn after(&self, ns: f64) -> u64 {
        self.now.saturating_add(Self::ps(ns))
    }

    /// Makes the next event happen, unless it is after `limit`.
    fn step_once(&mut self, limit: u64) -> bool {
        // At the clock's end (213 days), where nothing can take time any more, nothing happens any more.
        if self.shared.state() == DeviceState::Halted || self.now == u64::MAX {
            return false;
        }
        let Some(at) = self.next_event().filter(|&at| at <= limit) else { return false };
        self.advance(at.max(self.now));
        self.arrive();
        self.work();
        // Data that moved on its way changes nothing for what waits.
        if mem::take(&mut self.changed) {
            for group in 0..self.groups.len() {
                self.dispatch(group);
            }
        }
        true
    }

    /// When something happens next.
    fn next_event(&self) -> Option<u64> {
        let arrivals = self.queues.iter().filter_map(|queue| queue.arriving.front().map(|&(at, _)| at));
        let active = self.active();
        let engines =
            self.engines.iter().filter_map(|engine| engine.next_event(self.now, &self.timing, active));
        arrivals.chain(engines).min()
    }

    /// DSA engines that are moving data.
    fn active(&self) -> u32 {
        self.engines.iter().filter(|engine| engine.is_moving()).count() as u32
    }

    /// Sets the clock; data moves meanwhile.
    fn advance(&mut self, to: u64) {
        if self.shared.state() == DeviceState::Enabled {
            let active = self.active();
            for engine in &mut self.engines {
                engine.move_data(to - self.now, &self.timing, active);
            }
        }
        self.now = to;
    }

    /// Descriptors reach their queues.
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

    /// The checks of section 5.3: a dedicated queue that is full drops the descriptor.
    fn accept(&mut self, queue: usize, job: usize) {
        let full = self.queues[queue].waiting.len() >= self.shared.layout.queues[queue].info.size as usize;
        if self.random.happens(self.faults.drop) {
            self.count(|counters| &counters.injected_drops, 1);
            self.leave_queue(job);
        } else if full {
            // Portals count here, too.
            self.shared.counters.overflowed.fetch_add(1, Ordering::Relaxed);
            self.report(job, None, 0);
            self.leave_queue(job);
        } else {
            self.count(|counters| &counters.arrived, 1);
            self.queues[queue].waiting.push_back(job);
            self.changed = true;
        }
    }

    /// Reports what no record tells of.
    fn report(&self, job: usize, status: Option<crate::completion::Status>, address: u64) {
        let job = self.job(job);
        self.shared.report(SoftwareError {
            status,
            wq: self.shared.layout.queues[job.queue].number as u32,
            opcode: job.descriptor.code(),
            batch_member: job.batch.map(|(_, index)| index),
            address,
        });
    }

    /// Gives descriptors to the DSA engines of a group that have a place, one to each in turn.
    fn dispatch(&mut self, group: usize) {
        while self.anything_waits(group) {
            let mut dispatched = false;
            for position in self.in_turn(group) {
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

    fn anything_waits(&self, group: usize) -> bool {
        let Group { queues, engines, .. } = &self.groups[group];
        queues.iter().any(|&queue| !self.queues[queue].waiting.is_empty())
            || engines.iter().any(|&engine| !self.engines[engine].batches.is_empty())
    }

    /// The DSA engines of a group, the least busy first.
    fn in_turn(&mut self, group: usize) -> impl Iterator<Item = usize> + use<> {
        let engines = &self.groups[group].engines;
        let mut order = [0, 1, 2, 3, 4, 5, 6, 7];
        let n = engines.len().min(order.len());
        if n > 1 {
            order[..n].rotate_left(self.random.below(n as u64) as usize);
            order[..n].sort_by_key(|&position| self.engines[engines[position]].in_progress);
        }
        order.into_iter().take(n)
    }

    /// Gives the DSA engine a descriptor of a work queue.
    fn dispatch_queued(&mut self, group: usize, engine: usize) -> bool {
        let Self { groups, queues, jobs, engines, timing, .. } = self;
        let place = |queue: &WorkQueue| {
            let head = queue.waiting.front().and_then(|&job| jobs[job].as_ref());
            head.is_some_and(|job| match job.descriptor.opcode() {
                Some(Opcode::Batch) => engines[engine].has_batch_place(),
                // A drain waits for everything before it, and everything behind it for the drain.
                Some(Opcode::Drain) => queue.outstanding == 0 && engines[engine].has_place(timing),
                _ => engines[engine].has_place(timing),
            })
        };
        let Group { queues: numbers, arbiter, .. } = &mut groups[group];
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

    /// Checks a descriptor, and draws what will go wrong with it.
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
        // A step that panicked has ended, too.
        self.shared.stepping.store(false, Ordering::Release);
        self.shared.alive.store(false, Ordering::Release);
    }
}

/// Bytes that an operation takes of the data path: what it reads or what it writes, whichever is more.
fn traffic(descriptor: &Descriptor) -> f64 {
    let size = f64::from(descriptor.size);
    match descriptor.opcode() {
        Some(Opcode::Compare | Opcode::CreateDelta | Opcode::Dualcast) => 2.0 * size,
        Some(Opcode::ApplyDelta) => f64::from(descriptor.specific[0] as u32),
        Some(Opcode::Noop | Opcode::Batch | Opcode::Drain | Opcode::TranslationFetch) | None => 0.0,
        Some(_) => size,
    }
}

/// Whether a descriptor wants the device to wait for pages.
fn blocks(descriptor: &Descriptor) -> bool {
    descriptor.flags().contains(Flags::BLOCK_ON_FAULT)
}
