//! Explanations of status codes, completion records and command statuses, in words and with advice.

/// Defines a table of codes: each with its name, its meaning, and advice.
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

/// An explanation: a title, facts, and advice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Explanation {
    /// One line: code and name.
    pub title: String,
    /// Facts, one per line.
    pub facts: Vec<String>,
    /// Advice, one per line.
    pub advice: Vec<String>,
}

/// Name, meaning and advice.
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
