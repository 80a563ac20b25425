//! One connection: a request is read, answered, and only then is the next one looked at.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::SystemTime;

use offcore_session::{Reader, Writer};
use offcore_tcp::proto::ConnId;

use super::files::{Missing, Root};
use super::request::{self, Refusal};
use super::response;
use super::status::Status;
use crate::host::Calls;

/// Bytes of a request's head, at most.
pub const HEAD_LIMIT: usize = 8 << 10;
/// Bytes of a file that one connection reads in a row, at most.
const QUANTUM: usize = 64 << 10;
/// What a request counts as in bytes of a round: opening a file takes about as long as reading so much of it.
const REQUEST_COST: usize = 8 << 10;
/// A connection without a request is closed after so long, in microseconds.
const IDLE: u64 = 30_000_000;
/// A request has come as a whole so long after its first byte.
const REQUEST: u64 = 10_000_000;
/// An answer of which the peer has taken nothing for so long is given up.
const STALLED: u64 = 30_000_000;
/// How long what the peer still sends is read after the last answer: closed at once, a reset would overtake the answer.
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

#[derive(Debug)]
pub(super) struct Session {
    pub conn: ConnId,
    reader: Reader,
    writer: Writer,
    phase: Phase,
    /// Bytes of a request that are known not to end it.
    scanned: usize,
    /// The head of the answer and how much of it is written.
    head: Vec<u8>,
    head_done: usize,
    /// What of which file follows it.
    body: Option<(OwnedFd, Range<u64>)>,
    /// The peer sends no more.
    pub ended: bool,
    /// It is among those whose turn comes.
    pub queued: bool,
    /// When it has taken too long, in microseconds.
    deadline: u64,
}

impl Session {
    /// Of a connection that was accepted.
    pub(super) fn new(conn: ConnId, calls: &mut Calls<'_>) -> Option<Self> {
        let memory = calls.stack.memory();
        let slot = calls.stack.slot(conn)?;
        let reader = Reader::new(Arc::clone(memory), slot)?;
        let writer = Writer::new(Arc::clone(memory), slot)?;
        Some(Self {
            conn,
            reader,
            writer,
            phase: Phase::Requests,
            scanned: 0,
            head: Vec::new(),
            head_done: 0,
            body: None,
            ended: false,
            queued: false,
            deadline: calls.now + IDLE,
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
                    if !self.next_request(root, scratch, calls) {
                        return if self.ended { Next::Close } else { Next::Wait };
                    }
                    *quantum = quantum.saturating_sub(REQUEST_COST);
                }
                Phase::Answers { keep_alive } => {
                    if let Some(next) = self.send(calls, quantum) {
                        return next;
                    }
                    (self.phase, self.deadline) = if keep_alive {
                        (Phase::Requests, calls.now + IDLE)
                    } else if calls.stack.shutdown(calls.now, self.conn, calls.out).is_ok() {
                        (Phase::Lingers, calls.now + LINGER)
                    } else {
                        return Next::Close;
                    };
                }
                Phase::Lingers => {
                    let gone = !self.consume(self.reader.available(), calls);
                    return if gone || self.ended { Next::Close } else { Next::Wait };
                }
            }
        }
    }

    /// What becomes of it when it has taken too long.
    pub(super) fn expired(&mut self, calls: &Calls<'_>) -> Next {
        if self.deadline > calls.now {
            return Next::Wait;
        }
        match self.phase {
            Phase::Requests if self.reader.available() > 0 => {
                self.refuse(Refusal::last(Status::RequestTimeout), calls.now);
                Next::Again
            }
            Phase::Requests | Phase::Lingers => Next::Close,
            Phase::Answers { .. } => Next::Abort,
        }
    }

    /// Reads a request, if it is there as a whole, and begins its answer.
    fn next_request(&mut self, root: &Root, scratch: &mut [u8; HEAD_LIMIT], calls: &mut Calls<'_>) -> bool {
        if self.scanned == 0 && !self.skip_empty_lines(calls) {
            return false;
        }
        let seen = self.scanned;
        if self.reader.available().min(HEAD_LIMIT) == seen {
            return false;
        }
        let len = self.reader.peek(scratch);
        let bytes = &scratch[..len];
        let Some(end) = request::end_of_head(bytes, seen) else {
            if bytes.len() == HEAD_LIMIT {
                self.refuse(request::too_long(bytes), calls.now);
                return true;
            }
            if seen == 0 && !bytes.is_empty() {
                self.deadline = calls.now + REQUEST;
            }
            self.scanned = bytes.len();
            return false;
        };
        match request::parse(&bytes[..end]) {
            Ok(request) => self.answer(&request, root, calls.now),
            Err(refusal) => self.refuse(refusal, calls.now),
        }
        self.scanned = 0;
        // A connection that is gone is seen when its answer is written.
        self.consume(end, calls);
        true
    }

    /// Empty lines before a request are not part of it (RFC 9112, 2.2). Returns whether anything else is there.
    fn skip_empty_lines(&mut self, calls: &mut Calls<'_>) -> bool {
        loop {
            let mut some = [0; 64];
            let len = self.reader.peek(&mut some);
            let some = &some[..len];
            let empty = some.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            let rest = some.len() - empty;
            if empty > 0 && !self.consume(empty, calls) || rest > 0 || some.is_empty() {
                return rest > 0;
            }
        }
    }

    fn answer(&mut self, request: &request::Request<'_>, root: &Root, now: u64) {
        let date = SystemTime::now();
        match root.find(&request.target) {
            Ok(found) => {
                self.begin(request.session.keep_alive, now);
                let range = response::answer(request, &found.entity, date, &mut self.head);
                self.body = (!range.is_empty()).then_some((found.file, range));
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
        self.deadline = now + STALLED;
    }

    /// Writes the answer, up to `quantum` bytes of it; nothing when it is written.
    fn send(&mut self, calls: &mut Calls<'_>, quantum: &mut usize) -> Option<Next> {
        loop {
            let head = self.writer.write(&self.head[self.head_done..]);
            self.head_done += head;
            let mut wrote = head;
            if self.head_done == self.head.len()
                && let Some((file, range)) = &mut self.body
            {
                let left = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
                // A file that cannot be read, or is shorter than it was: the answer's length was a lie.
                let read = self.writer.write_from(file.as_fd(), range.start, left.min(*quantum));
                let Ok(read) = read else { return Some(Next::Abort) };
                range.start += read as u64;
                *quantum -= read;
                wrote += read;
                if range.is_empty() {
                    self.body = None;
                }
            }
            if wrote > 0 {
                self.deadline = calls.now + STALLED;
                if calls.stack.written(calls.now, self.conn, calls.out).is_err() {
                    return Some(Next::Close);
                }
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
