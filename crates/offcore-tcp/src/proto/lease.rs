//! The state of a DHCP client, and its lease (RFC 2131).

use std::net::{IpAddr, Ipv4Addr};

use offcore_stats::SplitMix;
use offcore_stats::time::{Micros, Time};
use offcore_wire::MacAddr;
use offcore_wire::dhcp::{DhcpKind, DhcpReply, DhcpRequest};

use super::iface::{AddressState, Iface, Prefix, Route};

pub(super) const SECOND: Micros = Micros::from_secs(1);
/// Retransmission interval of messages: it doubles up to the maximum (4.1).
const FIRST_WAIT: Micros = Micros::from_secs(4);
const LONGEST_WAIT: Micros = Micros::from_secs(64);
/// Minimum time between two attempts to renew a lease (4.4.5).
pub(super) const LEAST_RENEWAL: Micros = Micros::from_secs(60);
/// Minimum duration of a lease. Shorter leases are extended, which limits the client's messages.
const SHORTEST_LEASE: Micros = Micros::from_secs(10);
/// Minimum accepted MTU from a server: every host accepts IPv4 packets of this length (RFC 1122, 3.3.2), and every link
/// carries IPv6 packets of this length (RFC 8200, 5).
const LEAST_MTU: u16 = 576;
const LEAST_MTU_V6: u16 = 1280;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Init,
    Selecting,
    Requesting,
    /// The address is probed before it is used.
    Probing,
    Bound,
    Renewing,
    Rebinding,
}

/// An address with its parameters.
#[derive(Debug, Clone)]
pub(super) struct Lease {
    pub(super) prefix: Prefix,
    pub(super) server: Ipv4Addr,
    /// The MAC address of the sender of the server's messages: the server, a relay or a router.
    pub(super) station: MacAddr,
    pub(super) name_servers: Vec<Ipv4Addr>,
    pub(super) routes: Vec<Route>,
    pub(super) mtu: Option<u16>,
    pub(super) renewal: Time,
    pub(super) rebinding: Time,
    pub(super) end: Time,
}

/// The client of one interface.
#[derive(Debug)]
pub(crate) struct Client {
    pub iface: u8,
    pub(super) state: State,
    pub(super) xid: u32,
    /// Start of the current attempt.
    pub(super) began: Time,
    pub(super) tries: u8,
    /// Time of the next action.
    pub(super) due: Time,
    /// The offered or bound lease.
    pub(super) lease: Option<Lease>,
    /// Whether the client has provided an address to the interface.
    pub(super) has_served: bool,
    pub(super) chance: SplitMix,
}

impl Client {
    pub(super) fn new(now: Time, iface: u8, seed: u64) -> Self {
        let chance = SplitMix::new(seed);
        Self {
            iface,
            state: State::Init,
            xid: 0,
            began: now,
            tries: 0,
            due: now,
            lease: None,
            has_served: false,
            chance,
        }
    }

    /// Returns whether the interface has the address of a lease.
    pub(super) fn has_address(&self) -> bool {
        matches!(self.state, State::Bound | State::Renewing | State::Rebinding)
    }

    pub(super) fn enter(&mut self, state: State, due: Time) {
        (self.state, self.due, self.tries) = (state, due, 0);
    }

    /// Returns the time of the next retransmission of a message that is sent now for the `tries`th time.
    pub(super) fn again(&mut self, now: Time) -> Time {
        let wait = (FIRST_WAIT << self.tries.min(4)).min(LONGEST_WAIT);
        self.tries = self.tries.saturating_add(1);
        now + wait - SECOND + (SECOND * 2).random(&mut self.chance)
    }

