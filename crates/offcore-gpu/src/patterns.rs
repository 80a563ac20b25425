//! Sets of byte patterns to find in payloads, and their files.
//!
//! A pattern file has one pattern per line, numbered from 0. The bytes of the line are the pattern, in any encoding.
//! Empty lines and lines that start with `#` are skipped and have no number. A carriage return before the newline is
//! not part of the pattern. Escapes represent bytes that a line cannot contain:
//!
//! | escape | byte |
//! |---|---|
//! | `\xNN` | 0xNN, two hexadecimal digits |
//! | `\\` | a backslash |
//! | `\n`, `\r`, `\t` | newline, carriage return, tab |
//!
//! A pattern that starts with `#` is written with `\x23`.

use std::fs::File;
use std::io::{self, Read};
use std::ops::RangeInclusive;
use std::path::Path;

use offcore_stats::SplitMix;

/// Maximum bytes of a pattern.
pub const MAX_PATTERN_LEN: usize = 1024;
/// Maximum patterns of a set.
pub const MAX_PATTERNS: usize = 65_536;
/// Maximum states of a set's trie: the root, and one per distinct prefix.
pub const MAX_STATES: usize = (1 << 24) - 1;
/// The byte order mark (U+FEFF) in UTF-8.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Maximum bytes of a pattern file: the longest patterns with every byte escaped.
const MAX_FILE: u64 = (MAX_PATTERNS * (4 * MAX_PATTERN_LEN + 2)) as u64;

/// An invalid pattern set. Lines, and columns in bytes, are counted from 1.
#[derive(Debug, displaydoc::Display, thiserror::Error)]
pub enum PatternsError {
    /// pattern file {file}: {error}; expected a file that can be read, with one pattern per line
    Unreadable { file: String, error: io::Error },
    /// pattern file {file} has more than {MAX_FILE:?} bytes: expected one pattern of at most {MAX_PATTERN_LEN:?}
    /// bytes a line, and {MAX_PATTERNS:?} of them at most; check that it is the right file
    FileTooLong { file: String },
    /// {file} contains no pattern, only {lines} empty lines and comments: add some, one pattern per line (a first # as
    /// \x23)
    NoPattern { file: String, lines: usize },
    /// {file}, line {line}: a NUL byte at byte {column} of the line: expected text, one pattern per line; write the
    /// byte as \x00 if a pattern has it, or check that it is the right file
    Binary { file: String, line: usize, column: usize },
    /// {file}, line {line}: '{found}' at byte {column} is no escape: expected \xNN with two hexadecimal digits, \\,
    /// \n, \r or \t; write a backslash that is part of the pattern as \\
    Escape { file: String, line: usize, column: usize, found: String },
    /// {file}, line {line}: a pattern of {found} bytes: expected 1 to {MAX_PATTERN_LEN:?}; shorten it, a part that
    /// tells it from other traffic is enough
    Length { file: String, line: usize, found: usize },
    /// {file}, line {line}: one pattern too many: expected at most {MAX_PATTERNS:?}; split the set
    TooMany { file: String, line: usize },
    /// {file}, line {line}: its patterns need {found} trie states: expected at most {MAX_STATES:?}, one for every
    /// different prefix of a pattern and one more; use fewer or shorter patterns
    TooManyStates { file: String, line: usize, found: usize },
}

/// A set of patterns, numbered from 0: at least one, none of them empty. The lowest number of equal patterns counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patterns {
    bytes: Vec<u8>,
    /// End offset of each pattern in `bytes`, where the next one starts.
    ends: Vec<u32>,
    longest: usize,
    states: usize,
}

impl Patterns {
    /// Reads a pattern file.
    ///
    /// # Errors
    /// The file cannot be read or is invalid; the error names file and line.
    pub fn read(path: &Path) -> Result<Self, PatternsError> {
        let file = path.display().to_string();
        let mut text = Vec::new();
        match File::open(path).and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut text)) {
            Ok(read) if read as u64 > MAX_FILE => Err(PatternsError::FileTooLong { file }),
            Ok(_) => Self::parse(&file, &text),
            Err(error) => Err(PatternsError::Unreadable { file, error }),
        }
    }

    /// Parses the text of a pattern file. `file` is its name in errors.
    ///
    /// # Errors
    /// The text is not a valid pattern file.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self, PatternsError> {
        let mut builder = Builder::new(file);
        let mut lines = 0;
        // Windows editors write the mark at the start of a file.
        let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            lines += 1;
            let line = match line.strip_suffix(b"\n") {
                Some(line) => line.strip_suffix(b"\r").unwrap_or(line),
                None => line,
            };
            if line.is_empty() || line.starts_with(b"#") {
                continue;
            }
            builder.line = lines;
            unescape(line, &mut builder.bytes).map_err(|wrong| wrong.at(file, lines))?;
            builder.end()?;
        }
        builder.finish(lines)
    }

    /// Creates a set from `list`, in order. Errors give `the list` as file, and the index from 1 as line.
    ///
    /// # Errors
    /// The list is empty, a pattern is empty or too long, or there are too many.
    pub fn from_list<P: AsRef<[u8]>>(list: impl IntoIterator<Item = P>) -> Result<Self, PatternsError> {
        let mut builder = Builder::new("the list");
        for pattern in list {
            builder.line += 1;
            builder.bytes.extend_from_slice(pattern.as_ref());
            builder.end()?;
        }
        let lines = builder.line;
        builder.finish(lines)
    }

    /// Creates `count` patterns of random bytes with random lengths from `lengths`, reproducible by `seed`.
    ///
    /// # Errors
    /// As for [`from_list`](Self::from_list): a count or length out of range, or an empty range of lengths.
    pub fn random(seed: u64, count: usize, lengths: RangeInclusive<usize>) -> Result<Self, PatternsError> {
        let mut random = SplitMix::new(seed);
        let choices = (*lengths.end() as u64).saturating_sub(*lengths.start() as u64).saturating_add(1);
        let mut builder = Builder::new("the random list");
        for _ in 0..count {
            builder.line += 1;
            // The remainder is less than the size of the range.
            let len =
                if lengths.is_empty() { 0 } else { lengths.start() + (random.next() % choices) as usize };
            if len > MAX_PATTERN_LEN {
                return Err(builder.length(len));
            }
            builder.bytes.extend((0..len).map(|_| random.next() as u8));
            builder.end()?;
        }
        let lines = builder.line;
        builder.finish(lines)
    }

    /// Returns the number of patterns, at least 1.
    #[allow(clippy::len_without_is_empty, reason = "a set is never empty")]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Returns the length of the longest pattern in bytes.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Returns the total length of all patterns in bytes.
    pub fn total_len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the number of states of the patterns' trie, including its root: at most [`MAX_STATES`].
    pub fn states(&self) -> usize {
        self.states
    }

    /// Returns the patterns in the order of their numbers.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &[u8]> + Clone {
        let mut begin = 0;
        self.ends.iter().map(move |end| {
            let pattern = &self.bytes[begin..*end as usize];
            begin = *end as usize;
            pattern
        })
    }

    /// Returns the number of trie states, including the root: in sorted order, a pattern adds one per byte after its
    /// common prefix with the previous one.
    fn count_states(&self) -> usize {
        let mut sorted: Vec<&[u8]> = self.iter().collect();
        sorted.sort_unstable();
        let shared = |pair: &[&[u8]]| pair[0].iter().zip(pair[1]).take_while(|(a, b)| a == b).count();
        1 + self.bytes.len() - sorted.windows(2).map(shared).sum::<usize>()
    }
}

