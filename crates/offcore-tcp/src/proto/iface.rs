//! Interfaces, their addresses, and routes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use offcore_stats::time::Time;
use offcore_wire::{MacAddr, ipv6};

use super::groups::{Groups, Sender};
use super::ready::Ready;

/// The configuration of an interface.
#[derive(Debug, Clone)]
pub struct IfaceConfig {
    pub mac: MacAddr,
    /// MTU: maximum length of an IP packet in bytes, 576 to 65535. IPv6 requires at least 1280.
    pub mtu: u16,
    pub addresses: Vec<Prefix>,
    pub routes: Vec<Route>,
}

/// An address and the length of its network prefix in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    pub address: IpAddr,
    pub len: u8,
}

impl Prefix {
    /// Returns the network's address, with host bits 0.
    pub fn network(&self) -> IpAddr {
        let host = |bits: u8| u32::from(bits.saturating_sub(self.len));
        match self.address {
            IpAddr::V4(own) => {
                Ipv4Addr::from_bits(own.to_bits() & u32::MAX.checked_shl(host(32)).unwrap_or(0)).into()
            }
            IpAddr::V6(own) => {
                Ipv6Addr::from_bits(own.to_bits() & u128::MAX.checked_shl(host(128)).unwrap_or(0)).into()
            }
        }
    }

    /// Returns whether `other` is in the same network.
    pub fn contains(&self, other: IpAddr) -> bool {
        match (self.address, other) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                (own.to_bits() ^ other.to_bits()).leading_zeros() >= u32::from(self.len).min(32)
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                (own.to_bits() ^ other.to_bits()).leading_zeros() >= u32::from(self.len).min(128)
            }
            _ => false,
        }
    }
}

/// A route to a network through a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    pub to: Prefix,
    pub gateway: IpAddr,
}

impl Route {
    /// Returns the default route through a gateway, for its family.
    pub fn default_by(gateway: IpAddr) -> Self {
        let address = match gateway {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        Self { to: Prefix { address, len: 0 }, gateway }
    }
}

/// The state of an own address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressState {
    /// Duplicate address detection runs until this time (RFC 4862, 5.4).
    Tentative {
        until: Time,
    },
    Preferred,
    /// Another host has it.
    Duplicated,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnAddress {
    pub prefix: Prefix,
    pub standing: AddressState,
    /// Remaining IPv4 probes or announcements.
    pub left: u8,
    /// Time of the next probe or announcement, or of the next attempt to use the address.
    pub next: Option<Time>,
    pub life: AddressLifetime,
    /// New connections prefer any other address (RFC 4862, 5.5.4).
    pub deprecated: bool,
}

/// The source and the lifetime of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddressLifetime {
    pub origin: Origin,
    /// Time when it becomes deprecated, and when it expires; `u64::MAX` for never.
    pub preferred: Time,
    pub valid: Time,
}

impl AddressLifetime {
    /// Returns the lifetime of an address that does not expire.
    pub(crate) fn permanent(origin: Origin) -> Self {
        Self { origin, preferred: Time::NEVER, valid: Time::NEVER }
    }
}

/// The source of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Configured manually.
    Static,
    /// Derived from the interface's MAC address.
    LinkLocal,
    /// Assigned by a DHCP server.
    Dhcp,
    /// Derived from a prefix of a router advertisement.
    Slaac,
}

impl OwnAddress {
    pub(crate) fn new(prefix: Prefix, life: AddressLifetime) -> Self {
        let standing = AddressState::Tentative { until: Time::ZERO };
        Self { prefix, standing, left: 0, next: None, life, deprecated: false }
    }
}

/// An interface.
#[derive(Debug)]
pub(crate) struct Iface {
    pub mac: MacAddr,
    /// The index that applications see.
    pub index: u32,
    /// The minimum of the link's MTU and the MTUs from a DHCP server and routers.
    pub mtu: u16,
    link_mtu: u16,
    dhcp_mtu: u16,
    router_mtu: u16,
    pub addresses: Vec<OwnAddress>,
    pub routes: Vec<Route>,
    /// Maximum payload in bytes that the port segments; 0 without segmentation offload.
    pub segment_offload: u32,
    /// Connections that may have something to send.
    pub ready: Ready,
    /// The port is full: connections neither send nor acknowledge. `unacknowledged`: connections whose acknowledgement
    /// is due.
    pub held: bool,
    pub unacknowledged: Vec<u32>,
    /// Multicast groups: the solicited-node groups of its addresses, and groups that sockets have joined.
    pub groups: Groups,
}

