//! One end of a connection: the data that it writes and expects. A stream consists of a request, followed by bytes that
//! are derived from the request's key.

use std::sync::Arc;

use offcore_session::{Reader, Writer};
use offcore_stats::time::{Micros, Time};
use offcore_tcp::proto::{AppId, Cause, ConnId, KeepAlive};

use crate::end::End;

/// Maximum number of bytes per read or write.
const CHUNK: usize = 16 << 10;
const KEEP_ALIVE: KeepAlive =
    KeepAlive { idle: Micros::from_secs(20), interval: Micros::from_secs(5), probes: 9 };
/// Length of a request in bytes.
pub(crate) const REQUEST: usize = 24;

/// The first message of a client: the lengths of both streams and how they end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) key: u64,
    /// Number of bytes that the client sends, and that the server sends back.
    pub(crate) there: u32,
    pub(crate) back: u32,
    /// Number of received bytes after which the server aborts the connection.
    pub(crate) abort_at: u32,
    /// One side ends the connection prematurely.
    pub(crate) is_cut: bool,
}

impl Request {
    pub(crate) fn to_bytes(self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.there.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.back.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.abort_at.to_le_bytes());
        bytes[20] = u8::from(self.is_cut);
        bytes
    }

    pub(crate) fn from_bytes(bytes: [u8; REQUEST]) -> Self {
        let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().unwrap());
        let key = u64::from_le_bytes(*bytes.first_chunk().unwrap());
        Self { key, there: number(8), back: number(12), abort_at: number(16), is_cut: bytes[20] != 0 }
    }
}

/// Returns the byte at a position of the stream of `key`.
pub(crate) fn byte(key: u64, position: u64) -> u8 {
    let word = (position / 8).wrapping_add(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (word >> (8 * (position % 8))) as u8 ^ (word >> 60) as u8
}

#[derive(Debug)]
pub(crate) struct Session {
    reader: Reader,
    writer: Writer,
    /// The written stream: a request, then bytes of `key`.
    request: Vec<u8>,
    key: u64,
    written: u64,
    to_write: u64,
    shut: bool,
    /// The received stream.
    expected: u64,
    pub(crate) read: u64,
    pub(crate) ended: bool,
    pub(crate) closed: Option<Cause>,
    /// This end reads only occasionally.
    pub(crate) slow: bool,
}

impl Session {
    pub(crate) fn open(now: Time, end: &mut End, conn: ConnId) -> Self {
        let (stack, out) = end.path.call();
        // A reset may be lost. A side that only waits needs keep-alive probes to notice that the peer is gone.
        stack.set_keepalive(now, conn, Some(KEEP_ALIVE), out).unwrap();
        let slot = stack.slot(conn).unwrap();
        Self {
            reader: Reader::new(Arc::clone(stack.memory(AppId::OWN)), slot).unwrap(),
            writer: Writer::new(Arc::clone(stack.memory(AppId::OWN)), slot).unwrap(),
            request: Vec::new(),
            key: 0,
            written: 0,
            to_write: 0,
            shut: false,
            expected: 0,
            read: 0,
            ended: false,
            closed: None,
            slow: false,
        }
    }

    /// Starts to write `request` and `len` bytes of `key`.
    pub(crate) fn write(&mut self, request: &[u8], key: u64, len: u64) {
        self.request = request.to_vec();
        (self.key, self.to_write) = (key, len + request.len() as u64);
    }

    /// Sets the key of the expected bytes.
    pub(crate) fn expect(&mut self, key: u64) {
        self.expected = key;
    }

    /// Takes a complete request.
    pub(crate) fn take_request(&mut self) -> Option<Request> {
        let mut bytes = [0; REQUEST];
        if self.reader.peek(&mut bytes) < REQUEST {
            return None;
        }
        self.reader.consume(REQUEST);
        Some(Request::from_bytes(bytes))
    }

    /// Reads and checks the received bytes.
    pub(crate) fn read(&mut self, now: Time, conn: ConnId, end: &mut End) {
        let mut chunk = [0; CHUNK];
        loop {
            let n = self.reader.read(&mut chunk);
            if n == 0 {
                break;
            }
            for (byte_read, position) in chunk[..n].iter().zip(self.read..) {
                assert!(*byte_read == byte(self.expected, position), "byte {position} of {self:?}");
            }
            self.read += n as u64;
        }
        let (stack, out) = end.path.call();
        let _ = stack.consumed(now, conn, out);
    }

    /// Writes as much as fits, and then ends the stream.
    pub(crate) fn pump(&mut self, now: Time, conn: ConnId, end: &mut End) {
        let (stack, out) = end.path.call();
        while self.written < self.to_write {
            let n = self.writer.space().min((self.to_write - self.written) as usize).min(CHUNK);
            let head = self.request.len() as u64;
            let bytes: Vec<u8> = (self.written..self.written + n as u64)
                .map(|at| match self.request.get(at as usize) {
                    Some(byte) => *byte,
                    None => byte(self.key, at - head),
                })
                .collect();
            self.written += self.writer.write(&bytes) as u64;
            if stack.written(now, conn, out).is_err() {
                return;
            }
            if n == 0 {
                return stack.want_room(conn);
            }
        }
        if self.to_write > 0 && !self.shut {
            self.shut = stack.shutdown(now, conn, out).is_ok();
        }
    }

    /// Returns whether both streams have ended and everything was read.
    pub(crate) fn is_over(&self) -> bool {
        self.shut && self.ended && self.reader.available() == 0
    }
}
