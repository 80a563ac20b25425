//! One connection: a request is read, answered, and only then is the next one looked at.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::SystemTime;

use offcore_session::{Reader, Writer};
use offcore_tcp::proto::{AppId, ConnId};

use super::files::{Missing, Name, Root};
use super::progress::Progress;
use super::request::{self, Refusal};
use super::response;
use super::status::Status;
use super::timeouts::{Source, Timeouts};
use crate::host::Calls;

/// Bytes of a request's head, at most.
pub const HEAD_LIMIT: usize = 8 << 10;
/// Bytes of a file that one connection reads in a row, at most.
const QUANTUM: usize = 64 << 10;
/// What a request counts as in bytes of a round: opening a file takes about as long as reading so much of it.
const REQUEST_COST: usize = 8 << 10;
/// How long what the peer still sends is read after the last answer: closed at once, a reset would overtake the answer. In microseconds.
const LINGER: u64 = 2_000_000;

/// What is to become of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Nothing, until something happens.
    Wait,
    /// It has had its share: its turn comes again.
    Again,
    /// It ends.
    Close,
    /// It ends at once, in the middle of an answer.
    Abort,
}

/// What it is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Requests,
    /// An answer is sent; behind it come more requests or none.
    Answers {
        keep_alive: bool,
    },
    Lingers,
}

/// A part of a file that is to be sent.
#[derive(Debug)]
struct Body {
    /// It is opened again by its name when others needed the descriptor.
    file: Option<OwnedFd>,
    name: Name,
    range: Range<u64>,
}

/// What has become of a look for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Looked {
    /// Its answer has begun.
    Found,
    /// It is not there as a whole.
    Missing,
    /// There is more to look through.
    Unfinished,
}

#[derive(Debug)]
pub(super) struct Session {
    pub conn: ConnId,
    pub source: Source,
    reader: Reader,
    writer: Writer,
    phase: Phase,
    /// Bytes of a request that are known not to end it.
    scanned: usize,
    /// The head of the answer and how much of it is written.
    head: Vec<u8>,
    head_done: usize,
    /// What of which file follows it.
    body: Option<Body>,
    /// How the peer takes answers.
    progress: Progress,
    /// The peer sends no more.
    pub ended: bool,
    /// It is among those whose turn comes.
    pub queued: bool,
    /// Start of the time that its phase may take, in microseconds.
    since: u64,
}

