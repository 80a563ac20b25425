//! The specification of a `pcap:` port.

use std::fmt;
use std::path::PathBuf;

use super::{Options, flag};

const KEYS: [&str; 2] = ["loop", "overwrite"];

/// `pcap:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcapSpec {
    pub input: Option<PathBuf>,
    /// The file to which sent packets are written.
    pub output: Option<PathBuf>,
    /// Whether the input is repeated.
    pub repeat: bool,
    /// Whether an existing output is replaced.
    pub overwrite: bool,
}

impl PcapSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let file = |field: &str| (!matches!(field, "" | "-")).then(|| PathBuf::from(field));
        // The second field is the output unless it is an option. A file with an option's name is written as `./loop`.
        let (files, options) = match fields {
            [_, second, ..] if !KEYS.contains(second) => fields.split_at(2),
            _ => fields.split_at(1.min(fields.len())),
        };
        let options = Options::parse(options, &KEYS)?;
        let spec = Self {
            input: files.first().and_then(|field| file(field)),
            output: files.get(1).and_then(|field| file(field)),
            repeat: options.switch("loop", false)?,
            overwrite: options.switch("overwrite", false)?,
        };
        match &spec {
            Self { input: None, output: None, .. } => {
                Err("it names no file, expected pcap:IN,OUT with '-' for the one that is not wanted".into())
            }
            Self { input: None, repeat: true, .. } => {
                Err("'loop' is given without an input, expected pcap:IN,OUT,loop".into())
            }
            Self { output: None, overwrite: true, .. } => {
                Err("'overwrite' is given without an output, expected pcap:IN,OUT,overwrite".into())
            }
            Self { input, output, .. } if input == output => {
                Err("input and output are the same file, expected two different ones".into())
            }
            _ => Ok(spec),
        }
    }
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