impl Iface {
    /// `seed` makes its random delays different from other hosts' delays.
    pub(crate) fn new(config: &IfaceConfig, seed: u64) -> Self {
        let with_v6 = config.addresses.iter().any(|prefix| prefix.address.is_ipv6());
        let own = |prefix: &Prefix| OwnAddress::new(*prefix, AddressLifetime::permanent(Origin::Static));
        let all = config.addresses.iter().map(own);
        let link_local =
            OwnAddress::new(link_local(config.mac), AddressLifetime::permanent(Origin::LinkLocal));
        Self {
            mac: config.mac,
            index: 0,
            mtu: config.mtu,
            link_mtu: config.mtu,
            dhcp_mtu: u16::MAX,
            router_mtu: u16::MAX,
            addresses: all.chain(with_v6.then_some(link_local)).collect(),
            routes: config.routes.clone(),
            segment_offload: 0,
            ready: Ready::default(),
            held: false,
            unacknowledged: Vec::new(),
            groups: Groups::new(seed),
        }
    }

    /// Sets the MTU of the link.
    pub(crate) fn set_link_mtu(&mut self, mtu: u16) {
        self.link_mtu = mtu;
        self.choose_mtu();
    }

    /// Sets the MTU from a DHCP server; `u16::MAX` for none.
    pub(crate) fn set_dhcp_mtu(&mut self, mtu: u16) {
        self.dhcp_mtu = mtu;
        self.choose_mtu();
    }

    /// Sets the MTU from a router.
    pub(crate) fn set_router_mtu(&mut self, mtu: u16) {
        self.router_mtu = mtu;
        self.choose_mtu();
    }

    fn choose_mtu(&mut self) {
        self.mtu = self.link_mtu.min(self.dhcp_mtu).min(self.router_mtu);
    }

    /// Returns the source addresses of group reports on this interface, whose number is `iface`.
    pub(crate) fn sender(&self, iface: u8) -> Sender {
        let good = || self.addresses.iter().filter(|own| own.standing == AddressState::Preferred);
        let v4 = good().find_map(|own| match own.prefix.address {
            IpAddr::V4(address) => Some(address),
            IpAddr::V6(_) => None,
        });
        let v6 = good().find_map(|own| match own.prefix.address {
            IpAddr::V6(address) if address.is_unicast_link_local() => Some(address),
            _ => None,
        });
        let (v4, v6) = (v4.unwrap_or(Ipv4Addr::UNSPECIFIED), v6.unwrap_or(Ipv6Addr::UNSPECIFIED));
        Sender { iface, mac: self.mac, v4, v6 }
    }

    /// Returns whether the interface has this address and may use it.
    pub(crate) fn owns(&self, address: IpAddr) -> bool {
        self.addresses
            .iter()
            .any(|own| own.prefix.address == address && own.standing == AddressState::Preferred)
    }

    /// Returns whether the interface has joined the multicast group `address`.
    pub(crate) fn is_in_group(&self, address: IpAddr) -> bool {
        const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        if self.groups.contains(address) {
            return true;
        }
        let IpAddr::V6(group) = address else { return address == Ipv4Addr::new(224, 0, 0, 1) };
        group == ALL_NODES
            || self.addresses.iter().any(|own| match own.prefix.address {
                IpAddr::V6(address) => group == ipv6::solicited_node(address),
                IpAddr::V4(_) => false,
            })
    }

    /// Returns whether `address` is a broadcast address of the interface, or 255.255.255.255.
    pub(crate) fn is_broadcast(&self, address: IpAddr) -> bool {
        let IpAddr::V4(address) = address else { return false };
        address.is_broadcast() || self.broadcasts().any(|own| own == address)
    }

    /// Returns the broadcast addresses of the interface's networks. Point-to-point links have none (RFC 3021).
    pub(crate) fn broadcasts(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.addresses.iter().filter_map(|own| match own.prefix.address {
            IpAddr::V4(ours) if own.prefix.len < 31 => {
                let host = u32::MAX.checked_shr(own.prefix.len.into()).unwrap_or(0);
                Some(Ipv4Addr::from_bits(ours.to_bits() | host))
            }
            _ => None,
        })
    }

