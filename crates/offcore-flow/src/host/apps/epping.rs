//! The stream source of Intel's mTCP guide (`epping`): it sends chunks from a few buffers to a TCP sink, over real TCP.
//!
//! Chunks can be copied into the send FIFO by a DMA engine. Copied bytes are shown to the stack when their copy is
//! complete; their buffer is then free again. The latency of a chunk is the time from the order of its first copy to
//! the acknowledgement of its last byte.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use offcore_dma::mover::MoverError;
use offcore_dma::{Binding, Mover};
use offcore_mem::Hugepages;
use offcore_mem::mapping::{Mapping, MemoryError};
use offcore_port::Context;
use offcore_session::{Reader, Writer};
use offcore_stats::time::{Micros, Time};
use offcore_stats::{Histogram, tsc};
use offcore_tcp::proto::{AppId, CallError, Cause, ConnId, Event};
use offcore_tcp::writes::Writes;

use super::streams::fill;
use crate::host::{App, Calls};

/// Time between the end of a connection and the next attempt.
const AGAIN: Micros = Micros::from_secs(1);
/// Time between attempts while the local address is tentative.
const TENTATIVE: Micros = Micros::from_millis(50);
/// Maximum number of returned bytes checked per round.
const LOOK: usize = 256 << 10;
/// At the end of a verified stream: the maximum time without returned data, and the maximum total time.
const QUIET: Micros = Micros::from_secs(1);
const RETURN: Micros = Micros::from_secs(10);

/// Parameters of the stream.
#[derive(Clone, Debug)]
pub struct EppingConfig {
    pub to: SocketAddr,
    /// Length of a chunk in bytes, at least 1.
    pub chunk: usize,
    /// Number of buffers of one chunk each, at least 1.
    pub buffers: usize,
    /// Maximum payload of a segment in bytes.
    pub segment: Option<u16>,
    /// Copy chunks into the send FIFO with the channels of `txq0` instead of the core.
    pub offload_writes: bool,
    /// The channels also copy payload from the FIFO to packets.
    pub offload_segments: bool,
    /// The receiver returns all data (RFC 862), and the source compares it with the sent data.
    pub verify: bool,
    pub tally: Arc<Mutex<Tally>>,
}

/// Results of the stream so far.
#[derive(Debug, Default)]
pub struct Tally {
    /// Number of established connections, and the cause of the last end.
    pub connections: u64,
    pub ended: Option<Cause>,
    /// TSC values when the first connection was established, and when a chunk was last acknowledged.
    pub began: Option<u64>,
    pub last: u64,
    /// Number of fully acknowledged chunks, and their latencies in TSC ticks.
    pub chunks: u64,
    pub latencies: Histogram,
    /// Number of returned bytes, of returned bytes that differ from the sent ones, and of acknowledged bytes that were
    /// never returned.
    pub returned: u64,
    pub wrong: u64,
    pub missing: u64,
}

/// The stream source.
#[derive(Debug)]
pub struct Epping {
    config: EppingConfig,
    buffer: Arc<Mapping>,
    writes: Writes,
    session: Option<Session>,
    /// Time of the next connection attempt.
    again: Time,
    /// Set while the source waits for returned data before it stops.
    ending: Option<Ending>,
    seen: Vec<u8>,
    expected: Vec<u8>,
}

/// The end of a stream that is verified.
#[derive(Debug)]
struct Ending {
    /// Number of bytes that had been acknowledged.
    awaited: u64,
    /// Times when the wait ends: in any case, and if nothing was returned in the meantime.
    latest: Time,
    quiet: Time,
}

#[derive(Debug)]
struct Session {
    conn: ConnId,
    reader: Reader,
    writer: Writer,
    connected: bool,
    /// Number of bytes whose copies were ordered.
    ordered: u64,
    returned: u64,
    /// TSC value when the current chunk was started.
    begun: u64,
    /// For each chunk that is not fully acknowledged: its end position, and the TSC value when it was started.
    under_way: VecDeque<(u64, u64)>,
}

