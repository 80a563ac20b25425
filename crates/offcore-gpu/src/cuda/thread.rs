//! The thread that launches the kernels of bursts, one for a GPU.
//!
//! The launch path of a CUDA context is serialised: lcores that launch wait for each other, microseconds for each
//! launch. So a lcore puts what it has submitted into a [`Queue`], and one thread launches for all of them. It goes
//! round the queues, and what has come to one since it was there last goes in one launch, up to [`MOST`] bursts. It does
//! not wait for more: a burst that comes alone is launched alone, at once.
//!
//! The thread is there as long as there are queues.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use offcore_ring::spsc::{self, Consumer, Producer};

use crate::idle::{Idle, NAP};

/// Bursts of one launch, at most.
pub(crate) const MOST: usize = 16;
/// How long the thread may take to let go of a queue, or to end: it may be in a call of the driver's.
const PATIENCE: Duration = Duration::from_secs(5);

/// Bursts that go together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Together {
    /// Of the first one; the others are those of the turns behind it.
    pub(super) turn: u64,
    /// How many there are: 1 to [`MOST`].
    pub(super) bursts: u32,
    /// Of the longest one.
    pub(super) packets: usize,
}

/// Who launches for one ring. The thread drops it when it has let go of the queue.
pub(super) trait Launches: fmt::Debug + Send {
    /// Launches a kernel for these bursts, or remembers why it could not.
    fn launch(&mut self, bursts: Together);
}

/// A burst that has been submitted.
#[derive(Clone, Copy, Debug)]
struct Submitted {
    turn: u64,
    packets: usize,
}

/// The bursts that go together, of those that have been submitted: of one turn after the other.
fn together<'a>(submitted: impl IntoIterator<Item = &'a Submitted>) -> Option<Together> {
    let mut submitted = submitted.into_iter();
    let Submitted { turn, packets } = *submitted.next()?;
    let mut bursts = Together { turn, bursts: 1, packets };
    for next in submitted.take(MOST - 1) {
        if next.turn != turn + u64::from(bursts.bursts) {
            break;
        }
        bursts.bursts += 1;
        bursts.packets = bursts.packets.max(next.packets);
    }
    Some(bursts)
}

/// A queue, for the thread.
#[derive(Debug)]
struct Served {
    submitted: Consumer<Submitted>,
    /// A ring has no more slots for bursts at the same time.
    most: usize,
    /// Whoever submitted has gone.
    left: Arc<AtomicBool>,
    launches: Box<dyn Launches>,
}

impl Served {
    /// Launches what has come. Whether something had.
    #[inline]
    fn turn(&mut self) -> bool {
        let (first, second) = self.submitted.peek(self.most);
        let Some(bursts) = together(first.iter().chain(second)) else { return false };
        self.launches.launch(bursts);
        // Behind the launch: what has been released was launched or dropped.
        self.submitted.release(bursts.bursts as usize);
        true
    }
}

/// What the thread and the queues share.
pub(super) struct Desk {
    /// Queues that the thread has not seen yet.
    arrived: Mutex<Vec<Served>>,
    /// One more with each queue that arrives or leaves: the thread looks at `arrived` and `Served::left` when it has
    /// changed.
    changes: AtomicU64,
    /// What it was when the thread did so last.
    seen: AtomicU64,
    /// There are no queues any more, and will be none.
    ending: AtomicBool,
    /// The thread has ended, whatever for.
    gone: AtomicBool,
}

impl fmt::Debug for Desk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Desk({:?} changes, {:?} seen)", self.changes, self.seen)
    }
}

impl Desk {
    /// Whether the thread has ended: it launches nothing any more.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    fn arrived(&self) -> MutexGuard<'_, Vec<Served>> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the thread that a queue has arrived or left; the number of that change.
    fn change(&self) -> u64 {
        self.changes.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// What the thread does.
    fn serve(&self) {
        let (mut served, mut seen, mut idle) = (Vec::new(), 0, Idle::default());
        loop {
            let changes = self.changes.load(Ordering::Acquire);
            if changes != seen {
                served.append(&mut self.arrived());
                served.retain(|one: &Served| !one.left.load(Ordering::Relaxed));
                seen = changes;
                self.seen.store(seen, Ordering::Release);
            }
            let mut launched = false;
            for one in &mut served {
                launched |= one.turn();
            }
            if launched {
                idle.over();
            } else if self.ending.load(Ordering::Acquire) {
                return;
            } else {
                idle.wait();
            }
        }
    }

    /// Waits until `done`, or until nothing will come of it.
    fn wait_until(&self, done: impl Fn() -> bool) {
        let since = Instant::now();
        while !done() && !self.is_gone() {
            if since.elapsed() > PATIENCE {
                tracing::error!("the thread that launches kernels stands still");
                return;
            }
            thread::sleep(NAP);
        }
    }
}

/// Says that the thread has gone, however it ends.
struct Gone(Arc<Desk>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.gone.store(true, Ordering::Release);
    }
}

