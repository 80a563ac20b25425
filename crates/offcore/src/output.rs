//! Output: results go to stdout, everything else to stderr.

pub(crate) mod table;

use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::signals::is_stopping;

/// Number of bytes that a writable pipe accepts at once: PIPE_BUF of pipe(7).
const CHUNK: usize = 4096;
/// Time for which a slow reader of results may delay a stop.
const READER_TIMEOUT: Duration = Duration::from_millis(500);

/// Writes a line to stderr. A failure is ignored.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Returns an error with each of its causes once: the project's own errors include their causes, anyhow's contexts do
/// not.
pub(crate) fn told(error: &anyhow::Error) -> anyhow::Error {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !text.contains(&cause) {
            let colon = if text.is_empty() { "" } else { ": " };
            text = text + colon + &cause;
        }
    }
    anyhow!(text)
}

/// Writes results to stdout. Returns `false` if the reader has closed the pipe, as `| head` does, or does not read
/// while it is time to stop.
///
/// # Errors
/// Other system errors, such as a full disk.
pub(crate) fn write(text: &str) -> anyhow::Result<bool> {
    let mut stdout = std::io::stdout().lock();
    for part in text.as_bytes().chunks(CHUNK) {
        if !wait_for_reader(&stdout) {
            return Ok(false);
        }
        match stdout.write_all(part).and_then(|()| stdout.flush()) {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(false),
            Err(error) => return Err(anyhow!("writing to stdout: {error}")),
        }
    }
    Ok(true)
}

/// Waits until stdout accepts data. Returns `false` if it has not for a while after a signal to stop.
fn wait_for_reader(stdout: &impl std::os::fd::AsFd) -> bool {
    let tick = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    let mut stopping = None;
    loop {
        let mut fds = [PollFd::new(stdout, PollFlags::OUT)];
        // Files that cannot be polled are written directly.
        if !matches!(poll(&mut fds, Some(&tick)), Ok(0) | Err(rustix::io::Errno::INTR)) {
            return true;
        }
        if is_stopping() && stopping.get_or_insert_with(Instant::now).elapsed() > READER_TIMEOUT {
            return false;
        }
    }
}

/// Formats a number of bytes in the syntax of `--chunk`: 4K, 2M.
pub(crate) fn kib(bytes: usize) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}
