//! The specification of a `tap:` port.

use std::fmt;

use super::{Options, first, flag, interface_name, unless};

/// `tap:`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapSpec {
    pub name: String,
    pub queues: u16,
    /// Whether partial checksums and unsegmented packets are exchanged with the kernel.
    pub offloads: bool,
}

impl TapSpec {
    pub(super) fn parse(fields: &[&str]) -> Result<Self, String> {
        let (name, options) = first(fields, "the interface's name, as in tap:tap0")?;
        let options = Options::parse(options, &["queues", "offloads"])?;
        let offloads = options.switch("offloads", true)?;
        Ok(Self { name: interface_name(name)?, queues: options.queues()?, offloads })
    }
}

impl fmt::Display for TapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap:{}", self.name)?;
        unless(f, "queues", self.queues, 1)?;
        f.write_str(flag(!self.offloads, ",offloads=off"))
    }
}
