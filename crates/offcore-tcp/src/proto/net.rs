//! The layers below transport: interfaces, neighbours, and transmission of packets.

use std::net::{IpAddr, Ipv6Addr};

use offcore_stats::time::{Micros, Time};
use offcore_wire::{Arp, ArpOperation, IpProtocol, MacAddr, NeighborAdvert, NeighborSolicit, ipv6};

use super::announce::{BROADCAST, arp_packet};
use super::autoconf::Autoconf;
use super::call_error::CallError;
use super::groups::Query;
use super::iface::{
    AddressState, Iface, IfaceConfig, Origin, ResolvedRoute, is_link_local, may_have_route, way,
};
use super::ip::{Envelope, IpHeaders};
use super::lease::Client;
use super::neighbour::{AdvertFlags, Ask, NeighbourKey, Neighbours};
use super::packet::{Control, DropReason, Event, HEAD, Out, Verdict};
use super::path_mtu::PathMtus;
use super::steering::Share;
use super::tcb::Tcb;

/// Duration of duplicate address detection (RFC 4862: RetransTimer).
pub(super) const DETECTION: Micros = Micros::from_secs(1);
/// The Ethernet address of the loopback interface, as on Linux.
pub(super) const NO_STATION: MacAddr = MacAddr([0; 6]);
/// Interfaces and neighbours.
#[derive(Debug)]
pub(crate) struct Net {
    pub ifaces: Vec<Iface>,
    /// The interface that sends first in the next call.
    first: usize,
    /// The interface that returns packets to the host itself.
    pub(super) loopback: Option<u8>,
    pub neighbours: Neighbours,
    pub paths: PathMtus,
    /// DHCP clients of interfaces.
    pub(super) clients: Vec<Client>,
    /// Autoconfiguration of interfaces.
    pub(super) autoconfs: Vec<Autoconf>,
    /// Changes with addresses and routes. Connections then look up their route again.
    pub(super) routes: u32,
    share: Share,
    pub(super) seed: u64,
    /// Time of the last defence of an address.
    pub(super) defended: Option<Time>,
    /// Messages from other hosts that use our addresses.
    pub conflicts: u64,
}

impl Net {
    /// `seed` makes random delays different from other hosts' delays.
    pub(crate) fn new(neighbours: usize, share: Share, seed: u64) -> Self {
        Self {
            ifaces: Vec::new(),
            first: 0,
            loopback: None,
            neighbours: Neighbours::new(neighbours),
            paths: PathMtus::default(),
            clients: Vec::new(),
            autoconfs: Vec::new(),
            routes: 0,
            share,
            seed,
            defended: None,
            conflicts: 0,
        }
    }

    /// Adds an interface and announces its addresses. IPv6 addresses become usable if duplicate address detection finds
    /// no other owner within a second.
    pub(crate) fn add(&mut self, now: Time, config: &IfaceConfig, out: &mut Out) -> u8 {
        let number = self.ifaces.len() as u8;
        let mut iface = Iface::new(config, self.seed.wrapping_add(number.into()));
        iface.index = u32::from(number) + 1;
        let runs_neighbour_protocols = self.runs_neighbour_protocols();
        let v6 = iface
            .addresses
            .iter()
            .filter_map(|own| v6_of(own.prefix.address))
            .filter(|_| runs_neighbour_protocols);
        for address in v6 {
            // The groups are reported before neighbour discovery starts, so that answers pass a snooping switch (RFC
            // 4862, 5.4.2).
            iface.groups.join(now, ipv6::solicited_node(address).into());
        }
        iface.groups.timers(now, iface.sender(number), out);
        for own in &mut iface.addresses {
            match own.prefix.address {
                IpAddr::V4(_) => own.claim(now),
                IpAddr::V6(address) => {
                    own.standing = AddressState::Tentative { until: now + DETECTION };
                    if runs_neighbour_protocols {
                        let none = Ipv6Addr::UNSPECIFIED;
                        out.controls.push(solicitation(number, config.mac, none, address, None));
                    }
                }
            }
        }
        self.ifaces.push(iface);
        number
    }

    /// Returns the interfaces in the order in which they send in this call.
    #[inline]
    pub(super) fn turns(&mut self) -> impl Iterator<Item = usize> + Clone + use<> {
        let (first, count) = (self.first, self.ifaces.len());
        self.first = if first + 1 < count { first + 1 } else { 0 };
        (first..count).chain(0..first)
    }

