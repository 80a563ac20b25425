//! The launch thread, one per GPU, for services with a kernel per burst or with graphs.
//!
//! The launch path of a CUDA context is serialised: lcores that launch concurrently wait for each other, for
//! microseconds per launch. Therefore an lcore pushes its submissions to a [`BurstQueue`], and one thread launches for
//! all lcores. It visits the queues in turn, and launches the bursts that have arrived in a queue together, up to
//! [`MAX_BATCH`] bursts. Graphs have been launched ahead of their bursts. With a kernel per burst, a single burst is
//! launched immediately while fewer than [`AHEAD`] launches of its queue are unfinished. Otherwise it would only wait
//! in the stream, so it waits here for other bursts that can share its launch.
//!
//! The thread exists as long as there are queues.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use offcore_ring::spsc::{self, Consumer, Producer};

use crate::idle::{Idle, NAP};

/// Maximum bursts per launch.
pub(crate) const MAX_BATCH: usize = 16;
/// Launches of a queue that keep its stream busy: one runs, and the next one is queued when it ends.
const AHEAD: usize = 2;
/// Time for the thread to release a queue, or to end: it may be blocked in the driver.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Bursts of consecutive turns that are launched together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LaunchBatch {
    pub(super) turn: u64,
    /// Number of bursts, 1 to [`MAX_BATCH`].
    pub(super) bursts: u32,
    /// Packets in the longest burst.
    pub(super) packets: usize,
}

/// Launches the bursts of one ring. The thread drops it when it releases the queue.
pub(super) trait BatchLauncher: fmt::Debug + Send {
    /// Launches the kernels for these bursts. An error is stored.
    fn launch(&mut self, batch: LaunchBatch);

    /// Returns whether the next launch need not wait for the burst of this turn, which has been launched: it is
    /// answered, or never will be.
    fn is_answered(&self, turn: u64) -> bool;
}

/// A submitted burst.
#[derive(Clone, Copy, Debug)]
struct SubmittedBurst {
    turn: u64,
    packets: usize,
}

/// Returns the next bursts to launch together: consecutive turns at the head of `submitted`.
fn next_batch<'a>(submitted: impl IntoIterator<Item = &'a SubmittedBurst>) -> Option<LaunchBatch> {
    let mut submitted = submitted.into_iter();
    let SubmittedBurst { turn, packets } = *submitted.next()?;
    let mut bursts = LaunchBatch { turn, bursts: 1, packets };
    for next in submitted.take(MAX_BATCH - 1) {
        if next.turn != turn + u64::from(bursts.bursts) {
            break;
        }
        bursts.bursts += 1;
        bursts.packets = bursts.packets.max(next.packets);
    }
    Some(bursts)
}

/// The launch thread's end of a queue.
#[derive(Debug)]
struct ServedQueue {
    submitted: Consumer<SubmittedBurst>,
    /// At most as many bursts as the ring has slots can be launched together.
    max_batch: usize,
    /// The last turns of the last launches, the oldest first.
    ahead: [Option<u64>; AHEAD],
    /// The other end has been dropped.
    closed: Arc<AtomicBool>,
    launcher: Box<dyn BatchLauncher>,
}

impl ServedQueue {
    /// Launches the bursts that have arrived, if that is useful now. Returns whether it did.
    #[inline]
    fn poll(&mut self) -> bool {
        let (first, second) = self.submitted.peek(self.max_batch);
        let Some(batch) = next_batch(first.iter().chain(second)) else { return false };
        let bursts = batch.bursts as usize;
        if bursts < self.max_batch && self.ahead[0].is_some_and(|turn| !self.launcher.is_answered(turn)) {
            return false;
        }
        self.ahead.rotate_left(1);
        self.ahead[AHEAD - 1] = Some(batch.turn + bursts as u64 - 1);
        self.launcher.launch(batch);
        // Done after the launch: a released entry has been launched or dropped.
        self.submitted.release(bursts);
        true
    }
}

/// The mailbox through which queues reach the launch thread.
pub(super) struct LaunchMailbox {
    /// Queues that the thread has not taken over yet.
    arrived: Mutex<Vec<ServedQueue>>,
    /// Incremented when a queue is opened or closed; tells the thread to check `arrived` and `ServedQueue::closed`.
    changes: AtomicU64,
    /// The value of `changes` at the thread's last check.
    seen: AtomicU64,
    /// No queues are left, and none will come.
    ending: AtomicBool,
    /// The thread has ended, for whatever reason.
    gone: AtomicBool,
}

impl fmt::Debug for LaunchMailbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LaunchMailbox({:?} changes, {:?} seen)", self.changes, self.seen)
    }
}

