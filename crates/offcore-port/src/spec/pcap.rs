//! The specification of a `pcap:` port.

use std::fmt;
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

use super::flag;
use super::text::Pairs;
use super::values::Switch;

const KEYS: [&str; 2] = ["loop", "overwrite"];
/// Keys whose values come first.
pub(super) const FILES: &[&str] = &["input", "output"];

/// `pcap:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PcapSpec {
    /// The file whose packets are received.
    #[serde(default, deserialize_with = "file")]
    #[schemars(with = "String")]
    pub input: Option<PathBuf>,
    /// The file to which sent packets are written.
    #[serde(default, deserialize_with = "file")]
    #[schemars(with = "String")]
    pub output: Option<PathBuf>,
    /// Whether the input is repeated.
    #[serde(rename = "loop", default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub repeat: bool,
    /// Whether an existing output is replaced.
    #[serde(default, deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub overwrite: bool,
}

impl PcapSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        // The second field is the output unless it is an option. A file with an option's name is written as `./loop`.
        let files = match fields {
            [_, second, ..] if !KEYS.contains(second) => FILES,
            _ => &FILES[..1],
        };
        let by_key = |field: &&&str| {
            FILES.iter().any(|key| field.split_once('=').is_some_and(|(found, _)| found == *key))
        };
        if let Some(field) = fields[files.len().min(fields.len())..].iter().find(by_key) {
            return Err(format!("'{field}': expected the name of a file without a key"));
        }
        Pairs::parse(fields, files)?.read::<Self>()?.check()
    }

    /// Refuses keys that contradict one another.
    pub(super) fn check(self) -> Result<Self, String> {
        match &self {
            Self { input: None, output: None, .. } => {
                Err("it names no file, expected input, output or both, as in pcap:IN,OUT".into())
            }
            Self { input: None, repeat: true, .. } => Err("'loop' is given without an input".into()),
            Self { output: None, overwrite: true, .. } => {
                Err("'overwrite' is given without an output".into())
            }
            Self { input, output, .. } if input == output => {
                Err("input and output are the same file, expected two different ones".into())
            }
            _ => Ok(self),
        }
    }
}

/// Reads the name of a file; `-` or nothing stands for no file.
fn file<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
    let name = String::deserialize(deserializer)?;
    Ok((!matches!(name.as_str(), "" | "-")).then(|| PathBuf::from(name)))
}

impl fmt::Display for PcapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |file: &Option<PathBuf>| match file {
            None => "-".to_string(),
            Some(path) => path.display().to_string(),
        };
        write!(f, "pcap:{},{}", name(&self.input), name(&self.output))?;
        f.write_str(flag(self.repeat, ",loop"))?;
        f.write_str(flag(self.overwrite, ",overwrite"))
    }
}