/// A set under construction: append to `bytes`, then end the pattern.
struct Builder<'a> {
    file: &'a str,
    line: usize,
    bytes: Vec<u8>,
    ends: Vec<u32>,
    longest: usize,
}

impl<'a> Builder<'a> {
    fn new(file: &'a str) -> Self {
        Self { file, line: 0, bytes: Vec::new(), ends: Vec::new(), longest: 0 }
    }

    fn end(&mut self) -> Result<(), PatternsError> {
        let len = self.bytes.len() - self.ends.last().map_or(0, |end| *end as usize);
        if !(1..=MAX_PATTERN_LEN).contains(&len) {
            return Err(self.length(len));
        }
        if self.ends.len() == MAX_PATTERNS {
            return Err(PatternsError::TooMany { file: self.file.into(), line: self.line });
        }
        self.longest = self.longest.max(len);
        // At most MAX_PATTERNS * MAX_PATTERN_LEN, 2^26.
        self.ends.push(self.bytes.len() as u32);
        Ok(())
    }

    fn length(&self, found: usize) -> PatternsError {
        PatternsError::Length { file: self.file.into(), line: self.line, found }
    }

    fn finish(self, lines: usize) -> Result<Patterns, PatternsError> {
        if self.ends.is_empty() {
            return Err(PatternsError::NoPattern { file: self.file.into(), lines });
        }
        let mut patterns = Patterns { bytes: self.bytes, ends: self.ends, longest: self.longest, states: 0 };
        patterns.states = patterns.count_states();
        if patterns.states > MAX_STATES {
            let (file, line) = (self.file.into(), self.line);
            return Err(PatternsError::TooManyStates { file, line, found: patterns.states });
        }
        Ok(patterns)
    }
}

/// An error within a line, with its byte offset from 1.
enum Wrong {
    Nul { column: usize },
    Escape { column: usize, found: String },
}

impl Wrong {
    fn at(self, file: &str, line: usize) -> PatternsError {
        let file = file.into();
        match self {
            Self::Nul { column } => PatternsError::Binary { file, line, column },
            Self::Escape { column, found } => PatternsError::Escape { file, line, column, found },
        }
    }
}

/// Appends the unescaped bytes of `line` to `bytes`.
fn unescape(line: &[u8], bytes: &mut Vec<u8>) -> Result<(), Wrong> {
    let mut rest = line;
    while let Some((&first, behind)) = rest.split_first() {
        let column = line.len() - rest.len() + 1;
        let (byte, taken) = match (first, behind) {
            (0, _) => return Err(Wrong::Nul { column }),
            (b'\\', [b'\\', ..]) => (b'\\', 2),
            (b'\\', [b'n', ..]) => (b'\n', 2),
            (b'\\', [b'r', ..]) => (b'\r', 2),
            (b'\\', [b't', ..]) => (b'\t', 2),
            (b'\\', [b'x', high, low, ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                (digit(*high) << 4 | digit(*low), 4)
            }
            (b'\\', _) => {
                let shown = if behind.first() == Some(&b'x') { 4 } else { 2 };
                // The error shows the backslash, too.
                let found = format!("\\{}", behind[..behind.len().min(shown - 1)].escape_ascii());
                return Err(Wrong::Escape { column, found });
            }
            _ => (first, 1),
        };
        bytes.push(byte);
        rest = &rest[taken..];
    }
    Ok(())
}

/// Returns the value of a hexadecimal digit.
fn digit(digit: u8) -> u8 {
    match digit {
        b'0'..=b'9' => digit - b'0',
        _ => (digit | 0x20) - b'a' + 10,
    }
}

#[cfg(test)]
mod tests;
