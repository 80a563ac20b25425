//! Descriptors that another process has passed.
//!
//! To close one may take as long as somebody else wants: a socket that lingers (`SO_LINGER`), a file of a file system in user space,
//! a Unix socket in which such descriptors are on their way. So they are closed on a thread of their own, unless they are known to be
//! of another kind, and what a file system has to answer is asked there, too.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::Builder;
use std::time::Duration;

use rustix::fs::StatFs;
use rustix::io::Errno;

/// How long a file system may take to say what it is.
const ANSWER: Duration = Duration::from_secs(1);
/// What the thread has of a stack, in bytes.
const STACK: usize = 64 << 10;
/// Errands that may be left before nothing more is taken from whoever they are for.
const ERRANDS: usize = 64;
/// What the link in /proc of an eventfd says.
pub(crate) const EVENTFD: &str = "anon_inode:[eventfd]";

/// A descriptor that another process has passed.
#[derive(Debug)]
pub struct PassedFd {
    /// Always there, until it is dropped.
    fd: Option<OwnedFd>,
    errands: Errands,
}

impl PassedFd {
    /// One that is closed by `errands`.
    pub(crate) fn new(fd: OwnedFd, errands: &Errands) -> Self {
        Self { fd: Some(fd), errands: errands.clone() }
    }

    /// What the link in /proc says that it is.
    pub(crate) fn kind(&self) -> Result<String, Errno> {
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", self.as_fd().as_raw_fd()), Vec::new());
        link.map(|target| target.to_string_lossy().into_owned())
    }

    /// The descriptor itself, which is of a kind that can be closed anywhere.
    pub(crate) fn into_checked(mut self) -> Option<OwnedFd> {
        self.fd.take()
    }

    /// Closes it here. It is of no more use.
    pub(crate) fn close(&mut self) {
        self.fd = None;
    }

    /// What file system its file is on.
    ///
    /// # Errors
    /// Those of fstatfs(2), and [`Errno::TIMEDOUT`] for a file system that does not answer.
    pub(crate) fn file_system(&self) -> Result<StatFs, Errno> {
        if self.is_memory() {
            return rustix::fs::fstatfs(self);
        }
        let file = rustix::io::fcntl_dupfd_cloexec(self, 0)?;
        let (answer, answered) = mpsc::channel();
        self.errands.run(move || {
            // Who has asked may have given up.
            let _ = answer.send(rustix::fs::fstatfs(&file));
        });
        answered.recv_timeout(ANSWER).unwrap_or(Err(Errno::TIMEDOUT))
    }

    /// Whether it is a file of shared memory or hugepages: only those have seals.
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

/// What may have to wait for other processes, those that come after one another to one port's socket, done by a thread of its own, one
/// after the other. Clones share it.
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
    /// Whether there is a thread.
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
            // Where there cannot be a thread now, the next errand tries it again.
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

    /// How many are not done.
    pub(crate) fn left(&self) -> usize {
        self.0.left.load(Ordering::Acquire)
    }

    /// Whether there are so many that nothing more is to be taken from the other process.
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
    fn errands_are_done_in_turn_and_nobody_waits() {
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
        // A thread comes again.
        errands.run(move || say.send(10).unwrap());
        assert_eq!(said.recv_timeout(Duration::from_secs(30)), Ok(10));
    }

    #[test]
    fn file_system_that_does_not_answer_is_waited_for_no_longer_than_a_second() {
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
