//! An application: processes that share memory and sessions.

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
use super::feed::Share;
use super::key::Key;
use super::session::Session;

/// Marks of an application that are taken at once, or up to 63 more.
const MARKS: usize = 256;

/// One application.
#[derive(Debug)]
pub(super) struct Application {
    pub(super) id: AppId,
    /// What its processes name it by.
    pub(super) key: [u8; KEY],
    /// Which one it is of all that have had the key.
    pub(super) instance: u64,
    /// The user that may join it.
    pub(super) user: u32,
    pub(super) memory: Arc<Memory>,
    /// Until it ends.
    pub(super) share: Option<Share>,
    pub(super) shared: Shared,
    /// Wakes the stack. It is never read: each write is an event.
    pub(super) event: OwnedFd,
    /// Where it has listeners of the kernel's.
    pub(super) acceptor: Option<Acceptor>,
    processes: Vec<Option<Process>>,
    living: usize,
    sessions: Vec<Option<Box<Session>>>,
    /// Numbers below `sessions.len()` that no session has.
    free: BinaryHeap<Reverse<u32>>,
    /// Numbers by what the kernel calls the application's end.
    by_cookie: HashMap<u64, u32>,
    /// More memory is being made for it.
    pub(super) growing: bool,
    /// The last slice of a round that it has had.
    pub(super) slice: u64,
    /// Its marks are read in each round; and when it had work the last time.
    pub(super) awake: bool,
    pub(super) worked: u64,
    /// Processes that have more to say, and sessions, by number and generation, whose pairs may have data.
    pub(super) talking: Queue<Key>,
    pub(super) raws: Queue<(u32, u32)>,
    /// Listeners that may have connections to pass on, by number and generation.
    pub(super) listening: Queue<(u32, u32)>,
    /// Whether there may be marks, sessions whose marks were taken, and where the next ones are taken.
    may_be_marked: bool,
    marked: Vec<u32>,
    marks: usize,
    /// Sessions that are to be looked at although they have no marks: the next one and how many there are.
    rest: (u32, u32),
    /// Which kind of work comes next.
    kind: usize,
}

/// What is to be done for an application in its turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Work {
    /// A session is marked.
    Marked(u32),
    /// A session, which may be none, is looked at although it is not marked.
    Rest(u32),
    /// A process may have something to say.
    Question(Key),
    /// The pair of a session, of this generation, may have data.
    Raw(u32, u32),
    /// A listener, of this generation, may have connections to pass on.
    Listener(u32, u32),
}

/// Things that are done one after the other: those in front now, and the others later.
#[derive(Debug)]
pub(super) struct Queue<T> {
    all: VecDeque<T>,
    /// How many are in front.
    due: usize,
}

impl<T> Queue<T> {
    const fn new() -> Self {
        Self { all: VecDeque::new(), due: 0 }
    }

    /// It is done as soon as it is its turn.
    pub(super) fn push(&mut self, item: T) {
        self.all.insert(self.due, item);
        self.due += 1;
    }

    /// It is done when those that wait are [due](Self::come_due).
    pub(super) fn push_waiting(&mut self, item: T) {
        self.all.push_back(item);
    }

    /// Nothing waits any more.
    fn come_due(&mut self) {
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

/// One of its processes.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) generation: u32,
    /// Its number in the system.
    pub(super) pid: i32,
    /// Its socket, until it closes that.
    pub(super) channel: Option<OwnedFd>,
    /// What it has asked for and waits for; and whether it is among those that have more to say.
    pub(super) asked: Option<Box<Asked>>,
    pub(super) talks: bool,
    /// Readable when it has ended; none where that cannot be seen.
    pub(super) pidfd: Option<OwnedFd>,
}

/// What a process has asked for.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) question: Question,
    /// One that came with it.
    pub(super) descriptor: Option<OwnedFd>,
    /// One could not be taken.
    pub(super) lost: bool,
    /// When that was.
    pub(super) since: u64,
}

