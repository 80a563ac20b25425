//! A production worker whose rounds are timed, with what works for it in turns of its own: the engine and, where there is
//! one, a copier beside, both on the other core.

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

/// How often in a row the engine is run for nothing, at most.
const MOST_IN_VAIN: usize = 64;
/// A copy that takes longer counts as lost.
const NEVER_LOST: Duration = Duration::from_secs(600);

/// The worker.
#[derive(Debug)]
pub(crate) struct TimedWorker {
    pub(crate) worker: Worker,
    pub(crate) temperature: Temperature,
    /// TSC ticks inside rounds that are not the worker's.
    pub(crate) not_its_own: Arc<AtomicU64>,
    engine: Option<Arc<Mutex<Engine>>>,
    /// Whether it has copied anything when it was run last.
    engine_worked: Arc<AtomicBool>,
    background: Option<Background>,
    /// Of the queues that the core may copy for.
    routines: Vec<Routines>,
}

/// A mover with `engine`'s channel, if there is one, and that channel.
pub(crate) fn mover_with(engine: Option<&mut Engine>) -> Result<(Mover, Vec<ChannelId>)> {
    let mut mover = Mover::new();
    // Whoever steps the engine may be taken off its core for long; no copy is lost by that.
    mover.set_lost_after(tsc::ticks(NEVER_LOST));
    if let Some(engine) = engine {
        mover.add_channel(engine.take_channel().context("the engine's channel belongs to another variant")?);
    }
    let channels = mover.channels().map(|(id, _)| id).collect();
    Ok((mover, channels))
}

impl TimedWorker {
    /// `worker`, whose mover has `engine`'s channel.
    pub(crate) fn new(worker: Worker, engine: Option<Engine>, temperature: Temperature) -> Self {
        Self {
            worker,
            temperature,
            not_its_own: Arc::default(),
            engine: engine.map(|engine| Arc::new(Mutex::new(engine))),
            engine_worked: Arc::default(),
            background: None,
            routines: Vec::new(),
        }
    }

    /// Puts a copier on the other core that makes as many copies, of `len` bytes, as this core, while that is timed.
    pub(crate) fn set_background(&mut self, len: usize) {
        self.background = Some(Background::new(len));
    }

    /// Copies that the copier beside has made; `None` without one.
    pub(crate) fn background_copies(&self) -> Option<u64> {
        self.background.as_ref().map(Background::made)
    }

    /// Bytes that core and engine have copied so far.
    pub(crate) fn copied_bytes(&self) -> u64 {
        let mover = &self.worker.mover;
        mover.stats().core_bytes + mover.channels().map(|(_, channel)| channel.stats().bytes).sum::<u64>()
    }

    /// Forgets by which routines the core copied, and how long the engine took: something else is measured from now on.
    pub(crate) fn forget(&mut self) {
        self.routines.clear();
        if let Some(engine) = &self.engine {
            lock(engine).forget();
        }
    }

    /// Nanoseconds that the engine took for a copy; `None` without one.
    pub(crate) fn engine_ns_per_copy(&self) -> Option<f64> {
        Some(lock(self.engine.as_ref()?).ns_per_copy())
    }

    /// TSC ticks of a round that finds nothing.
    pub(crate) fn empty_poll(&mut self) -> f64 {
        const ROUNDS: usize = 1000;
        self.rounds(ROUNDS) as f64 / ROUNDS as f64
    }

    /// TSC ticks of so many rounds.
    fn rounds(&mut self, rounds: usize) -> u64 {
        let before = self.not_its_own.load(Ordering::Relaxed);
        let start = tsc::now();
        for _ in 0..rounds {
            self.worker.round();
        }
        let all = tsc::now() - start;
        all.saturating_sub(self.not_its_own.load(Ordering::Relaxed) - before)
    }

    /// TSC ticks of so many rounds, with the copier beside where there is one, and of those that it takes, the engine run
    /// between them, until nothing is `left` or the engine has nothing to do.
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
        // In mode `auto` the core may have made all copies: then there is nothing to wait for.
        let mut in_vain = 0;
        while left() && in_vain < MOST_IN_VAIN {
            in_vain = if self.run_engine(other)? { 0 } else { in_vain + 1 };
            ticks += self.rounds(1);
        }
        Ok(ticks)
    }

    /// Some copies by the engine, always on the other core: on this one it would leave the packets in its caches. Returns
    /// whether it has made any.
    fn run_engine(&self, other: &OtherCore) -> Result<bool> {
        let Some(engine) = self.engine.as_ref().map(Arc::clone) else { return Ok(false) };
        let made = Arc::clone(&self.engine_worked);
        other.run(move || {
            made.store(lock(&engine).run_portion().copies > 0, Ordering::Relaxed);
            Ok(())
        })?;
        Ok(self.engine_worked.load(Ordering::Relaxed))
    }

    /// Remembers by which routines the core copies for the mover's queues of these numbers, always the same ones.
    pub(crate) fn note_routines(&mut self, queues: Range<usize>) {
        self.routines.resize_with(queues.len(), Routines::default);
        let mover = &self.worker.mover;
        for (queue, routines) in mover.queues().skip(queues.start).zip(&mut self.routines) {
            if let Some(routine) = mover.routine(queue) {
                routines.note(routine);
            }
        }
    }

    /// How often that was since it was last forgotten.
    #[cfg(test)]
    pub(crate) fn routine_windows(&self) -> u64 {
        self.routines.iter().flat_map(|routines| &routines.0).map(|(_, times)| times).sum()
    }

    /// Those routines, as it mostly had them; `None` where the core has made no copy.
    pub(crate) fn copy_routine(&self) -> Option<String> {
        let made = self.worker.mover.stats().core_copies > 0;
        let names: Vec<_> = self.routines.iter().filter_map(Routines::most).map(Routine::name).collect();
        made.then(|| names.join("+"))
    }

    /// The rules of a worker that forwards, and does nothing else.
    pub(crate) fn rules(&mut self) -> Result<&mut Rules> {
        let task: &mut dyn Task = self.worker.tasks.first_mut().context("the worker has no task")?.as_mut();
        let task: &mut dyn Any = task;
        if task.is::<GuestPair>() {
            return task.downcast_mut::<GuestPair>().map(GuestPair::rules).context("the task is a pair");
        }
        task.downcast_mut::<Forwarding>().map(Forwarding::rules).context("the worker's task does not forward")
    }
}

/// How often each routine was the present one of a queue.
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