    pub(super) fn request(&self, now: Time, mac: MacAddr, kind: DhcpKind) -> DhcpRequest {
        let secs = now.saturating_since(self.began).as_secs();
        let (xid, secs) = (self.xid, u16::try_from(secs).unwrap_or(u16::MAX));
        let offered = self.lease.as_ref().and_then(|lease| v4(lease.prefix.address));
        let server = self.lease.as_ref().map(|lease| lease.server);
        let none = DhcpRequest { kind, xid, secs, mac, client: None, requested: None, server: None };
        match self.state {
            State::Requesting | State::Probing => DhcpRequest { requested: offered, server, ..none },
            State::Renewing | State::Rebinding => DhcpRequest { client: offered, ..none },
            _ => none,
        }
    }
}

pub(super) fn v4(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) => Some(address),
        IpAddr::V6(_) => None,
    }
}

/// Reads the lease of a reply from `station`. Returns `None` if the reply has no server identifier, or if its address
/// is not a host address.
pub(super) fn lease_of(now: Time, reply: &DhcpReply, station: MacAddr) -> Option<Lease> {
    let (yours, server) = (reply.yours, reply.server?);
    let prefix = Prefix { address: yours.into(), len: reply.prefix.unwrap_or(32) };
    let host = u32::MAX.checked_shr(prefix.len.into()).unwrap_or(0);
    let names_host = prefix.len >= 31 || ![0, host].contains(&(yours.to_bits() & host));
    let [first, ..] = yours.octets();
    if first == 0 || first >= 224 || yours.is_loopback() || yours == server || !names_host {
        return None;
    }
    let seconds = |seconds: u32| Micros::from_secs(seconds.into());
    let lease = reply.lease.map_or(SECOND * 3600, seconds).max(SHORTEST_LEASE);
    // Times that are out of order, or that would cause constant traffic, are replaced by the defaults (4.4.5).
    let least = LEAST_RENEWAL.min(lease / 2);
    let usual = |given: Option<u32>, end, usual: Micros| {
        given.map(seconds).filter(|time| (least..end).contains(time)).unwrap_or(usual)
    };
    let rebinding = usual(reply.rebinding, lease, lease / 8 * 7);
    let renewal = usual(reply.renewal, rebinding, (lease / 2).min(rebinding));
    let forever = reply.lease == Some(u32::MAX);
    let at = |time: Micros| if forever { Time::NEVER } else { now + time };
    let usable = |gateway: &Ipv4Addr| !gateway.is_multicast() && !gateway.is_broadcast() && *gateway != yours;
    let routes = reply.routes.iter().filter(|(_, _, gateway)| usable(gateway));
    let routes = routes.map(|&(network, len, gateway)| Route {
        to: Prefix { address: network.into(), len },
        gateway: gateway.into(),
    });
    Some(Lease {
        prefix,
        server,
        station,
        name_servers: reply.name_servers.clone(),
        routes: routes.collect(),
        mtu: reply.mtu,
        renewal: at(renewal),
        rebinding: at(rebinding),
        end: at(lease),
    })
}

impl Iface {
    /// Adds the routes of the lease and sets its MTU.
    pub(super) fn take_lease(&mut self, lease: &mut Lease) {
        // A route that already exists is not removed with the lease.
        lease.routes.retain(|route| !self.routes.contains(route));
        self.routes.extend(lease.routes.iter().copied());
        let with_v6 = self.addresses.iter().any(|own| own.prefix.address.is_ipv6());
        let least = if with_v6 { LEAST_MTU_V6 } else { LEAST_MTU };
        self.set_dhcp_mtu(lease.mtu.map_or(u16::MAX, |mtu| mtu.max(least)));
    }

    /// Removes the routes and the MTU of the lease.
    pub(super) fn drop_routes(&mut self, lease: &Lease) {
        self.routes.retain(|route| !lease.routes.contains(route));
        self.set_dhcp_mtu(u16::MAX);
    }

    pub(super) fn address_state_of(&self, address: IpAddr) -> Option<AddressState> {
        self.addresses.iter().find(|own| own.prefix.address == address).map(|own| own.standing)
    }
}