impl Epping {
    /// Creates the buffers and fills them like the `source` service. `binding` selects the channels that copy chunks.
    ///
    /// # Errors
    /// Fails if memory cannot be allocated, or if channels belong to another mover.
    pub fn new(config: EppingConfig, mover: &mut Mover, binding: &Binding) -> Result<Self, EppingError> {
        let len = config.chunk * config.buffers;
        let (buffer, _fd) = Mapping::memfd("offcore-epping", len, Hugepages::Auto)?;
        let mut bytes = vec![0; config.chunk];
        for number in 0..config.buffers {
            let at = number * config.chunk;
            fill(&mut bytes, at as u64);
            buffer.write_at(at, &bytes);
        }
        let mut writes = Writes::open(mover);
        writes.bind(mover, binding)?;
        let (buffer, seen, expected) = (Arc::new(buffer), vec![0; LOOK], vec![0; LOOK]);
        Ok(Self { config, buffer, writes, session: None, again: Time::ZERO, ending: None, seen, expected })
    }

    fn connect(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        self.again = calls.now + AGAIN;
        let asked = calls.stack.connect(calls.now, AppId::OWN, None, self.config.to, calls.out);
        if asked == Err(CallError::Tentative) {
            self.again = calls.now + TENTATIVE;
        }
        let conn = asked?;
        let memory = calls.stack.memory(AppId::OWN);
        self.session = calls.stack.slot(conn).and_then(|slot| {
            Some(Session {
                conn,
                reader: Reader::new(Arc::clone(memory), slot)?,
                writer: Writer::new(Arc::clone(memory), slot)?,
                connected: false,
                ordered: 0,
                returned: 0,
                begun: 0,
                under_way: VecDeque::new(),
            })
        });
        Ok(())
    }

    /// Shows the stack the bytes whose copies are complete.
    fn show(&mut self, ctx: &mut Context<'_>, calls: &mut Calls<'_>) {
        let Self { session, writes, .. } = self;
        let mut shown = 0;
        writes.poll(ctx, calls.stack, |conn, len| {
            if let Some(session) = session.as_mut().filter(|session| session.conn == conn) {
                session.writer.show(len);
                shown += len;
            }
        });
        if let Some(session) = session.as_ref().filter(|_| shown > 0) {
            // The end of the connection is reported by an event.
            let _ = calls.stack.written(calls.now, session.conn, calls.out);
        }
    }

    /// Orders copies of as many chunks as the FIFO has room for.
    fn write(&mut self, ctx: &mut Context<'_>, calls: &mut Calls<'_>) {
        let Self { config, buffer, writes, session, .. } = self;
        let Some(session) = session.as_mut().filter(|session| session.connected) else { return };
        let (chunk, all) = (config.chunk as u64, (config.chunk * config.buffers) as u64);
        loop {
            let at = session.ordered % all;
            let end = at - at % chunk + chunk;
            if at.is_multiple_of(chunk) {
                session.begun = tsc::now();
            }
            let range = at as usize..end as usize;
            let n = writes.write(ctx, calls.stack, session.conn, &mut session.writer, buffer, range);
            session.ordered += n as u64;
            if n as u64 == end - at {
                session.under_way.push_back((session.ordered, session.begun));
            } else {
                return;
            }
        }
    }

    /// Records acknowledged chunks and returned bytes. Returns whether any bytes were returned.
    fn record_progress(&mut self, calls: &mut Calls<'_>) -> bool {
        let Self { config, session, seen, expected, .. } = self;
        let Some(session) = session else { return false };
        let acknowledged = session.writer.acknowledged();
        let mut tally = None;
        while let Some((_, begun)) = session.under_way.pop_front_if(|(end, _)| *end <= acknowledged) {
            let tally: &mut Tally = tally.get_or_insert_with(|| lock(&config.tally));
            tally.chunks += 1;
            tally.last = tsc::now();
            tally.latencies.record(tally.last.wrapping_sub(begun));
        }
        let n = session.reader.read(seen);
        if n == 0 {
            return false;
        }
        let mut wrong = 0;
        if config.verify {
            let all = (config.chunk * config.buffers) as u64;
            let mut done = 0;
            while done < n {
                let at = (session.returned + done as u64) % all;
                let len = (n - done).min((all - at) as usize);
                fill(&mut expected[..len], at);
                let pairs = seen[done..done + len].iter().zip(&expected[..len]);
                wrong += pairs.filter(|(seen, expected)| seen != expected).count() as u64;
                done += len;
            }
        }
        session.returned += n as u64;
        let tally = tally.get_or_insert_with(|| lock(&config.tally));
        tally.returned += n as u64;
        tally.wrong += wrong;
        let _ = calls.stack.consumed(calls.now, session.conn, calls.out);
        true
    }