    /// Returns the next hop of a packet to `to`, and the length of the matching prefix.
    fn next_hop(&self, to: IpAddr) -> Option<(IpAddr, u8)> {
        let link = |to: IpAddr| self.addresses.iter().filter(move |own| own.prefix.contains(to));
        // A gateway is on the link even if no prefix contains it.
        let gateways =
            self.routes.iter().filter(move |route| route.gateway == to).map(move |_| (to, u8::MAX));
        let direct = link(to).map(|own| (to, own.prefix.len)).chain(gateways);
        let by_gateway = self.routes.iter().filter(|route| route.to.contains(to));
        // A route without a gateway is for a network on the link.
        let hop = |route: &Route| if route.gateway.is_unspecified() { to } else { route.gateway };
        let all = direct.chain(by_gateway.map(|route| (hop(route), route.to.len)));
        // `max_by_key` returns the last of equal elements, hence the reverse order: the first route wins.
        all.rev().max_by_key(|hop| hop.1)
    }

    /// Returns the source address of a packet to `to` through `next_hop` (a subset of RFC 6724). It has the family and
    /// the scope of `to`. The order of preference: not deprecated, in the network of `next_hop`, and the most similar
    /// to `to`. `is_good` selects by standing.
    fn source(&self, to: IpAddr, next_hop: IpAddr, is_good: fn(AddressState) -> bool) -> Option<IpAddr> {
        let fits = |own: &&OwnAddress| {
            let address = own.prefix.address;
            is_good(own.standing)
                && address.is_ipv4() == to.is_ipv4()
                && (is_link_local(address) == is_link_local(to) || to.is_ipv4())
        };
        let rank = |own: &&OwnAddress| {
            (!own.deprecated, own.prefix.contains(next_hop), alike(own.prefix.address, to))
        };
        // In reverse order, so that the first of equal addresses wins.
        let best = self.addresses.iter().rev().filter(fits).max_by_key(rank);
        best.map(|own| own.prefix.address)
    }

    /// Returns whether `address` may be a neighbour: it is in a network of the link, or a gateway.
    pub(crate) fn is_near(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|own| own.prefix.contains(address))
            || self.routes.iter().any(|route| match route.gateway.is_unspecified() {
                true => route.to.contains(address),
                false => route.gateway == address,
            })
    }

    /// Returns the source address for address resolution of a neighbour.
    pub(crate) fn source_towards(&self, neighbour: IpAddr) -> Option<IpAddr> {
        self.source(neighbour, neighbour, |standing| standing == AddressState::Preferred)
    }
}

/// Returns the similarity of an IPv6 address to a destination (RFC 6724, 5, rules 6 and 8): whether both or neither are
/// unique local addresses, and the length of the common prefix.
fn alike(own: IpAddr, to: IpAddr) -> (bool, u32) {
    let (IpAddr::V6(own), IpAddr::V6(to)) = (own, to) else { return (true, 0) };
    let shared = (own.to_bits() ^ to.to_bits()).leading_zeros().min(64);
    (own.is_unique_local() == to.is_unique_local(), shared)
}

/// Returns the link-local address for a MAC address.
pub(crate) fn link_local(mac: MacAddr) -> Prefix {
    Prefix { address: ipv6::link_local(mac).into(), len: 64 }
}

pub(crate) fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(address) if address.is_unicast_link_local())
}

/// The route of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResolvedRoute {
    pub iface: u8,
    pub next_hop: IpAddr,
    /// Our address on that route.
    pub source: IpAddr,
}

/// Returns the route to `to`: the longest prefix, and the first of several interfaces.
pub(crate) fn way(ifaces: &[Iface], to: IpAddr) -> Option<ResolvedRoute> {
    resolve_route(ifaces, to, |standing| standing == AddressState::Preferred)
}

/// Returns whether a route to `to` will exist if no own address turns out to be a duplicate.
pub(crate) fn may_have_route(ifaces: &[Iface], to: IpAddr) -> bool {
    resolve_route(ifaces, to, |standing| standing != AddressState::Duplicated).is_some()
}

