//! Errors of parsers that refuse a packet.

use std::net::{IpAddr, Ipv6Addr};

use crate::ip::IpProtocol;

/// The header that was being looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display)]
pub enum Layer {
    /// ARP
    Arp, // RFC 826
    /// DHCP
    Dhcp, // RFC 2131
    /// Ethernet
    Ethernet,
    /// ICMP
    Icmpv4, // RFC 792
    /// ICMPv6
    Icmpv6, // RFC 4443 and 4861
    /// IGMP
    Igmp, // RFC 3376
    /// IPv4
    Ipv4, // RFC 791
    /// IPv6
    Ipv6, // RFC 8200
    /// TCP
    Tcp, // RFC 9293
    /// UDP
    Udp, // RFC 768
    /// VLAN
    Vlan, // IEEE 802.1Q
}

/// A reason for rejecting bytes as a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum WireError {
    /// IPv6 packet has {found}, an extension header that is not known or not where it may be
    Extension { found: IpProtocol },
    /// {layer} field {field} is {found}, expected {expected}
    Field { layer: Layer, field: &'static str, found: u16, expected: u16 },
    /// {layer} header says it is {found} bytes long; the least is {min}
    HeaderLength { layer: Layer, found: usize, min: usize },
    /// {layer} length field says {found} bytes; expected {min} to {max}
    Length { layer: Layer, found: usize, min: usize, max: usize },
    /// {layer} target is {found}, a multicast address; expected a unicast address
    MulticastTarget { layer: Layer, found: Ipv6Addr },
    /// {layer} query asks about {found}, expected a multicast address
    NoGroup { layer: Layer, found: IpAddr },
    /// ARP operation is {found}, expected 1 (request) or 2 (reply)
    Operation { found: u16 },
    /// {layer} option {kind} is {found} bytes long; expected {min} to {max}
    OptionLength { layer: Layer, kind: u8, found: usize, min: usize, max: usize },
    /// IPv6 routing header has {segments_left} segments left, expected 0
    Routing { segments_left: u8 },
    /// IPv6 packet has more extension headers than {max}
    TooManyHeaders { max: usize },
    /// {layer} header needs {needed} bytes, but only {found} are there
    TooShort { layer: Layer, found: usize, needed: usize },
    /// IPv6 option {kind:#04x} is not known and says that the packet is to be dropped then
    UnknownOption { kind: u8 },
    /// {layer} header has version {found}, expected {expected}
    Version { layer: Layer, found: u8, expected: u8 },
}
