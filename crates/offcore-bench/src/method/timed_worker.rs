//! A production worker whose rounds are timed. The engine and an optional background copier run on the other core: the
//! engine in its own turns, the copier in parallel.

use std::any::Any;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use offcore_dma::cpu::Routine;
use offcore_dma::{ChannelId, Mover};
use offcore_flow::forwarding::{Forwarding, Rules};
use offcore_flow::guest_pair::GuestPair;
use offcore_flow::task::Task;
use offcore_flow::worker::Worker;
use offcore_stats::tsc;

use crate::method::background::Background;
use crate::method::copier::Engine;
use crate::method::lockstep::{OtherCore, lock};
use crate::method::temperature::Temperature;

/// Maximum number of consecutive engine runs that make no copy.
const MAX_IDLE_RUNS: usize = 64;
/// Time after which a copy counts as lost: practically never.
const NEVER_LOST: Duration = Duration::from_secs(600);

/// The timed worker.
#[derive(Debug)]
pub(crate) struct TimedWorker {
    pub(crate) worker: Worker,
    pub(crate) temperature: Temperature,
    /// TSC ticks within rounds that do not belong to the worker.
    pub(crate) foreign_ticks: Arc<AtomicU64>,
    engine: Option<Arc<Mutex<Engine>>>,
    /// Whether the last run of the engine copied anything.
    engine_worked: Arc<AtomicBool>,
    background: Option<Background>,
    /// Copy routines of the queues for which the core may copy.
    routines: Vec<Routines>,
}

/// Returns a mover with `engine`'s channel, if `engine` is given, and the IDs of its channels.
pub(crate) fn mover_with(engine: Option<&mut Engine>) -> Result<(Mover, Vec<ChannelId>)> {
    let mut mover = Mover::new();
    // The thread that steps the engine may be preempted for a long time. No copy may count as lost because of that.
    mover.set_lost_after(tsc::ticks(NEVER_LOST));
    if let Some(engine) = engine {
        mover.add_channel(engine.take_channel().context("the engine's channel belongs to another variant")?);
    }
    let channels = mover.channels().map(|(id, _)| id).collect();
    Ok((mover, channels))
}

impl TimedWorker {
    /// Creates a timed worker from `worker`, whose mover has `engine`'s channel.
    pub(crate) fn new(worker: Worker, engine: Option<Engine>, temperature: Temperature) -> Self {
        Self {
            worker,
            temperature,
            foreign_ticks: Arc::default(),
            engine: engine.map(|engine| Arc::new(Mutex::new(engine))),
            engine_worked: Arc::default(),
            background: None,
            routines: Vec::new(),
        }
    }

    /// Starts a background copier on the other core for the timed rounds. It makes as many copies of `len` bytes as
    /// this core.
    pub(crate) fn set_background(&mut self, len: usize) {
        self.background = Some(Background::new(len));
    }

    /// Returns the number of copies that the background copier has made, or `None` without a background copier.
    pub(crate) fn background_copies(&self) -> Option<u64> {
        self.background.as_ref().map(Background::made)
    }

    /// Returns the number of bytes that core and engine have copied so far.
    pub(crate) fn copied_bytes(&self) -> u64 {
        let mover = &self.worker.mover;
        mover.stats().core_bytes + mover.channels().map(|(_, channel)| channel.stats().bytes).sum::<u64>()
    }

    /// Discards the recorded copy routines and engine times before another measurement.
    pub(crate) fn forget(&mut self) {
        self.routines.clear();
        if let Some(engine) = &self.engine {
            lock(engine).forget();
        }
    }

    /// Returns the engine's nanoseconds per copy, or `None` without an engine.
    pub(crate) fn engine_ns_per_copy(&self) -> Option<f64> {
        Some(lock(self.engine.as_ref()?).ns_per_copy())
    }

    /// Returns the TSC ticks of a round without work.
    pub(crate) fn empty_poll(&mut self) -> f64 {
        const ROUNDS: usize = 1000;
        self.rounds(ROUNDS) as f64 / ROUNDS as f64
    }

