//! The control thread of a virtio-user port: connects to the back end, and reconnects after a disconnect.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use offcore_mem::Pool;
use offcore_vhost::frontend::{FrontEnd, FrontEndConfig, FrontEndError, MemoryFd};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};

use super::cell::{Cell, Ring};

/// Maximum time that opening a port waits for its first connection.
const FIRST: Duration = Duration::from_secs(1);
/// Interval between two checks whether the back end is still connected.
const WATCH: Duration = Duration::from_millis(50);
/// Time between a failure and the next attempt.
const PAUSE: Duration = Duration::from_millis(500);

/// The state of the connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LinkState {
    /// No back end is connected.
    Waiting {
        /// Why the last connection or attempt ended.
        why: Option<String>,
    },
    /// The back end is connected and the rings are running.
    Connected { features: u64 },
}

#[derive(Debug)]
struct Shared {
    config: FrontEndConfig,
    pool: &'static Pool,
    /// Indexed by virtqueue.
    cells: Vec<Arc<Cell>>,
    state: Mutex<LinkState>,
    /// Whether the workers may have rings.
    serving: AtomicBool,
    closing: AtomicBool,
    /// An eventfd that wakes up the thread.
    wake: OwnedFd,
}

/// The connection of one port, managed by a thread. Dropping it stops the rings and closes the connection.
#[derive(Debug)]
pub(super) struct Link {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Link {
    /// Starts the thread and waits up to [`FIRST`] for its first connection.
    pub(super) fn open(config: FrontEndConfig, pool: &'static Pool) -> Result<Self, FrontEndError> {
        let system = |what| move |source: std::io::Error| FrontEndError::System { what, source };
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|source| system("eventfd")(source.into()))?;
        let shared = Arc::new(Shared {
            pool,
            cells: (0..config.queue_pairs * 2).map(|_| Arc::default()).collect(),
            config,
            state: Mutex::new(LinkState::Waiting { why: None }),
            serving: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            wake,
        });
        let (told, first) = sync_channel(1);
        let thread = thread::Builder::new()
            .name("virtio-user".into())
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.keep_connected(&told)
            })
            .map_err(system("thread"))?;
        let link = Self { shared, thread: Some(thread) };
        match first.recv_timeout(FIRST) {
            Ok(Err(error)) => Err(error),
            Ok(Ok(())) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => Ok(link),
        }
    }

    /// Returns the state of the connection.
    pub(super) fn state(&self) -> LinkState {
        self.shared.state()
    }

    /// Returns the virtqueues' cells.
    pub(super) fn cells(&self) -> &[Arc<Cell>] {
        &self.shared.cells
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        // A thread that waits for a back end notices later, and has nothing to clean up.
        let serving = self.shared.serving.load(Ordering::Acquire);
        if let Some(thread) = self.thread.take().filter(|_| serving) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> LinkState {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_state(&self, state: LinkState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// Waits for `time`, or until the port is closed.
    fn sleep(&self, time: Duration) {
        let time = Timespec::try_from(time).unwrap_or_default();
        let _ = rustix::event::poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&time));
    }

    /// Runs the thread: connects again and again until the port is closed. The result of the first attempt goes to the
    /// thread that opens the port, which closes the port if the attempt was refused.
    fn keep_connected(&self, told: &SyncSender<Result<(), FrontEndError>>) {
        let (base, len) = self.pool.memory();
        let memory = [MemoryFd { fd: self.pool.fd(), address: base.as_ptr() as u64, len: len as u64 }];
        let mut denied = false;
        while !self.is_closing() {
            let connected =
                FrontEnd::connect(&self.config, &memory).and_then(|front_end| self.start(front_end));
            // From the second attempt on, or after a slow first one, the receiver is gone.
            let why = match connected {
                Ok((front_end, rings)) => {
                    let _ = told.try_send(Ok(()));
                    self.serve(front_end, rings, &memory)
                }
                Err(error) => {
                    let why = error.to_string();
                    // A back end may change its socket's owner shortly after creating it, so a first refusal is not
                    // final.
                    let again = std::mem::replace(&mut denied, is_denied(&error));
                    if is_lasting(&error) || denied && again {
                        let _ = told.try_send(Err(error));
                    }
                    why
                }
            };
            tracing::info!(socket = %self.config.path.display(), why, "virtio-user port has no back end");
            self.set_state(LinkState::Waiting { why: Some(why) });
            self.sleep(PAUSE);
        }
    }

    /// Creates the driver's sides before the back end starts its own, because creating one clears memory that the back
    /// end writes.
    fn start(&self, mut front_end: FrontEnd) -> Result<(FrontEnd, Vec<Ring>), FrontEndError> {
        let rings = front_end.queues().iter().map(Ring::new).collect();
        front_end.start()?;
        Ok((front_end, rings))
    }

    /// Publishes the rings to the workers until the back end is gone for good or the port is closed; returns the
    /// reason.
    fn serve(&self, mut front_end: FrontEnd, rings: Vec<Ring>, memory: &[MemoryFd<'_>]) -> String {
        self.serving.store(true, Ordering::Release);
        for (cell, ring) in self.cells.iter().zip(rings) {
            cell.publish(Some(ring), self.pool);
        }
        let why = loop {
            self.watch(&front_end);
            if self.is_closing() {
                break front_end.stop().map_or_else(|e| e.to_string(), |()| "the port was closed".into());
            }
            let why = String::from("the back end has closed the connection");
            if !front_end.is_resumable() || self.cells.iter().any(|cell| cell.broken().is_some()) {
                break why;
            }
            // The rings stay as they are for the next back end.
            tracing::info!(socket = %self.config.path.display(), why, "virtio-user port waits for it to come again");
            self.set_state(LinkState::Waiting { why: Some(why) });
            if let Err(error) = self.resume(&mut front_end, memory) {
                break error.to_string();
            }
        };
        // The connection is closed before packet buffers are taken back, so that the back end does not use them any
        // more.
        drop(front_end);
        for cell in &self.cells {
            cell.publish(None, self.pool);
        }
        self.serving.store(false, Ordering::Release);
        why
    }

    /// Waits for a back end that resumes the rings, as long as for a first one.
    fn resume(&self, front_end: &mut FrontEnd, memory: &[MemoryFd<'_>]) -> Result<(), FrontEndError> {
        let deadline = Instant::now() + self.config.timeout;
        // Waits in short intervals, because the port may be closed meanwhile.
        let config = FrontEndConfig { timeout: PAUSE, ..self.config.clone() };
        loop {
            let error = match front_end.resume(&config, memory) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if is_lasting(&error) || self.is_closing() || Instant::now() > deadline {
                return Err(error);
            }
        }
    }

    /// Waits until the back end is gone or the port is closed.
    fn watch(&self, front_end: &FrontEnd) {
        let features = front_end.features();
        tracing::info!(socket = %self.config.path.display(), features, "virtio-user port is connected");
        self.set_state(LinkState::Connected { features });
        while !self.is_closing() && front_end.is_alive() {
            self.sleep(WATCH);
        }
    }
}

/// Returns whether the user of this process may not connect.
fn is_denied(error: &FrontEndError) -> bool {
    matches!(error, FrontEndError::NoBackEnd { source } if source.is_denied())
}

/// Returns whether another attempt would fail in the same way.
fn is_lasting(error: &FrontEndError) -> bool {
    use FrontEndError::{AcceptTimedOut, Connection, NoBackEnd};
    !matches!(error, NoBackEnd { .. } | AcceptTimedOut { .. } | Connection(_))
}
