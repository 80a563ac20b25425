//! Applications of the measured connections: they write and read FIFOs on another core and check every byte.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use anyhow::{Context as _, Result, ensure};
use offcore_flow::host::{App, Calls};
use offcore_port::Context;
use offcore_session::{Reader, Writer};
use offcore_stats::{SplitMix, tsc};
use offcore_tcp::proto::{AppId, CallError, ConnId, Event, Stack};

use crate::method::flush;
use crate::method::lockstep::lock;

/// Port on which the receiving host listens.
pub(super) const PORT: u16 = 5001;
/// Length of the pattern in bytes: a prime number, so that data at a wrong position is detected.
const PERIOD: usize = 1_048_573;
/// Distance in the pattern between the start positions of connections with consecutive ports, in bytes.
const APART: u64 = 4099;
/// Maximum number of connections that are being opened, used or closed at a time, limited by queues and packet buffers.
pub(super) const AT_A_TIME: usize = 256;

/// The pattern of every stream, repeated twice.
static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = SplitMix::new(15);
    let period: Vec<u8> = (0..PERIOD).map(|_| random.next() as u8).collect();
    [&period[..], &period[..]].concat()
});

/// A connection from the viewpoint of the writing and reading application.
#[derive(Debug)]
struct Stream {
    conn: ConnId,
    reader: Reader,
    writer: Writer,
    /// Start position in the pattern, different for each connection.
    start: u64,
    written: u64,
    read: u64,
    /// Number of bytes still to write.
    unwritten: usize,
}

/// The streams of a host, shared by its application and the measurement.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Sorted by the client's port.
    streams: Vec<Stream>,
    by_port: HashMap<u16, Stream>,
    buffer: Vec<u8>,
    /// Whether written data must not be in any cache.
    pub(super) cold: bool,
    /// TSC ticks spent on writing and reading, without generating, checking and flushing bytes.
    pub(super) ticks: u64,
    /// Connections with data to write.
    owing: Vec<usize>,
    /// Connections that have been written or read since the stack was last notified.
    touched: Vec<(ConnId, bool)>,
}

impl Streams {
    /// Sorts the connections, so that both hosts have the same order.
    pub(super) fn sort(&mut self) {
        let mut all: Vec<_> = self.by_port.drain().collect();
        all.sort_by_key(|(port, _)| *port);
        self.streams = all.into_iter().map(|(_, stream)| stream).collect();
    }

    /// Returns the number of open connections.
    pub(super) fn len(&self) -> usize {
        self.streams.len().max(self.by_port.len())
    }

    /// Adds `len` bytes to the data to write on connection `index`.
    pub(super) fn queue_bytes(&mut self, index: usize, len: usize) -> Result<()> {
        self.streams.get_mut(index).context("there is no such connection")?.unwritten += len;
        self.owing.push(index);
        Ok(())
    }

    /// Writes as much as the FIFOs take.
    pub(super) fn write(&mut self) {
        let Self { streams, owing, touched, cold, ticks, .. } = self;
        let write = |writer: &mut Writer, from: &[u8]| match *cold {
            true => flush::write(writer, from),
            false => (writer.write(from), 0),
        };
        owing.retain(|&index| {
            let stream = &mut streams[index];
            let mut all = 0;
            while stream.unwritten > 0 {
                let at = ((stream.start + stream.written) % PERIOD as u64) as usize;
                let start = tsc::now();
                let (n, flushing) =
                    write(&mut stream.writer, &PATTERN[at..at + stream.unwritten.min(PERIOD)]);
                *ticks += (tsc::now() - start).saturating_sub(flushing);
                if n == 0 {
                    break;
                }
                (stream.unwritten, stream.written, all) =
                    (stream.unwritten - n, stream.written + n as u64, all + n);
            }
            if all > 0 {
                touched.push((stream.conn, true));
            }
            stream.unwritten > 0
        });
    }

    /// Omits a byte of the data written on connection `index`.
    #[cfg(test)]
    pub(super) fn skip(&mut self, index: usize) {
        self.streams[index].written += 1;
    }

