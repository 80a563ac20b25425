//! Multicast (RFC 1112) and broadcast datagrams.

use std::net::{IpAddr, Ipv4Addr};

use offcore_wire::{MacAddr, ipv6};

use super::iface::{AddressState, Iface, ResolvedRoute};
use super::net::Net;
use super::stack::Stack;

/// The default TTL of multicast packets: they stay on the link (RFC 1112, 6.1).
pub(super) const GROUP_HOPS: u8 = 1;

/// Returns the MAC address of a group.
pub(super) fn station_of_group(group: IpAddr) -> MacAddr {
    match group {
        IpAddr::V4(group) => {
            let [_, b, c, d] = group.octets();
            MacAddr([0x01, 0x00, 0x5e, b & 0x7f, c, d])
        }
        IpAddr::V6(group) => ipv6::multicast_mac(group),
    }
}

impl Iface {
    /// Returns the source address for a group or broadcast address. A group of link-local scope gets a link-local
    /// source (RFC 6724, 5).
    pub(super) fn multicast_source(&self, to: IpAddr) -> Option<IpAddr> {
        let of_link = |address: IpAddr| match address {
            IpAddr::V4(_) => true,
            IpAddr::V6(address) => address.is_unicast_link_local(),
        };
        let near = match to {
            IpAddr::V4(_) => true,
            IpAddr::V6(to) => to.octets()[1] & 15 <= 2,
        };
        let ours = || {
            let good = self.addresses.iter().filter(|own| own.standing == AddressState::Preferred);
            good.map(|own| own.prefix.address).filter(|own| own.is_ipv4() == to.is_ipv4())
        };
        ours().find(|own| of_link(*own) == near).or_else(|| ours().next())
    }
}

impl Stack {
    /// Returns the broadcast addresses of all networks. Programs need `SO_BROADCAST` to use them.
    pub fn broadcasts(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.net.ifaces.iter().flat_map(Iface::broadcasts)
    }
}

impl Net {
    /// Returns the MAC address of a multicast or broadcast destination.
    pub(super) fn multicast_station(&self, iface: u8, to: IpAddr) -> Option<MacAddr> {
        match to.is_multicast() {
            true => Some(station_of_group(to)),
            false => self.ifaces.get(usize::from(iface))?.is_broadcast(to).then_some(MacAddr([0xff; 6])),
        }
    }

    /// Returns the route of a datagram to a group or to 255.255.255.255, or `None` for any other destination. The
    /// interface is selected by the source address `from`, else by its `index` if that is not 0, else by a route, else
    /// it is the first one.
    pub(super) fn multicast_route(
        &self,
        to: IpAddr,
        from: Option<IpAddr>,
        index: u32,
    ) -> Option<ResolvedRoute> {
        if !to.is_multicast() && to != Ipv4Addr::BROADCAST {
            return None;
        }
        let by_source = from.and_then(|from| self.ifaces.iter().position(|iface| iface.owns(from)));
        let by_route = || self.way(to).map(|way| usize::from(way.iface));
        let first = || self.ifaces.iter().position(|iface| iface.multicast_source(to).is_some());
        let iface = match by_source {
            None if index > 0 => self.ifaces.iter().position(|iface| iface.index == index),
            by_source => by_source.or_else(by_route).or_else(first),
        };
        let iface = iface?;
        let source = from.or_else(|| self.ifaces[iface].multicast_source(to))?;
        Some(ResolvedRoute { iface: iface as u8, next_hop: to, source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multicast_groups_map_to_macs() {
        for (group, station) in [
            ("224.0.0.251", [0x01, 0x00, 0x5e, 0, 0, 251]),
            ("239.255.255.250", [0x01, 0x00, 0x5e, 0x7f, 255, 250]),
            ("ff02::fb", [0x33, 0x33, 0, 0, 0, 0xfb]),
        ] {
            assert_eq!(station_of_group(group.parse().unwrap()), MacAddr(station), "{group}");
        }
    }
}
