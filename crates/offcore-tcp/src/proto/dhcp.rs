//! A DHCP client for an interface (RFC 2131). It requests a lease, renews it, and removes the address when the lease
//! has expired.
//!
//! ```text
//! Init -> Selecting -> Requesting -> Probing -> Bound <-> Renewing -> Rebinding -> Init
//! ```

use std::net::{IpAddr, Ipv4Addr};

use arrayvec::ArrayVec;
use offcore_stats::time::{Micros, Time};
use offcore_wire::dhcp::{self, DhcpKind, DhcpReply, DhcpRequest};
use offcore_wire::{EtherType, IpProtocol, Ipv4Header, MacAddr, Sum, UdpHeader, ethernet, ipv4, udp};

use super::announce::BROADCAST;
use super::iface::{AddressLifetime, AddressState, Origin};
use super::ip::IpHeaders;
use super::lease::{Client, LEAST_RENEWAL, Lease, SECOND, State, lease_of, v4};
use super::neighbour::NeighbourKey;
use super::net::Net;
use super::packet::{DropReason, Event, Message, Out, RxSeg, Verdict};
use super::stack::Stack;

/// Number of requests before another server is selected.
const REQUESTS: u8 = 4;
/// Delay before the client restarts after a conflict (3.1, 5).
const AFTER_CONFLICT: Micros = Micros::from_secs(10);
/// Interval of checks whether the probes of the address have passed.
const LOOK: Micros = Micros::from_millis(20);

impl Stack {
    /// Starts a DHCP client, which configures the IPv4 address of an interface, its routes and its MTU (RFC 2131). The
    /// stack must have one worker.
    pub fn start_dhcp(&mut self, now: Time, iface: u8) {
        self.net.start_dhcp(now, iface);
    }

    /// Releases the leases of all DHCP clients, and removes their addresses. The clients stop (4.4.6).
    pub fn release_leases(&mut self, now: Time, out: &mut Out) {
        for mut client in std::mem::take(&mut self.net.clients) {
            self.net.release(now, &mut client, out);
        }
    }

    /// Processes a packet to an address that the interface does not have: a server may send its reply to the offered
    /// address.
    #[cold]
    pub(super) fn dhcp_offer(
        &mut self,
        now: Time,
        iface: u8,
        ip: &IpHeaders,
        packet: &RxSeg<'_>,
        out: &mut Out,
    ) -> Result<Verdict, DropReason> {
        if !self.net.has_client(iface, ip.dst) {
            return Err(DropReason::NotForUs);
        }
        let here = self.net.ifaces.get(usize::from(iface));
        let to_station = here.is_some_and(|here| ip.dst_mac == here.mac || ip.dst_mac == BROADCAST);
        let port = packet.head.get(ip.transport + 2..).and_then(<[u8]>::first_chunk);
        let to_client = port.is_some_and(|port| u16::from_be_bytes(*port) == dhcp::CLIENT_PORT);
        if to_station && to_client && ip.protocol == IpProtocol::UDP && !ip.fragment {
            return self.datagram(now, iface, ip, packet, out);
        }
        Err(DropReason::NotForUs)
    }

    /// Processes a datagram from `station` to the client of an interface. It is empty if it is not in one buffer.
    #[cold]
    pub(super) fn dhcp_message(
        &mut self,
        now: Time,
        iface: u8,
        station: MacAddr,
        message: &[u8],
        out: &mut Out,
    ) {
        let before = self.net.ifaces.get(usize::from(iface)).map_or(0, |iface| iface.mtu);
        self.net.dhcp_reply(now, iface, station, message, out);
        self.fit_mtu(iface, before);
    }

