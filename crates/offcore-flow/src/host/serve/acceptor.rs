//! Connections of the kernel's listeners, taken by a thread of each application's that has such listeners.
//!
//! A worker must not accept them: whether that waits is a flag of the listener's, which the application has, too, and can
//! change at any time. So the one that may have to wait is a thread beside the workers, and an application that makes it wait
//! gets no connections of the kernel's, and nobody else lacks any.
//!
//! A listener tells the thread once that it has connections. The thread takes some of them, and the worker, which passes them
//! on, has it go on when it is done with these: so an application has a bounded number of descriptors here.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};

use arrayvec::ArrayVec;
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use rustix::thread::{CpuSet, sched_setaffinity};

/// Connections of a listener that are taken at once, at most.
const AT_ONCE: usize = 16;
/// Listeners of an application, at most, those included that have ended and that the thread waits for.
const LISTENERS: usize = 256;
/// What the thread has of a stack, in bytes.
const STACK: usize = 64 << 10;
/// Events that are taken at once.
const EVENTS: usize = 16;
/// Bits of a session's number and generation, and of a descriptor, in the word by which a listener is told of.
const GENERATION_BITS: u32 = 21;
const NAME_BITS: u32 = GENERATION_BITS + 16;
/// Names the thread's own event: no descriptor has as many bits.
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

/// A listener of the kernel's, which is there until the thread has let go of it.
#[derive(Debug)]
pub(super) struct Kernel {
    fd: Arc<OwnedFd>,
    /// The descriptor, and the session that it belongs to.
    word: u64,
}

/// Number and generation of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub(super) number: u32,
    pub(super) generation: u32,
}

impl Name {
    fn of(word: u64) -> Self {
        let generation = word as u32 & ((1 << GENERATION_BITS) - 1);
        Self { number: (word >> GENERATION_BITS) as u16 as u32, generation }
    }

    /// The word of its listener; `None` for a descriptor whose number is larger than any kernel's limit.
    fn word(self, fd: RawFd) -> Option<u64> {
        let fd = u64::try_from(fd).ok().filter(|fd| fd >> (63 - NAME_BITS) == 0)?;
        let name = u64::from(self.number & 0xffff) << GENERATION_BITS | u64::from(self.generation);
        Some(fd << NAME_BITS | name)
    }
}

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    /// Tells the thread of what is gone, and that it ends.
    poke: OwnedFd,
    /// Tells the worker that something has come.
    told: OwnedFd,
    ends: AtomicBool,
}

/// The thread of an application.
#[derive(Debug)]
pub(super) struct Acceptor {
    shared: Arc<Shared>,
    come: Receiver<(Name, Come)>,
    gone: Sender<Arc<OwnedFd>>,
    /// Those that are there, or that the thread has not let go of.
    listeners: Vec<Weak<OwnedFd>>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Starts the thread, on `cpus`.
    pub(super) fn new(cpus: CpuSet) -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (poke, told) = (eventfd(0, flags)?, eventfd(0, flags)?);
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &poke, epoll::EventData::new_u64(POKED), edges)?;
        let shared = Arc::new(Shared { epoll, poke, told, ends: AtomicBool::new(false) });
        let (come_to, come) = channel();
        let (gone, gone_from) = channel();
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("acceptor".into()).stack_size(STACK).spawn(move || {
            // A worker, whose core is its own, has started it.
            let _ = sched_setaffinity(None, &cpus);
            theirs.run(&come_to, &gone_from);
        });
        let thread = thread.map_err(|_| Errno::AGAIN)?;
        Ok(Self { shared, come, gone, listeners: Vec::new(), thread })
    }

    /// Has an event when there is something to be [taken](Self::next).
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.told.as_fd()
    }

    /// Adds a listener, whose connections are taken from now on.
    pub(super) fn add(&mut self, fd: OwnedFd, name: Name) -> Result<Kernel, Errno> {
        self.listeners.retain(|listener| listener.strong_count() > 0);
        let word = name.word(fd.as_raw_fd()).filter(|_| self.listeners.len() < LISTENERS);
        let word = word.ok_or(Errno::NOBUFS)?;
        let wanted = EventFlags::IN | EventFlags::ONESHOT;
        epoll::add(&self.shared.epoll, &fd, epoll::EventData::new_u64(word), wanted)?;
        let fd = Arc::new(fd);
        self.listeners.push(Arc::downgrade(&fd));
        Ok(Kernel { fd, word })
    }

    /// The worker is done with what a listener has had.
    pub(super) fn go_on(&self, kernel: &Kernel) {
        let wanted = EventFlags::IN | EventFlags::ONESHOT;
        let _ =
            epoll::modify(&self.shared.epoll, &*kernel.fd, epoll::EventData::new_u64(kernel.word), wanted);
    }

    /// Ends a listener, also where the thread waits for it.
    pub(super) fn remove(&self, kernel: Kernel) {
        let _ = epoll::delete(&self.shared.epoll, &*kernel.fd);
        let _ = shutdown(&*kernel.fd, Shutdown::Both);
        // The thread may have been told of it just before. It has the last reference, so that the number stays as it is.
        let _ = self.gone.send(kernel.fd);
        self.shared.poke();
    }

    /// The next thing that has come.
    pub(super) fn next(&self) -> Option<(Name, Come)> {
        self.come.try_recv().ok()
    }

    /// Has the thread end. Whether it has: it may wait for a listener that somebody makes listen again.
    pub(super) fn end(&self) -> bool {
        self.shared.ends.store(true, Ordering::Release);
        for listener in self.listeners.iter().filter_map(Weak::upgrade) {
            let _ = shutdown(&*listener, Shutdown::Both);
        }
        self.shared.poke();
        self.thread.is_finished()
    }
}

impl Shared {
    fn poke(&self) {
        let _ = rustix::io::write(&self.poke, &1u64.to_ne_bytes());
    }

    fn run(&self, come: &Sender<(Name, Come)>, gone: &Receiver<Arc<OwnedFd>>) {
        let mut space = [const { MaybeUninit::uninit() }; EVENTS];
        while !self.ends.load(Ordering::Acquire) {
            // Those that the events below are of are not among them: they were taken out of the set before.
            gone.try_iter().for_each(drop);
            let words: ArrayVec<u64, EVENTS> = match epoll::wait(&self.epoll, &mut space[..], None) {
                Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
                Err(_) => continue,
            };
            for word in words.into_iter().filter(|word| *word != POKED) {
                // SAFETY: a descriptor of the set is closed by the loop above and nowhere else, after it was taken out of the
                // set; or when `gone` ends, after this.
                let listener = unsafe { BorrowedFd::borrow_raw((word >> NAME_BITS) as RawFd) };
                let told = take(listener, Name::of(word), come);
                // Who does not listen any more is gone.
                if told.is_err() {
                    return;
                }
                let _ = rustix::io::write(&self.told, &1u64.to_ne_bytes());
            }
        }
    }
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
    come.send((name, Come::Done))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_were_written() {
        for (number, generation, fd) in
            [(0, 1, 0), (65_535, (1 << GENERATION_BITS) - 1, (1 << 26) - 1), (1, 2, 3)]
        {
            let name = Name { number, generation };
            let word = name.word(fd).unwrap();
            assert_eq!((Name::of(word), word >> NAME_BITS), (name, fd as u64));
            assert_ne!(word, POKED);
        }
        assert_eq!(Name { number: 1, generation: 1 }.word(1 << 26), None);
    }
}
