//! Connections of the kernel's listeners, taken by a thread of each application's that has such listeners.
//!
//! A worker must not accept them: whether that waits is a flag of the listener's, which the application has, too, and can
//! change at any time. So the one that may have to wait is a thread beside the workers, and an application that makes it wait
//! gets no connections of the kernel's, and nobody else lacks any.
//!
//! A listener tells the thread once that it has connections. The thread takes some of them, and the worker, which passes them
//! on, has it go on when it is done with these: so an application has a bounded number of descriptors here.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, PoisonError, RwLock, Weak};
use std::thread::{Builder, JoinHandle};

use arrayvec::ArrayVec;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_protocol, socket_type};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, accept_with, ipproto, shutdown};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::errands::Errands;

/// Connections of a listener that are taken at once, at most.
const AT_ONCE: usize = 16;
/// Listeners of an application, at most, those included that have ended and that the thread waits for.
const LISTENERS: usize = 256;
/// What the thread has of a stack, in bytes.
const STACK: usize = 64 << 10;
/// How long a thread may go on accepting from what has ended, in microseconds.
const WAIT: u64 = 1_000_000;
/// Events that are taken at once.
const EVENTS: usize = 16;
/// Names the thread's own event: no session has this number.
const POKED: u64 = u64::MAX;

/// What a listener has had, in this order.
#[derive(Debug)]
pub(super) enum Come {
    Connection(OwnedFd),
    /// There is one, and no descriptor for it.
    Full,
    /// No more until the worker asks for more.
    Done,
}

/// A listener of the kernel's.
#[derive(Debug)]
pub(super) struct Kernel {
    listener: Arc<Listener>,
    name: Name,
}

/// What the worker shares with the thread, which reads as long as it accepts; the worker waits for no lock. None: it is closed.
#[derive(Debug)]
struct Listener {
    fd: RwLock<Option<OwnedFd>>,
    /// The thread is to close it: the worker could not.
    gone: AtomicBool,
}

impl Listener {
    /// Takes it out to be closed, unless somebody has the lock. Another process may have it, too, and go on listening.
    fn take(&self, epoll: &OwnedFd) -> Option<OwnedFd> {
        let fd = self.fd.try_write().ok()?.take()?;
        let _ = epoll::delete(epoll, &fd);
        Some(fd)
    }

    fn is_closed(&self) -> bool {
        self.fd.try_read().is_ok_and(|fd| fd.is_none())
    }

    /// Has nobody wait for it any more. This itself may wait.
    fn shut_down(&self) {
        if let Ok(fd) = self.fd.try_read()
            && let Some(fd) = &*fd
        {
            let _ = shutdown(fd, Shutdown::Both);
        }
    }
}

/// What the thread hears of, in this order.
#[derive(Debug)]
enum Change {
    New(Name, Arc<Listener>),
    Gone(Name),
}

/// Number and generation of the session that a listener belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Name {
    pub(super) number: u32,
    pub(super) generation: u32,
}

impl Name {
    fn of(word: u64) -> Self {
        Self { number: (word >> 32) as u32, generation: word as u32 }
    }

    fn word(self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.generation)
    }
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    /// Tells the thread of changes, and that it ends.
    poke: OwnedFd,
    /// Tells the worker that something has come.
    told: OwnedFd,
    ends: AtomicBool,
}