    /// Runs the timers of interfaces, neighbours, autoconfiguration and DHCP clients.
    pub(super) fn net_timers(&mut self, now: Time, out: &mut Out) {
        let mut silent = ArrayVec::<NeighbourKey, 64>::new();
        self.net.timers(now, out, |who| {
            let _ = silent.try_push(who);
        });
        // By reference: moving the list costs more than its entries, usually none.
        for &(iface, address) in &silent {
            self.net.neighbour_is_silent(iface, address);
        }
        self.net.autoconf_timers(now, out);
        for at in 0..self.net.clients.len() {
            let client = &self.net.clients[at];
            if client.due <= now {
                let iface = client.iface;
                let before = self.net.ifaces[usize::from(iface)].mtu;
                self.net.dhcp_timers(now, iface, out);
                self.fit_mtu(iface, before);
            }
        }
    }
}

impl Net {
    /// Returns whether a client receives datagrams to `address` on an interface.
    pub(crate) fn has_client(&self, iface: u8, address: IpAddr) -> bool {
        address.is_ipv4() && self.clients.iter().any(|client| client.iface == iface)
    }

    /// Starts the client of an interface.
    pub(crate) fn start_dhcp(&mut self, now: Time, iface: u8) {
        let seed = self.seed ^ u64::from(iface).rotate_left(32);
        if usize::from(iface) < self.ifaces.len() && !self.clients.iter().any(|client| client.iface == iface)
        {
            self.clients.push(Client::new(now, iface, seed));
        }
    }

    /// Runs the timer of an interface's client.
    pub(crate) fn dhcp_timers(&mut self, now: Time, number: u8, out: &mut Out) {
        let Some(at) = self.clients.iter().position(|client| client.iface == number) else { return };
        let mut dhcp = self.clients.remove(at);
        let mac = self.ifaces[usize::from(number)].mac;
        match dhcp.state {
            State::Init => {
                dhcp.xid = dhcp.chance.next() as u32;
                dhcp.began = now;
                dhcp.enter(State::Selecting, now);
                dhcp.due = dhcp.again(now);
                out.messages.push(broadcast(number, mac, &dhcp.request(now, mac, DhcpKind::Discover)));
            }
            State::Selecting => {
                dhcp.due = dhcp.again(now);
                out.messages.push(broadcast(number, mac, &dhcp.request(now, mac, DhcpKind::Discover)));
            }
            State::Requesting if dhcp.tries >= REQUESTS => {
                dhcp.lease = None;
                dhcp.enter(State::Init, now);
            }
            State::Requesting => {
                dhcp.due = dhcp.again(now);
                out.messages.push(broadcast(number, mac, &dhcp.request(now, mac, DhcpKind::Request)));
            }
            State::Probing => self.look_at_probes(now, number, &mut dhcp, out),
            State::Bound | State::Renewing | State::Rebinding => self.renew(now, number, &mut dhcp, out),
        }
        self.clients.insert(at, dhcp);
    }

    /// Binds the address when its probes have passed, or declines it if another host has it.
    fn look_at_probes(&mut self, now: Time, number: u8, dhcp: &mut Client, out: &mut Out) {
        let Some(mut lease) = dhcp.lease.clone() else { return dhcp.enter(State::Init, now) };
        let iface = &mut self.ifaces[usize::from(number)];
        match iface.address_state_of(lease.prefix.address) {
            Some(AddressState::Tentative { .. }) => dhcp.due = now + LOOK,
            Some(AddressState::Preferred) => {
                self.take_lease(number, None, &mut lease);
                dhcp.enter(State::Bound, lease.renewal);
                dhcp.has_served = true;
                out.events.push(Event::Address { iface: number, address: lease.prefix.address, held: true });
                dhcp.lease = Some(lease);
            }
            _ => {
                let decline = dhcp.request(now, iface.mac, DhcpKind::Decline);
                out.messages.push(broadcast(number, iface.mac, &decline));
                self.drop_lease(now, number, &lease, out);
                dhcp.lease = None;
                dhcp.enter(State::Init, now + AFTER_CONFLICT);
            }
        }
    }

