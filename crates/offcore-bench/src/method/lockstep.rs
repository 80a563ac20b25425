//! Two threads in lock-step: the measured core and the other core take turns, so that each turn's work is where it
//! belongs and nothing runs beside what is timed.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use offcore_stats::lcore;

use crate::method::temperature::Temperature;

/// A piece of work for the other core.
type Job = Box<dyn FnOnce() -> Result<()> + Send>;

/// The other core.
#[derive(Debug)]
pub struct OtherCore {
    jobs: Option<SyncSender<Job>>,
    turn: Arc<Turn>,
    results: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Whose turn it is: jobs handed over and jobs done.
#[derive(Debug, Default)]
struct Turn {
    given: AtomicU32,
    done: AtomicU32,
}

impl OtherCore {
    /// Starts the other core's thread on `lcore`; without one (a machine with a single core) it runs unpinned.
    ///
    /// # Errors
    /// When the thread cannot be started or pinned.
    pub fn start(lcore: Option<usize>) -> Result<Self> {
        let (jobs, queue) = sync_channel::<Job>(1);
        let (report, results) = sync_channel(1);
        let turn = Arc::new(Turn::default());
        let theirs = Arc::clone(&turn);
        let thread = std::thread::Builder::new().name("bench-guest".into()).spawn(move || {
            let pinned = lcore.map_or(Ok(()), lcore::pin).context("pinning the guest's thread");
            let _ = report.send(pinned);
            let mut seen = 0;
            loop {
                // Spins, so that a turn begins within a cache line's transfer.
                while theirs.given.load(Ordering::Acquire) == seen {
                    std::hint::spin_loop();
                }
                seen = seen.wrapping_add(1);
                let Ok(job) = queue.recv() else { return };
                let result = job();
                let _ = report.send(result);
                theirs.done.store(seen, Ordering::Release);
            }
        })?;
        let other = Self { jobs: Some(jobs), turn, results, thread: Some(thread) };
        other.results.recv().context("the guest's thread ended")??;
        Ok(other)
    }

    /// Runs `job` on the other core and waits for it, spinning.
    ///
    /// # Errors
    /// The job's own.
    pub fn run(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let turn = self.give(Box::new(job))?;
        self.wait(turn)
    }

    /// Runs `job` on `with` where that belongs: hot data stays with this core, all other is the other core's.
    pub(crate) fn run_on<T: Send + 'static>(
        &self,
        temperature: Temperature,
        with: &Arc<Mutex<T>>,
        job: impl FnOnce(&mut T) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        if temperature == Temperature::Hot {
            return job(&mut lock(with));
        }
        let with = Arc::clone(with);
        self.run(move || job(&mut lock(&with)))
    }

    /// Runs `job` on the other core beside what this core does until [`Beside::end`], which the job is told by the flag
    /// that it gets. Returns when the job has begun.
    ///
    /// # Errors
    /// When the other core's thread has ended.
    pub fn beside(&self, job: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static) -> Result<Beside<'_>> {
        let (begun, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (began, until) = (Arc::clone(&begun), Arc::clone(&end));
        let turn = self.give(Box::new(move || {
            began.store(true, Ordering::Release);
            job(&until)
        }))?;
        while !begun.load(Ordering::Acquire) {
            self.alive()?;
            std::hint::spin_loop();
        }
        Ok(Beside { other: self, turn, end, ended: false })
    }

    fn give(&self, job: Job) -> Result<u32> {
        let Some(jobs) = &self.jobs else { bail!("the guest's thread has ended") };
        jobs.send(job).map_err(|_| anyhow!("the guest's thread ended"))?;
        let turn = self.turn.given.load(Ordering::Relaxed).wrapping_add(1);
        self.turn.given.store(turn, Ordering::Release);
        Ok(turn)
    }

    fn wait(&self, turn: u32) -> Result<()> {
        while self.turn.done.load(Ordering::Acquire) != turn {
            self.alive()?;
            std::hint::spin_loop();
        }
        self.results.recv().context("the guest's thread ended")?
    }

    fn alive(&self) -> Result<()> {
        match self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            true => bail!("the guest's thread ended"),
            false => Ok(()),
        }
    }
}

/// Locks what both cores use, a panic of the other one or not.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A job that runs on the other core beside this one's work. Dropping it ends the job, too.
#[derive(Debug)]
pub struct Beside<'a> {
    other: &'a OtherCore,
    turn: u32,
    end: Arc<AtomicBool>,
    ended: bool,
}

impl Beside<'_> {
    /// Has the job end, and waits until it has.
    ///
    /// # Errors
    /// The job's own.
    pub fn end(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        self.ended = true;
        self.end.store(true, Ordering::Release);
        self.other.wait(self.turn)
    }
}

impl Drop for Beside<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // Whoever drops it has an error of his own to tell.
            let _ = self.finish();
        }
    }
}

impl Drop for OtherCore {
    fn drop(&mut self) {
        self.jobs = None;
        self.turn.given.fetch_add(1, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // A panic there has been reported by the run that it ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn turns_alternate_and_errors_come_back() {
        let other = OtherCore::start(None).unwrap();
        let log = Arc::new(Mutex::new(Vec::new()));
        for i in 0..100 {
            log.lock().unwrap().push(2 * i);
            let theirs = Arc::clone(&log);
            other
                .run(move || {
                    theirs.lock().unwrap().push(2 * i + 1);
                    Ok(())
                })
                .unwrap();
        }
        assert_eq!(*log.lock().unwrap(), (0..200).collect::<Vec<_>>());
        assert!(other.run(|| bail!("no")).is_err());
    }

    #[test]
    fn a_job_beside_ends_when_it_is_told_to() {
        let other = OtherCore::start(None).unwrap();
        let rounds = Arc::new(AtomicU32::new(0));
        let theirs = Arc::clone(&rounds);
        let beside = other
            .beside(move |end| {
                while !end.load(Ordering::Acquire) {
                    theirs.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
            .unwrap();
        while rounds.load(Ordering::Relaxed) < 1000 {
            std::hint::spin_loop();
        }
        beside.end().unwrap();
        let after = rounds.load(Ordering::Relaxed);
        other.run(|| Ok(())).unwrap();
        assert_eq!(rounds.load(Ordering::Relaxed), after);
        assert!(other.beside(|_| bail!("no")).unwrap().end().is_err());
    }
}
