//! Streams of bytes: what comes back, what goes away, what never ends.

use std::collections::HashMap;
use std::sync::Arc;

use offcore_session::{Reader, Writer};
use offcore_tcp::proto::{CallError, ConnId, Event};

use super::datagrams::DatagramService;
use crate::host::{App, Calls};

/// Bytes that are moved at a time.
const CHUNK: usize = 64 << 10;
/// Connections that are accepted ahead.
const BACKLOG: usize = 1024;

/// What becomes of a connection's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Sends back what it reads (RFC 862).
    Echo,
    /// Reads and forgets (RFC 863).
    Sink,
    /// Writes as much as the peer takes: the number of each 8 bytes' place in the stream, big-endian.
    Source,
}

/// Serves all who connect to a port.
#[derive(Debug)]
pub struct Streams {
    stream: Stream,
    port: u16,
    sessions: HashMap<ConnId, Session>,
    chunk: Box<[u8]>,
    /// UDP at the same port.
    datagrams: Option<DatagramService>,
    /// Bytes read and written, of all connections and datagrams.
    pub read: u64,
    pub written: u64,
}

#[derive(Debug)]
struct Session {
    reader: Reader,
    writer: Writer,
    /// Bytes written: where the next one of a source is.
    position: u64,
    /// The peer has ended its stream.
    ended: bool,
}

impl Streams {
    /// Serves who connects to `port` of all addresses.
    pub fn new(stream: Stream, port: u16) -> Self {
        let chunk = vec![0; CHUNK].into_boxed_slice();
        Self { stream, port, sessions: HashMap::new(), chunk, datagrams: None, read: 0, written: 0 }
    }

    fn open(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let memory = calls.stack.memory();
        let session = calls.stack.slot(conn).and_then(|slot| {
            let reader = Reader::new(Arc::clone(memory), slot)?;
            Some(Session {
                reader,
                writer: Writer::new(Arc::clone(memory), slot)?,
                position: 0,
                ended: false,
            })
        });
        match session {
            Some(session) => {
                self.sessions.insert(conn, session);
                self.serve(conn, calls);
            }
            None => calls.close(conn),
        }
    }

    /// Does what can be done for a connection.
    fn serve(&mut self, conn: ConnId, calls: &mut Calls<'_>) {
        let Some(session) = self.sessions.get_mut(&conn) else { return };
        let (mut read, mut written, mut waits) = (0, 0, false);
        match self.stream {
            Stream::Sink => {
                read = session.reader.available();
                session.reader.consume(read);
            }
            Stream::Echo => loop {
                let wanted = session.reader.available().min(CHUNK);
                let room = session.writer.space();
                let n = wanted.min(room);
                waits = wanted > n;
                if n == 0 {
                    break;
                }
                let chunk = &mut self.chunk[..n];
                session.reader.read(chunk);
                session.writer.write(chunk);
                read += n;
                written += n;
                if calls.stack.written(calls.now, conn, calls.out).is_err() {
                    break;
                }
            },
            Stream::Source => {
                read = session.reader.available();
                session.reader.consume(read);
                loop {
                    let n = session.writer.space().min(CHUNK);
                    if n == 0 {
                        break;
                    }
                    fill(&mut self.chunk[..n], session.position);
                    session.writer.write(&self.chunk[..n]);
                    session.position += n as u64;
                    written += n;
                    if calls.stack.written(calls.now, conn, calls.out).is_err() {
                        break;
                    }
                }
                waits = true;
            }
        }
        self.read += read as u64;
        self.written += written as u64;
        let over = session.ended && session.reader.available() == 0;
        if read > 0 && calls.stack.consumed(calls.now, conn, calls.out).is_err() {
            self.sessions.remove(&conn);
            return;
        }
        if over {
            self.sessions.remove(&conn);
            calls.close(conn);
        } else if waits {
            calls.stack.want_room(conn);
        }
    }
}

/// Fills `bytes` with what the stream has from `position` on.
pub fn fill(bytes: &mut [u8], position: u64) {
    for (byte, at) in bytes.iter_mut().zip(position..) {
        *byte = (at / 8).to_be_bytes()[(at % 8) as usize];
    }
}

impl App for Streams {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        calls.stack.listen(None, self.port, BACKLOG)?;
        // A source would send to whoever is named as the sender of a datagram.
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
            Event::Readable(conn) | Event::Writable(conn) | Event::Connected(conn) => {
                match &mut self.datagrams {
                    Some(datagrams) if datagrams.socket == conn => {
                        let (read, written) = datagrams.serve(calls);
                        self.read += read;
                        self.written += written;
                    }
                    _ => self.serve(conn, calls),
                }
            }
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
            Event::AddressConflict { address, .. } => {
                tracing::warn!(%address, "somebody else has this address: it is not used");
            }
        }
    }

    fn stop(&mut self, calls: &mut Calls<'_>) {
        for (conn, _) in self.sessions.drain() {
            calls.close(conn);
        }
        if let Some(datagrams) = self.datagrams.take() {
            calls.close(datagrams.socket);
        }
    }
}
