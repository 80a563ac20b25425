//! The protocol number, which IPv4 and IPv6 share.

use std::fmt;

/// The protocol field of IPv4 and the next-header field of IPv6.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct IpProtocol(pub u8);

impl IpProtocol {
    /// Destination options, an extension header of IPv6.
    pub const DESTINATION_OPTIONS: Self = Self(60);
    /// The fragment header, an extension header of IPv6.
    pub const FRAGMENT: Self = Self(44);
    /// Generic routing encapsulation.
    pub const GRE: Self = Self(47);
    /// Hop-by-hop options, an extension header of IPv6.
    pub const HOP_BY_HOP: Self = Self(0);
    /// ICMP.
    pub const ICMP: Self = Self(1);
    /// ICMPv6.
    pub const ICMPV6: Self = Self(58);
    /// IGMP.
    pub const IGMP: Self = Self(2);
    /// An IPv4 packet.
    pub const IPV4: Self = Self(4);
    /// An IPv6 packet.
    pub const IPV6: Self = Self(41);
    /// No next header (IPv6).
    pub const NO_NEXT_HEADER: Self = Self(59);
    /// The routing header, an extension header of IPv6.
    pub const ROUTING: Self = Self(43);
    /// TCP.
    pub const TCP: Self = Self(6);
    /// UDP.
    pub const UDP: Self = Self(17);
}

impl fmt::Display for IpProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ICMP => f.write_str("ICMP"),
            Self::ICMPV6 => f.write_str("ICMPv6"),
            Self::IGMP => f.write_str("IGMP"),
            Self::TCP => f.write_str("TCP"),
            Self::UDP => f.write_str("UDP"),
            Self(other) => write!(f, "IP protocol {other}"),
        }
    }
}

impl fmt::Debug for IpProtocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