/// The thread of an application.
#[derive(Debug)]
pub(super) struct Acceptor {
    /// Whose listeners they are.
    pub(super) user: u32,
    shared: Arc<Shared>,
    come: Receiver<(Name, Come)>,
    changes: Sender<Change>,
    /// Those that are there, or that the thread has not let go of.
    listeners: Vec<Weak<Listener>>,
    /// Those that the thread was accepting from when they ended, and when that was.
    leaving: Vec<(Arc<Listener>, u64)>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Starts the thread, on `cpus`.
    pub(super) fn new(user: u32, cpus: CpuSet) -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (poke, told) = (eventfd(0, flags)?, eventfd(0, flags)?);
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &poke, epoll::EventData::new_u64(POKED), edges)?;
        let shared = Arc::new(Shared { epoll, poke, told, ends: AtomicBool::new(false) });
        let (come_to, come) = channel();
        let (changes, changes_from) = channel();
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("acceptor".into()).stack_size(STACK).spawn(move || {
            // A worker, whose core is its own, has started it.
            let _ = sched_setaffinity(None, &cpus);
            theirs.run(&come_to, &changes_from);
        });
        let thread = thread.map_err(|_| Errno::AGAIN)?;
        Ok(Self { user, shared, come, changes, listeners: Vec::new(), leaving: Vec::new(), thread })
    }

    /// Has an event when there is something to be [taken](Self::next).
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.told.as_fd()
    }

    /// Adds a listener, whose connections are taken from now on.
    pub(super) fn add(
        &mut self,
        fd: OwnedFd,
        name: Name,
        now: u64,
        errands: &mut Errands,
    ) -> Result<Kernel, Errno> {
        self.listeners.retain(|listener| listener.strong_count() > 0);
        let fits =
            if self.listeners.len() < LISTENERS { is_listener(fd.as_fd()) } else { Err(Errno::NOBUFS) };
        if let Err(error) = fits {
            errands.close(self.user, fd);
            return Err(error);
        }
        let listener = Listener { fd: RwLock::new(Some(fd)), gone: AtomicBool::new(false) };
        let kernel = Kernel { listener: Arc::new(listener), name };
        self.listeners.push(Arc::downgrade(&kernel.listener));
        // Before the first event that names it.
        let _ = self.changes.send(Change::New(name, Arc::clone(&kernel.listener)));
        let added = self.watch(&kernel, |fd, data, wanted| epoll::add(&self.shared.epoll, fd, data, wanted));
        if let Err(error) = added {
            self.remove(kernel, now, errands);
            return Err(error);
        }
        Ok(kernel)
    }

    /// The worker is done with what a listener has had.
    pub(super) fn go_on(&self, kernel: &Kernel) {
        let epoll = &self.shared.epoll;
        let _ = self.watch(kernel, |fd, data, wanted| epoll::modify(epoll, fd, data, wanted));
    }

    fn watch(
        &self,
        kernel: &Kernel,
        how: impl FnOnce(&OwnedFd, epoll::EventData, EventFlags) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let fd = kernel.listener.fd.try_read().map_err(|_| Errno::AGAIN)?;
        let data = epoll::EventData::new_u64(kernel.name.word());
        fd.as_ref().map_or(Ok(()), |fd| how(fd, data, EventFlags::IN | EventFlags::ONESHOT))
    }

    /// Ends a listener: by an errand, unless the thread is just accepting from it.
    pub(super) fn remove(&mut self, kernel: Kernel, now: u64, errands: &mut Errands) {
        let Kernel { listener, name } = kernel;
        let taken = listener.take(&self.shared.epoll).or_else(|| {
            listener.gone.store(true, Ordering::SeqCst);
            // The thread may have been done before it could see that.
            listener.take(&self.shared.epoll)
        });
        match taken {
            Some(fd) => errands.close(self.user, fd),
            None => self.leaving.push((listener, now)),
        }
        let _ = self.changes.send(Change::Gone(name));
        self.shared.poke();
    }

    /// Has the thread accept no longer from what has ended a while ago.
    pub(super) fn hurry(&mut self, now: u64, errands: &mut Errands) {
        self.leaving.retain_mut(|(listener, since)| {
            if now >= *since + WAIT && !listener.is_closed() && !errands.are_full(self.user) {
                *since = now;
                let listener = Arc::clone(listener);
                errands.run(self.user, move || listener.shut_down());
            }
            !listener.is_closed()
        });
    }

    /// The next thing that has come.
    pub(super) fn next(&self) -> Option<(Name, Come)> {
        self.come.try_recv().ok()
    }

    /// Has the thread end. Whether it has: it may wait for a listener that somebody makes listen again.
    pub(super) fn end(&mut self, now: u64, errands: &mut Errands) -> bool {
        self.shared.ends.store(true, Ordering::Release);
        self.hurry(now, errands);
        self.shared.poke();
        self.thread.is_finished()
    }
}

impl Shared {
    fn poke(&self) {
        let _ = rustix::io::write(&self.poke, &1u64.to_ne_bytes());
    }

    fn run(&self, come: &Sender<(Name, Come)>, changes: &Receiver<Change>) {
        let mut listeners = HashMap::new();
        let mut space = [const { MaybeUninit::uninit() }; EVENTS];
        while !self.ends.load(Ordering::Acquire) {
            let words: ArrayVec<u64, EVENTS> = match epoll::wait(&self.epoll, &mut space[..], None) {
                Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
                Err(_) => continue,
            };
            for change in changes.try_iter() {
                match change {
                    Change::New(name, fd) => drop(listeners.insert(name, fd)),
                    Change::Gone(name) => drop(listeners.remove(&name)),
                }
            }
            for word in words.into_iter().filter(|word| *word != POKED) {
                let name = Name::of(word);
                let Some(listener) = listeners.get(&name) else { continue };
                let taken = match &*listener.fd.read().unwrap_or_else(PoisonError::into_inner) {
                    Some(fd) => take(fd.as_fd(), name, come),
                    None => continue,
                };
                if listener.gone.load(Ordering::SeqCst) {
                    drop(listener.take(&self.epoll));
                }
                // Who would hear of it is gone.
                if taken.and_then(|()| come.send((name, Come::Done))).is_err() {
                    return;
                }
                let _ = rustix::io::write(&self.told, &1u64.to_ne_bytes());
            }
        }
    }
}

/// Whether nothing waits that a worker does with a descriptor: it is a TCP listener.
///
/// # Errors
/// What it is instead, as `listen` has it.
fn is_listener(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let inet = [AddressFamily::INET, AddressFamily::INET6].contains(&socket_domain(fd)?);
    let tcp = socket_type(fd)? == SocketType::STREAM && socket_protocol(fd)? == Some(ipproto::TCP);
    if !inet || !tcp {
        return Err(Errno::OPNOTSUPP);
    }
    if socket_acceptconn(fd)? { Ok(()) } else { Err(Errno::INVAL) }
}

/// Takes some of a listener's connections.
fn take(
    listener: BorrowedFd<'_>,
    name: Name,
    come: &Sender<(Name, Come)>,
) -> Result<(), SendError<(Name, Come)>> {
    for _ in 0..AT_ONCE {
        // The application may undo this before the next line.
        let _ = fcntl_setfl(listener, OFlags::NONBLOCK);
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(fd) => come.send((name, Come::Connection(fd)))?,
            // That one is gone; there may be others.
            Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                come.send((name, Come::Full))?;
                break;
            }
            Err(_) => break,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_were_written() {
        for (number, generation) in [(0, 1), (65_535, u32::MAX), (1, 2)] {
            let name = Name { number, generation };
            assert_eq!(Name::of(name.word()), name);
            assert_ne!(name.word(), POKED);
        }
    }
}
