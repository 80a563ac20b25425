//! Progress of long work, on stderr: a bar when a person is looking, a line now and then when not.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Where there is no bar, a line is written after so long.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// A progress bar, lines, or nothing.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    /// When the last line was written; none where there are no lines.
    line: Mutex<Option<Instant>>,
}

impl Progress {
    /// A bar on stderr; lines where stderr is no terminal.
    pub fn visible() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg:24} {wide_bar} {percent:>3} % {eta}") {
            bar.set_style(style);
        }
        let line = Mutex::new(bar.is_hidden().then(Instant::now));
        Self { bar, line }
    }

    /// Nothing.
    pub fn hidden() -> Self {
        Self { bar: ProgressBar::hidden(), line: Mutex::new(None) }
    }

    /// There are `steps` steps to come.
    pub fn begin(&self, steps: usize) {
        self.bar.set_length(steps as u64);
        self.bar.set_position(0);
    }

    /// What is being done.
    pub fn say(&self, what: &str) {
        self.bar.set_message(what.to_string());
        let mut line = self.line.lock().unwrap_or_else(PoisonError::into_inner);
        if line.is_some_and(|last| last.elapsed() >= LINE_EVERY) {
            let percent = 100 * self.bar.position() / self.bar.length().unwrap_or(0).max(1);
            eprintln!("{percent} %: {what}");
            *line = Some(Instant::now());
        }
    }

    /// One step is done.
    pub fn step(&self) {
        self.bar.inc(1);
    }

    /// So many steps are done, or not needed.
    pub fn at(&self, steps: usize) {
        self.bar.set_position(steps as u64);
    }

    /// Several steps are done, or not needed.
    pub fn steps(&self, steps: usize) {
        self.bar.inc(steps as u64);
    }

    /// All is done.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}
