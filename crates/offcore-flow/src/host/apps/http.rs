//! A file server for a directory, with HTTP/1.1 and 1.0 (RFC 9110 and 9112).
//!
//! * [`request`]: the head of a request; [`target`]: the file that it names
//! * [`response`]: the head of an answer, derived from a [`status`] and the file's state
//! * [`files`]: the directory
//! * [`session`]: one connection; `progress`: acknowledgements of its peer; `timeouts`: its time limits
//!
//! The worker reads files into the memory from which their bytes are sent. The number of bytes per round is limited,
//! and connections take turns. The worker waits for the disk if data is not in the page cache.

pub mod files;
mod progress;
pub mod request;
pub mod response;
pub mod session;
pub mod status;
pub mod target;
#[cfg(test)]
mod tests;
mod timeouts;

use std::collections::VecDeque;
use std::io;
use std::path::Path;

use offcore_port::Context;
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, CallError, ConnId, Event};
use rustix::process::{Resource, getrlimit};

use self::files::Root;
use self::session::{HEAD_LIMIT, Next, Session};
use self::timeouts::Sources;
use crate::host::{App, Calls};

/// Length of the queue of connections that are not accepted yet.
const BACKLOG: usize = 1024;
/// Maximum number of bytes read from files per round.
const ROUND: usize = 128 << 10;
/// Maximum number of connections served per round. Even a turn without a request has a cost.
const TURNS: usize = 64;
/// Interval between checks for connections that have exceeded their time limits, and the number of
/// connections per check.
const SWEEP: Micros = Micros::from_millis(1);
const SWEPT: usize = 256;
/// Maximum number of connections that receive an error because their request took too long. Silent peers do not
/// acknowledge it, and each retransmission takes time from others. Other late connections are reset.
const LATE_ANSWERS: usize = 64;

/// Limits for the number of files that a server keeps open between turns of their connections: one file per this number
/// of the process's descriptors, and an absolute maximum. Other files are reopened in each turn, so that peers that do
/// not read leave descriptors for others.
const DESCRIPTORS: u64 = 16;
const FILES: u64 = 1024;

/// Serves the files of a directory.
#[derive(Debug)]
pub struct FileServer {
    root: Root,
    port: u16,
    /// By the connection's index.
    sessions: Vec<Option<Box<Session>>>,
    /// Connections with pending work.
    queue: VecDeque<ConnId>,
    /// Number of files that are open between turns, and its maximum.
    open: usize,
    most: usize,
    /// Buffer for the head of a request while it is parsed.
    scratch: Box<[u8; HEAD_LIMIT]>,
    /// Index of the last session checked for its time limits, and the time of the next check.
    swept: usize,
    next_sweep: Time,
    sources: Sources,
    /// Number of connections whose request took too long and that receive an error.
    late: usize,
}

impl FileServer {
    /// Creates a server of the directory `root` on `port` of all addresses.
    ///
    /// # Errors
    /// Fails if the directory cannot be opened.
    pub fn new(root: &Path, port: u16) -> io::Result<Self> {
        let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        Ok(Self {
            root: Root::open(root)?,
            port,
            open: 0,
            most: (descriptors / DESCRIPTORS).min(FILES) as usize,
            sessions: Vec::new(),
            queue: VecDeque::new(),
            scratch: Box::new([0; HEAD_LIMIT]),
            swept: 0,
            next_sweep: Time::ZERO,
            sources: Sources::default(),
            late: 0,
        })
    }

    /// Sets the maximum number of files kept open between turns of their connections.
    pub fn with_open_files(self, most: usize) -> Self {
        Self { most, ..self }
    }

    fn session(&mut self, conn: ConnId) -> Option<&mut Session> {
        let session = self.sessions.get_mut(conn.index as usize)?.as_deref_mut();
        session.filter(|session| session.conn == conn)
    }

    fn open(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let Some(session) = Session::new(conn, calls) else { return calls.close(conn) };
        // Answers are written as a whole, so a short segment must not wait for more data.
        let _ = calls.stack.set_nodelay(calls.now, conn, true, calls.out);
        let index = conn.index as usize;
        if index >= self.sessions.len() {
            self.sessions.resize_with(index + 1, || None);
        }
        self.sources.add(session.source);
        self.sessions[index] = Some(Box::new(session));
        self.enqueue(conn);
    }

