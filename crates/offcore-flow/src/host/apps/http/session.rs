//! One connection: requests are read and answered one after the other.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::SystemTime;

use offcore_session::{Reader, Writer};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, ConnId};

use super::files::{Missing, Name, Root};
use super::progress::Progress;
use super::request::{self, Refusal};
use super::response;
use super::status::Status;
use super::timeouts::{Source, Timeouts};
use crate::host::Calls;

/// Maximum length of a request's head in bytes.
pub const HEAD_LIMIT: usize = 8 << 10;
/// Maximum number of bytes of a file that one connection reads in a turn.
const QUANTUM: usize = 64 << 10;
/// The cost of a request in the byte budget of a round. Opening a file takes about as long as reading this number of
/// bytes.
const REQUEST_COST: usize = 8 << 10;
/// How long data of the peer is still read after the last answer. After an immediate close, a reset
/// would overtake the answer.
const LINGER: Micros = Micros::from_secs(2);

/// The next step of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Wait for an event.
    Wait,
    /// The turn is used up, and the connection is queued again.
    Again,
    /// Close the connection.
    Close,
    /// Reset the connection, in the middle of an answer.
    Abort,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Requests,
    /// An answer is being sent. `keep_alive`: more requests may follow it.
    Answers {
        keep_alive: bool,
    },
    Lingers,
}

/// The rest of a file that is being sent.
#[derive(Debug)]
struct Body {
    /// `None` while the descriptor was needed by others. The file is then reopened by its name.
    file: Option<OwnedFd>,
    name: Name,
    range: Range<u64>,
}

/// The result of a search for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SearchOutcome {
    /// A request was found, and its answer has begun.
    Found,
    /// The request is incomplete.
    Missing,
    /// The search continues in the next turn.
    Unfinished,
}

#[derive(Debug)]
pub(super) struct Session {
    pub conn: ConnId,
    pub source: Source,
    reader: Reader,
    writer: Writer,
    phase: Phase,
    /// Number of bytes of an incomplete request that were already searched for its end.
    scanned: usize,
    /// The head of the answer, and the number of bytes already written.
    head: Vec<u8>,
    head_done: usize,
    /// The part of a file that follows the head.
    body: Option<Body>,
    /// The progress of the peer in receiving answers.
    progress: Progress,
    /// The peer has ended its stream.
    pub ended: bool,
    /// The connection is in the queue.
    pub queued: bool,
    /// The request took too long, and the peer receives an error.
    pub is_late: bool,
    /// Start of the current time limit.
    since: Time,
}

impl Session {
    /// Creates the session of an accepted connection.
    pub(super) fn new(conn: ConnId, calls: &mut Calls<'_>) -> Option<Self> {
        let memory = calls.stack.memory(AppId::OWN);
        let slot = calls.stack.slot(conn)?;
        let source = calls.stack.info(conn)?.remote.ip().into();
        let reader = Reader::new(Arc::clone(memory), slot)?;
        let writer = Writer::new(Arc::clone(memory), slot)?;
        let progress = Progress::new(calls.now, writer.acknowledged());
        Some(Self {
            conn,
            source,
            reader,
            writer,
            progress,
            phase: Phase::Requests,
            scanned: 0,
            head: Vec::new(),
            head_done: 0,
            body: None,
            ended: false,
            queued: false,
            is_late: false,
            since: calls.now,
        })
    }

    /// Serves the connection, up to a quantum of work. Deducts the work from `budget`.
    pub(super) fn serve(
        &mut self,
        root: &Root,
        scratch: &mut [u8; HEAD_LIMIT],
        calls: &mut Calls<'_>,
        budget: &mut usize,
    ) -> Next {
        let mut quantum = QUANTUM.min(*budget);
        let given = quantum;
        let next = self.serve_for(root, scratch, calls, &mut quantum);
        *budget = budget.saturating_sub(given - quantum);
        next
    }

