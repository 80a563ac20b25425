//! Progress of long work, on stderr when a person is looking.

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar, or nothing.
#[derive(Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar on stderr; hidden where stderr is no terminal.
    pub fn visible() -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{msg:24} {wide_bar} {percent:>3} % {eta}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    /// No bar.
    pub fn hidden() -> Self {
        Self(ProgressBar::hidden())
    }

    /// There are `steps` steps to come.
    pub fn begin(&self, steps: usize) {
        self.0.set_length(steps as u64);
        self.0.set_position(0);
    }

    /// What is being done.
    pub fn say(&self, what: &str) {
        self.0.set_message(what.to_string());
    }

    /// One step is done.
    pub fn step(&self) {
        self.0.inc(1);
    }

    /// So many steps are done, or not needed.
    pub fn at(&self, steps: usize) {
        self.0.set_position(steps as u64);
    }

    /// Several steps are done, or not needed.
    pub fn steps(&self, steps: usize) {
        self.0.inc(steps as u64);
    }

    /// All is done.
    pub fn end(&self) {
        self.0.finish_and_clear();
    }
}
