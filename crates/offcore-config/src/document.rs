//! A parsed file, whose values know their lines, and the problems found in it.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

/// Maximum length of a file in bytes.
pub const MAX_FILE: u64 = 1 << 20;
/// Reading ends after this number of problems.
const MAX_PROBLEMS: usize = 50;
/// Maximum length of a key, a value or a name in messages, in characters.
const MAX_SHOWN: usize = 200;
/// Maximum length of a misspelt word for which the right one is suggested, in bytes.
const MAX_SUGGESTED: usize = 64;

/// A problem in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line number, from 1; `None` if the problem is about the whole file.
    pub line: Option<usize>,
    /// The key, such as `port.web1.queues`; empty if the problem is about the syntax.
    pub key: String,
    /// The found value, the reason, and what to do.
    pub text: String,
}

/// The problems of a file, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems {
    pub file: String,
    pub list: Vec<Problem>,
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Problem { line, key, text }) in self.list.iter().enumerate() {
            if index > 0 {
                writeln!(f)?;
            }
            f.write_str(&self.file)?;
            if let Some(line) = line {
                write!(f, ":{line}")?;
            }
            if key.is_empty() { write!(f, ": {text}")? } else { write!(f, ": {key}: {text}")? }
        }
        Ok(())
    }
}

impl std::error::Error for Problems {}

/// A table of a file.
pub(crate) type Table<'i> = DeTable<'i>;
/// A value of a file.
pub(crate) type Value<'i> = Spanned<DeValue<'i>>;

/// A file while it is read.
#[derive(Debug)]
pub(crate) struct Document<'i> {
    /// The tables that are not read yet.
    pub root: Table<'i>,
    pub problems: Vec<Problem>,
    /// Offsets of the ends of lines.
    lines: Vec<usize>,
    /// Keys and their places, for problems that are found later.
    places: Vec<(String, Range<usize>)>,
}

impl<'i> Document<'i> {
    /// Parses a file. Syntax errors are in `problems`; the rest of the file is read.
    pub(crate) fn parse(text: &'i str) -> Self {
        let (root, errors) = DeTable::parse_recoverable(text);
        let lines = text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at).collect();
        let mut document = Self { root: root.into_inner(), problems: Vec::new(), lines, places: Vec::new() };
        for error in errors {
            let at = error.span();
            document.add(at, "", error.message().trim().replace('\n', ", "));
        }
        document
    }

    /// Adds a problem at a place in the file.
    pub(crate) fn add(&mut self, at: Option<Range<usize>>, key: &str, text: impl Into<String>) {
        let line = at.map(|at| self.lines.partition_point(|end| *end < at.start) + 1);
        self.problems.push(Problem { line, key: printable(key), text: printable(&text.into()) });
    }

    /// Adds a problem of a key that was read before. An absent key has the line of the nearest table.
    pub(crate) fn add_about(&mut self, key: &str, text: impl Into<String>) {
        let mut prefix = key;
        let at = loop {
            if let Some((_, at)) = self.places.iter().find(|(known, _)| known == prefix) {
                break Some(at.clone());
            }
            match prefix.rsplit_once('.') {
                Some((parent, _)) => prefix = parent,
                None => break None,
            }
        };
        self.add(at, key, text);
    }

    /// Adds a problem of a key that was read before, whose text names the key.
    pub(crate) fn add_text_about(&mut self, key: &str, text: impl Into<String>) {
        self.add_about(key, text);
        if let Some(problem) = self.problems.last_mut() {
            problem.key.clear();
        }
    }

    /// Takes a value out of the root.
    pub(crate) fn take(&mut self, key: &str) -> Option<Value<'i>> {
        self.root.remove(key)
    }

    /// Takes a section, which must be a table.
    pub(crate) fn take_table(&mut self, key: &str) -> Option<(Table<'i>, Range<usize>)> {
        let value = self.take(key)?;
        self.table(value, key)
    }

    /// Returns the table of a value.
    pub(crate) fn table(&mut self, value: Value<'i>, key: &str) -> Option<(Table<'i>, Range<usize>)> {
        let at = value.span();
        self.places.push((key.into(), at.clone()));
        match value.into_inner() {
            DeValue::Table(table) => Some((table, at)),
            other => {
                self.add(Some(at), key, format!("found {}, expected a table", described(&other)));
                None
            }
        }
    }

    /// Returns the text of a value.
    pub(crate) fn text_of(&mut self, value: &Value<'i>, key: &str) -> Option<String> {
        let text = value.get_ref().as_str().map(str::to_owned);
        if text.is_none() {
            let found = described(value.get_ref());
            self.add(Some(value.span()), key, format!("found {found}, expected a text"));
        }
        text
    }

    /// Reads a table as a `T`. Every wrong value is a problem.
    pub(crate) fn read<T: DeserializeOwned>(
        &mut self,
        table: Table<'i>,
        at: Range<usize>,
        key: &str,
    ) -> Option<T> {
        self.read_with(table, at, key, T::deserialize)
    }

    /// Reads a table with `read`. After an error it removes the invalid entry and reads again, to find all errors.
    pub(crate) fn read_with<T>(
        &mut self,
        mut table: Table<'i>,
        at: Range<usize>,
        key: &str,
        read: impl Fn(ValueDeserializer<'i>) -> Result<T, toml::de::Error>,
    ) -> Option<T> {
        self.note_places(&table, key);
        let mut removed = BTreeSet::new();
        let mut value = None;
        while self.problems.len() < MAX_PROBLEMS {
            let spanned = Spanned::new(at.clone(), DeValue::Table(table.clone()));
            match read(ValueDeserializer::from(spanned)) {
                Ok(read) => {
                    value = Some(read);
                    break;
                }
                Err(error) => {
                    let text = reworded(error.message());
                    let wrong = error.span().filter(|span| *span != at);
                    let Some(wrong) = wrong.and_then(|span| remove_at(&mut table, &span)) else {
                        // A key that was removed because of its value is not missing.
                        let is_consequence =
                            removed.iter().any(|key: &String| text.contains(&format!("'{key}'")));
                        if !is_consequence {
                            self.add(Some(at.clone()), key, text);
                        }
                        break;
                    };
                    let (path, found, place) = wrong;
                    let key = if key.is_empty() { path.clone() } else { format!("{key}.{path}") };
                    let text =
                        if text.starts_with("expected ") { format!("found {found}, {text}") } else { text };
                    self.add(Some(place), &key, text);
                    removed.insert(path.rsplit('.').next().unwrap_or_default().to_owned());
                }
            }
        }
        value.filter(|_| removed.is_empty())
    }

    fn note_places(&mut self, table: &Table<'i>, prefix: &str) {
        for (key, value) in table {
            let key = match prefix {
                "" => key.get_ref().to_string(),
                prefix => format!("{prefix}.{}", key.get_ref()),
            };
            self.places.push((key.clone(), value.span()));
            if let DeValue::Table(inner) = value.get_ref() {
                self.note_places(inner, &key);
            }
        }
    }
}

