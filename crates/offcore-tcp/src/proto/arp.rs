//! ARP (RFC 826), and conflicts of IPv4 addresses (RFC 5227).

use std::net::IpAddr;

use offcore_stats::time::{Micros, Time};
use offcore_wire::{Arp, ArpOperation, ethernet};

use super::announce::{AddressClaim, arp_packet};
use super::iface::{AddressState, OwnAddress};
use super::neighbour::AdvertFlags;
use super::net::Net;
use super::packet::{DropReason, Event, Out, Verdict};

/// Minimum time between two defences of an address (2.4: DEFEND_INTERVAL).
const DEFEND: Micros = Micros::from_secs(10);
/// Time until an address in conflict is probed again (RATE_LIMIT_INTERVAL).
const RETRY: Micros = Micros::from_secs(60);

impl Net {
    /// Probes the IPv4 addresses of an interface before they are used.
    pub(crate) fn detect_conflicts(&mut self, now: Time, iface: u8) {
        let Some(iface) = self.ifaces.get_mut(usize::from(iface)) else { return };
        iface.addresses.iter_mut().filter(|own| own.prefix.address.is_ipv4()).for_each(|own| own.probe(now));
    }

    /// Returns whether an IPv4 address is still being probed.
    pub(crate) fn is_probing(&self) -> bool {
        let mut own = self.ifaces.iter().flat_map(|iface| &iface.addresses);
        own.any(|own| own.prefix.address.is_ipv4() && matches!(own.standing, AddressState::Tentative { .. }))
    }

    /// Handles a received ARP packet.
    pub(crate) fn arp(&mut self, now: Time, number: u8, head: &[u8], out: &mut Out) -> Verdict {
        let Ok(message) = Arp::parse(&head[ethernet::HEADER_LEN.min(head.len())..]) else {
            return Verdict::Drop(DropReason::Malformed);
        };
        let mac = self.ifaces[usize::from(number)].mac;
        if message.sender_mac == mac || self.conflicts_with(now, number, &message, out) {
            return Verdict::Consumed;
        }
        let iface = &self.ifaces[usize::from(number)];
        if iface.owns(message.sender_ip.into()) {
            if !self.runs_neighbour_protocols() {
                return Verdict::Consumed;
            }
            self.conflicts += 1;
            if self.defended.is_none_or(|last| now - last >= DEFEND) {
                self.defended = Some(now);
                let claim = AddressClaim { address: message.sender_ip, sender: message.sender_ip };
                out.controls.push(claim.packet(number, mac));
            }
            return Verdict::Consumed;
        }
        let wanted = iface.owns(message.target_ip.into());
        if !message.sender_ip.is_unspecified() && !message.sender_mac.is_multicast() {
            let answer = wanted && message.operation == ArpOperation::Reply;
            // Only neighbours on the link and gateways can be a next hop.
            let near = iface.is_near(message.sender_ip.into());
            let said = AdvertFlags { answer, replaces: true, wanted: wanted && near };
            self.learned(now, (number, message.sender_ip.into()), message.sender_mac, said, out);
        }
        if wanted && self.runs_neighbour_protocols() && message.operation == ArpOperation::Request {
            let answer = Arp {
                operation: ArpOperation::Reply,
                sender_mac: mac,
                sender_ip: message.target_ip,
                target_mac: message.sender_mac,
                target_ip: message.sender_ip,
            };
            out.controls.push(arp_packet(number, message.sender_mac, &answer));
        }
        Verdict::Consumed
    }

    /// Returns whether another host has, or probes, an address that is being probed here (2.1.1).
    fn conflicts_with(&mut self, now: Time, number: u8, message: &Arp, out: &mut Out) -> bool {
        let is_probe = message.sender_ip.is_unspecified() && message.operation == ArpOperation::Request;
        let claimed = IpAddr::from(if is_probe { message.target_ip } else { message.sender_ip });
        let probed = |own: &&mut OwnAddress| {
            own.prefix.address == claimed && matches!(own.standing, AddressState::Tentative { .. })
        };
        let Some(own) = self.ifaces[usize::from(number)].addresses.iter_mut().find(probed) else {
            return false;
        };
        own.standing = AddressState::Duplicated;
        (own.left, own.next) = (0, Some(now + RETRY));
        self.conflicts += u64::from(self.runs_neighbour_protocols());
        out.events.push(Event::AddressConflict { iface: number, address: claimed, mac: message.sender_mac });
        true
    }
}
