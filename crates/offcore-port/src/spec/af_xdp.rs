//! `af_xdp:` as it is written.

use std::fmt;

use super::{Options, first, interface_name, unless};

/// `af_xdp:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfXdpSpec {
    /// Name of the interface.
    pub name: String,
    /// Queue pairs.
    pub queues: u16,
}

impl AfXdpSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (name, options) = first(fields, "the interface's name, as in af_xdp:eth0")?;
        let options = Options::parse(options, &["queues"])?;
        Ok(Self { name: interface_name(name)?, queues: options.queues()? })
    }
}

impl fmt::Display for AfXdpSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "af_xdp:{}", self.name)?;
        unless(f, "queues", self.queues, 1)
    }
}
