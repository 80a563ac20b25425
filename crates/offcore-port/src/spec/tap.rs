//! The specification of a `tap:` port.

use std::fmt;

use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Interface, Queues, Switch};
use super::{flag, one, unless, yes};

/// `tap:`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TapSpec {
    /// Name of the interface.
    #[serde(rename = "interface", deserialize_with = "Interface::read")]
    #[schemars(with = "Interface")]
    pub name: String,
    /// Number of queue pairs.
    #[serde(default = "one", deserialize_with = "Queues::read")]
    #[schemars(with = "Queues")]
    pub queues: u16,
    /// Whether partial checksums and unsegmented packets are exchanged with the kernel.
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub offloads: bool,
}

impl fmt::Display for TapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap:{}", self.name)?;
        unless(f, "queues", self.queues, 1)?;
        f.write_str(flag(!self.offloads, ",offloads=off"))
    }
}
