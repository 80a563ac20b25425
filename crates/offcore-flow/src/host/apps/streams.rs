//! Stream services: echo, discard, and a data source.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use offcore_port::Context;
use offcore_session::{Reader, Writer};
use offcore_tcp::proto::{AppId, CallError, ConnId, Event, KeepAlive};

use super::datagrams::{DatagramService, Served};
use crate::host::{App, Calls};

/// Maximum number of bytes moved for a connection in its turn.
const CHUNK: usize = 64 << 10;
/// Approximate number of bytes moved per round. The rest waits for the next round.
const ROUND: usize = 256 << 10;
/// Length of the queue of connections that are not accepted yet.
const BACKLOG: usize = 1024;

/// The treatment of a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Echoes all bytes (RFC 862).
    Echo,
    /// Reads and discards (RFC 863).
    Sink,
    /// Writes as much as the peer accepts: a sequence of big-endian 64-bit numbers that count up from 0.
    Source,
}

/// Serves all connections to a port.
#[derive(Debug)]
pub struct Streams {
    stream: Stream,
    port: u16,
    sessions: HashMap<ConnId, Session>,
    /// Connections with more data to move.
    queue: VecDeque<ConnId>,
    /// Number of bytes that may still be moved in this round.
    budget: usize,
    chunk: Box<[u8]>,
    /// The UDP service on the same port.
    datagrams: Option<DatagramService>,
    /// More datagrams are waiting.
    more_datagrams: bool,
    /// Bytes read and written, for all connections and datagrams.
    pub read: u64,
    pub written: u64,
}

#[derive(Debug)]
struct Session {
    reader: Reader,
    writer: Writer,
    /// Number of bytes written: the position of a source in its stream.
    position: u64,
    /// The peer has ended its stream.
    ended: bool,
    /// The connection is in the queue.
    queued: bool,
}

impl Session {
    fn new(conn: ConnId, calls: &Calls<'_>) -> Option<Self> {
        let (memory, slot) = (calls.stack.memory(AppId::OWN), calls.stack.slot(conn)?);
        let reader = Reader::new(Arc::clone(memory), slot)?;
        let writer = Writer::new(Arc::clone(memory), slot)?;
        Some(Self { reader, writer, position: 0, ended: false, queued: false })
    }

    /// Moves up to `chunk.len()` bytes. Returns the number of bytes read and written.
    fn turn(&mut self, stream: Stream, chunk: &mut [u8]) -> (usize, usize) {
        let available = self.reader.available();
        let n = self.writer.space().min(chunk.len());
        match stream {
            Stream::Sink => {
                self.reader.consume(available);
                (available, 0)
            }
            Stream::Echo => {
                let chunk = &mut chunk[..n.min(available)];
                self.reader.read(chunk);
                self.writer.write(chunk);
                (chunk.len(), chunk.len())
            }
            Stream::Source => {
                self.reader.consume(available);
                fill(&mut chunk[..n], self.position);
                self.writer.write(&chunk[..n]);
                self.position += n as u64;
                (available, n)
            }
        }
    }

    /// Whether there is data to write.
    fn wants_to_write(&self, stream: Stream) -> bool {
        match stream {
            Stream::Sink => false,
            Stream::Echo => self.reader.available() > 0,
            Stream::Source => true,
        }
    }
}

impl Streams {
    /// Creates a service on `port` of all addresses.
    pub fn new(stream: Stream, port: u16) -> Self {
        let chunk = vec![0; CHUNK].into_boxed_slice();
        Self {
            stream,
            port,
            sessions: HashMap::new(),
            queue: VecDeque::new(),
            budget: ROUND,
            chunk,
            datagrams: None,
            more_datagrams: false,
            read: 0,
            written: 0,
        }
    }

    fn open(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let Some(session) = Session::new(conn, calls) else { return calls.close(conn) };
        // Keep-alive removes connections of peers that have disappeared.
        let _ = calls.stack.set_keepalive(calls.now, conn, Some(KeepAlive::default()), calls.out);
        self.sessions.insert(conn, session);
        self.serve(conn, calls);
    }

    /// Serves a connection now, or in the next round if the budget is used up.
    fn serve(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let Some(session) = self.sessions.get_mut(&conn).filter(|session| !session.queued) else { return };
        if self.budget == 0 {
            session.queued = true;
            return self.queue.push_back(conn);
        }
        let (read, written) = session.turn(self.stream, &mut self.chunk);
        self.budget = self.budget.saturating_sub(written);
        self.read += read as u64;
        self.written += written as u64;
        if read > 0 && calls.stack.consumed(calls.now, conn, calls.out).is_err() {
            self.sessions.remove(&conn);
        } else if session.ended && session.reader.available() == 0 {
            let _ = calls.stack.written(calls.now, conn, calls.out);
            self.sessions.remove(&conn);
            calls.close(conn);
        } else if written > 0 && calls.stack.written(calls.now, conn, calls.out).is_err() {
            // The end of the connection is reported by an event.
        } else if session.wants_to_write(self.stream) {
            // The write may have made more room available.
            if session.writer.space() > 0 {
                session.queued = true;
                self.queue.push_back(conn);
            } else {
                calls.stack.want_room(conn);
            }
        }
    }

    fn serve_datagrams(&mut self, calls: &mut Calls<'_>) {
        let Some(datagrams) = &mut self.datagrams else { return };
        let Served { read, written, more } = datagrams.serve(calls, &mut self.budget);
        self.more_datagrams = more;
        self.read += read;
        self.written += written;
    }
}

/// Fills `bytes` with the contents of a source's stream from `position` on.
pub fn fill(bytes: &mut [u8], position: u64) {
    for (byte, at) in bytes.iter_mut().zip(position..) {
        *byte = (at / 8).to_be_bytes()[(at % 8) as usize];
    }
}

impl App for Streams {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        calls.stack.listen(AppId::OWN, None, self.port, BACKLOG, false)?;
        // A source would send data to the sender address of any datagram, which may be forged.
        if self.stream != Stream::Source {
            self.datagrams = Some(DatagramService::open(self.port, self.stream == Stream::Echo, calls)?);
        }
        Ok(())
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = calls.stack.accept(listener) {
                    self.open(conn, calls);
                }
            }
            Event::Readable(conn) | Event::Writable(conn) | Event::Connected(conn) => match &self.datagrams {
                Some(datagrams) if datagrams.socket == conn => self.serve_datagrams(calls),
                _ => self.serve(conn, calls),
            },
            Event::EndOfStream(conn) => {
                if let Some(session) = self.sessions.get_mut(&conn) {
                    session.ended = true;
                }
                self.serve(conn, calls);
            }
            Event::Closed(conn, _) => {
                if self.sessions.remove(&conn).is_some() {
                    calls.close(conn);
                }
            }
            Event::Failed(..) | Event::AddressConflict { .. } | Event::Address { .. } => {}
        }
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        self.budget = ROUND;
        if self.more_datagrams {
            self.serve_datagrams(calls);
        }
        while self.budget > 0
            && let Some(conn) = self.queue.pop_front()
        {
            if let Some(session) = self.sessions.get_mut(&conn) {
                session.queued = false;
                self.serve(conn, calls);
            }
        }
    }

    fn is_busy(&self) -> bool {
        self.more_datagrams || !self.queue.is_empty()
    }

    fn stop(&mut self, calls: &mut Calls<'_>) {
        self.queue.clear();
        for (conn, _) in self.sessions.drain() {
            calls.close(conn);
        }
        if let Some(datagrams) = self.datagrams.take() {
            calls.close(datagrams.socket);
        }
    }
}