    /// Joins a multicast group on interface `iface`. Each join needs a [`leave`](Self::leave).
    pub(crate) fn join(&mut self, now: Time, iface: u8, group: IpAddr) {
        if let Some(iface) = self.ifaces.get_mut(usize::from(iface)) {
            iface.groups.join(now, group);
        }
    }

    /// Leaves a group on interface `iface`.
    pub(crate) fn leave(&mut self, now: Time, iface: u8, group: IpAddr) -> Result<(), CallError> {
        let iface = self.ifaces.get_mut(usize::from(iface)).ok_or(CallError::Gone)?;
        iface.groups.leave(now, group)
    }

    /// Handles a router's group query.
    pub(crate) fn group_query_received(&mut self, now: Time, iface: u8, query: Query) {
        if let Some(iface) = self.ifaces.get_mut(usize::from(iface)) {
            iface.groups.asked(now, query);
        }
    }

    /// Handles another host's report in an older version of the protocol.
    pub(crate) fn group_reported(&mut self, now: Time, iface: u8, group: IpAddr) {
        if let Some(iface) = self.ifaces.get_mut(usize::from(iface)) {
            iface.groups.reported(now, group);
        }
    }

    /// Sends a packet without payload by `route`. `write` writes the transport header and payload behind the headers of
    /// the envelope, and returns the total length.
    pub(crate) fn send(
        &mut self,
        now: Time,
        route: ResolvedRoute,
        mut envelope: Envelope,
        out: &mut Out,
        write: impl FnOnce(&mut [u8; HEAD], &Envelope) -> usize,
    ) {
        // The source address may have been removed.
        if self.routes != 0 && !self.owns(envelope.src) {
            return;
        }
        let who = (route.iface, route.next_hop);
        let station = self.station(now, who, out);
        envelope.src_mac = self.ifaces[usize::from(route.iface)].mac;
        envelope.dst_mac = station.unwrap_or(MacAddr([0; 6]));
        let packet = Control::new(route.iface, |bytes| write(bytes, &envelope));
        match station {
            Some(_) => out.controls.push(packet),
            None => self.neighbours.wait(who, packet),
        }
    }

    /// Returns the route to `to`. Own addresses are reached through the loopback interface, if there is one.
    pub(crate) fn way(&self, to: IpAddr) -> Option<ResolvedRoute> {
        match self.loopback.filter(|_| self.owns(to)) {
            Some(iface) => Some(ResolvedRoute { iface, next_hop: to, source: to }),
            None => way(&self.ifaces, to),
        }
    }

    /// Returns whether an interface has `address` and may use it.
    pub(crate) fn owns(&self, address: IpAddr) -> bool {
        self.ifaces.iter().any(|iface| iface.owns(address))
    }

    /// Returns whether a route to `to` may become available.
    pub(crate) fn may_have_route(&self, to: IpAddr) -> bool {
        may_have_route(&self.ifaces, to)
    }

    /// Returns whether an interface has the address, even if it is tentative.
    pub(crate) fn has(&self, address: IpAddr) -> bool {
        let mut all = self.ifaces.iter().flat_map(|iface| &iface.addresses);
        all.any(|own| own.prefix.address == address)
    }

    /// Returns whether this stack announces, defends and resolves addresses on behalf of all workers.
    pub(super) fn runs_neighbour_protocols(&self) -> bool {
        self.share.worker == 0
    }

    /// Returns the MAC address of a neighbour. If it is unknown, it is solicited.
    pub(crate) fn station(&mut self, now: Time, who: NeighbourKey, out: &mut Out) -> Option<MacAddr> {
        if Some(who.0) == self.loopback {
            return Some(NO_STATION);
        }
        let mut question = None;
        let station = self.neighbours.resolve(now, who, |ask| question = Some(ask));
        if let Some(ask) = question {
            self.ask(ask, out);
        }
        station
    }

    /// Returns the MAC address of a connection's next hop, which the connection caches.
    #[inline]
    pub(crate) fn link(&mut self, now: Time, tcb: &mut Tcb, out: &mut Out) -> Option<MacAddr> {
        if let Some(mac) = tcb.hop.mac(now, self.neighbours.generation()) {
            return Some(mac);
        }
        if !self.has_route(tcb) {
            return None;
        }
        let mac = self.station(now, tcb.hop.neighbour(), out)?;
        tcb.hop.resolved(now, self.neighbours.generation(), mac);
        self.fit(now, tcb);
        Some(mac)
    }