    /// Returns the TSC ticks of `rounds` rounds.
    fn rounds(&mut self, rounds: usize) -> u64 {
        let before = self.foreign_ticks.load(Ordering::Relaxed);
        let start = tsc::now();
        for _ in 0..rounds {
            self.worker.round();
        }
        let all = tsc::now() - start;
        all.saturating_sub(self.foreign_ticks.load(Ordering::Relaxed) - before)
    }

    /// Returns the TSC ticks of `rounds` rounds, with the background copier if one is set, and of the additional rounds
    /// until `left` returns false or the engine has no work. The engine runs between the additional rounds.
    pub(crate) fn rounds_until(
        &mut self,
        rounds: usize,
        other: &OtherCore,
        left: impl Fn() -> bool,
    ) -> Result<u64> {
        let beside = self.background.as_ref().map(|background| background.begin(other)).transpose()?;
        let before = self.worker.mover.stats().core_copies;
        let mut ticks = self.rounds(rounds);
        if let Some(beside) = beside {
            beside.end()?;
        }
        let copies = self.worker.mover.stats().core_copies - before;
        if let Some(background) = &mut self.background {
            background.follow(ticks, copies);
        }
        // In mode `auto` the core may have made all copies. Then the engine has no work to wait for.
        let mut in_vain = 0;
        while left() && in_vain < MAX_IDLE_RUNS {
            in_vain = if self.run_engine(other)? { 0 } else { in_vain + 1 };
            ticks += self.rounds(1);
        }
        Ok(ticks)
    }

    /// Makes some copies with the engine, always on the other core: on this core the engine would leave the packets in
    /// the caches. Returns whether the engine made a copy.
    fn run_engine(&self, other: &OtherCore) -> Result<bool> {
        let Some(engine) = self.engine.as_ref().map(Arc::clone) else { return Ok(false) };
        let made = Arc::clone(&self.engine_worked);
        other.run(move || {
            made.store(lock(&engine).run_portion().copies > 0, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(self.engine_worked.load(Ordering::Relaxed))
    }

    /// Records the routines with which the core copies for the mover's queues `queues`. The range must be the same in
    /// all calls.
    pub(crate) fn note_routines(&mut self, queues: Range<usize>) {
        self.routines.resize_with(queues.len(), Routines::default);
        let mover = &self.worker.mover;
        for (queue, routines) in mover.queues().skip(queues.start).zip(&mut self.routines) {
            if let Some(routine) = mover.routine(queue) {
                routines.note(routine);
            }
        }
    }

    /// Returns the number of recorded routines since the last [`TimedWorker::forget`].
    #[cfg(test)]
    pub(crate) fn routine_windows(&self) -> u64 {
        self.routines.iter().flat_map(|routines| &routines.0).map(|(_, times)| times).sum()
    }

    /// Returns the most frequent routine of each queue, or `None` if the core has made no copy.
    pub(crate) fn copy_routine(&self) -> Option<String> {
        let made = self.worker.mover.stats().core_copies > 0;
        let names: Vec<_> = self.routines.iter().filter_map(Routines::most).map(Routine::name).collect();
        made.then(|| names.join("+"))
    }

    /// Returns the rules of a worker whose only task is forwarding.
    pub(crate) fn rules(&mut self) -> Result<&mut Rules> {
        let task: &mut dyn Task = self.worker.tasks.first_mut().context("the worker has no task")?.as_mut();
        let task: &mut dyn Any = task;
        if task.is::<GuestPair>() {
            return task.downcast_mut::<GuestPair>().map(GuestPair::rules).context("the task is a pair");
        }
        task.downcast_mut::<Forwarding>().map(Forwarding::rules).context("the worker's task does not forward")
    }
}

/// Number of observations of each routine of a queue.
#[derive(Clone, Debug, Default)]
struct Routines(Vec<(Routine, u64)>);

impl Routines {
    fn note(&mut self, routine: Routine) {
        match self.0.iter_mut().find(|(known, _)| *known == routine) {
            Some((_, times)) => *times += 1,
            None => self.0.push((routine, 1)),
        }
    }

    fn most(&self) -> Option<Routine> {
        self.0.iter().max_by_key(|(_, times)| *times).map(|(routine, _)| *routine)
    }
}
