//! An application: a group of processes that share memory and sessions.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use offcore_session::control::{Owner, PROCESSES, Processes, SESSIONS};
use offcore_session::message::{KEY, Question};
use offcore_session::shared::Shared;
use offcore_session::slot::Slot;
use offcore_session::{Memory, Place, Segments};
use offcore_tcp::proto::AppId;

use super::acceptor::Acceptor;
use super::descriptors::DescriptorCharge;
use super::feed::Share;
use super::key::Key;
use super::session::Session;

/// Marks of an application taken at a time. Up to 63 more may be taken.
const MARKS: usize = 256;

/// One application.
#[derive(Debug)]
pub(super) struct Application {
    pub(super) id: AppId,
    /// The key with which its processes identify it.
    pub(super) key: [u8; KEY],
    /// Identifies the application among all applications that have ever had the key.
    pub(super) instance: u64,
    /// The user whose processes may join the application.
    pub(super) user: u32,
    pub(super) memory: Arc<Memory>,
    /// `None` once the application has ended.
    pub(super) share: Option<Share>,
    pub(super) shared: Shared,
    /// Wakes the stack. The eventfd is never read: each write is an event.
    pub(super) event: OwnedFd,
    /// The charge for the descriptors of the application. Processes and sessions have their own charges.
    pub(super) charge: DescriptorCharge,
    /// The thread that accepts from the application's kernel listeners, if it has any.
    pub(super) acceptor: Option<Acceptor>,
    processes: Vec<Option<Process>>,
    living: usize,
    sessions: Vec<Option<Box<Session>>>,
    /// Free numbers below `sessions.len()`.
    free: BinaryHeap<Reverse<u32>>,
    /// Session numbers by the kernel's socket cookie of the application's end.
    by_cookie: HashMap<u64, u32>,
    /// More memory is being created.
    pub(super) growing: bool,
    /// All sessions are being closed, and the application ends after the last one.
    ends: bool,
    /// The application is queued for a slice.
    pub(super) ready: bool,
    /// Whether the marks are read in each round, and when the application last had work.
    pub(super) awake: bool,
    pub(super) worked: u64,
    /// Processes that may have sent messages, and sessions, by number and generation, whose pairs may contain data.
    pub(super) talking: Queue<Key>,
    pub(super) raws: Queue<(u32, u32)>,
    /// Listeners that may have connections to pass on, by number and generation.
    pub(super) listening: Queue<(u32, u32)>,
    /// Whether there may be marks, the marked sessions that were taken, and the position at which the next marks are
    /// taken.
    may_be_marked: bool,
    marked: Vec<u32>,
    marks: usize,
    /// Sessions to be handled without marks: the next one and the number left.
    rest: (u32, u32),
    /// The kind of work that was served last.
    kind: usize,
}

/// A unit of work for an application.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A session is marked.
    Marked(u32),
    /// A session is handled although it is not marked. The number may be unused.
    Rest(u32),
    /// A process may have sent a message.
    Question(Key),
    /// The pair of a session of this generation may contain data.
    Raw(u32, u32),
    /// A listener of this generation may have connections to pass on.
    Listener(u32, u32),
    /// The application is ending: the session with this number, which may be unused, is closed. `None` ends the
    /// application itself.
    End(Option<u32>),
}

/// A queue in two parts: the front part is due now, and the rest waits for a later round.
#[derive(Debug)]
pub(super) struct Queue<T> {
    all: VecDeque<T>,
    /// Number of items that are due.
    due: usize,
}

impl<T> Queue<T> {
    const fn new() -> Self {
        Self { all: VecDeque::new(), due: 0 }
    }

    /// Adds an item that is due now.
    pub(super) fn push(&mut self, item: T) {
        self.all.insert(self.due, item);
        self.due += 1;
    }

    /// Adds an item that waits until the next call of [`make_all_due`](Self::come_due).
    pub(super) fn push_waiting(&mut self, item: T) {
        self.all.push_back(item);
    }

    /// Makes all items due.
    fn make_all_due(&mut self) {
        self.due = self.all.len();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn pop(&mut self) -> Option<T> {
        self.due = self.due.checked_sub(1)?;
        self.all.pop_front()
    }
}

/// A process of an application.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) generation: u32,
    /// The process number in the kernel.
    pub(super) pid: i32,
    /// The process's socket, until the process closes it.
    pub(super) channel: Option<OwnedFd>,
    pub(super) charge: Option<DescriptorCharge>,
    /// A postponed request, and whether the process is in the queue of processes that may have sent messages.
    pub(super) asked: Option<Box<Asked>>,
    pub(super) talks: bool,
    /// Readable after the process has ended; `None` if the kernel cannot report that.
    pub(super) pidfd: Option<OwnedFd>,
}

