//! The fields of each benchmark's rows as `--format json` prints them, compared with the list in `fields.txt`.
//!
//! The first two sections of the list have all names in their order. Each other section has the names that are not null
//! in one kind of row. A name with `?` may be null: its value depends on the run.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};

use super::row::Row;

const LIST: &str = include_str!("fields.txt");
/// Sections with all names: the names of every row, and the additional names of `offcore bench gpu`.
const ALL: [&str; 2] = ["every row", "rows of gpu"];

/// Names of a JSON object in their order, each with whether its value is null.
struct Fields(Vec<(String, bool)>);

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldVisitor)
    }
}

struct FieldVisitor;

impl<'de> Visitor<'de> for FieldVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Fields, M::Error> {
        let mut fields = Vec::new();
        while let Some((name, value)) = map.next_entry::<String, serde_json::Value>()? {
            fields.push((name, value.is_null()));
        }
        Ok(Fields(fields))
    }
}

/// Returns the names of a section.
fn section(name: &str) -> Vec<&'static str> {
    let start = format!("[{name}]\n");
    let text = LIST.split_once(&start).map_or("", |(_, text)| text);
    text.split('[').next().unwrap_or_default().split_whitespace().collect()
}

/// Checks the fields of a row of kind `kind`.
pub(crate) fn check(kind: &str, row: &Row) {
    let json = serde_json::to_string(row).unwrap();
    let Fields(fields) = serde_json::from_str(&json).unwrap();
    let names: Vec<&str> = fields.iter().map(|(name, _)| name.as_str()).collect();
    let sections = if row.head.bench == "gpu" { &ALL[..] } else { &ALL[..1] };
    let all: Vec<&str> = sections.iter().flat_map(|name| section(name)).collect();
    assert_eq!(names, all, "{kind}: names and their order");
    let listed = section(kind);
    let is = |name: &str| listed.contains(&name);
    let known = |name: &str| names.contains(&name.trim_end_matches('?'));
    assert!(listed.iter().all(|name| known(name)), "{kind}: unknown names in {listed:?}");
    let found: Vec<&str> = fields.iter().filter(|(_, null)| !null).map(|(name, _)| name.as_str()).collect();
    for (name, is_null) in &fields {
        assert!(is(&format!("{name}?")) || is(name) != *is_null, "{kind}: {name}, present are {found:?}");
    }
}
