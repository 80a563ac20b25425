//! Accepts connections of kernel listeners, in one thread for each application that has such listeners.
//!
//! Workers do not call `accept`, because it may block: the application shares the listener and can clear its
//! non-blocking flag at any time. A thread outside the workers makes the call. An application that blocks its thread
//! gets no more connections of the kernel, without effect on other applications.
//!
//! A listener with waiting connections wakes the thread once. The thread accepts some connections, and the worker
//! passes them on and then requests more. This bounds the number of descriptors held here for an application.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread::{Builder, JoinHandle};

use arrayvec::ArrayVec;
use offcore_stats::time::{Micros, Time};
use rustix::event::epoll::{self, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_protocol, socket_type};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, accept_with, ipproto, shutdown};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::descriptors::{ACCEPTED, DescriptorCharge};
use super::errands::{Errands, Pending, notify};

/// Maximum number of listeners per application, including listeners that have ended but are still open in the thread.
const LISTENERS: usize = 1024;
/// Stack size of the thread, in bytes.
const STACK: usize = 64 << 10;
/// How long a call of `accept` may block on a listener that has ended.
const WAIT: Micros = Micros::from_secs(1);
/// Maximum number of events taken at a time.
const EVENTS: usize = 16;
/// Identifies the thread's own event. No session has this name.
const NOTIFY_NAME: u64 = u64::MAX;

/// The results of a listener, in order.
#[derive(Debug)]
pub(super) enum AcceptResult {
    Connection(OwnedFd),
    /// A connection is waiting, but no descriptor is available.
    Full,
    /// The listener cannot be watched.
    Failed(Errno),
    /// The thread pauses until the worker requests more.
    Done,
}

/// A listener of the kernel. The thread closes it, because closing may block.
#[derive(Debug)]
pub(super) struct Kernel {
    listener: Arc<OwnedFd>,
    name: Name,
    /// The charge for the listener and for the connections accepted from it, until all of them are closed.
    charge: DescriptorCharge,
}

impl Kernel {
    /// Returns a reference to the charge. The caller holds it as long as an accepted connection.
    pub(super) fn charge(&self) -> DescriptorCharge {
        self.charge.clone()
    }

    /// Duplicates the descriptor of the kernel's listener, for a process that adopts the session.
    pub(super) fn try_clone(&self) -> Result<OwnedFd, Errno> {
        fcntl_dupfd_cloexec(&self.listener, 0)
    }
}

/// Messages to the thread, in order. The thread itself adds listeners to its epoll set and removes them: these
/// operations walk through all waiters on the listener, and other threads may do so at the same time.
#[derive(Debug)]
enum Change {
    New(Name, Arc<OwnedFd>),
    /// The worker has handled all previous results of the listener.
    GoOn(Name),
    Gone(Kernel, Pending),
}

/// Number and generation of the session to which a listener belongs.
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
    /// Wakes the thread for changes, and to end it.
    notify_thread: OwnedFd,
    /// Wakes the worker when results are available.
    told: OwnedFd,
    /// The [`Name`] of the listener of the last call of `accept`, and the number of starts and ends of calls. The
    /// number is odd during a call.
    accepting: AtomicU64,
    calls: AtomicU64,
    ends: AtomicBool,
}

/// A listener that has ended but is still open in the thread.
#[derive(Debug)]
struct Leaving {
    listener: Weak<OwnedFd>,
    name: Name,
    /// The number of a call of `accept` on the listener, and when it was first seen.
    call: Option<(u64, Time)>,
}

