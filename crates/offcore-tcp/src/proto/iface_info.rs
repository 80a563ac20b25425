//! The configuration of interfaces, for reports.

use std::net::{IpAddr, Ipv4Addr};

use offcore_stats::time::Time;

use super::iface::{AddressState, Iface, Origin, OwnAddress, Prefix};
use super::stack::Stack;

/// An interface's configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IfaceInfo {
    pub mtu: u16,
    pub addresses: Vec<AddressInfo>,
    /// Gateways of default routes.
    pub gateways: Vec<IpAddr>,
    /// Name servers announced by the network.
    pub name_servers: Vec<IpAddr>,
    /// The DHCP server of the interface's lease.
    pub dhcp_server: Option<Ipv4Addr>,
}

/// An address of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressInfo {
    pub prefix: Prefix,
    pub origin: Origin,
    /// `tentative`, `preferred`, `deprecated` or `duplicated`.
    pub state: &'static str,
    /// Seconds until the address becomes deprecated, and until it expires. `None` for a permanent address.
    pub preferred: Option<u64>,
    pub valid: Option<u64>,
}

impl Stack {
    /// Returns the configuration of each interface, without the loopback interface.
    pub fn interfaces(&self, now: Time) -> Vec<IfaceInfo> {
        let ports = self.net.ifaces.iter().enumerate();
        let ports = ports.filter(|(number, _)| self.net.loopback.map(usize::from) != Some(*number));
        ports.map(|(number, iface)| self.interface(now, number, iface)).collect()
    }

    fn interface(&self, now: Time, number: usize, iface: &Iface) -> IfaceInfo {
        let lease = self.net.clients.iter().find(|client| usize::from(client.iface) == number);
        let lease = lease.and_then(|client| client.lease.as_ref());
        let left = |until: Time| (until != Time::NEVER).then(|| until.saturating_since(now).as_secs());
        let address = |own: &OwnAddress| {
            let end = lease.filter(|_| own.life.origin == Origin::Dhcp).map(|lease| lease.end);
            AddressInfo {
                prefix: own.prefix,
                origin: own.life.origin,
                state: match own.standing {
                    AddressState::Tentative { .. } => "tentative",
                    AddressState::Preferred if own.deprecated => "deprecated",
                    AddressState::Preferred => "preferred",
                    AddressState::Duplicated => "duplicated",
                },
                preferred: left(end.unwrap_or(own.life.preferred)),
                valid: left(end.unwrap_or(own.life.valid)),
            }
        };
        let addresses: Vec<_> = iface.addresses.iter().map(address).collect();
        let has_lease = addresses.iter().any(|address| address.origin == Origin::Dhcp);
        let lease = lease.filter(|_| has_lease);
        let defaults = iface.routes.iter().filter(|route| route.to.len == 0);
        let advertised = self.net.autoconfs.iter().filter(|autoconf| usize::from(autoconf.iface) == number);
        let name_servers = lease.iter().flat_map(|lease| &lease.name_servers).map(|server| (*server).into());
        let name_servers = name_servers.chain(advertised.flat_map(|autoconf| autoconf.name_servers()));
        IfaceInfo {
            mtu: iface.mtu,
            addresses,
            gateways: defaults.map(|route| route.gateway).collect(),
            name_servers: name_servers.collect(),
            dhcp_server: lease.map(|lease| lease.server),
        }
    }
}
