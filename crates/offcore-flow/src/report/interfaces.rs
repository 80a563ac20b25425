//! Reports on a host's interfaces.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use offcore_tcp::proto::{AddressInfo, IfaceInfo, Origin, Prefix};
use serde::Serialize;

/// An interface of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct IfaceReport {
    /// The port, such as `port0`.
    pub port: String,
    pub mtu: u16,
    pub addresses: Vec<AddressReport>,
    /// Gateways of default routes.
    pub gateways: Vec<IpAddr>,
    /// Name servers announced by the network.
    pub name_servers: Vec<IpAddr>,
    /// The server that assigned the IPv4 address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dhcp_server: Option<Ipv4Addr>,
}

/// An address of an interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AddressReport {
    /// The address with the length of its prefix.
    pub address: String,
    /// `static`, `link-local`, `dhcp` or `slaac`.
    pub origin: &'static str,
    /// `tentative`, `preferred`, `deprecated` or `duplicated`.
    pub state: &'static str,
    /// Seconds until the address becomes deprecated, and until it expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferred_seconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_seconds: Option<u64>,
}

impl IfaceReport {
    pub(super) fn new(port: String, info: &IfaceInfo) -> Self {
        Self {
            port,
            mtu: info.mtu,
            addresses: info.addresses.iter().map(AddressReport::from).collect(),
            gateways: info.gateways.clone(),
            name_servers: info.name_servers.clone(),
            dhcp_server: info.dhcp_server,
        }
    }
}

impl From<&AddressInfo> for AddressReport {
    fn from(info: &AddressInfo) -> Self {
        let Prefix { address, len } = info.prefix;
        let origin = match info.origin {
            Origin::Static => "static",
            Origin::LinkLocal => "link-local",
            Origin::Dhcp => "dhcp",
            Origin::Slaac => "slaac",
        };
        Self {
            address: format!("{address}/{len}"),
            origin,
            state: info.state,
            preferred_seconds: info.preferred,
            valid_seconds: info.valid,
        }
    }
}

impl fmt::Display for AddressReport {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(to, "{} ({}", self.address, self.origin)?;
        if self.state != "preferred" {
            write!(to, ", {}", self.state)?;
        }
        match self.valid_seconds {
            Some(seconds) => write!(to, ", {seconds} s left)"),
            None => write!(to, ")"),
        }
    }
}