    /// Closes the connection. Bytes that were acknowledged but not returned are counted as missing.
    fn end(&mut self, calls: &mut Calls<'_>) {
        while self.record_progress(calls) {}
        let ending = self.ending.take();
        let Some(session) = self.session.take() else { return };
        if self.config.verify {
            let awaited = ending.map_or_else(|| session.writer.acknowledged(), |ending| ending.awaited);
            lock(&self.config.tally).missing += awaited.saturating_sub(session.returned);
        }
        calls.close(session.conn);
    }

    /// Ends the wait for returned data when it is complete or too slow.
    fn wait_for_rest(&mut self, returns: bool, calls: &mut Calls<'_>) {
        let (Some(ending), Some(session)) = (&mut self.ending, &self.session) else { return };
        if returns {
            ending.quiet = calls.now + QUIET;
        }
        if session.returned >= ending.awaited || calls.now >= ending.latest.min(ending.quiet) {
            self.end(calls);
        }
    }
}

fn lock(tally: &Mutex<Tally>) -> std::sync::MutexGuard<'_, Tally> {
    tally.lock().unwrap_or_else(PoisonError::into_inner)
}

impl App for Epping {
    fn start(&mut self, calls: &mut Calls<'_>) -> Result<(), CallError> {
        match self.connect(calls) {
            // A later round repeats the attempt.
            Err(CallError::Tentative) => Ok(()),
            done => done,
        }
    }

    fn event(&mut self, event: Event, calls: &mut Calls<'_>) {
        let ours = |conn| self.session.as_ref().is_some_and(|session| session.conn == conn);
        match event {
            Event::Connected(conn) if ours(conn) => {
                if let Some(session) = &mut self.session {
                    session.connected = true;
                }
                let mut tally = lock(&self.config.tally);
                tally.connections += 1;
                tally.began.get_or_insert_with(tsc::now);
            }
            Event::Closed(conn, cause) if ours(conn) => {
                tracing::warn!(to = %self.config.to, ?cause, "the connection ended; retrying in a second");
                lock(&self.config.tally).ended = Some(cause);
                self.again = self.again.max(calls.now + AGAIN);
                self.end(calls);
            }
            _ => {}
        }
    }

    fn round(&mut self, ctx: &mut Context<'_>, calls: &mut Calls<'_>) {
        if self.session.is_none() && self.again <= calls.now && self.connect(calls).is_err() {
            self.session = None;
        }
        self.show(ctx, calls);
        self.write(ctx, calls);
        self.show(ctx, calls);
        let returns = self.record_progress(calls);
        self.wait_for_rest(returns, calls);
    }

    fn is_busy(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.connected)
    }

    fn in_flight(&self, mover: &mut Mover) -> usize {
        self.writes.in_flight(mover)
    }

    fn stop(&mut self, calls: &mut Calls<'_>) {
        self.again = Time::NEVER;
        let Some(session) = &mut self.session else { return };
        if self.config.verify && session.connected {
            // No more data is written, and written data may still be returned.
            session.connected = false;
            let awaited = session.writer.acknowledged();
            let (latest, quiet) = (calls.now + RETURN, calls.now + QUIET);
            self.ending = Some(Ending { awaited, latest, quiet });
        } else {
            self.end(calls);
        }
    }

    fn is_ending(&self) -> bool {
        self.ending.is_some()
    }
}

/// An error in the set-up of the source.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum EppingError {
    /// the buffers: {0}
    Memory(#[from] MemoryError),
    /// {0}
    Mover(#[from] MoverError),
}
