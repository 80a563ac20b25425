//! The threads that workers run on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use offcore_stats::lcore;

use crate::error::SwitchError;

/// Threads of workers, each pinned to its lcore. Dropping them stops the workers.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    threads: Vec<JoinHandle<usize>>,
    stop: Arc<AtomicBool>,
}

impl Threads {
    /// Starts a thread. `run` continues until it is told to stop, and returns the number of unfinished packets.
    pub(crate) fn start(
        &mut self,
        lcore: usize,
        rt_priority: Option<i32>,
        run: impl FnOnce(&Arc<AtomicBool>) -> usize + Send + 'static,
    ) -> Result<(), SwitchError> {
        let stop = Arc::clone(&self.stop);
        let (ready, started) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name(format!("lcore{lcore}")).spawn(move || {
            let set_up = lcore::pin(lcore).and_then(|()| rt_priority.map_or(Ok(()), lcore::realtime));
            let ok = set_up.is_ok();
            // The receiver is waiting for this message, so it still exists.
            let _ = ready.send(set_up);
            if ok { run(&stop) } else { 0 }
        });
        let failed = |source| SwitchError::Thread { lcore, source };
        self.threads.push(thread.map_err(failed)?);
        let set_up = started.recv().map_err(|_| failed(std::io::Error::other("it ended at once")))?;
        Ok(set_up?)
    }

    /// Whether every thread is still running.
    pub(crate) fn all_run(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }

    /// Stops the threads after they have finished the packets in flight. Returns the number of unfinished packets.
    pub(crate) fn stop(&mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        // A worker that panicked has already reported it. Its packets are not counted.
        let left = self.threads.drain(..).map(|thread| thread.join().unwrap_or(0)).sum();
        if left > 0 {
            tracing::error!(left, "packets in flight were never completed");
        }
        left
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}
