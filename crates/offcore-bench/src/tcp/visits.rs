//! Applications whose connections are used once: a client sends a request, the server answers, the client closes, and
//! then the server. Every byte is checked.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, LazyLock, Mutex};

use offcore_flow::host::{App, Calls};
use offcore_port::Context;
use offcore_session::{Reader, Writer};
use offcore_stats::SplitMix;
use offcore_tcp::proto::{AppId, CallError, ConnId, Event};

use crate::method::lockstep::lock;

/// Ports that the server listens on: so many more connections may be in TIME-WAIT before a port is used again.
const PORTS: [u16; 8] = [5001, 5002, 5003, 5004, 5005, 5006, 5007, 5008];
/// Bytes of a request, and of an answer.
const MESSAGE: usize = 64;
/// Connections that are being opened, used or closed at a time, at most: queues and packet buffers are to suffice.
const AT_A_TIME: usize = 256;

/// What requests and answers are cut out of.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = SplitMix::new(16);
    (0..2 * (usize::from(u16::MAX) + MESSAGE)).map(|_| random.next() as u8).collect()
});

/// The request from a port of the client's, or the answer to it.
fn message(port: u16, answer: bool) -> &'static [u8] {
    let at = usize::from(port) + if answer { PATTERN.len() / 2 } else { 0 };
    &PATTERN[at..at + MESSAGE]
}

/// What has come of a host's connections, and what is still to be done. The measurement and the application share it.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Connections that are wanted altogether, and those of them that the client has still to open.
    pub(super) wanted: usize,
    pub(super) to_open: usize,
    /// Those that are open, that have been used, and that the application has let go of.
    pub(super) open: usize,
    pub(super) used: usize,
    pub(super) closed: usize,
    /// Those that the stack still has.
    pub(super) left: usize,
    /// What went wrong.
    pub(super) wrong: Option<String>,
}

/// What a host's application and its measurement share.
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
        let info = calls.stack.info(conn)?;
        let (memory, slot) = (calls.stack.memory(AppId::OWN), calls.stack.slot(conn)?);
        Some(Self {
            conn,
            reader: Reader::new(Arc::clone(memory), slot)?,
            writer: Writer::new(Arc::clone(memory), slot)?,
            port: if client { info.local.port() } else { info.remote.port() },
            used: false,
        })
    }

    /// Writes the request, or the answer.
    fn write(&mut self, answer: bool, calls: &mut Calls<'_>) -> Result<(), String> {
        let n = self.writer.write(message(self.port, answer));
        if n != MESSAGE {
            return Err(format!("there is room for {n} bytes of a message"));
        }
        calls.stack.written(calls.now, self.conn, calls.out).map_err(|error| error.to_string())
    }

    /// Reads the request, or the answer, once it is there; returns whether it was.
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

/// Its connections.
#[derive(Debug)]
struct All {
    /// Whom to connect to; nobody: it listens.
    to: Option<IpAddr>,
    /// By number of the connection: what the application takes is timed, and is to be little.
    visits: Vec<Option<Visit>>,
    /// The client's connections that are being opened, that are open and unused, and that have been used.
    opening: usize,
    unused: Vec<ConnId>,
    used: Vec<ConnId>,
}

impl Visits {
    /// A server, or a client of the server at `to`.
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
            // The request may be there already.
            false => self.serve(conn, calls, tally),
        }
    }

    /// Reads what has come; the server answers.
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

    /// What the client does without being asked: opens all connections, then uses all, then closes all.
    fn go_on(&mut self, to: IpAddr, calls: &mut Calls<'_>, tally: &mut Tally) {
        while tally.to_open > 0 && self.opening < AT_A_TIME {
            let to = SocketAddr::new(to, PORTS[tally.to_open % PORTS.len()]);
            // Until duplicate address detection is over there is no way.
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
        // Those that have been closed and are still there.
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
            all.go_on(to, calls, tally);
        }
        tally.left = calls.stack.connections();
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}
