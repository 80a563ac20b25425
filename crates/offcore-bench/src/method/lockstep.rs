//! Lock-step execution of two threads: the measured core and the other core take turns, so that each piece of work runs
//! on its own core and nothing runs in parallel with the timed code.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use offcore_stats::lcore;

use crate::method::temperature::Temperature;

/// A job for the other core.
type Job = Box<dyn FnOnce() -> Result<()> + Send>;

/// The other core.
#[derive(Debug)]
pub struct OtherCore {
    jobs: Option<SyncSender<Job>>,
    turn: Arc<Turn>,
    results: Receiver<Result<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Turn counters: number of jobs submitted and number of jobs completed.
#[derive(Debug, Default)]
struct Turn {
    given: AtomicU32,
    done: AtomicU32,
}

impl OtherCore {
    /// Starts the thread on `lcore`. If `lcore` is `None` (a machine with a single core), the thread is not pinned.
    ///
    /// # Errors
    /// If the thread cannot be started or pinned.
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
                // Spins, so that the turn begins after the transfer of one cache line.
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

    /// Runs `job` on the other core and spins until it is done.
    ///
    /// # Errors
    /// The job's errors.
    pub fn run(&self, job: impl FnOnce() -> Result<()> + Send + 'static) -> Result<()> {
        let turn = self.give(Box::new(job))?;
        self.wait(turn)
    }

    /// Runs `job` on the core that owns the data: on this core for hot data, otherwise on the other core.
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

    /// Runs `job` on the other core in parallel with this core until [`BackgroundJob::end`], which sets the flag that
    /// is passed to the job. Returns as soon as the job has begun.
    ///
    /// # Errors
    /// If the other core's thread has ended.
    pub fn beside(
        &self,
        job: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static,
    ) -> Result<BackgroundJob<'_>> {
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
        Ok(BackgroundJob { other: self, turn, end, ended: false })
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

/// Locks a mutex that both cores use, even if the other core panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A job that runs on the other core in parallel with this core. Dropping it also ends the job.
#[derive(Debug)]
pub struct BackgroundJob<'a> {
    other: &'a OtherCore,
    turn: u32,
    end: Arc<AtomicBool>,
    ended: bool,
}

impl BackgroundJob<'_> {
    /// Ends the job and waits for it.
    ///
    /// # Errors
    /// The job's errors.
    pub fn end(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        self.ended = true;
        self.end.store(true, Ordering::Release);
        self.other.wait(self.turn)
    }
}

impl Drop for BackgroundJob<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // The value is dropped only on an error path, and the caller reports that error.
            let _ = self.finish();
        }
    }
}

impl Drop for OtherCore {
    fn drop(&mut self) {
        self.jobs = None;
        self.turn.given.fetch_add(1, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            // The run that the panic ended has already reported it.
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
    fn background_job_stops_on_request() {
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