impl Application {
    pub(super) fn new(
        id: AppId,
        (key, instance): ([u8; KEY], u64),
        user: u32,
        (memory, share): (Arc<Memory>, Share),
        shared: Shared,
        event: OwnedFd,
    ) -> Self {
        Self {
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
            slice: 0,
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

    /// Its processes that live, and its sessions.
    pub(super) fn living(&self) -> usize {
        self.living
    }

    pub(super) fn len(&self) -> usize {
        self.sessions.len() - self.free.len()
    }

    /// Whether nothing of it is left.
    pub(super) fn is_over(&self) -> bool {
        self.living == 0 && self.len() == 0
    }

    pub(super) fn slot(&self, place: Place) -> Option<&Slot> {
        self.memory.slot(place)
    }

    /// Adds a process; its number. `None` when there are as many as may be.
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

    /// The process that an event is of, when it still lives.
    pub(super) fn process(&mut self, number: u32, generation: u32) -> Option<&mut Process> {
        let process = self.processes.get_mut(number as usize)?.as_mut();
        process.filter(|process| process.generation == generation)
    }

    /// The number and generation of the process that the system calls `pid`.
    pub(super) fn find_process(&self, pid: i32) -> Option<(u32, u32)> {
        let mut processes = self.processes.iter().zip(0..);
        processes.find_map(|(process, number)| {
            let process = process.as_ref().filter(|process| process.pid == pid)?;
            Some((number, process.generation))
        })
    }

    /// A process is gone.
    pub(super) fn remove_process(&mut self, number: u32) -> Option<Process> {
        let process = self.processes.get_mut(number as usize)?.take()?;
        self.shared.processes().set(number as usize, 0);
        self.living -= 1;
        Some(process)
    }

    /// The sockets of its processes are its own no more.
    pub(super) fn take_channels(&mut self) -> Vec<OwnedFd> {
        self.processes.iter_mut().flatten().filter_map(|process| process.channel.take()).collect()
    }

    /// Looks whether there may be marks. They are taken in the application's turn.
    #[inline]
    pub(super) fn look_for_marks(&mut self) {
        self.may_be_marked = self.shared.control().has_marks();
    }

    /// The next marked session.
    #[inline]
    fn next_marked(&mut self) -> Option<u32> {
        if self.marked.is_empty() && std::mem::take(&mut self.may_be_marked) {
            let Self { shared, marks, marked, .. } = self;
            shared.control().take_marks(marks, MARKS, |number| marked.push(number));
        }
        self.marked.pop()
    }

    /// Whether something is to be done now.
    #[inline]
    pub(super) fn is_behind(&self) -> bool {
        let marked = self.may_be_marked || !self.marked.is_empty();
        marked || self.rest.1 > 0 || self.talking.due > 0 || self.raws.due > 0 || self.listening.due > 0
    }

    /// What waits is done in the next round.
    pub(super) fn come_due(&mut self) {
        self.talking.come_due();
        self.raws.come_due();
        self.listening.come_due();
    }

    /// Whether it has work, now or later.
    pub(super) fn has_work(&self) -> bool {
        let waits = !self.talking.is_empty() || !self.raws.is_empty() || !self.listening.is_empty();
        self.is_behind() || waits || self.acceptor.as_ref().is_some_and(Acceptor::is_leaving)
    }

    /// What is to be done next; one kind after the other, so that none waits for all of another.
    pub(super) fn next_work(&mut self) -> Option<Work> {
        const KINDS: usize = 5;
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

    /// All its sessions are to be looked at.
    pub(super) fn look_at_all(&mut self) {
        self.rest.1 = self.sessions.len() as u32;
    }

    /// The number of the next of them, which may be no session's; `None` when all were looked at.
    fn next_of_rest(&mut self) -> Option<u32> {
        let (next, left) = self.rest;
        let left = left.checked_sub(1)?;
        let len = self.sessions.len() as u32;
        let number = if next < len { next } else { 0 };
        self.rest = (number + 1, left);
        Some(number)
    }

    /// The number that the next session gets: the lowest that is free. `None` when there are as many as may be.
    pub(super) fn next_number(&self) -> Option<u32> {
        match self.free.peek() {
            Some(Reverse(number)) => Some(*number),
            None if self.sessions.len() < SESSIONS => Some(self.sessions.len() as u32),
            None => None,
        }
    }

    /// Adds a session by the [next number](Self::next_number).
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

    /// A session, and what it shares.
    pub(super) fn both(&mut self, number: u32) -> Option<(&mut Session, &Slot)> {
        let session = self.sessions.get_mut(number as usize)?.as_deref_mut()?;
        let slot = self.memory.slot(session.place)?;
        Some((session, slot))
    }

    /// The same, and which processes live.
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

    /// Our ends of all its sessions, which have none any more.
    pub(super) fn take_ends(&mut self) -> Vec<OwnedFd> {
        self.sessions.iter_mut().flatten().flat_map(|session| session.take_ends()).collect()
    }

    /// Numbers of all its sessions.
    pub(super) fn numbers(&self) -> Vec<u32> {
        let sessions = self.sessions.iter().zip(0..);
        sessions.filter(|(session, _)| session.is_some()).map(|(_, number)| number).collect()
    }

    /// The session whose application's end the kernel calls `cookie`.
    pub(super) fn find_session(&self, cookie: u64) -> Option<u32> {
        self.by_cookie.get(&cookie).copied()
    }
}