/// The acceptor thread of an application.
#[derive(Debug)]
pub(super) struct Acceptor {
    /// The user of the application.
    pub(super) user: u32,
    _charge: DescriptorCharge,
    shared: Arc<Shared>,
    come: Receiver<(Name, AcceptResult)>,
    changes: Sender<Change>,
    /// Listeners that are still open.
    listeners: Vec<Weak<OwnedFd>>,
    /// Listeners that have ended but are still open.
    leaving: Vec<Leaving>,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Starts the thread on the CPUs `cpus`. `charge` covers its descriptors.
    pub(super) fn new(user: u32, charge: DescriptorCharge, cpus: CpuSet) -> Result<Self, Errno> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let (notify_thread, told) = (eventfd(0, flags)?, eventfd(0, flags)?);
        let edges = EventFlags::IN | EventFlags::ET;
        epoll::add(&epoll, &notify_thread, epoll::EventData::new_u64(NOTIFY_NAME), edges)?;
        let shared = Arc::new(Shared {
            epoll,
            notify_thread,
            told,
            accepting: AtomicU64::new(NOTIFY_NAME),
            calls: AtomicU64::new(0),
            ends: AtomicBool::new(false),
        });
        let (come_to, come) = channel();
        let (changes, changes_from) = channel();
        let theirs = Arc::clone(&shared);
        let thread = Builder::new().name("acceptor".into()).stack_size(STACK).spawn(move || {
            // The thread inherits the affinity of the worker, which has a dedicated core.
            let _ = sched_setaffinity(None, &cpus);
            theirs.run(&come_to, &changes_from);
        });
        let thread = thread.map_err(|_| Errno::AGAIN)?;
        Ok(Self {
            user,
            _charge: charge,
            shared,
            come,
            changes,
            listeners: Vec::new(),
            leaving: Vec::new(),
            thread,
        })
    }

    /// An event is pending when [`next`](Self::next) has results.
    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.told.as_fd()
    }

    /// Adds a listener. The thread accepts its connections from now on.
    pub(super) fn add(
        &mut self,
        fd: OwnedFd,
        name: Name,
        charge: DescriptorCharge,
        errands: &mut Errands,
    ) -> Result<Kernel, Errno> {
        self.listeners.retain(|listener| listener.strong_count() > 0);
        let fits =
            if self.listeners.len() < LISTENERS { is_listener(fd.as_fd()) } else { Err(Errno::NOBUFS) };
        if let Err(error) = fits {
            errands.close(self.user, fd);
            return Err(error);
        }
        let listener = Arc::new(fd);
        self.listeners.push(Arc::downgrade(&listener));
        self.tell(Change::New(name, Arc::clone(&listener)), errands);
        Ok(Kernel { listener, name, charge })
    }

    /// Requests more results of a listener after the worker has handled all previous ones.
    pub(super) fn go_on(&self, kernel: &Kernel, errands: &mut Errands) {
        self.tell(Change::GoOn(kernel.name), errands);
    }

    /// Ends a listener.
    pub(super) fn remove(&mut self, kernel: Kernel, errands: &mut Errands) {
        let listener = Arc::downgrade(&kernel.listener);
        self.leaving.push(Leaving { listener, name: kernel.name, call: None });
        let pending = errands.pending(self.user);
        self.tell(Change::Gone(kernel, pending), errands);
    }

    fn tell(&self, change: Change, errands: &mut Errands) {
        if let Err(SendError(change)) = self.changes.send(change) {
            errands.close(self.user, change);
        }
        self.shared.notify_thread();
    }

    /// Whether the thread still holds a listener that has ended.
    pub(super) fn is_leaving(&self) -> bool {
        !self.leaving.is_empty()
    }

    /// Ends a call of `accept` that has blocked for some time on a listener that has ended.
    ///
    /// The listener is shut down only in this case, because other processes may share it.
    pub(super) fn interrupt_blocked_accept(&mut self, now: Time, errands: &mut Errands) {
        self.leaving.retain_mut(|Leaving { listener, name, call }| {
            let waits = self.shared.call_on(*name);
            match (waits, *call) {
                (Some(waits), Some((seen, since))) if waits == seen => {
                    if now >= since + WAIT && !errands.are_full(self.user) {
                        *call = None;
                        let (listener, shared, name) =
                            (Weak::clone(listener), Arc::clone(&self.shared), *name);
                        errands.run(self.user, move || {
                            if shared.call_on(name) == Some(seen) {
                                let _ = listener.upgrade().map(|fd| shutdown(fd, Shutdown::Both));
                            }
                        });
                    }
                }
                _ => *call = waits.map(|waits| (waits, now)),
            }
            listener.strong_count() > 0
        });
    }

    /// Takes the next result.
    pub(super) fn next(&self) -> Option<(Name, AcceptResult)> {
        self.come.try_recv().ok()
    }

    /// Tells the thread to end, and returns whether it has ended. The thread may block on a listener on which a process
    /// calls `listen` again.
    pub(super) fn end(&mut self, now: Time, errands: &mut Errands) -> bool {
        self.shared.ends.store(true, Ordering::Release);
        self.interrupt_blocked_accept(now, errands);
        self.shared.notify_thread();
        self.thread.is_finished()
    }
}