fn resolve_route(ifaces: &[Iface], to: IpAddr, is_good: fn(AddressState) -> bool) -> Option<ResolvedRoute> {
    let mut best: Option<(ResolvedRoute, u8)> = None;
    for (iface, this) in ifaces.iter().enumerate() {
        let Some((next_hop, len)) = this.next_hop(to) else { continue };
        let Some(source) = this.source(to, next_hop, is_good) else { continue };
        if best.is_none_or(|(_, found)| len > found) {
            best = Some((ResolvedRoute { iface: iface as u8, next_hop, source }, len));
        }
    }
    best.map(|(way, _)| way)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str, len: u8) -> Prefix {
        Prefix { address: text.parse().unwrap(), len }
    }

    fn iface(addresses: &[Prefix], routes: &[Route]) -> Iface {
        let config = IfaceConfig {
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: 1500,
            addresses: addresses.to_vec(),
            routes: routes.to_vec(),
        };
        let mut iface = Iface::new(&config, 1);
        iface.addresses.iter_mut().for_each(|own| own.standing = AddressState::Preferred);
        iface
    }

    #[test]
    fn prefixes_contain_their_network() {
        assert!(prefix("10.0.0.2", 24).contains("10.0.0.77".parse().unwrap()));
        assert!(!prefix("10.0.0.2", 24).contains("10.0.1.2".parse().unwrap()));
        assert!(prefix("10.0.0.2", 0).contains("192.168.1.1".parse().unwrap()));
        assert!(prefix("10.0.0.2", 32).contains("10.0.0.2".parse().unwrap()));
        assert!(!prefix("::", 0).contains("10.0.0.2".parse().unwrap()), "families are apart");
    }

    #[test]
    fn network_has_no_host_bits() {
        for (text, len, network) in [
            ("10.1.2.3", 16, "10.1.0.0"),
            ("10.1.2.3", 32, "10.1.2.3"),
            ("10.1.2.3", 0, "0.0.0.0"),
            ("fd00::1:2", 112, "fd00::1:0"),
            ("fd00::2", 0, "::"),
        ] {
            assert_eq!(prefix(text, len).network(), network.parse::<IpAddr>().unwrap());
        }
    }

    #[test]
    fn longest_prefix_selects_route() {
        let gateway: IpAddr = "10.0.0.1".parse().unwrap();
        let near = Route { to: prefix("192.168.0.0", 16), gateway: "10.1.0.9".parse().unwrap() };
        let first = iface(&[prefix("10.0.0.2", 24)], &[Route::default_by(gateway)]);
        let second = iface(&[prefix("10.1.0.2", 24)], &[near]);
        let ifaces = [first, second];
        let to = |text: &str| way(&ifaces, text.parse().unwrap()).unwrap();
        assert_eq!(to("10.0.0.7").next_hop, "10.0.0.7".parse::<IpAddr>().unwrap());
        assert_eq!((to("8.8.8.8").iface, to("8.8.8.8").next_hop), (0, gateway));
        assert_eq!((to("192.168.3.4").iface, to("192.168.3.4").next_hop), (1, near.gateway));
        assert_eq!(to("192.168.3.4").source, "10.1.0.2".parse::<IpAddr>().unwrap());
        assert_eq!(way(&ifaces, "2001:db8::1".parse().unwrap()), None);
    }

    #[test]
    fn broadcast_of_each_network() {
        let iface = iface(&[prefix("10.0.0.2", 24), prefix("10.9.0.1", 31)], &[]);
        let is = |text: &str| iface.is_broadcast(text.parse().unwrap());
        assert!(is("10.0.0.255") && is("255.255.255.255"));
        assert!(!is("10.0.0.254") && !is("10.9.0.1"), "point-to-point links have none (RFC 3021)");
    }

    #[test]
    fn ipv6_prefix_adds_link_local_address() {
        let iface = iface(&[prefix("2001:db8::2", 64)], &[]);
        assert!(iface.owns("fe80::ff:fe00:1".parse().unwrap()));
        assert!(iface.is_in_group("ff02::1:ff00:2".parse().unwrap()));
        assert!(!iface.is_in_group("ff02::1:ff00:3".parse().unwrap()));
    }

    #[test]
    fn tentative_address_is_not_assigned() {
        let mut iface = iface(&[prefix("10.0.0.2", 24)], &[]);
        iface.addresses[0].standing = AddressState::Tentative { until: Time::from_micros(5) };
        assert!(!iface.owns("10.0.0.2".parse().unwrap()));
        let mut ifaces = [iface];
        let [near, far] = ["10.0.0.3", "10.0.1.3"].map(|to| to.parse().unwrap());
        assert_eq!((way(&ifaces, near), may_have_route(&ifaces, near)), (None, true));
        assert!(!may_have_route(&ifaces, far));
        ifaces[0].addresses[0].standing = AddressState::Duplicated;
        assert!(!may_have_route(&ifaces, near));
    }
}
