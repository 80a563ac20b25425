//! The next hop of a connection's packets.

use offcore_stats::time::{Micros, Time};
use offcore_wire::MacAddr;

use super::iface::ResolvedRoute;
use super::neighbour::NeighbourKey;

/// Time for which a connection uses the MAC address of its next hop without checking the cache.
const LINK_AGE: Micros = Micros::from_secs(1);

/// A MAC address, as last resolved in this generation of the neighbour cache.
#[derive(Debug, Clone, Copy)]
struct Link {
    mac: MacAddr,
    generation: u32,
    until: Time,
}

/// The route of a connection, and the MAC address of its next hop.
#[derive(Debug)]
pub(crate) struct Hop {
    way: ResolvedRoute,
    /// The generation of addresses and routes from which `way` was derived.
    routes: u32,
    link: Option<Link>,
}

impl Hop {
    pub(crate) fn new(way: ResolvedRoute) -> Self {
        Self { way, routes: 0, link: None }
    }

    #[inline]
    pub(crate) fn route(&self) -> ResolvedRoute {
        self.way
    }

    #[inline]
    pub(crate) fn iface(&self) -> u8 {
        self.way.iface
    }

    #[inline]
    pub(crate) fn neighbour(&self) -> NeighbourKey {
        (self.way.iface, self.way.next_hop)
    }

    /// Returns whether the route belongs to this generation of addresses and routes.
    #[inline]
    pub(crate) fn is_current(&self, routes: u32) -> bool {
        self.routes == routes
    }

    /// Uses the next hop of the route `way` of a newer generation. A connection keeps its interface.
    pub(crate) fn refresh(&mut self, routes: u32, way: ResolvedRoute) {
        if way.iface == self.way.iface && way.next_hop != self.way.next_hop {
            (self.way.next_hop, self.link) = (way.next_hop, None);
        }
        self.routes = routes;
    }

    /// Returns the MAC address if it is known in this generation of the neighbour cache.
    #[inline]
    pub(crate) fn mac(&self, now: Time, generation: u32) -> Option<MacAddr> {
        let link = self.link?;
        (link.generation == generation && now < link.until).then_some(link.mac)
    }

    /// Returns whether a MAC address was resolved, which may be outdated.
    #[inline]
    pub(crate) fn was_resolved(&self) -> bool {
        self.link.is_some()
    }

    pub(crate) fn resolved(&mut self, now: Time, generation: u32, mac: MacAddr) {
        self.link = Some(Link { mac, generation, until: now + LINK_AGE });
    }

    pub(crate) fn forget_mac(&mut self) {
        self.link = None;
    }
}