    /// Queues a connection for its turn.
    fn enqueue(&mut self, conn: ConnId) {
        if let Some(session) = self.session(conn)
            && !session.queued
        {
            session.queued = true;
            self.queue.push_back(conn);
        }
    }

    fn forget(&mut self, conn: ConnId) -> bool {
        let Some(session) = self.session(conn) else { return false };
        let (open, late, source) = (session.holds_file(), session.is_late, session.source);
        self.open -= usize::from(open);
        self.late -= usize::from(late);
        self.sources.remove(source);
        self.sessions[conn.index as usize] = None;
        true
    }

    fn proceed(&mut self, conn: ConnId, next: Next, calls: &mut Calls<'_>) {
        match next {
            Next::Wait => {}
            Next::Again => self.enqueue(conn),
            Next::Close => {
                self.forget(conn);
                calls.close(conn);
            }
            Next::Abort => {
                self.forget(conn);
                calls.stack.abort(calls.now, conn, calls.out);
            }
        }
    }

    /// Ends connections that have exceeded their time limits.
    fn sweep(&mut self, calls: &mut Calls<'_>) {
        self.sources.set_scarce(calls.now, calls.stack.is_memory_scarce(AppId::OWN));
        for _ in 0..SWEPT.min(self.sessions.len()) {
            self.swept = (self.swept + 1) % self.sessions.len();
            let Some(session) = self.sessions[self.swept].as_deref_mut() else { continue };
            let timeouts = self.sources.timeouts(calls.now, session.source);
            let (conn, was_late) = (session.conn, session.is_late);
            let next = session.expired(calls, timeouts, self.late < LATE_ANSWERS);
            self.late += usize::from(session.is_late && !was_late);
            self.proceed(conn, next, calls);
            if next == Next::Abort {
                // The reset may have freed enough memory.
                self.sources.set_scarce(calls.now, calls.stack.is_memory_scarce(AppId::OWN));
            }
        }
    }
}

impl App for FileServer {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        calls.stack.listen(AppId::OWN, None, self.port, BACKLOG, false).map(|_| ())
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = calls.stack.accept(listener) {
                    self.open(conn, calls);
                }
            }
            Event::Readable(conn) | Event::Writable(conn) | Event::Connected(conn) => self.enqueue(conn),
            Event::EndOfStream(conn) => {
                if let Some(session) = self.session(conn) {
                    session.ended = true;
                }
                self.enqueue(conn);
            }
            Event::Closed(conn, _) => {
                if self.forget(conn) {
                    calls.close(conn);
                }
            }
            Event::Failed(..) | Event::AddressConflict { .. } | Event::Address { .. } => {}
        }
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        let mut budget = ROUND;
        for _ in 0..self.queue.len().min(TURNS) {
            if budget == 0 {
                break;
            }
            let Some(conn) = self.queue.pop_front() else { break };
            let Self { root, sessions, scratch, open, most, .. } = self;
            let session = sessions.get_mut(conn.index as usize).and_then(Option::as_deref_mut);
            let Some(session) = session.filter(|session| session.conn == conn) else { continue };
            session.queued = false;
            *open -= usize::from(session.holds_file());
            let next = session.serve(root, scratch, calls, &mut budget);
            if *open >= *most {
                session.close_file_until_turn();
            }
            *open += usize::from(session.holds_file());
            self.proceed(conn, next, calls);
        }
        if calls.now >= self.next_sweep {
            self.next_sweep = calls.now + SWEEP;
            self.sweep(calls);
        }
    }

    fn is_busy(&self) -> bool {
        !self.queue.is_empty()
    }

    fn stop(&mut self, calls: &mut Calls<'_>) {
        for session in self.sessions.drain(..).flatten() {
            calls.close(session.conn);
        }
        (self.open, self.late) = (0, 0);
        self.sources = Sources::default();
        self.queue.clear();
    }
}
