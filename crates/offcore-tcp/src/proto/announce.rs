//! Probes and announcements of our own IPv4 addresses (RFC 5227), as ARP packets.
//!
//! An address is probed before it is used. RFC 5227 spreads the probes over 4 to 7 s, for links with seconds of delay.
//! This module takes 120 ms, because a kernel does not probe at all and a starting server should answer about as early.

use std::net::{IpAddr, Ipv4Addr};

use offcore_stats::time::{Micros, Time};
use offcore_wire::{Arp, ArpOperation, EtherType, MacAddr, arp, ethernet};

use super::iface::{AddressState, OwnAddress};
use super::packet::Control;

/// Number of probes (PROBE_NUM), and the time after each.
const PROBES: u8 = 3;
const PROBE_INTERVAL: Micros = Micros::from_millis(40);
/// Number of announcements (ANNOUNCE_NUM), and the time between them (ANNOUNCE_INTERVAL).
const ANNOUNCEMENTS: u8 = 2;
const ANNOUNCE_INTERVAL: Micros = Micros::from_secs(2);

pub(super) const BROADCAST: MacAddr = MacAddr([0xff; 6]);

/// A probe or an announcement of an own address.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AddressClaim {
    pub(super) address: Ipv4Addr,
    /// The sender's protocol address. A probe has none, so that no cache learns from it.
    pub(super) sender: Ipv4Addr,
}

impl AddressClaim {
    pub(super) fn packet(self, iface: u8, mac: MacAddr) -> Control {
        let message = Arp {
            operation: ArpOperation::Request,
            sender_mac: mac,
            sender_ip: self.sender,
            target_mac: MacAddr([0; 6]),
            target_ip: self.address,
        };
        arp_packet(iface, BROADCAST, &message)
    }
}

impl OwnAddress {
    /// Makes the address preferred, and announces an IPv4 address.
    pub(super) fn claim(&mut self, now: Time) {
        self.standing = AddressState::Preferred;
        if self.prefix.address.is_ipv4() {
            (self.left, self.next) = (ANNOUNCEMENTS, Some(now));
        }
    }

    /// Makes the address tentative, and probes it.
    pub(super) fn probe(&mut self, now: Time) {
        self.standing = AddressState::Tentative { until: now + PROBE_INTERVAL * PROBES.into() };
        (self.left, self.next) = (PROBES, Some(now));
    }

    /// Returns the next probe or announcement if it is due.
    pub(super) fn next_message(&mut self, now: Time) -> Option<AddressClaim> {
        let IpAddr::V4(address) = self.prefix.address else { return None };
        if self.standing == AddressState::Duplicated {
            self.probe(now);
        }
        let (sender, interval) = match self.standing {
            AddressState::Preferred => (address, ANNOUNCE_INTERVAL),
            _ => (Ipv4Addr::UNSPECIFIED, PROBE_INTERVAL),
        };
        self.left = self.left.saturating_sub(1);
        self.next = (self.left > 0).then_some(now + interval);
        Some(AddressClaim { address, sender })
    }
}

pub(super) fn arp_packet(iface: u8, to: MacAddr, message: &Arp) -> Control {
    Control::new(iface, |bytes| {
        let (link, rest) = bytes.split_first_chunk_mut().expect("the buffer has room for all headers");
        ethernet::write_header(link, to, message.sender_mac, EtherType::ARP);
        message.write(rest.first_chunk_mut().expect("the buffer has room for all headers"));
        ethernet::HEADER_LEN + arp::LEN
    })
}
