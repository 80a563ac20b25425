//! Two threads in lock-step: the measured core and the other core take turns, so that each turn's work is where it
//! belongs and nothing runs beside what is timed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};
use offcore_stats::lcore;

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
        let Some(jobs) = &self.jobs else { bail!("the guest's thread has ended") };
        jobs.send(Box::new(job)).map_err(|_| anyhow!("the guest's thread ended"))?;
        let turn = self.turn.given.load(Ordering::Relaxed).wrapping_add(1);
        self.turn.given.store(turn, Ordering::Release);
        while self.turn.done.load(Ordering::Acquire) != turn {
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                bail!("the guest's thread ended");
            }
            std::hint::spin_loop();
        }
        self.results.recv().context("the guest's thread ended")?
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
}