/// A request of a process.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) question: Question,
    /// A descriptor that came with the request.
    pub(super) descriptor: Option<OwnedFd>,
    /// A descriptor could not be received.
    pub(super) lost: bool,
    /// When the request was received, in microseconds.
    pub(super) since: u64,
}

impl Application {
    pub(super) fn new(
        id: AppId,
        (key, instance): ([u8; KEY], u64),
        user: u32,
        (memory, share): (Arc<Memory>, Share),
        shared: Shared,
        (event, charge): (OwnedFd, DescriptorCharge),
    ) -> Self {
        Self {
            charge,
            id,
            key,
            instance,
            user,
            memory,
            share: Some(share),
            shared,
            event,
            acceptor: None,
            processes: Vec::new(),
            living: 0,
            sessions: Vec::new(),
            free: BinaryHeap::new(),
            by_cookie: HashMap::new(),
            growing: false,
            ends: false,
            ready: false,
            awake: true,
            worked: 0,
            talking: Queue::new(),
            raws: Queue::new(),
            listening: Queue::new(),
            may_be_marked: false,
            marked: Vec::new(),
            marks: 0,
            rest: (0, 0),
            kind: 0,
        }
    }

    /// Number of living processes.
    pub(super) fn living(&self) -> usize {
        self.living
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len() - self.free.len()
    }

    /// Whether the application has neither processes nor sessions.
    pub(super) fn is_over(&self) -> bool {
        self.living == 0 && self.len() == 0
    }

    pub(super) fn slot(&self, place: Place) -> Option<&Slot> {
        self.memory.slot(place)
    }

    /// Adds a process and returns its number, or `None` if the application has the maximum number of processes.
    pub(super) fn add_process(&mut self, process: Process) -> Option<(usize, Owner)> {
        let free = self.processes.iter().position(Option::is_none);
        let number = free.unwrap_or(self.processes.len());
        let owner = Owner::new(number, process.generation)
            .filter(|owner| owner.word() % (PROCESSES as u32) != Owner::STACK.word() % (PROCESSES as u32))?;
        self.shared.processes().set(number, process.generation);
        if number == self.processes.len() {
            self.processes.push(None);
        }
        self.processes[number] = Some(process);
        self.living += 1;
        Some((number, owner))
    }

    /// The process with this number and generation, if it is still alive.
    pub(super) fn process(&mut self, number: u32, generation: u32) -> Option<&mut Process> {
        let process = self.processes.get_mut(number as usize)?.as_mut();
        process.filter(|process| process.generation == generation)
    }

    /// Number and generation of the process with the kernel's process number `pid`.
    pub(super) fn find_process(&self, pid: i32) -> Option<(u32, u32)> {
        let mut processes = self.processes.iter().zip(0..);
        processes.find_map(|(process, number)| {
            let process = process.as_ref().filter(|process| process.pid == pid)?;
            Some((number, process.generation))
        })
    }

    /// Removes a process.
    pub(super) fn remove_process(&mut self, number: u32) -> Option<Process> {
        let process = self.processes.get_mut(number as usize)?.take()?;
        self.shared.processes().set(number as usize, 0);
        self.living -= 1;
        Some(process)
    }

    /// Returns the watched descriptors of all processes.
    pub(super) fn process_descriptors(&self) -> impl Iterator<Item = &OwnedFd> {
        self.processes.iter().flatten().flat_map(|process| process.channel.iter().chain(&process.pidfd))
    }

    /// The sockets of all processes.
    pub(super) fn channels(&self) -> impl Iterator<Item = &OwnedFd> {
        self.processes.iter().flatten().filter_map(|process| process.channel.as_ref())
    }

    /// Checks for marks. They are taken in the application's turn.
    #[inline]
    pub(super) fn scan_for_marks(&mut self) {
        self.may_be_marked = self.shared.control().has_marks();
    }

    /// Returns the next marked session.
    #[inline]
    fn next_marked(&mut self) -> Option<u32> {
        if self.marked.is_empty() && std::mem::take(&mut self.may_be_marked) {
            let Self { shared, marks, marked, .. } = self;
            shared.control().take_marks(marks, MARKS, |number| marked.push(number));
        }
        self.marked.pop()
    }

    /// Whether work is due now.
    #[inline]
    pub(super) fn has_due_work(&self) -> bool {
        let marked = self.may_be_marked || !self.marked.is_empty();
        marked
            || self.ends
            || self.rest.1 > 0
            || self.talking.due > 0
            || self.raws.due > 0
            || self.listening.due > 0
    }

    /// Makes all waiting work due in the next round.
    pub(super) fn make_all_due(&mut self) {
        self.talking.make_all_due();
        self.raws.make_all_due();
        self.listening.make_all_due();
    }

