//! Failures of commands, which determine the exit code.

use std::fmt;

/// The reason why a command fails.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The flags are invalid: exit code 2.
    Usage(String),
    /// A configuration file has problems, one per line: exit code 2.
    File(String),
    /// Anything else: exit code 1.
    Failed(anyhow::Error),
    /// A program cannot be run, with the exit code for the reason.
    Program(u8, anyhow::Error),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) | Self::File(text) => f.write_str(text),
            // The project's own errors include their causes.
            Self::Failed(error) | Self::Program(_, error) => error.fmt(f),
        }
    }
}

/// A description of invalid flags.
impl From<String> for Failure {
    fn from(text: String) -> Self {
        Self::Usage(text)
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::Failed(error)
    }
}