    fn serve_for(
        &mut self,
        root: &Root,
        scratch: &mut [u8; HEAD_LIMIT],
        calls: &mut Calls<'_>,
        quantum: &mut usize,
    ) -> Next {
        loop {
            match self.phase {
                Phase::Requests => {
                    if *quantum == 0 {
                        return Next::Again;
                    }
                    match self.next_request(root, scratch, calls, quantum) {
                        SearchOutcome::Found => *quantum = quantum.saturating_sub(REQUEST_COST),
                        SearchOutcome::Unfinished => return Next::Again,
                        SearchOutcome::Missing if !self.ended => return Next::Wait,
                        SearchOutcome::Missing if self.shutdown(calls) => {}
                        SearchOutcome::Missing => return Next::Close,
                    }
                }
                Phase::Answers { keep_alive } => {
                    if let Some(next) = self.send(root, calls, quantum) {
                        return next;
                    }
                    if keep_alive {
                        (self.phase, self.since) = (Phase::Requests, calls.now);
                    } else if !self.shutdown(calls) {
                        return Next::Close;
                    }
                }
                Phase::Lingers => {
                    let gone = !self.consume(self.reader.available(), calls);
                    return if gone || self.is_over() { Next::Close } else { Next::Wait };
                }
            }
        }
    }

    /// Ends the stream after the data that is already written. Returns whether the connection still exists.
    fn shutdown(&mut self, calls: &mut Calls<'_>) -> bool {
        (self.phase, self.since) = (Phase::Lingers, calls.now);
        calls.stack.shutdown(calls.now, self.conn, calls.out).is_ok()
    }

    /// Whether both directions are complete. If the connection were closed earlier, the stack would continue to send
    /// the rest for as long as the peer delays it.
    fn is_over(&self) -> bool {
        self.ended && self.writer.unacknowledged() == 0
    }

    /// Whether the session has an open file.
    pub(super) fn holds_file(&self) -> bool {
        self.body.as_ref().is_some_and(|body| body.file.is_some())
    }

    /// Closes the session's file until its next turn.
    pub(super) fn close_file_until_turn(&mut self) {
        if let Some(body) = &mut self.body {
            body.file = None;
        }
    }

    /// Returns how the connection ends, if it or its peer has taken longer than `timeouts` allows. `may_answer`: a late
    /// request may receive an error.
    pub(super) fn expired(&mut self, calls: &Calls<'_>, timeouts: &Timeouts, may_answer: bool) -> Next {
        let answers = matches!(self.phase, Phase::Answers { .. });
        if answers || self.writer.unacknowledged() > 0 {
            let (acknowledged, left) = (self.writer.acknowledged(), self.writer.unacknowledged() as u64);
            if left == 0 {
                // The server is late, not the peer.
                self.progress = Progress::new(calls.now, acknowledged);
            } else if self.progress.is_stalled(calls.now, acknowledged, left, timeouts) {
                return Next::Abort;
            }
            // The other time limits begin when the peer has received the answer.
            match self.phase {
                Phase::Answers { .. } => return Next::Wait,
                Phase::Requests if self.scanned > 0 => {}
                Phase::Requests | Phase::Lingers => self.since = calls.now,
            }
        }
        let limit = match self.phase {
            Phase::Requests if self.scanned > 0 => timeouts.request,
            Phase::Requests => timeouts.idle,
            Phase::Answers { .. } | Phase::Lingers => LINGER,
        };
        match self.phase {
            Phase::Lingers if self.is_over() => Next::Close,
            // The server is late with the request.
            Phase::Requests if self.queued && self.reader.available() > self.scanned => Next::Wait,
            _ if self.since + limit > calls.now => Next::Wait,
            // An answer and an orderly close would occupy memory for as long as the peer delays them.
            _ if timeouts.aborts => Next::Abort,
            Phase::Requests if self.reader.available() > 0 && !may_answer => Next::Abort,
            Phase::Requests if self.reader.available() > 0 => {
                self.is_late = true;
                self.refuse(Refusal::last(Status::RequestTimeout), calls.now);
                Next::Again
            }
            _ => Next::Close,
        }
    }

    /// Reads a request if it is complete, and begins its answer.
    fn next_request(
        &mut self,
        root: &Root,
        scratch: &mut [u8; HEAD_LIMIT],
        calls: &mut Calls<'_>,
        quantum: &mut usize,
    ) -> SearchOutcome {
        if self.scanned == 0 {
            match self.skip_empty_lines(scratch, calls, quantum) {
                SearchOutcome::Found => {}
                other => return other,
            }
        }
        let seen = self.scanned;
        if self.reader.available().min(HEAD_LIMIT) == seen {
            return SearchOutcome::Missing;
        }
        let len = self.reader.peek(scratch);
        let bytes = &scratch[..len];
        let Some(end) = request::end_of_head(bytes, seen) else {
            if bytes.len() == HEAD_LIMIT {
                self.refuse(request::too_long(bytes), calls.now);
                return SearchOutcome::Found;
            }
            if seen == 0 && !bytes.is_empty() {
                self.since = calls.now;
            }
            self.scanned = bytes.len();
            return SearchOutcome::Missing;
        };
        match request::parse(&bytes[..end]) {
            Ok(request) => self.answer(&request, root, calls.now),
            Err(refusal) => self.refuse(refusal, calls.now),
        }
        self.scanned = 0;
        // If the connection is gone, the write of the answer fails.
        self.consume(end, calls);
        SearchOutcome::Found
    }