impl Session {
    /// Of a connection that was accepted.
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
            since: calls.now,
        })
    }

    /// Does what can be done, for a quantum at most; takes what it has done off `budget`.
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
                        Looked::Found => *quantum = quantum.saturating_sub(REQUEST_COST),
                        Looked::Unfinished => return Next::Again,
                        Looked::Missing if !self.ended => return Next::Wait,
                        Looked::Missing if self.shutdown(calls) => {}
                        Looked::Missing => return Next::Close,
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

    /// Nothing is sent any more but what is written; whether the connection is still there.
    fn shutdown(&mut self, calls: &mut Calls<'_>) -> bool {
        (self.phase, self.since) = (Phase::Lingers, calls.now);
        calls.stack.shutdown(calls.now, self.conn, calls.out).is_ok()
    }

    /// Neither side has anything to say. Let go of before that, a connection would send the rest for as long as the peer
    /// likes.
    fn is_over(&self) -> bool {
        self.ended && self.writer.unacknowledged() == 0
    }

    /// Whether it has a file open.
    pub(super) fn holds_file(&self) -> bool {
        self.body.as_ref().is_some_and(|body| body.file.is_some())
    }

    /// Closes its file until its turn comes again.
    pub(super) fn let_go_of_file(&mut self) {
        if let Some(body) = &mut self.body {
            body.file = None;
        }
    }

    /// Returns how the connection ends, if it or its peer has taken longer than `timeouts` allows.
    pub(super) fn expired(&mut self, calls: &Calls<'_>, timeouts: &Timeouts) -> Next {
        let answers = matches!(self.phase, Phase::Answers { .. });
        if answers || self.writer.unacknowledged() > 0 {
            let (acknowledged, left) = (self.writer.acknowledged(), self.writer.unacknowledged() as u64);
            if left == 0 {
                // The answer waits for this server, not for its peer.
                self.progress = Progress::new(calls.now, acknowledged);
            } else if self.progress.is_stalled(calls.now, (acknowledged, left), timeouts) {
                return Next::Abort;
            }
            // The other times begin when the peer has the answer.
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
            // The request waits for this server.
            Phase::Requests if self.queued && self.reader.available() > self.scanned => Next::Wait,
            _ if self.since + limit > calls.now => Next::Wait,
            // An answer and an orderly end would take memory, for as long as the peer likes.
            _ if timeouts.aborts => Next::Abort,
            Phase::Requests if self.reader.available() > 0 => {
                self.refuse(Refusal::last(Status::RequestTimeout), calls.now);
                Next::Again
            }
            _ => Next::Close,
        }
    }

    /// Reads a request, if it is there as a whole, and begins its answer.
    fn next_request(
        &mut self,
        root: &Root,
        scratch: &mut [u8; HEAD_LIMIT],
        calls: &mut Calls<'_>,
        quantum: &mut usize,
    ) -> Looked {
        if self.scanned == 0 {
            match self.skip_empty_lines(scratch, calls, quantum) {
                Looked::Found => {}
                other => return other,
            }
        }
        let seen = self.scanned;
        if self.reader.available().min(HEAD_LIMIT) == seen {
            return Looked::Missing;
        }
        let len = self.reader.peek(scratch);
        let bytes = &scratch[..len];
        let Some(end) = request::end_of_head(bytes, seen) else {
            if bytes.len() == HEAD_LIMIT {
                self.refuse(request::too_long(bytes), calls.now);
                return Looked::Found;
            }
            if seen == 0 && !bytes.is_empty() {
                self.since = calls.now;
            }
            self.scanned = bytes.len();
            return Looked::Missing;
        };
        match request::parse(&bytes[..end]) {
            Ok(request) => self.answer(&request, root, calls.now),
            Err(refusal) => self.refuse(refusal, calls.now),
        }
        self.scanned = 0;
        // A connection that is gone is seen when its answer is written.
        self.consume(end, calls);
        Looked::Found
    }

    /// Empty lines before a request are not part of it (RFC 9112, 2.2). Whether anything else is there.
    fn skip_empty_lines(
        &mut self,
        scratch: &mut [u8; HEAD_LIMIT],
        calls: &mut Calls<'_>,
        quantum: &mut usize,
    ) -> Looked {
        // Nearly always there is none.
        let mut most = 4;
        while *quantum > 0 {
            let len = self.reader.peek(&mut scratch[..most]);
            let empty = scratch[..len].iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            *quantum = quantum.saturating_sub(empty);
            if len == 0 || empty > 0 && !self.consume(empty, calls) {
                return Looked::Missing;
            }
            if empty < len {
                return Looked::Found;
            }
            most = HEAD_LIMIT;
        }
        Looked::Unfinished
    }

    fn answer(&mut self, request: &request::Request<'_>, root: &Root, now: u64) {
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

    fn refuse(&mut self, refusal: Refusal, now: u64) {
        self.begin(refusal.session.keep_alive, now);
        response::refuse(refusal, SystemTime::now(), &mut self.head);
    }

    fn begin(&mut self, keep_alive: bool, now: u64) {
        self.head.clear();
        self.head_done = 0;
        self.body = None;
        self.phase = Phase::Answers { keep_alive };
        if self.writer.unacknowledged() == 0 {
            self.progress = Progress::new(now, self.writer.acknowledged());
        }
    }

    /// Writes the answer, up to `quantum` bytes of it; nothing when it is written.
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
                // A file that cannot be read, is another one, or is shorter than it was: the answer's length was a lie.
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

    /// Gives bytes back that were read; whether the connection is still there.
    fn consume(&mut self, len: usize, calls: &mut Calls<'_>) -> bool {
        self.reader.consume(len);
        len == 0 || calls.stack.consumed(calls.now, self.conn, calls.out).is_ok()
    }
}