    /// Renews the lease with its server, then with any server. Removes the address when the lease has expired.
    fn renew(&mut self, now: Time, number: u8, dhcp: &mut Client, out: &mut Out) {
        let Some(lease) = dhcp.lease.clone() else { return dhcp.enter(State::Init, now) };
        if now >= lease.end {
            return self.lose_lease(now, number, dhcp, out);
        }
        if dhcp.state == State::Bound {
            (dhcp.xid, dhcp.began) = (dhcp.chance.next() as u32, now);
        }
        let (state, until) = match now >= lease.rebinding {
            true => (State::Rebinding, lease.end),
            false => (State::Renewing, lease.rebinding),
        };
        dhcp.enter(state, now.saturating_add(LEAST_RENEWAL.max((until - now) / 2)).min(until));
        let mac = self.ifaces[usize::from(number)].mac;
        let request = dhcp.request(now, mac, DhcpKind::Request);
        let Some(own) = v4(lease.prefix.address) else { return };
        if state == State::Rebinding {
            return out.messages.push(message(number, mac, BROADCAST, own, Ipv4Addr::BROADCAST, &request));
        }
        // Uses the route to the server, which may be behind a router.
        let way = self.way(lease.server.into()).filter(|way| way.iface == number);
        let station = way.and_then(|way| self.station(now, (number, way.next_hop), out));
        match station {
            Some(station) => out.messages.push(message(number, mac, station, own, lease.server, &request)),
            None => dhcp.due = (now + SECOND).min(until),
        }
    }

    /// Applies the routes and the MTU of a lease, which replace those from the previous lease.
    fn take_lease(&mut self, number: u8, old: Option<&Lease>, lease: &mut Lease) {
        let iface = &mut self.ifaces[usize::from(number)];
        let before = iface.routes.clone();
        if let Some(old) = old {
            iface.drop_routes(old);
        }
        iface.take_lease(lease);
        if iface.routes != before {
            self.routes_changed();
        }
    }

    /// Removes the address, the routes and the MTU of a lease.
    fn drop_lease(&mut self, now: Time, number: u8, lease: &Lease, out: &mut Out) {
        self.ifaces[usize::from(number)].drop_routes(lease);
        self.remove_address(now, number, lease.prefix.address, out);
    }

    fn lose_lease(&mut self, now: Time, number: u8, dhcp: &mut Client, out: &mut Out) {
        if let Some(lease) = dhcp.lease.take() {
            self.drop_lease(now, number, &lease, out);
        }
        // The delay limits the rate of messages if a server repeatedly grants and revokes leases.
        dhcp.enter(State::Init, now + SECOND);
    }

    /// Releases a lease to its server.
    fn release(&mut self, now: Time, dhcp: &mut Client, out: &mut Out) {
        let number = dhcp.iface;
        if matches!(dhcp.state, State::Bound | State::Renewing | State::Rebinding)
            && let Some(lease) = dhcp.lease.take()
        {
            let (mac, own) = (self.ifaces[usize::from(number)].mac, v4(lease.prefix.address));
            let request = DhcpRequest {
                kind: DhcpKind::Release,
                xid: dhcp.chance.next() as u32,
                secs: 0,
                mac,
                client: own,
                requested: None,
                server: Some(lease.server),
            };
            let from = own.unwrap_or(Ipv4Addr::UNSPECIFIED);
            out.messages.push(message(number, mac, lease.station, from, lease.server, &request));
            self.drop_lease(now, number, &lease, out);
        }
    }

    /// Processes a message of a server, received on an interface from `station`.
    pub(crate) fn dhcp_reply(
        &mut self,
        now: Time,
        number: u8,
        station: MacAddr,
        message: &[u8],
        out: &mut Out,
    ) {
        let Some(at) = self.clients.iter().position(|client| client.iface == number) else { return };
        let mac = self.ifaces[usize::from(number)].mac;
        let mut dhcp = self.clients.remove(at);
        if let Ok(reply) = DhcpReply::parse(message, mac)
            && reply.xid == dhcp.xid
        {
            self.take_reply(now, station, &mut dhcp, &reply, out);
        }
        self.clients.insert(at, dhcp);
    }