    /// Adapts a connection's segment size to a path MTU that other sockets have learned.
    pub(super) fn fit(&self, now: Time, tcb: &mut Tcb) {
        if let Some(mtu) = self.paths.get(now, tcb.key.remote().ip()) {
            tcb.report_path(now, mtu);
        }
    }

    /// Stores a path MTU that a router has reported. Connections look it up before they send again.
    pub(super) fn learn_path(&mut self, now: Time, to: IpAddr, mtu: u16) {
        if self.paths.set(now, to, mtu) {
            self.neighbours.renew();
        }
    }

    fn ask(&self, ask: Ask, out: &mut Out) {
        let (number, target) = ask.who;
        let iface = &self.ifaces[usize::from(number)];
        let Some(source) = iface.source_towards(target) else { return };
        match (target, source) {
            (IpAddr::V4(target_ip), IpAddr::V4(sender_ip)) => {
                let question = Arp {
                    operation: ArpOperation::Request,
                    sender_mac: iface.mac,
                    sender_ip,
                    target_mac: MacAddr([0; 6]),
                    target_ip,
                };
                out.controls.push(arp_packet(number, ask.station.unwrap_or(BROADCAST), &question));
            }
            (IpAddr::V6(target), IpAddr::V6(source)) => {
                out.controls.push(solicitation(number, iface.mac, source, target, ask.station));
            }
            _ => {}
        }
    }

    pub(super) fn learned(
        &mut self,
        now: Time,
        who: NeighbourKey,
        mac: MacAddr,
        said: AdvertFlags,
        out: &mut Out,
    ) {
        // A multicast MAC address cannot belong to a neighbour.
        if mac.is_multicast() {
            return;
        }
        out.controls.extend(self.neighbours.learn(now, who, mac, said));
    }

    /// Processes a neighbour solicitation (RFC 4861, 7.2.3; RFC 4862, 5.4.3 for a tentative address).
    pub(crate) fn solicited(
        &mut self,
        now: Time,
        number: u8,
        ip: &IpHeaders,
        question: &NeighborSolicit,
        out: &mut Out,
    ) -> Verdict {
        let IpAddr::V6(src) = ip.src else { return Verdict::Drop(DropReason::Malformed) };
        if ip.hops != 255 {
            return Verdict::Drop(DropReason::Malformed);
        }
        let runs_neighbour_protocols = self.runs_neighbour_protocols();
        let iface = &mut self.ifaces[usize::from(number)];
        let target = IpAddr::from(question.target);
        let Some(own) = iface.addresses.iter_mut().find(|own| own.prefix.address == target) else {
            return Verdict::Consumed;
        };
        if matches!(own.standing, AddressState::Tentative { .. }) {
            if src.is_unspecified() && ip.src_mac != iface.mac {
                own.standing = AddressState::Duplicated;
                self.conflicts += u64::from(runs_neighbour_protocols);
                out.events.push(Event::AddressConflict { iface: number, address: target, mac: ip.src_mac });
            }
            return Verdict::Consumed;
        }
        let mac = iface.mac;
        if own.standing == AddressState::Duplicated {
            return Verdict::Consumed;
        }
        if let Some(station) = question.source_link.filter(|_| !src.is_unspecified()) {
            let said = AdvertFlags { answer: false, replaces: true, wanted: true };
            self.learned(now, (number, ip.src), station, said, out);
        }
        if !runs_neighbour_protocols {
            return Verdict::Consumed;
        }
        let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
        let (to, station) = match src.is_unspecified() {
            true => (all_nodes, ipv6::multicast_mac(all_nodes)),
            false => (src, question.source_link.unwrap_or(ip.src_mac)),
        };
        let advert = NeighborAdvert {
            router: false,
            solicited: !src.is_unspecified(),
            replaces: true,
            target: question.target,
            target_link: Some(mac),
        };
        out.controls.push(discovery(number, mac, station, question.target, to, |bytes| {
            advert.write(bytes, question.target, to)
        }));
        Verdict::Consumed
    }

