//! Where words go: results to stdout, everything else to stderr.

pub(crate) mod table;

use std::io::{ErrorKind, Write};

use anyhow::anyhow;

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

/// Writes results to stdout; `false` when nobody reads them any more, as behind `| head`.
///
/// # Errors
/// What else the system says, such as that a disk is full.
pub(crate) fn write(text: &str) -> anyhow::Result<bool> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(anyhow!("writing to stdout: {error}")),
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
