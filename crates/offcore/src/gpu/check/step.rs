//! A step: a run of this program, with its output in files and a time limit.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};

use crate::signals::is_stopping;

/// Polling interval of a step.
const TICK: Duration = Duration::from_millis(10);
/// Time limits for the start of a run, and for its end after a signal.
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// A running step. It is killed when this is dropped.
pub(super) struct Started {
    child: Child,
    since: Instant,
    output: PathBuf,
    log: PathBuf,
}

/// A step that has ended.
pub(super) struct Ended {
    pub status: ExitStatus,
    pub took: Duration,
    /// Time from the signal to the end.
    pub ending: Option<Duration>,
    pub output: String,
    pub log: String,
}

impl Started {
    /// Starts `offcore LINE`. Its output goes to files in `out` that are named after the step.
    pub(super) fn new(out: &Path, name: &str, line: &str) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("finding this program")?;
        let path = |kind: &str| out.join(format!("{name}.{kind}"));
        let (output, log) = (path("out"), path("log"));
        let file =
            |path: &Path| File::create_new(path).with_context(|| format!("creating {}", path.display()));
        let mut command = Command::new(program);
        command.args(line.split_whitespace()).current_dir(out).stdin(Stdio::null());
        command.stdout(file(&output)?).stderr(file(&log)?);
        let child = command.spawn().with_context(|| format!("starting offcore {line}"))?;
        Ok(Self { child, since: Instant::now(), output, log })
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If it takes longer than `limit`. It is then killed.
    pub(super) fn wait(mut self, limit: Duration) -> Result<Ended, String> {
        let status = self.ends_within(limit.saturating_sub(self.since.elapsed()))?;
        Ok(self.ended(status, None))
    }

    /// Sends a signal once packets arrive, and waits for the end.
    ///
    /// # Errors
    /// If it does not start, or does not end.
    pub(super) fn end_by(mut self, signal: Signal) -> Result<Ended, String> {
        // A few reports with packets that came back.
        while written(&self.output).lines().count() < 4 {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("it has ended with {status}: {}", last_line(&written(&self.log))));
            }
            if is_stopping() {
                return Err("interrupted".into());
            }
            if self.since.elapsed() > START_TIMEOUT {
                return Err(format!("no reports within {} s", START_TIMEOUT.as_secs()));
            }
            std::thread::sleep(TICK);
        }
        let sent = Instant::now();
        // The process ID of a child is not reused until it has been waited for.
        kill_process(Pid::from_child(&self.child), signal)
            .map_err(|error| format!("sending {signal:?}: {error}"))?;
        let status = self.ends_within(STOP_TIMEOUT)?;
        Ok(self.ended(status, Some(sent.elapsed())))
    }

    fn ends_within(&mut self, limit: Duration) -> Result<ExitStatus, String> {
        let since = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if since.elapsed() > limit => {
                    return Err(format!("it has not ended within {} s", limit.as_secs()));
                }
                Ok(None) if is_stopping() => return Err("interrupted".into()),
                Ok(None) => std::thread::sleep(TICK),
                Err(error) => return Err(format!("waiting for it: {error}")),
            }
        }
    }

    fn ended(&self, status: ExitStatus, ending: Option<Duration>) -> Ended {
        let (output, log) = (written(&self.output), written(&self.log));
        Ended { status, took: self.since.elapsed(), ending, output, log }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        // Fails if the child has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn written(path: &Path) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

/// Returns the last line of a program's output.
pub(super) fn last_line(text: &str) -> &str {
    text.lines().next_back().unwrap_or("it printed nothing")
}