    /// Processes a neighbour advertisement (RFC 4861, 7.2.5).
    pub(crate) fn advertised(
        &mut self,
        now: Time,
        number: u8,
        ip: &IpHeaders,
        answer: &NeighborAdvert,
        out: &mut Out,
    ) -> Verdict {
        if ip.hops != 255 {
            return Verdict::Drop(DropReason::Malformed);
        }
        let runs_neighbour_protocols = self.runs_neighbour_protocols();
        let iface = &mut self.ifaces[usize::from(number)];
        let target = IpAddr::from(answer.target);
        if let Some(own) = iface.addresses.iter_mut().find(|own| own.prefix.address == target) {
            if ip.src_mac != iface.mac {
                self.conflicts += u64::from(runs_neighbour_protocols);
                if matches!(own.standing, AddressState::Tentative { .. }) {
                    own.standing = AddressState::Duplicated;
                    out.events.push(Event::AddressConflict {
                        iface: number,
                        address: target,
                        mac: ip.src_mac,
                    });
                }
            }
            return Verdict::Consumed;
        }
        let station = answer.target_link.unwrap_or(ip.src_mac);
        let said = AdvertFlags { answer: answer.solicited, replaces: answer.replaces, wanted: false };
        self.learned(now, (number, target), station, said, out);
        Verdict::Consumed
    }

    /// Processes expired timers. `gone` is called for neighbours that do not answer.
    pub(crate) fn timers(&mut self, now: Time, out: &mut Out, gone: impl FnMut(NeighbourKey)) {
        let runs_neighbour_protocols = self.runs_neighbour_protocols();
        for (number, iface) in self.ifaces.iter_mut().enumerate() {
            for own in &mut iface.addresses {
                if matches!(own.standing, AddressState::Tentative { until } if until <= now) {
                    own.claim(now);
                    if own.life.origin == Origin::Slaac {
                        let address = own.prefix.address;
                        out.events.push(Event::Address { iface: number as u8, address, held: true });
                    }
                    if is_link_local(own.prefix.address) {
                        iface.groups.report_v6(now);
                    }
                }
                if own.next.is_some_and(|due| due <= now)
                    && let Some(message) = own.next_message(now)
                    && runs_neighbour_protocols
                {
                    out.controls.push(message.packet(number as u8, iface.mac));
                }
            }
            if iface.groups.deadline().is_some_and(|due| due <= now) {
                let sender = iface.sender(number as u8);
                iface.groups.timers(now, sender, out);
            }
        }
        let mut questions = arrayvec::ArrayVec::<Ask, 64>::new();
        self.neighbours.expire(now, questions.capacity(), |ask| questions.push(ask), gone);
        for ask in questions {
            self.ask(ask, out);
        }
    }

    /// Returns the time of the next timer.
    pub(crate) fn deadline(&self) -> Option<Time> {
        let addresses = self.ifaces.iter().flat_map(|iface| &iface.addresses);
        let detection = addresses.flat_map(|own| match own.standing {
            AddressState::Tentative { until } => [Some(until), own.next],
            _ => [None, own.next],
        });
        let detection = detection.flatten();
        let reports = self.ifaces.iter().filter_map(|iface| iface.groups.deadline());
        let leases = self.clients.iter().map(|client| client.due);
        let autoconfs = self.autoconfs.iter().filter_map(|autoconf| autoconf.deadline(&self.ifaces));
        detection.chain(reports).chain(leases).chain(autoconfs).chain(self.neighbours.deadline()).min()
    }
}

fn v6_of(address: IpAddr) -> Option<Ipv6Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => Some(address),
    }
}

pub(super) fn solicitation(
    iface: u8,
    mac: MacAddr,
    source: Ipv6Addr,
    target: Ipv6Addr,
    station: Option<MacAddr>,
) -> Control {
    let to = if station.is_some() { target } else { ipv6::solicited_node(target) };
    let question = NeighborSolicit { target, source_link: (!source.is_unspecified()).then_some(mac) };
    let station = station.unwrap_or_else(|| ipv6::multicast_mac(to));
    discovery(iface, mac, station, source, to, |bytes| question.write(bytes, source, to))
}

/// Creates a neighbour discovery packet. Its hop limit of 255 proves that it originates on the link (RFC 4861, 7.1).
pub(super) fn discovery(
    iface: u8,
    src_mac: MacAddr,
    dst_mac: MacAddr,
    src: Ipv6Addr,
    dst: Ipv6Addr,
    write: impl FnOnce(&mut [u8; 32]) -> usize,
) -> Control {
    let envelope = Envelope::new(src.into(), dst.into(), IpProtocol::ICMPV6);
    let envelope = Envelope { src_mac, dst_mac, hops: 255, ..envelope };
    Control::new(iface, |bytes| {
        let at = envelope.len();
        let len = write(bytes[at..].first_chunk_mut().expect("the buffer has room for all headers"));
        envelope.write(bytes, len);
        at + len
    })
}
