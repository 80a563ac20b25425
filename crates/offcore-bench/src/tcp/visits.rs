//! Applications with connections that are used once: a client sends a request, the server answers, the client closes,
//! and then the server closes. Every byte is checked.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock, Mutex};

use offcore_flow::host::{App, Calls};
use offcore_port::Context;
use offcore_session::{Reader, Writer};
use offcore_stats::SplitMix;
use offcore_tcp::proto::{AppId, CallError, ConnId, Event};

use super::streams::{AT_A_TIME, client_port, fifos};
use crate::method::lockstep::lock;

/// Ports on which the server listens. More ports allow more connections in TIME-WAIT before a client port is reused.
const PORTS: [u16; 8] = [5001, 5002, 5003, 5004, 5005, 5006, 5007, 5008];
/// Size of a request and of an answer in bytes.
const MESSAGE: usize = 64;

/// Source of the bytes of requests and answers.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = SplitMix::new(16);
    (0..2 * (usize::from(u16::MAX) + MESSAGE)).map(|_| random.next() as u8).collect()
});

/// Returns the request from a port of the client, or the answer to it.
fn message(port: u16, answer: bool) -> &'static [u8] {
    let at = usize::from(port) + if answer { PATTERN.len() / 2 } else { 0 };
    &PATTERN[at..at + MESSAGE]
}

/// Progress of a host's connections, shared by the measurement and the application.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Total number of connections, and number of connections that the client still has to open.
    pub(super) wanted: usize,
    pub(super) to_open: usize,
    /// Numbers of connections that have been opened, used, and closed by the application.
    pub(super) open: usize,
    pub(super) used: usize,
    pub(super) closed: usize,
    /// Number of connections that the stack still holds.
    pub(super) left: usize,
    /// The first error.
    pub(super) wrong: Option<String>,
}

/// State shared by a host's application and its measurement.
pub(super) type SharedTally = Arc<Mutex<Tally>>;

/// A connection.
#[derive(Debug)]
struct Visit {
    conn: ConnId,
    reader: Reader,
    writer: Writer,
    /// The client's port.
    port: u16,
    used: bool,
}

impl Visit {
    fn new(conn: ConnId, client: bool, calls: &Calls<'_>) -> Option<Self> {
        let (reader, writer) = fifos(conn, calls)?;
        Some(Self { conn, reader, writer, port: client_port(conn, client, calls)?, used: false })
    }

    /// Writes the request or the answer.
    fn write(&mut self, answer: bool, calls: &mut Calls<'_>) -> Result<(), String> {
        let n = self.writer.write(message(self.port, answer));
        if n != MESSAGE {
            return Err(format!("there is room for {n} bytes of a message"));
        }
        calls.stack.written(calls.now, self.conn, calls.out).map_err(|error| error.to_string())
    }

    /// Reads and checks the request or the answer if it is complete. Returns whether it was.
    fn read(&mut self, answer: bool, calls: &mut Calls<'_>) -> Result<bool, String> {
        if self.used || self.reader.available() < MESSAGE {
            return Ok(false);
        }
        let mut seen = [0; MESSAGE];
        self.reader.read(&mut seen);
        if seen != message(self.port, answer) || self.reader.available() > 0 {
            return Err(format!("wrong bytes on the connection of port {}", self.port));
        }
        self.used = true;
        calls.stack.consumed(calls.now, self.conn, calls.out).map_err(|error| error.to_string())?;
        Ok(true)
    }
}

/// The application of either host.
#[derive(Debug)]
pub(super) struct Visits {
    tally: SharedTally,
    all: All,
}

/// The connections of an application.
#[derive(Debug)]
struct All {
    /// Address to connect to; `None` for a listening host.
    to: Option<IpAddr>,
    /// Indexed by connection number, because the application's time is included in the timed part.
    visits: Vec<Option<Visit>>,
    /// The client's connections: number being opened, opened but unused, and used.
    opening: usize,
    unused: Vec<ConnId>,
    used: Vec<ConnId>,
}

impl Visits {
    /// Creates a server, or a client of the server at `to`.
    pub(super) fn new(to: Option<IpAddr>, tally: SharedTally) -> Self {
        let (opening, unused, used) = Default::default();
        Self { tally, all: All { to, visits: Vec::new(), opening, unused, used } }
    }
}