impl LaunchMailbox {
    /// Returns whether the thread has ended and launches nothing any more.
    pub(super) fn has_ended(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn arrived(&self) -> MutexGuard<'_, Vec<ServedQueue>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the thread that a queue was opened or closed. Returns the number of that change.
    fn change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Runs the thread's main loop.
    fn serve(&self) {
        let (mut served, mut seen, mut idle) = (Vec::new(), 0, Idle::default());
        loop {
            let changes = self.changes.load(Ordering::Acquire);
            if changes != seen {
                served.append(&mut self.arrived());
                served.retain(|one: &ServedQueue| !one.closed.load(Ordering::Relaxed));
                seen = changes;
                self.seen.store(seen, Ordering::Release);
            }
            let mut launched = false;
            for one in &mut served {
                launched |= one.poll();
            }
            if launched {
                idle.reset();
            } else if self.ending.load(Ordering::Acquire) {
                return;
            } else {
                idle.wait();
            }
        }
    }

    /// Waits until `done` returns true, the thread has ended, or the timeout is reached.
    fn wait_until(&self, done: impl Fn() -> bool) {
        let since = Instant::now();
        while !done() && !self.has_ended() {
            if since.elapsed() > TIMEOUT {
                tracing::error!("the launch thread hangs");
                return;
            }
            thread::sleep(NAP);
        }
    }
}

/// Sets `gone` when the thread ends, also on a panic.
struct Gone(Arc<LaunchMailbox>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.gone.store(true, Ordering::Release);
    }
}

/// The launch thread, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct LaunchThread {
    mailbox: Arc<LaunchMailbox>,
    handle: Option<JoinHandle<()>>,
}

impl LaunchThread {
    /// Returns the thread shared through `place`, or a new one if it does not exist or has ended.
    pub(super) fn shared_at(place: &Mutex<Weak<Self>>) -> Result<Arc<Self>, String> {
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = place.upgrade().filter(|thread| !thread.mailbox.has_ended()) {
            return Ok(thread);
        }
        let thread = Arc::new(Self::start()?);
        *place = Arc::downgrade(&thread);
        Ok(thread)
    }

    fn start() -> Result<Self, String> {
        let mailbox = Arc::new(LaunchMailbox {
            arrived: Mutex::default(),
            changes: 0.into(),
            seen: 0.into(),
            ending: false.into(),
            gone: false.into(),
        });
        let gone = Gone(Arc::clone(&mailbox));
        let handle = thread::Builder::new()
            .name("offcore-launch".into())
            .spawn(move || gone.0.serve())
            .map_err(|error| format!("starting the launch thread: {error}"))?;
        Ok(Self { mailbox, handle: Some(handle) })
    }

    /// Creates a queue for a ring of `slots` slots. Its bursts are launched after [`BurstQueue::open`].
    pub(super) fn queue(self: &Arc<Self>, slots: u32) -> Result<BurstQueue, String> {
        let max_batch = MAX_BATCH.min(slots as usize);
        // An entry is released only after the launch, when the burst may already have been answered and its slot
        // reused.
        let room = (slots as usize + max_batch).next_power_of_two();
        let (submitted, to_launch) =
            spsc::ring(room).map_err(|error| format!("a queue of launches: {error}"))?;
        let (closed, thread) = (Arc::default(), Arc::clone(self));
        Ok(BurstQueue { submitted, to_launch: Some((to_launch, max_batch)), closed, thread })
    }
}

impl Drop for LaunchThread {
    fn drop(&mut self) {
        self.mailbox.ending.store(true, Ordering::Release);
        self.mailbox.wait_until(|| false);
        if let Some(handle) = self.handle.take().filter(|_| self.mailbox.has_ended())
            && handle.join().is_err()
        {
            tracing::error!("the launch thread has panicked");
        }
    }
}

/// The queue of one ring's bursts to the launch thread.
#[derive(Debug)]
pub(super) struct BurstQueue {
    submitted: Producer<SubmittedBurst>,
    /// The thread's end and its maximum batch, until the thread has them.
    to_launch: Option<(Consumer<SubmittedBurst>, usize)>,
    closed: Arc<AtomicBool>,
    thread: Arc<LaunchThread>,
}

impl BurstQueue {
    /// Returns the thread's mailbox, which also shows whether the thread still runs.
    pub(super) fn mailbox(&self) -> Arc<LaunchMailbox> {
        Arc::clone(&self.thread.mailbox)
    }

    /// Passes the queue to the thread, which from now on launches its bursts by `launcher`.
    pub(super) fn open(&mut self, launcher: Box<dyn BatchLauncher>) {
        if let Some((submitted, max_batch)) = self.to_launch.take() {
            let closed = Arc::clone(&self.closed);
            self.thread.mailbox.arrived().push(ServedQueue {
                submitted,
                max_batch,
                ahead: [None; AHEAD],
                closed,
                launcher,
            });
            self.thread.mailbox.change();
        }
    }

    /// Queues a submitted burst.
    #[inline]
    pub(super) fn push(&mut self, turn: u64, packets: usize) {
        // The queue has room for every burst in flight.
        let _ = self.submitted.push(SubmittedBurst { turn, packets });
    }

    /// Returns whether everything pushed has been launched or dropped.
    pub(super) fn is_empty(&mut self) -> bool {
        self.submitted.released() == self.submitted.published()
    }
}

impl Drop for BurstQueue {
    /// Waits until the thread has released the queue. Bursts left in it are not launched, and the launcher is dropped.
    fn drop(&mut self) {
        if self.to_launch.is_some() {
            return;
        }
        let mailbox = &self.thread.mailbox;
        self.closed.store(true, Ordering::Relaxed);
        let change = mailbox.change();
        mailbox.wait_until(|| mailbox.seen.load(Ordering::Acquire) >= change);
        if mailbox.has_ended() {
            // The thread may have ended before it took this queue over.
            mailbox.arrived().retain(|one| !one.closed.load(Ordering::Relaxed));
        }
    }
}

#[cfg(test)]
mod tests;
