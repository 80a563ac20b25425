//! `af_packet:` as it is written.

use std::fmt;

use super::{Options, first, interface_name, unless};

/// `af_packet:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfPacketSpec {
    /// Name of the interface.
    pub name: String,
    /// Queue pairs.
    pub queues: u16,
}

impl AfPacketSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (name, options) = first(fields, "the interface's name, as in af_packet:eth0")?;
        let options = Options::parse(options, &["queues"])?;
        Ok(Self { name: interface_name(name)?, queues: options.queues()? })
    }
}

impl fmt::Display for AfPacketSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "af_packet:{}", self.name)?;
        unless(f, "queues", self.queues, 1)
    }
}
