//! Operations that may block on an application, performed outside the workers.
//!
//! A process can pass any descriptor. Closing the last reference to a file may take as long as its user wants
//! (`SO_LINGER`, a file in a user-space file system). A call that locks a socket may block as long. So a worker uses
//! such descriptors only for calls without locks, and leaves everything else to a thread of the user. A user who blocks
//! it delays only its own errands.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Builder;

use rustix::net::{Shutdown, shutdown};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::descriptors::{DescriptorCharge, MAX_PENDING_CLOSES};

/// The number of pending errands of a user at which the stack stops receiving from the user's processes.
const MOST: usize = MAX_PENDING_CLOSES;
/// Stack size of a thread, in bytes.
const STACK: usize = 64 << 10;

type Errand = Box<dyn FnOnce() + Send>;

/// The threads, by user.
#[derive(Debug)]
pub(super) struct Errands {
    /// The CPUs on which they may run.
    cpus: CpuSet,
    users: HashMap<u32, User>,
    /// Wakes the worker when a user is no longer at the limit of errands.
    helpers: Arc<OwnedFd>,
}

struct User {
    errands: Sender<Errand>,
    left: Arc<AtomicUsize>,
    /// Number of operations for the user in other threads.
    pending: Arc<AtomicUsize>,
    /// The queue, until the thread is started.
    waiting: Option<Receiver<Errand>>,
}

impl fmt::Debug for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Errands {
    pub(super) fn new(cpus: CpuSet, helpers: Arc<OwnedFd>) -> Self {
        Self { cpus, users: HashMap::new(), helpers }
    }

    /// Runs an errand in a user's thread.
    pub(super) fn run(&mut self, user: u32, errand: impl FnOnce() + Send + 'static) {
        let (left, helpers) = (Arc::clone(&self.user(user).left), Arc::clone(&self.helpers));
        left.fetch_add(1, Ordering::Relaxed);
        self.run_unawaited(user, move || {
            errand();
            if left.fetch_sub(1, Ordering::Release) == MOST {
                notify(&helpers);
            }
        });
    }

    /// Runs an errand that is not counted by [`has_some`](Self::has_some).
    pub(super) fn run_unawaited(&mut self, user: u32, errand: impl FnOnce() + Send + 'static) {
        let cpus = self.cpus;
        let of = self.user(user);
        let _ = of.errands.send(Box::new(errand));
        if of.waiting.is_some() {
            of.start(cpus);
        }
    }

    fn user(&mut self, user: u32) -> &mut User {
        self.users.entry(user).or_insert_with(|| {
            let (errands, waiting) = channel();
            User { errands, left: Arc::default(), pending: Arc::default(), waiting: Some(waiting) }
        })
    }

    /// Counts an operation in another thread as an errand of the user, see [`has_some`](Self::has_some).
    pub(super) fn pending(&mut self, user: u32) -> Pending {
        let pending = Arc::clone(&self.user(user).pending);
        pending.fetch_add(1, Ordering::Relaxed);
        Pending(pending)
    }

    /// Drops an object with descriptors that a user has sent.
    pub(super) fn close(&mut self, user: u32, what: impl Send + 'static) {
        self.run(user, move || drop(what));
    }

    /// Closes a Unix socket. This wakes all waiters at its other end, which may be many.
    pub(super) fn close_socket(&mut self, user: u32, socket: OwnedFd, charge: Option<DescriptorCharge>) {
        self.run(user, move || {
            let _ = shutdown(&socket, Shutdown::Both);
            drop((socket, charge));
        });
    }

    /// Whether a user has pending errands.
    pub(super) fn has_some(&self, user: u32) -> bool {
        let count = |of: &User| of.left.load(Ordering::Acquire) + of.pending.load(Ordering::Acquire);
        self.users.get(&user).is_some_and(|of| count(of) > 0)
    }

    /// Whether the number of a user's errands is at the limit. The stack then stops receiving from the user's
    /// processes. An event reports when the number is below the limit again.
    pub(super) fn are_full(&self, user: u32) -> bool {
        self.count(user) >= MOST
    }

    /// The number of a user's errands.
    pub(super) fn count(&self, user: u32) -> usize {
        self.users.get(&user).map_or(0, |of| of.left.load(Ordering::Acquire))
    }
}

/// Writes to an eventfd that is never read, so that each write is an event.
pub(super) fn notify(event: &OwnedFd) {
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

/// Counts an operation as pending until dropped.
#[derive(Debug)]
pub(super) struct Pending(Arc<AtomicUsize>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl User {
    /// Starts the thread. After a failure the next errand tries again.
    fn start(&mut self, cpus: CpuSet) {
        // The thread receives its queue through a channel. If it were moved into the closure, a failed start would drop
        // it.
        let (pass, passed) = channel::<Receiver<Errand>>();
        let thread = Builder::new().name("errands".into()).stack_size(STACK).spawn(move || {
            // The thread inherits the affinity of the worker, which has a dedicated core.
            let _ = sched_setaffinity(None, &cpus);
            let Ok(errands) = passed.recv() else { return };
            errands.into_iter().for_each(|errand| errand());
        });
        if thread.is_ok() {
            let _ = self.waiting.take().map(|errands| pass.send(errands));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{Errno, read};
    use rustix::thread::sched_getaffinity;

    use super::*;

    #[test]
    fn blocked_errand_spares_other_users() {
        let helpers = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut errands = Errands::new(sched_getaffinity(None).unwrap(), Arc::clone(&helpers));
        let (go, wait) = channel::<()>();
        errands.run(1, move || wait.recv().unwrap());
        for _ in 1..MOST {
            errands.close(1, [0; 8]);
        }
        let (done, is_done) = channel();
        errands.run(2, move || done.send(()).unwrap());
        is_done.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(errands.are_full(1) && !errands.are_full(2) && !errands.has_some(3));
        assert_eq!(read(&*helpers, &mut [0; 8]), Err(Errno::AGAIN));
        go.send(()).unwrap();
        let start = Instant::now();
        while errands.has_some(1) {
            assert!(start.elapsed() < Duration::from_secs(30));
        }
        assert_eq!(read(&*helpers, &mut [0; 8]), Ok(8), "the worker is woken once there is room");
    }

    #[test]
    fn each_user_has_one_thread() {
        let helpers = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut errands = Errands::new(sched_getaffinity(None).unwrap(), helpers);
        let (to, ran) = channel();
        for user in [1, 2, 1, 2] {
            let to = to.clone();
            errands.run(user, move || to.send((user, std::thread::current().id())).unwrap());
        }
        drop(to);
        let ran: HashMap<_, _> =
            (0..4).map(|_| ran.recv().unwrap()).fold(HashMap::new(), |mut ran, (user, id)| {
                assert_eq!(*ran.entry(user).or_insert(id), id, "a second thread");
                ran
            });
        assert_ne!(ran[&1], ran[&2]);
    }
}
