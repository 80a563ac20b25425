//! A stream, and its use at both ends.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use offcore_stats::SplitMix;

/// Bytes per write or read.
pub(super) const CHUNK: usize = 64 << 10;
/// Run-in time of a connection.
pub(super) const SETTLE: Duration = Duration::from_millis(100);
/// Length of the pattern in bytes. It is a prime number, and therefore no multiple of a unit that could be lost or
/// repeated as a whole.
const PERIOD: usize = 65_521;

static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = SplitMix::new(17);
    let once: Vec<u8> = (0..PERIOD).map(|_| random.next() as u8).collect();
    once.iter().copied().cycle().take(PERIOD + CHUNK).collect()
});

/// Phase of a window, shared by both ends and the counting thread.
#[derive(Debug)]
pub(in crate::tcp) struct Phase {
    state: AtomicU8,
    /// How long the near end keeps the path open after the window, until the path is empty.
    pub(super) drain: Duration,
}

impl Phase {
    const COUNTS: u8 = 1;
    const OVER: u8 = 2;

    pub(super) fn new(drain: Duration) -> Self {
        Self { state: AtomicU8::new(0), drain }
    }

    /// Starts the counted part.
    pub(super) fn count(&self) {
        self.state.store(Self::COUNTS, Ordering::Relaxed);
    }

    pub(super) fn end(&self) {
        self.state.store(Self::OVER, Ordering::Relaxed);
    }

    pub(super) fn counts(&self) -> bool {
        self.state.load(Ordering::Relaxed) == Self::COUNTS
    }

    pub(super) fn is_over(&self) -> bool {
        self.state.load(Ordering::Relaxed) == Self::OVER
    }
}

/// A position in a stream.
#[derive(Debug, Default)]
pub(super) struct Position(usize);

impl Position {
    /// Returns the next `len` bytes, at most [`CHUNK`].
    pub(super) fn next(&self, len: usize) -> &'static [u8] {
        &PATTERN[self.0..self.0 + len]
    }

    pub(super) fn advance(&mut self, len: usize) {
        self.0 = (self.0 + len) % PERIOD;
    }

    /// Returns whether `bytes` are the next bytes, and advances the position.
    pub(super) fn take(&mut self, bytes: &[u8]) -> bool {
        let right = self.next(bytes.len()) == bytes;
        self.advance(bytes.len());
        right
    }
}

/// Writes the stream until the other end closes.
pub(super) fn write(mut stream: &TcpStream, moved: &AtomicU64, phase: &Phase) -> Result<()> {
    let mut at = Position::default();
    while !phase.is_over() {
        match stream.write(at.next(CHUNK)) {
            Ok(n) => {
                at.advance(n);
                moved.fetch_add(n as u64, Ordering::Relaxed);
            }
            Err(error) if is_end(error.kind()) => break,
            Err(error) if is_pause(error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Reads and compares the stream until it ends.
pub(super) fn read(mut stream: &TcpStream, moved: &AtomicU64, phase: &Phase) -> Result<()> {
    let (mut at, mut buffer) = (Position::default(), vec![0; CHUNK]);
    while !phase.is_over() {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                ensure!(at.take(&buffer[..n]), "wrong bytes have come");
                moved.fetch_add(n as u64, Ordering::Relaxed);
            }
            Err(error) if is_end(error.kind()) => break,
            Err(error) if is_pause(error.kind()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn is_end(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
}

/// Returns whether the socket's time limit expired without progress.
fn is_pause(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Limits the socket's blocking time, so that its thread notices the end of the window.
pub(super) fn bound_waits(stream: &TcpStream) -> Result<()> {
    stream.set_read_timeout(Some(SETTLE))?;
    Ok(stream.set_write_timeout(Some(SETTLE))?)
}
