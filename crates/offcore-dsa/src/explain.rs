//! What a status code, a completion record or a command status means, in words, and what to do about it.

mod codes;
mod record;
mod statuses;
mod text;

use std::fmt;

pub use codes::{command_error, flag_name, kernel_error, software_error};
pub use record::{descriptor, record};
pub use statuses::{status, status_name};
pub use text::{ExplainError, from_text};

/// An explanation: what it is, what is known about it, and what to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    /// One line: code and name.
    pub title: String,
    /// What is known, one thing a line.
    pub facts: Vec<String>,
    /// What to do, one thing a line.
    pub advice: Vec<String>,
}

impl Explanation {
    fn new(title: impl Into<String>, fact: &str, advice: &str) -> Self {
        let line = |text: &str| if text.is_empty() { Vec::new() } else { vec![text.to_owned()] };
        Self { title: title.into(), facts: line(fact), advice: line(advice) }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.title)?;
        for fact in &self.facts {
            write!(f, "\n  {fact}")?;
        }
        for advice in &self.advice {
            write!(f, "\n  What to do: {advice}")?;
        }
        Ok(())
    }
}