impl Shared {
    /// The number of the current call of `accept`, if the call is on this listener.
    fn call_on(&self, name: Name) -> Option<u64> {
        let call = self.calls.load(Ordering::Acquire);
        let is_on_it = call % 2 == 1 && self.accepting.load(Ordering::Relaxed) == name.word();
        is_on_it.then_some(call)
    }

    fn notify_thread(&self) {
        notify(&self.notify_thread);
    }

    fn run(&self, come: &Sender<(Name, AcceptResult)>, changes: &Receiver<Change>) {
        let mut listeners = HashMap::new();
        let mut space = [const { MaybeUninit::uninit() }; EVENTS];
        while !self.ends.load(Ordering::Acquire) {
            let words: ArrayVec<u64, EVENTS> = match epoll::wait(&self.epoll, &mut space[..], None) {
                Ok((events, _)) => events.iter().map(|event| event.data.u64()).collect(),
                Err(_) => continue,
            };
            for change in changes.try_iter() {
                if self.follow(change, &mut listeners, come).is_err() {
                    return;
                }
            }
            for word in words.into_iter().filter(|word| *word != NOTIFY_NAME) {
                let name = Name::of(word);
                let Some(listener) = listeners.get(&name) else { continue };
                let taken = self.take(listener.as_fd(), name, come);
                if taken.and_then(|()| self.tell(name, AcceptResult::Done, come)).is_err() {
                    return;
                }
            }
        }
    }

    /// Sends a result to the worker. Fails if the worker no longer receives results.
    fn tell(
        &self,
        name: Name,
        what: AcceptResult,
        come: &Sender<(Name, AcceptResult)>,
    ) -> Result<(), SendError<(Name, AcceptResult)>> {
        come.send((name, what))?;
        notify(&self.told);
        Ok(())
    }

    /// Accepts up to [`ACCEPTED`] connections of a listener.
    fn take(
        &self,
        listener: BorrowedFd<'_>,
        name: Name,
        come: &Sender<(Name, AcceptResult)>,
    ) -> Result<(), SendError<(Name, AcceptResult)>> {
        self.accepting.store(name.word(), Ordering::Relaxed);
        for _ in 0..ACCEPTED {
            // The application may clear the flag again before the call of `accept`.
            let _ = fcntl_setfl(listener, OFlags::NONBLOCK);
            self.calls.fetch_add(1, Ordering::Release);
            let accepted = accept_with(listener, SocketFlags::CLOEXEC);
            self.calls.fetch_add(1, Ordering::Release);
            match accepted {
                Ok(fd) => come.send((name, AcceptResult::Connection(fd)))?,
                // This connection is gone, but others may be waiting.
                Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => {}
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    come.send((name, AcceptResult::Full))?;
                    break;
                }
                Err(_) => break,
            }
        }
        Ok(())
    }

    fn follow(
        &self,
        change: Change,
        listeners: &mut HashMap<Name, Arc<OwnedFd>>,
        come: &Sender<(Name, AcceptResult)>,
    ) -> Result<(), SendError<(Name, AcceptResult)>> {
        let event =
            |name: Name| (epoll::EventData::new_u64(name.word()), EventFlags::IN | EventFlags::ONESHOT);
        match change {
            Change::New(name, listener) => {
                let (data, wanted) = event(name);
                let added = epoll::add(&self.epoll, &listener, data, wanted);
                listeners.insert(name, listener);
                added.or_else(|error| self.tell(name, AcceptResult::Failed(error), come))?;
            }
            Change::GoOn(name) => {
                let (data, wanted) = event(name);
                let _ =
                    listeners.get(&name).map(|listener| epoll::modify(&self.epoll, listener, data, wanted));
            }
            Change::Gone(Kernel { listener, name, charge }, pending) => {
                // Another process may share the listener and continue to listen.
                let _ = epoll::delete(&self.epoll, &listener);
                listeners.remove(&name);
                drop((listener, charge));
                drop(pending);
            }
        }
        Ok(())
    }
}