    fn take_reply(
        &mut self,
        now: Time,
        station: MacAddr,
        dhcp: &mut Client,
        reply: &DhcpReply,
        out: &mut Out,
    ) {
        let number = dhcp.iface;
        // Any server may offer or extend a lease. Otherwise only the selected server answers.
        let asked = dhcp.lease.as_ref().filter(|lease| reply.server == Some(lease.server));
        match (dhcp.state, reply.kind) {
            (State::Selecting, DhcpKind::Offer) => {
                // An offer of an address that the host already has is ignored.
                let lease = lease_of(now, reply, station).filter(|lease| !self.has(lease.prefix.address));
                if let Some(lease) = lease {
                    dhcp.lease = Some(lease);
                    dhcp.enter(State::Requesting, now);
                }
            }
            (State::Requesting, DhcpKind::Ack) => {
                let Some(offered) = asked.map(|lease| lease.prefix.address) else { return };
                let lease = lease_of(now, reply, station).filter(|lease| lease.prefix.address == offered);
                let Some(lease) = lease.filter(|_| !self.has(offered)) else { return };
                self.add_address(now, number, lease.prefix, AddressLifetime::permanent(Origin::Dhcp), out);
                dhcp.lease = Some(lease);
                dhcp.enter(State::Probing, now + LOOK);
            }
            (State::Requesting, DhcpKind::Nak) if asked.is_some() => {
                dhcp.lease = None;
                dhcp.enter(State::Init, now + SECOND);
            }
            (State::Renewing | State::Rebinding, DhcpKind::Ack | DhcpKind::Nak)
                if asked.is_none() && dhcp.state == State::Renewing => {}
            (State::Renewing | State::Rebinding, DhcpKind::Ack) => {
                let Some(mut lease) = lease_of(now, reply, station) else { return };
                match &dhcp.lease {
                    Some(old) if old.prefix == lease.prefix => {
                        self.take_lease(number, Some(old), &mut lease);
                        dhcp.enter(State::Bound, lease.renewal);
                        dhcp.lease = Some(lease);
                    }
                    // A different address requires a new lease.
                    _ => self.lose_lease(now, number, dhcp, out),
                }
            }
            (State::Renewing | State::Rebinding, DhcpKind::Nak) => self.lose_lease(now, number, dhcp, out),
            _ => {}
        }
    }
}

/// Creates a message of a client without an address.
fn broadcast(iface: u8, mac: MacAddr, request: &DhcpRequest) -> Message {
    message(iface, mac, BROADCAST, Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST, request)
}

fn message(
    iface: u8,
    src_mac: MacAddr,
    dst_mac: MacAddr,
    src: Ipv4Addr,
    dst: Ipv4Addr,
    request: &DhcpRequest,
) -> Message {
    let mut payload = [0; dhcp::LEN];
    request.write(&mut payload);
    let len = (udp::HEADER_LEN + dhcp::LEN) as u16;
    let header = Ipv4Header {
        src,
        dst,
        protocol: IpProtocol::UDP,
        dscp_ecn: 0,
        ident: 0,
        dont_fragment: false,
        ttl: 64,
        total_len: ipv4::HEADER_LEN as u16 + len,
    };
    let mut link = [0; ethernet::HEADER_LEN];
    ethernet::write_header(&mut link, dst_mac, src_mac, EtherType::IPV4);
    let mut network = [0; ipv4::HEADER_LEN];
    header.write(&mut network);
    let mut transport = [0; udp::HEADER_LEN];
    UdpHeader { src_port: dhcp::CLIENT_PORT, dst_port: dhcp::SERVER_PORT, len }.write(&mut transport);
    let pseudo = Sum::pseudo_v4(src, dst, IpProtocol::UDP, len);
    let sum = (pseudo + Sum::of(&transport) + Sum::of(&payload)).checksum_nonzero();
    transport[usize::from(udp::CHECKSUM_OFFSET)..].copy_from_slice(&sum.to_be_bytes());
    Message { iface, bytes: [&link[..], &network, &transport, &payload].concat() }
}
