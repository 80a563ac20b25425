//! File descriptors passed by another process.
//!
//! Closing such a descriptor may take as long as another process wants: a socket that lingers (`SO_LINGER`), a file of
//! a user-space file system, or a Unix socket with such descriptors in its queue. They are therefore closed on a
//! separate thread, unless they are known to be harmless. Queries to file systems also run there.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::Builder;
use std::time::Duration;

use rustix::fs::StatFs;
use rustix::io::Errno;

/// Time limit for a file system to report its type.
const ANSWER: Duration = Duration::from_secs(1);
/// Stack size of the thread in bytes.
const STACK: usize = 64 << 10;
/// Maximum number of pending errands. Beyond it, nothing more is accepted from the peer.
const ERRANDS: usize = 64;
/// Target of the link in /proc for an eventfd.
pub(crate) const EVENTFD: &str = "anon_inode:[eventfd]";

/// A file descriptor passed by another process.
#[derive(Debug)]
pub struct PassedFd {
    /// Always `Some` until it is dropped.
    fd: Option<OwnedFd>,
    errands: Errands,
}

impl PassedFd {
    /// Wraps a descriptor that `errands` will close.
    pub(crate) fn new(fd: OwnedFd, errands: &Errands) -> Self {
        Self { fd: Some(fd), errands: errands.clone() }
    }

    /// Returns the target of its link in /proc, which names the kind of file.
    pub(crate) fn kind(&self) -> Result<String, Errno> {
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", self.as_fd().as_raw_fd()), Vec::new());
        link.map(|target| target.to_string_lossy().into_owned())
    }

    /// Returns the descriptor itself, which must be of a kind that can be closed on any thread.
    pub(crate) fn into_checked(mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// Closes it on this thread. It can no longer be used.
    pub(crate) fn close(&mut self) {
        self.fd = None;
    }

    /// Returns information about the file system that contains its file.
    ///
    /// # Errors
    /// Fails with the errors of fstatfs(2), and with [`Errno::TIMEDOUT`] if the file system does not answer.
    pub(crate) fn file_system(&self) -> Result<StatFs, Errno> {
        if self.is_memory() {
            return rustix::fs::fstatfs(self);
        }
        let file = rustix::io::fcntl_dupfd_cloexec(self, 0)?;
        let (answer, answered) = mpsc::channel();
        self.errands.run(move || {
            // The caller may have given up already.
            let _ = answer.send(rustix::fs::fstatfs(&file));
        });
        answered.recv_timeout(ANSWER).unwrap_or(Err(Errno::TIMEDOUT))
    }

    /// Whether it is a file of shared memory or hugepages: no other files have seals.
    fn is_memory(&self) -> bool {
        rustix::fs::fcntl_get_seals(self).is_ok()
    }
}

impl AsFd for PassedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            Some(fd) => fd.as_fd(),
            None => unreachable!("it is taken by who has no more use of this"),
        }
    }
}

impl Drop for PassedFd {
    fn drop(&mut self) {
        if self.fd.is_some() && !self.is_memory() && !self.kind().is_ok_and(|kind| kind == EVENTFD) {
            let fd = self.fd.take();
            self.errands.run(move || drop(fd));
        }
    }
}

/// A queue of operations that may have to wait for other processes. A separate thread runs them one after the other.
/// Clones share the queue, and so do all connections of one port.
#[derive(Clone, Default)]
pub struct Errands(Arc<Shared>);

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    left: AtomicUsize,
}

#[derive(Default)]
struct Queue {
    errands: VecDeque<Box<dyn FnOnce() + Send>>,
    /// Whether the thread is running.
    runs: bool,
}

impl Errands {
    fn run(&self, errand: impl FnOnce() + Send + 'static) {
        self.0.left.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.errands.push_back(Box::new(errand));
        if !queue.runs {
            let errands = self.clone();
            let thread = Builder::new().name("vhost-errands".into()).stack_size(STACK);
            // If no thread can be created now, the next errand tries again.
            queue.runs = thread.spawn(move || errands.work()).is_ok();
        }
    }

    fn work(&self) {
        loop {
            let errand = {
                let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
                let errand = queue.errands.pop_front();
                queue.runs = errand.is_some();
                errand
            };
            let Some(errand) = errand else { return };
            errand();
            self.0.left.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns the number of pending errands.
    pub(crate) fn left(&self) -> usize {
        self.0.left.load(Ordering::Acquire)
    }

    /// Whether too many errands are pending to accept anything more from the other process.
    pub(crate) fn is_full(&self) -> bool {
        self.left() >= ERRANDS
    }
}

impl fmt::Debug for Errands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Errands").field("left", &self.left()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn background_jobs_run_in_order() {
        let errands = Errands::default();
        let (go, wait) = mpsc::channel::<()>();
        let (say, said) = mpsc::channel();
        errands.run(move || wait.recv().unwrap());
        for n in 0..10 {
            let say = say.clone();
            errands.run(move || say.send(n).unwrap());
        }
        assert_eq!(errands.left(), 11);
        go.send(()).unwrap();
        assert_eq!(said.iter().take(10).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
        let start = Instant::now();
        while errands.left() > 0 {
            assert!(start.elapsed() < Duration::from_secs(30));
        }
        // A new thread is started.
        errands.run(move || say.send(10).unwrap());
        assert_eq!(said.recv_timeout(Duration::from_secs(30)), Ok(10));
    }

    #[test]
    fn fstatfs_times_out_after_one_second() {
        let errands = Errands::default();
        let (go, wait) = mpsc::channel::<()>();
        let file = PassedFd::new(std::fs::File::open("/proc/self/status").unwrap().into(), &errands);
        assert!(file.file_system().is_ok());
        errands.run(move || wait.recv().unwrap());
        assert_eq!(file.file_system().map(|stat| stat.f_type), Err(Errno::TIMEDOUT));
        let memory = rustix::fs::memfd_create("passed", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(PassedFd::new(memory, &errands).file_system().is_ok());
        go.send(()).unwrap();
    }
}