    /// Skips empty lines before a request, which are not part of it (RFC 9112, 2.2). Returns whether other data
    /// follows.
    fn skip_empty_lines(
        &mut self,
        scratch: &mut [u8; HEAD_LIMIT],
        calls: &mut Calls<'_>,
        quantum: &mut usize,
    ) -> SearchOutcome {
        // Empty lines are rare.
        let mut most = 4;
        while *quantum > 0 {
            let len = self.reader.peek(&mut scratch[..most]);
            let empty = scratch[..len].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            *quantum = quantum.saturating_sub(empty);
            if len == 0 || empty > 0 && !self.consume(empty, calls) {
                return SearchOutcome::Missing;
            }
            if empty < len {
                return SearchOutcome::Found;
            }
            most = HEAD_LIMIT;
        }
        SearchOutcome::Unfinished
    }

    fn answer(&mut self, request: &request::Request<'_>, root: &Root, now: Time) {
        let date = SystemTime::now();
        match root.find(&request.target) {
            Ok(found) => {
                self.begin(request.session.keep_alive, now);
                let range = response::answer(request, &found.entity, date, &mut self.head);
                let body = Body { file: Some(found.file), name: found.name, range };
                self.body = (!body.range.is_empty()).then_some(body);
            }
            Err(Missing::Slash) => {
                self.begin(request.session.keep_alive, now);
                response::redirect(request, &request.target.with_slash(), date, &mut self.head);
            }
            Err(Missing::Because(status)) => {
                let (head_only, session) = (request.head_only, request.session);
                self.refuse(Refusal { status, head_only, session }, now);
            }
        }
    }

    fn refuse(&mut self, refusal: Refusal, now: Time) {
        self.begin(refusal.session.keep_alive, now);
        response::refuse(refusal, SystemTime::now(), &mut self.head);
    }

    fn begin(&mut self, keep_alive: bool, now: Time) {
        self.head.clear();
        self.head_done = 0;
        self.body = None;
        self.phase = Phase::Answers { keep_alive };
        if self.writer.unacknowledged() == 0 {
            self.progress = Progress::new(now, self.writer.acknowledged());
        }
    }

    /// Writes up to `quantum` bytes of the answer. Returns `None` when the answer is complete.
    fn send(&mut self, root: &Root, calls: &mut Calls<'_>, quantum: &mut usize) -> Option<Next> {
        loop {
            let head = self.writer.write(&self.head[self.head_done..]);
            self.head_done += head;
            let mut wrote = head;
            if self.head_done == self.head.len()
                && self.writer.space() > 0
                && let Some(Body { file, name, range }) = &mut self.body
            {
                if file.is_none() {
                    *file = root.find_again(name);
                    *quantum = quantum.saturating_sub(REQUEST_COST);
                }
                let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                // If the file cannot be read, was replaced, or has become shorter, the announced length of the answer
                // is wrong.
                let Some(file) = file else { return Some(Next::Abort) };
                let read = self.writer.write_from(file.as_fd(), range.start, left.min(*quantum));
                let Ok(read) = read else { return Some(Next::Abort) };
                range.start += read as u64;
                *quantum -= read;
                wrote += read;
                if range.is_empty() {
                    self.body = None;
                }
            }
            if wrote > 0 && calls.stack.written(calls.now, self.conn, calls.out).is_err() {
                return Some(Next::Close);
            }
            if self.head_done == self.head.len() && self.body.is_none() {
                return None;
            }
            if *quantum == 0 {
                return Some(Next::Again);
            }
            if wrote == 0 {
                calls.stack.want_room(self.conn);
                return Some(Next::Wait);
            }
        }
    }

    /// Releases `len` bytes that were read. Returns whether the connection still exists.
    fn consume(&mut self, len: usize, calls: &mut Calls<'_>) -> bool {
        self.reader.consume(len);
        len == 0 || calls.stack.consumed(calls.now, self.conn, calls.out).is_ok()
    }
}