    /// Reads and checks the received data of connection `index`. Returns its length.
    pub(super) fn read(&mut self, index: usize) -> Result<usize> {
        let stream = self.streams.get_mut(index).context("there is no such connection")?;
        self.buffer.resize(64 << 10, 0);
        let mut all = 0;
        loop {
            let start = tsc::now();
            let n = stream.reader.read(&mut self.buffer);
            self.ticks += tsc::now() - start;
            if n == 0 {
                break;
            }
            let at = ((stream.start + stream.read) % PERIOD as u64) as usize;
            ensure!(
                self.buffer[..n] == PATTERN[at..at + n],
                "wrong bytes from {} of connection {index} on",
                stream.read
            );
            stream.read += n as u64;
            all += n;
        }
        if all > 0 {
            self.touched.push((stream.conn, false));
        }
        Ok(all)
    }
}

/// State shared by a host's application and its measurement.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared {
    pub(super) streams: Arc<Mutex<Streams>>,
    /// Whether the stack must be notified of writes and reads.
    pub(super) touched: Arc<AtomicBool>,
    /// Number of copies in flight after the worker's last round.
    pub(super) in_flight: Arc<AtomicUsize>,
}

/// Returns the ends of a connection's FIFOs.
pub(super) fn fifos(conn: ConnId, calls: &Calls<'_>) -> Option<(Reader, Writer)> {
    let (memory, slot) = (calls.stack.memory(AppId::OWN), calls.stack.slot(conn)?);
    Some((Reader::new(Arc::clone(memory), slot)?, Writer::new(Arc::clone(memory), slot)?))
}

/// Returns the client's port of a connection.
pub(super) fn client_port(conn: ConnId, is_client: bool, calls: &Calls<'_>) -> Option<u16> {
    let info = calls.stack.info(conn)?;
    Some(if is_client { info.local.port() } else { info.remote.port() })
}

/// Opens or accepts connections, and notifies the stack of writes and reads.
#[derive(Debug)]
pub(super) struct Ends {
    shared: Shared,
    /// Address to connect to and number of connections still to open; `None` for a listening host.
    client: Option<(IpAddr, usize)>,
    opening: usize,
}

impl Ends {
    /// Creates an application that accepts connections.
    pub(super) fn server(shared: Shared) -> Self {
        Self { shared, client: None, opening: 0 }
    }

    /// Creates an application that opens `connections` connections to `to`.
    pub(super) fn client(shared: Shared, to: IpAddr, connections: usize) -> Self {
        Self { shared, client: Some((to, connections)), opening: 0 }
    }

    fn open(&mut self, conn: ConnId, calls: &mut Calls<'_>) -> Option<()> {
        let (reader, writer) = fifos(conn, calls)?;
        let port = client_port(conn, self.client.is_some(), calls)?;
        let stream = Stream {
            conn,
            reader,
            writer,
            start: u64::from(port) * APART,
            written: 0,
            read: 0,
            unwritten: 0,
        };
        lock(&self.shared.streams).by_port.insert(port, stream);
        Some(())
    }

    fn connect(&mut self, calls: &mut Calls<'_>) {
        let Some((to, left)) = &mut self.client else { return };
        while *left > 0 && self.opening < AT_A_TIME {
            // Fails until duplicate address detection is complete.
            if calls
                .stack
                .connect(calls.now, AppId::OWN, None, SocketAddr::new(*to, PORT), calls.out)
                .is_err()
            {
                return;
            }
            *left -= 1;
            self.opening += 1;
        }
    }
}

impl App for Ends {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        match self.client {
            None => calls.stack.listen(AppId::OWN, None, PORT, 4 * AT_A_TIME, false).map(drop),
            Some(_) => Ok(()),
        }
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        match event {
            Event::Incoming { listener } => {
                while let Some(conn) = calls.stack.accept(listener) {
                    self.open(conn, calls);
                }
            }
            Event::Connected(conn) => {
                self.opening -= 1;
                self.open(conn, calls);
            }
            _ => {}
        }
    }

    fn round(&mut self, ctx: &mut Context<'_>, calls: &mut Calls<'_>) {
        self.connect(calls);
        if self.shared.touched.swap(false, Ordering::Relaxed) {
            for (conn, written) in lock(&self.shared.streams).touched.drain(..) {
                let call = if written { Stack::written } else { Stack::consumed };
                // A lost connection is detected by its missing data.
                let _ = call(calls.stack, calls.now, conn, calls.out);
            }
        }
        self.shared.in_flight.store(ctx.mover.in_flight(), Ordering::Relaxed);
    }

    fn stop(&mut self, _: &mut Calls<'_>) {}
}