    /// Whether there is work, now or later.
    pub(super) fn has_work(&self) -> bool {
        let waits = !self.talking.is_empty() || !self.raws.is_empty() || !self.listening.is_empty();
        self.has_due_work() || waits || self.acceptor.as_ref().is_some_and(Acceptor::is_leaving)
    }

    /// Returns the next unit of work. The kinds of work alternate, so that no kind waits until another is done.
    pub(super) fn next_work(&mut self) -> Option<Work> {
        const KINDS: usize = 5;
        if self.ends {
            return Some(Work::End(self.next_of_rest()));
        }
        (0..KINDS).find_map(|_| {
            self.kind = (self.kind + 1) % KINDS;
            match self.kind {
                0 => self.next_marked().map(Work::Marked),
                1 => self.next_of_rest().map(Work::Rest),
                2 => self.talking.pop().map(Work::Question),
                3 => self.listening.pop().map(|(number, generation)| Work::Listener(number, generation)),
                _ => self.raws.pop().map(|(number, generation)| Work::Raw(number, generation)),
            }
        })
    }

    /// Begins to end the application. Its sessions are closed in its turns.
    pub(super) fn start_ending(&mut self) {
        self.request_full_scan();
        self.ends = true;
        self.shared.end();
    }

    /// Requests that all sessions are handled.
    pub(super) fn request_full_scan(&mut self) {
        // A scan that ends the application is not repeated.
        if !self.ends {
            self.rest.1 = self.sessions.len() as u32;
        }
    }

    /// Whether all sessions are being closed.
    pub(super) fn is_ending(&self) -> bool {
        self.ends
    }

    /// The next session number of such a request, which may be unused; `None` after the last one.
    fn next_of_rest(&mut self) -> Option<u32> {
        let (next, left) = self.rest;
        let left = left.checked_sub(1)?;
        let len = self.sessions.len() as u32;
        let number = if next < len { next } else { 0 };
        self.rest = (number + 1, left);
        Some(number)
    }

    /// The number for the next session: the lowest free one. `None` if the application has the maximum number of
    /// sessions.
    pub(super) fn next_number(&self) -> Option<u32> {
        match self.free.peek() {
            Some(Reverse(number)) => Some(*number),
            None if self.sessions.len() < SESSIONS => Some(self.sessions.len() as u32),
            None => None,
        }
    }

    /// Adds a session with the [next number](Self::next_number).
    pub(super) fn add_session(&mut self, session: Box<Session>) -> Option<u32> {
        let number = self.next_number()?;
        self.by_cookie.insert(session.cookie, number);
        if self.free.pop().is_some() {
            self.sessions[number as usize] = Some(session);
        } else {
            self.sessions.push(Some(session));
        }
        Some(number)
    }

    pub(super) fn session(&self, number: u32) -> Option<&Session> {
        self.sessions.get(number as usize)?.as_deref()
    }

    pub(super) fn session_mut(&mut self, number: u32) -> Option<&mut Session> {
        self.sessions.get_mut(number as usize)?.as_deref_mut()
    }

    /// A session and its slot.
    pub(super) fn both(&mut self, number: u32) -> Option<(&mut Session, &Slot)> {
        let session = self.sessions.get_mut(number as usize)?.as_deref_mut()?;
        let slot = self.memory.slot(session.place)?;
        Some((session, slot))
    }

    /// A session, its slot, and the table of living processes.
    pub(super) fn all(&mut self, number: u32) -> Option<(&mut Session, &Slot, &Processes)> {
        let session = self.sessions.get_mut(number as usize)?.as_deref_mut()?;
        let slot = self.memory.slot(session.place)?;
        Some((session, slot, self.shared.processes()))
    }

    pub(super) fn remove_session(&mut self, number: u32) -> Option<Box<Session>> {
        let session = self.sessions.get_mut(number as usize)?.take()?;
        self.free.push(Reverse(number));
        self.by_cookie.remove(&session.cookie);
        Some(session)
    }

    /// Takes the stack's ends of all sessions.
    pub(super) fn take_ends(&mut self) -> Vec<(OwnedFd, DescriptorCharge)> {
        let sessions = self.sessions.iter_mut().flatten();
        let ends = sessions.flat_map(|session| session.take_ends().map(|end| (end, session.charge.clone())));
        ends.collect()
    }

    /// The numbers of all sessions.
    pub(super) fn numbers(&self) -> Vec<u32> {
        let sessions = self.sessions.iter().zip(0..);
        sessions.filter(|(session, _)| session.is_some()).map(|(_, number)| number).collect()
    }

    /// The session whose application's end has the kernel's socket `cookie`.
    pub(super) fn find_session(&self, cookie: u64) -> Option<u32> {
        self.by_cookie.get(&cookie).copied()
    }
}
