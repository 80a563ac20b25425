//! What a status code, a completion record or a command status means, in words, and what to do about it.

/// Makes a table of codes: each with its name, what it means, and what to do.
macro_rules! codes {
    ($($code:literal $name:literal $meaning:literal $advice:literal;)*) => {
        &[$(($code, ($name, $meaning, $advice)),)*]
    };
}

mod codes;
mod record;
mod statuses;
mod text;

use std::fmt;

pub use codes::{command_error, flag_name, kernel_error, software_error};
pub use record::{descriptor, record};
pub use statuses::status;
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

/// Name, meaning, what to do.
type Words = (&'static str, &'static str, &'static str);
type Codes = &'static [(u32, Words)];

fn words_of(codes: Codes, code: u32) -> Option<Words> {
    codes.iter().find(|(known, _)| *known == code).map(|&(_, words)| words)
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
