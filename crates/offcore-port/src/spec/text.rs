//! Specifications as text: `KIND:FIRST,key=value,flag`, which is read by the same definitions as a table in a file.

use std::fmt;

use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};
use serde::forward_to_deserialize_any;

use super::PortSpec;

/// Returns the comma-separated fields of `text`. Commas within brackets do not separate fields.
///
/// # Errors
/// Brackets that are not closed or not opened.
pub fn split_fields(text: &str) -> Result<Vec<&str>, String> {
    let (mut fields, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '[' | ']' if inside == (c == '[') => {
                return Err(format!("'{c}' is not expected after '{}'", &text[..at]));
            }
            '[' | ']' => inside = !inside,
            ',' if !inside => {
                fields.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("'[' is not closed, expected ']'".into());
    }
    fields.push(&text[start..]);
    Ok(fields)
}

/// A key, and its value if it has one.
type Pair<'a> = (&'a str, Option<&'a str>);

/// The keys of a specification, to be read like a table.
#[derive(Debug, Default)]
pub(super) struct Pairs<'a> {
    pairs: Vec<Pair<'a>>,
    /// Keys whose values are written without the key, so that errors do not name them.
    positional: &'static [&'static str],
}

impl<'a> Pairs<'a> {
    /// Parses fields such as `key=value` and `flag`. The values of `positional` keys come first, without their keys.
    ///
    /// # Errors
    /// A key that occurs twice.
    pub(super) fn parse(fields: &[&'a str], positional: &'static [&'static str]) -> Result<Self, String> {
        let mut pairs: Vec<Pair<'a>> = Vec::with_capacity(fields.len());
        for (at, field) in fields.iter().enumerate() {
            if let Some(key) = positional.get(at) {
                pairs.push((key, Some(field)));
                continue;
            }
            let (key, value) = match field.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (*field, None),
            };
            if pairs.iter().any(|(other, _)| *other == key) {
                return Err(match positional.contains(&key) {
                    true => format!("write the value of '{key}' first, without the key"),
                    false => format!("key '{key}' is given twice, expected it once"),
                });
            }
            pairs.push((key, value));
        }
        Ok(Self { pairs, positional })
    }
}

/// An error in a specification.
#[derive(Debug)]
pub(super) enum TextError {
    Message(String),
    UnknownKey { found: String, known: &'static [&'static str] },
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(text) => f.write_str(text),
            Self::UnknownKey { found, known } => {
                write!(f, "key '{found}' is not known, expected {}", known.join(", "))
            }
        }
    }
}

impl std::error::Error for TextError {}

impl Error for TextError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::Message(text.to_string())
    }

    fn unknown_field(found: &str, known: &'static [&'static str]) -> Self {
        Self::UnknownKey { found: found.into(), known }
    }
}

impl TextError {
    /// Describes the error. Keys in `hidden` are not suggested.
    pub(super) fn describe(self, hidden: &[&str]) -> String {
        match self {
            Self::Message(text) => text,
            Self::UnknownKey { found, known } => {
                let known: Vec<&str> = known.iter().copied().filter(|key| !hidden.contains(key)).collect();
                format!("key '{found}' is not known, expected {}", known.join(", "))
            }
        }
    }
}

impl<'a> Pairs<'a> {
    /// Returns the keys and their values.
    pub(super) fn into_owned(self) -> Vec<(String, Option<String>)> {
        self.pairs.into_iter().map(|(key, value)| (key.to_owned(), value.map(str::to_owned))).collect()
    }

    /// Reads the keys of a port.
    pub(super) fn port(self, kind: &str) -> Result<PortSpec, String> {
        let positional = self.positional;
        PortSpec::of_kind(kind, self).map_err(|error| error.describe(positional))
    }

    /// Reads the keys of a `T`.
    pub(super) fn read<T: serde::Deserialize<'a>>(self) -> Result<T, String> {
        let positional = self.positional;
        T::deserialize(self).map_err(|error| error.describe(positional))
    }
}

impl<'de> Deserializer<'de> for Pairs<'de> {
    type Error = TextError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, TextError> {
        visitor.visit_map(Reading { pairs: self.pairs.into_iter(), value: None, positional: self.positional })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

/// The keys that are still to be read.
struct Reading<'a> {
    pairs: std::vec::IntoIter<Pair<'a>>,
    value: Option<Pair<'a>>,
    positional: &'static [&'static str],
}

impl<'de> MapAccess<'de> for Reading<'de> {
    type Error = TextError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, TextError> {
        self.value = self.pairs.next();
        self.value.map(|(key, _)| seed.deserialize(StrDeserializer::new(key))).transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, TextError> {
        let Some((key, found)) = self.value.take() else {
            return Err(TextError::custom("value without key"));
        };
        let value: Result<_, TextError> = match found {
            Some(text) => seed.deserialize(text.into_deserializer()),
            None => seed.deserialize(().into_deserializer()),
        };
        let positional = self.positional.contains(&key);
        value.map_err(|error| match error {
            TextError::Message(text) if !positional => {
                TextError::Message(format!("{key}={}: {text}", found.unwrap_or_default()))
            }
            other => other,
        })
    }
}
