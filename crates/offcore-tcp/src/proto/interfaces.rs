//! Calls about a stack's interfaces: their addresses and their MTU.

use std::net::{IpAddr, SocketAddr};

use offcore_stats::time::Time;

use super::addr::any_like;
use super::call_error::CallError;
use super::iface::{Iface, IfaceConfig};
use super::net::NO_STATION;
use super::packet::DropReason;
use super::stack::Stack;

/// The MTU of the loopback interface in bytes. Its segments are longer because it has segmentation offload.
const LOOPBACK_MTU: u16 = 1500;
/// The index of the loopback interface that applications see, as on Linux.
const LOOPBACK_INDEX: u32 = 1;

impl Stack {
    /// Probes the IPv4 addresses of a new interface before they are used, because another host may have them (RFC
    /// 5227).
    pub fn detect_conflicts(&mut self, now: Time, iface: u8) {
        self.net.detect_conflicts(now, iface);
    }

    /// Returns whether an IPv4 address is still being probed.
    pub fn is_probing(&self) -> bool {
        self.net.is_probing()
    }

    /// Returns an interface that still waits for its first address from a DHCP server or an advertisement, if there is
    /// one.
    pub fn awaits_address(&self) -> Option<u8> {
        let client = self.net.clients.iter().find(|client| !client.has_served);
        client.map(|client| client.iface).or_else(|| self.net.awaits_advertised_address())
    }

    /// Returns whether the route to `to` is missing while an interface waits for an address of this family from the
    /// network. The address, or the next one after its expiry, may bring a route.
    pub fn awaits_route(&self, to: IpAddr) -> bool {
        let lacks_address = match to {
            IpAddr::V4(_) => self.net.clients.iter().any(|client| !client.has_address()),
            IpAddr::V6(_) => self.net.awaits_advertised_address().is_some(),
        };
        lacks_address && self.source_to(to) == Err(CallError::NoRoute)
    }

    /// Sets the MTU of interface `iface`. A smaller MTU shortens the segments of its connections. A larger MTU applies
    /// to new connections.
    pub fn set_mtu(&mut self, iface: u8, mtu: u16) {
        let Some(this) = self.net.ifaces.get_mut(usize::from(iface)) else { return };
        let before = this.mtu;
        this.set_link_mtu(mtu);
        self.fit_mtu(iface, before);
    }

    /// Shortens segments if the interface's MTU is now less than `before`.
    pub(super) fn fit_mtu(&mut self, iface: u8, before: u16) {
        match self.net.ifaces.get(usize::from(iface)).map(|iface| iface.mtu) {
            Some(mtu) if mtu < before => self.cut_segments_by(iface, mtu),
            _ => {}
        }
    }

    /// Adds the loopback interface, which returns packets to the host's own addresses. Returns its number.
    pub fn add_loopback(&mut self) -> u8 {
        let (addresses, routes) = (Vec::new(), Vec::new());
        let config = IfaceConfig { mac: NO_STATION, mtu: LOOPBACK_MTU, addresses, routes };
        let mut iface = Iface::new(&config, self.net.seed);
        iface.index = LOOPBACK_INDEX;
        let number = self.net.ifaces.len() as u8;
        self.net.ifaces.push(iface);
        self.net.loopback = Some(number);
        number
    }

    /// Returns whether this stack listens at its own address `to` and can connect to it.
    pub fn reaches_listener(&self, to: SocketAddr) -> bool {
        let found = || self.listeners.find(to.ip(), to.port(), |_| 0);
        self.net.loopback.is_some() && self.net.owns(to.ip()) && found().is_some()
    }

    /// Returns whether this stack has a datagram socket at its own address `to` that accepts datagrams from any peer.
    pub fn reaches_socket(&self, to: SocketAddr) -> bool {
        let any = SocketAddr::new(any_like(to.ip()), 0);
        self.net.loopback.is_some() && self.net.owns(to.ip()) && self.socket_of(to, any).is_some()
    }

    /// Counts packets of other VLANs, which are dropped before they reach the stack.
    pub fn count_foreign(&mut self, packets: u64) {
        self.drops.count_many(DropReason::NotForUs, packets);
    }
}