/// A thread that launches. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct LaunchThread {
    desk: Arc<Desk>,
    handle: Option<JoinHandle<()>>,
}

impl LaunchThread {
    /// The thread of those who share `place`; a new one, if there is none, or none any more.
    ///
    /// # Errors
    /// Why there is no thread, in words.
    pub(super) fn shared_at(place: &Mutex<Weak<Self>>) -> Result<Arc<Self>, String> {
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(thread) = place.upgrade().filter(|thread| !thread.desk.is_gone()) {
            return Ok(thread);
        }
        let thread = Arc::new(Self::start()?);
        *place = Arc::downgrade(&thread);
        Ok(thread)
    }

    fn start() -> Result<Self, String> {
        let desk = Arc::new(Desk {
            arrived: Mutex::default(),
            changes: 0.into(),
            seen: 0.into(),
            ending: false.into(),
            gone: false.into(),
        });
        let gone = Gone(Arc::clone(&desk));
        let handle = thread::Builder::new()
            .name("offcore-launch".into())
            .spawn(move || gone.0.serve())
            .map_err(|error| format!("starting a thread that launches kernels: {error}"))?;
        Ok(Self { desk, handle: Some(handle) })
    }

    /// A queue for a ring of so many slots. Its bursts are launched from [`Queue::open`] on.
    ///
    /// # Errors
    /// The number of slots is no power of two.
    pub(super) fn queue(self: &Arc<Self>, slots: u32) -> Result<Queue, String> {
        let most = MOST.min(slots as usize);
        // What has been launched is released a little later, and may have been answered by then.
        let room = (slots as usize + most).next_power_of_two();
        let (submitted, to_launch) =
            spsc::ring(room).map_err(|error| format!("a queue of launches: {error}"))?;
        let (left, thread) = (Arc::default(), Arc::clone(self));
        Ok(Queue { submitted, to_launch: Some((to_launch, most)), left, thread })
    }
}

impl Drop for LaunchThread {
    fn drop(&mut self) {
        self.desk.ending.store(true, Ordering::Release);
        self.desk.wait_until(|| false);
        if let Some(handle) = self.handle.take().filter(|_| self.desk.is_gone())
            && handle.join().is_err()
        {
            tracing::error!("the thread that launches kernels has panicked");
        }
    }
}

/// Where one ring's bursts wait to be launched.
#[derive(Debug)]
pub(super) struct Queue {
    submitted: Producer<Submitted>,
    /// The thread's end and how many go together at most, until that has it.
    to_launch: Option<(Consumer<Submitted>, usize)>,
    left: Arc<AtomicBool>,
    thread: Arc<LaunchThread>,
}

impl Queue {
    /// What says whether the thread is still there.
    pub(super) fn desk(&self) -> Arc<Desk> {
        Arc::clone(&self.thread.desk)
    }

    /// From now on `launches` is told what to launch.
    pub(super) fn open(&mut self, launches: Box<dyn Launches>) {
        if let Some((submitted, most)) = self.to_launch.take() {
            let left = Arc::clone(&self.left);
            self.thread.desk.arrived().push(Served { submitted, most, left, launches });
            self.thread.desk.change();
        }
    }

    /// A burst has been submitted.
    #[inline]
    pub(super) fn push(&mut self, turn: u64, packets: usize) {
        // There is room for all that are on their way.
        let _ = self.submitted.push(Submitted { turn, packets });
    }

    /// Whether all that was pushed has been launched or dropped.
    pub(super) fn is_empty(&mut self) -> bool {
        self.submitted.released() == self.submitted.published()
    }
}

impl Drop for Queue {
    /// Waits until the thread has let go of it: what is in it is not launched any more, and who launched is dropped.
    fn drop(&mut self) {
        if self.to_launch.is_some() {
            return;
        }
        let desk = &self.thread.desk;
        self.left.store(true, Ordering::Relaxed);
        let change = desk.change();
        desk.wait_until(|| desk.seen.load(Ordering::Acquire) >= change);
        if desk.is_gone() {
            // It may have gone before it saw this one.
            desk.arrived().retain(|one| !one.left.load(Ordering::Relaxed));
        }
    }
}

#[cfg(test)]
mod tests;