/// Checks that a descriptor is a TCP listener. A worker cannot block on operations on such a descriptor.
///
/// # Errors
/// The same error that `listen` returns for the descriptor.
fn is_listener(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let inet = [AddressFamily::INET, AddressFamily::INET6].contains(&socket_domain(fd)?);
    let tcp = socket_type(fd)? == SocketType::STREAM && socket_protocol(fd)? == Some(ipproto::TCP);
    if !inet || !tcp {
        return Err(Errno::OPNOTSUPP);
    }
    if socket_acceptconn(fd)? { Ok(()) } else { Err(Errno::INVAL) }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::time::{Duration, Instant};

    use super::super::descriptors::Descriptors;
    use super::*;

    impl Acceptor {
        /// Replaces the results of the thread with `count` results of a listener that has ended.
        pub(in crate::host::serve) fn set_results(&mut self, count: usize) {
            let (to, come) = channel();
            let name = Name { number: 0, generation: 0 };
            (0..count).for_each(|_| to.send((name, AcceptResult::Done)).unwrap());
            self.come = come;
        }

        /// Returns the number of results that the worker has not taken.
        pub(in crate::host::serve) fn count_results(&mut self) -> usize {
            let count = self.come.try_iter().count();
            self.set_results(count);
            count
        }
    }

    /// The test simulates calls of `accept` by the shared counters. The thread itself waits for events.
    #[test]
    fn blocked_accept_closes_listener() {
        let helpers = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let mut errands = Errands::new(CpuSet::new(), helpers);
        let charge = Descriptors::new(1).take(0, 3).unwrap();
        let mut acceptor = Acceptor::new(0, charge, CpuSet::new()).unwrap();
        let kernel = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = kernel.local_addr().unwrap();
        let [name, other] = [1, 2].map(|number| Name { number, generation: 1 });
        let listener = Arc::new(OwnedFd::from(kernel));
        acceptor.leaving.push(Leaving { listener: Arc::downgrade(&listener), name, call: None });
        let shared = Arc::clone(&acceptor.shared);
        let mut now = Time::ZERO;
        let mut interrupt_blocked_accept = |acceptor: &mut Acceptor, name: Name, calls: u64| {
            shared.accepting.store(name.word(), Ordering::Relaxed);
            shared.calls.fetch_add(calls, Ordering::Release);
            now += WAIT;
            acceptor.interrupt_blocked_accept(now, &mut errands);
            let start = Instant::now();
            while errands.has_some(0) {
                assert!(start.elapsed() < Duration::from_secs(60));
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        // Without a call, with calls on another listener, and with calls that return, the listener stays open.
        for (name, calls) in [(name, 0), (name, 2), (other, 1), (other, 0), (name, 2), (name, 2), (name, 1)] {
            interrupt_blocked_accept(&mut acceptor, name, calls);
            assert!(TcpStream::connect(to).is_ok(), "{name:?} {calls}");
        }
        interrupt_blocked_accept(&mut acceptor, name, 1);
        interrupt_blocked_accept(&mut acceptor, name, 0);
        assert!(TcpStream::connect(to).is_err());
        drop(listener);
        interrupt_blocked_accept(&mut acceptor, name, 0);
        assert!(!acceptor.is_leaving());
    }

    #[test]
    fn listener_name_round_trips() {
        for (number, generation) in [(0, 1), (65_535, u32::MAX), (1, 2)] {
            let name = Name { number, generation };
            assert_eq!(Name::of(name.word()), name);
            assert_ne!(name.word(), NOTIFY_NAME);
        }
    }
}
