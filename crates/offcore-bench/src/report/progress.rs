//! Progress of long-running work on stderr: a bar on a terminal, otherwise a line from time to time.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Interval of progress lines if stderr is not a terminal.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// A progress bar, progress lines, or no output.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// Time of the last line; `None` if no lines are written.
    line: Mutex<Option<Instant>>,
}

impl Progress {
    /// Returns a bar on stderr, or lines if stderr is not a terminal.
    pub fn visible() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg:24} {wide_bar} {percent:>3} % {eta}") {
            bar.set_style(style);
        }
        let line = Mutex::new(bar.is_hidden().then(Instant::now));
        Self { bar, line }
    }

    /// Returns a progress object without output.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), line: Mutex::new(None) }
    }

    /// Starts a progress of `steps` steps.
    pub fn begin(&self, steps: usize) {
        self.bar.set_length(steps as u64);
        self.bar.set_position(0);
    }

    /// Shows `what` as the current activity.
    pub fn say(&self, what: &str) {
        self.bar.set_message(what.to_string());
        self.write_line();
    }

    /// Writes a line if one is due.
    fn write_line(&self) {
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.is_some_and(|last| last.elapsed() >= LINE_EVERY) {
            let percent = 100 * self.bar.position() / self.bar.length().unwrap_or(0).max(1);
            eprintln!("{percent} %: {}", self.bar.message());
            *line = Some(Instant::now());
        }
    }

    /// Advances by one step.
    pub fn step(&self) {
        self.bar.inc(1);
        self.write_line();
    }

    /// Sets the number of steps that are done or skipped.
    pub fn at(&self, steps: usize) {
        self.bar.set_position(steps as u64);
    }

    /// Advances by `steps` steps that are done or skipped.
    pub fn steps(&self, steps: usize) {
        self.bar.inc(steps as u64);
    }

    /// Ends the progress display.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