impl All {
    fn get(&mut self, conn: ConnId) -> Option<&mut Visit> {
        let visit = self.visits.get_mut(conn.index as usize)?.as_mut();
        visit.filter(|visit| visit.conn == conn)
    }

    fn open(&mut self, conn: ConnId, calls: &mut Calls<'_>, tally: &mut Tally) {
        let client = self.to.is_some();
        match Visit::new(conn, client, calls) {
            Some(visit) => {
                let index = conn.index as usize;
                self.visits.resize_with(self.visits.len().max(index + 1), || None);
                self.visits[index] = Some(visit);
            }
            None => tally.wrong = Some("a connection is gone as soon as it is open".into()),
        }
        tally.open += 1;
        match client {
            true => self.unused.push(conn),
            // The request may already have arrived.
            false => self.serve(conn, calls, tally),
        }
    }

    /// Reads received data. The server answers.
    fn serve(&mut self, conn: ConnId, calls: &mut Calls<'_>, tally: &mut Tally) {
        let client = self.to.is_some();
        let Some(visit) = self.get(conn) else { return };
        let served = visit.read(client, calls).and_then(|read| {
            if read && !client {
                visit.write(true, calls)?;
            }
            Ok(read)
        });
        match served {
            Ok(false) => {}
            Ok(true) => {
                tally.used += 1;
                if client {
                    self.used.push(conn);
                }
            }
            Err(error) => tally.wrong = Some(error),
        }
    }

    fn close(&mut self, conn: ConnId, calls: &mut Calls<'_>, tally: &mut Tally) {
        if self.get(conn).is_some() {
            self.visits[conn.index as usize] = None;
            tally.closed += 1;
            calls.close(conn);
        }
    }

    /// Performs the client's unprompted work: opens all connections, then uses all, then closes all.
    fn drive_client(&mut self, to: IpAddr, calls: &mut Calls<'_>, tally: &mut Tally) {
        while tally.to_open > 0 && self.opening < AT_A_TIME {
            let to = SocketAddr::new(to, PORTS[tally.to_open % PORTS.len()]);
            // Fails until duplicate address detection is complete.
            if calls.stack.connect(calls.now, AppId::OWN, None, to, calls.out).is_err() {
                break;
            }
            tally.to_open -= 1;
            self.opening += 1;
        }
        let asked = |unused: &[ConnId]| tally.wanted - unused.len() - tally.used;
        while tally.open == tally.wanted && asked(&self.unused) < AT_A_TIME {
            let Some(conn) = self.unused.pop() else { break };
            let written = self.get(conn).map(|visit| visit.write(false, calls));
            if let Some(Err(error)) = written {
                tally.wrong = Some(error);
            }
        }
        // Closed connections that the stack still holds.
        let closing = |tally: &Tally, left: usize| left + tally.closed - tally.wanted;
        while tally.used == tally.wanted && closing(tally, calls.stack.connections()) < AT_A_TIME {
            let Some(conn) = self.used.pop() else { break };
            self.close(conn, calls, tally);
        }
    }
}

impl App for Visits {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        match self.all.to {
            None => PORTS.iter().try_for_each(|&port| {
                calls.stack.listen(AppId::OWN, None, port, 4 * AT_A_TIME, false).map(drop)
            }),
            Some(_) => Ok(()),
        }
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        let Self { tally, all } = self;
        let tally = &mut lock(tally);
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = calls.stack.accept(listener) {
                    all.open(conn, calls, tally);
                }
            }
            Event::Connected(conn) => {
                all.opening -= 1;
                all.open(conn, calls, tally);
            }
            Event::Readable(conn) => all.serve(conn, calls, tally),
            Event::EndOfStream(conn) => all.close(conn, calls, tally),
            Event::Closed(conn, cause) if all.get(conn).is_some() => {
                tally.wrong = Some(format!("a connection is over before it is closed: {cause:?}"));
            }
            _ => {}
        }
    }

    fn round(&mut self, _: &mut Context<'_>, calls: &mut Calls<'_>) {
        let Self { tally, all } = self;
        let tally = &mut lock(tally);
        if let Some(to) = all.to {
            all.drive_client(to, calls, tally);
        }
        tally.left = calls.stack.connections();
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}