/// Returns a text in which control characters are escaped, because keys and names are the file's. It is shortened.
fn printable(text: &str) -> String {
    let shown: String =
        text.chars().take(MAX_SHOWN).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if shown.len() < text.len() && text.chars().nth(MAX_SHOWN).is_some() { shown + "..." } else { shown }
}

/// Removes the innermost entry at `span`. Returns its path, its value as written, and its place.
fn remove_at(table: &mut Table<'_>, span: &Range<usize>) -> Option<(String, String, Range<usize>)> {
    let covers = |place: Range<usize>| place.start <= span.start && span.end <= place.end;
    let key = table.iter().find(|(key, value)| covers(key.span()) || covers(value.span()))?;
    let (name, value_at, is_key) = (key.0.get_ref().to_string(), key.1.span(), covers(key.0.span()));
    if !is_key
        && value_at != *span
        && let Some(DeValue::Table(inner)) = table.get_mut(name.as_str()).map(Spanned::get_mut)
        && let Some((path, found, place)) = remove_at(inner, span)
    {
        return Some((format!("{name}.{path}"), found, place));
    }
    let value = table.remove(name.as_str())?;
    Some((name, described(value.get_ref()), span.clone()))
}

/// Describes a value as the file writes it, if it is short.
fn described(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("\"{}\"", text.chars().take(64).collect::<String>().escape_debug()),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(value) => value.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(list) if list.is_empty() => "an empty list".into(),
        DeValue::Array(_) => "a list".into(),
        DeValue::Table(_) => "a table".into(),
    }
}

/// Words serde's messages as the other ones of Offcore.
fn reworded(message: &str) -> String {
    let text = message.trim().replace('`', "'").replace('\n', ", ");
    if let Some(rest) = text.strip_prefix("unknown field '") {
        let (found, rest) = rest.split_once('\'').unwrap_or((rest, ""));
        let known = rest.trim_start_matches(", expected ").trim_start_matches("one of ");
        return unknown("key", found, known.split(", ").map(|key| key.trim_matches('\'')));
    }
    if let Some(rest) = text.strip_prefix("missing field ") {
        return format!("key {rest} is missing");
    }
    match text.split_once(", expected ") {
        Some((found, expected)) if found.starts_with("invalid ") => match expected {
            "usize" | "u64" | "u32" | "u16" | "u8" | "i32" => "expected a number".into(),
            "a sequence" => "expected a list".into(),
            "a boolean" => "expected true or false".into(),
            _ if expected.starts_with("struct ") => "expected a table".into(),
            _ => format!("expected {expected}"),
        },
        _ => text,
    }
}

/// The message for a `thing`, such as a key, that is not known.
pub(crate) fn unknown<'a>(thing: &str, found: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.filter(|key| !key.is_empty()).collect();
    let distance = |key: &&&str| strsim::damerau_levenshtein(key, found);
    let close = known.iter().filter(|key| found.len().max(key.len()) <= MAX_SUGGESTED).min_by_key(distance);
    match close.filter(|key| distance(key) <= 1 + found.len() / 4) {
        Some(close) => format!("unknown {thing}, did you mean '{close}'?"),
        None if known.is_empty() => format!("unknown {thing}: no {thing} is expected here"),
        None => format!("unknown {thing}, expected one of {}", known.join(", ")),
    }
}
