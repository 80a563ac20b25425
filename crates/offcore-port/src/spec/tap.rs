//! The specification of a `tap:` port.

use std::fmt;

use offcore_wire::ethernet::MacAddr;
use schemars::JsonSchema;
use serde::Deserialize;

use super::values::{Interface, Number, Queues, Station, Switch};
use super::{flag, given, one, unless, yes};

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
    /// Whether checksum and segmentation offloads are used between the port and the kernel.
    #[serde(default = "yes", deserialize_with = "Switch::read")]
    #[schemars(with = "Switch")]
    pub offloads: bool,
    /// Ethernet address of the kernel's interface. Default: the present address of an existing interface, or a random
    /// one.
    #[serde(default, deserialize_with = "Station::optional")]
    #[schemars(with = "Station")]
    pub mac: Option<MacAddr>,
    /// MTU of the kernel's interface. Default: the present MTU of an existing interface, or 1500.
    #[serde(default, deserialize_with = "Mtu::optional")]
    #[schemars(with = "Mtu")]
    pub mtu: Option<u16>,
}

type Mtu = Number<68, 65521>;

impl fmt::Display for TapSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tap:{}", self.name)?;
        unless(f, "queues", self.queues, 1)?;
        f.write_str(flag(!self.offloads, ",offloads=off"))?;
        given(f, "mac", self.mac)?;
        given(f, "mtu", self.mtu)
    }
}
