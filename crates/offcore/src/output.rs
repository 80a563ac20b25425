//! Where words go: results to stdout, everything else to stderr.

pub(crate) mod table;

use std::io::{ErrorKind, Write};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::signals::is_stopping;

/// What a pipe takes at once when it takes anything: PIPE_BUF of pipe(7).
const CHUNK: usize = 4096;
/// How long who reads results may keep a stop waiting.
const READERS_TIME: Duration = Duration::from_millis(500);

/// Writes a line to stderr. That nobody reads it is no reason to end.
pub(crate) fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// An error and its causes, each once: our errors name their causes themselves, anyhow's contexts do not.
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

/// Writes results to stdout; `false` when nobody reads them any more, as behind `| head`, or reads on when it is time to stop.
///
/// # Errors
/// What else the system says, such as that a disk is full.
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

/// Waits until stdout takes something; `false` when it has not for a while after a signal to stop.
fn wait_for_reader(stdout: &impl std::os::fd::AsFd) -> bool {
    let tick = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    let mut stopping = None;
    loop {
        let mut fds = [PollFd::new(stdout, PollFlags::OUT)];
        // What cannot be polled is written to as it is.
        if !matches!(poll(&mut fds, Some(&tick)), Ok(0) | Err(rustix::io::Errno::INTR)) {
            return true;
        }
        if is_stopping() && stopping.get_or_insert_with(Instant::now).elapsed() > READERS_TIME {
            return false;
        }
    }
}

/// Bytes as `--chunk` takes them: 4K, 2M.
pub(crate) fn kib(bytes: usize) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{}M", bytes >> 20),
        _ if bytes.is_multiple_of(1 << 10) => format!("{}K", bytes >> 10),
        _ => bytes.to_string(),
    }
}
