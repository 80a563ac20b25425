//! Packets of this host quoted by ICMP errors: an IP header and at least eight bytes of its payload (RFC 792).

use std::net::{IpAddr, SocketAddr};

use offcore_wire::{IpProtocol, Ipv4Packet, Ipv6Packet};

use super::addr::FlowKey;

/// A quoted packet of this host.
pub(super) struct Quoted<'a> {
    pub key: FlowKey,
    /// TCP or UDP.
    pub protocol: IpProtocol,
    /// The sequence number of a segment.
    pub seq: u32,
    /// The quoted bytes behind the first eight bytes of the transport header.
    pub payload: &'a [u8],
}

impl<'a> Quoted<'a> {
    pub(super) fn v4(bytes: &'a [u8]) -> Option<Self> {
        let ip = Ipv4Packet::head_of(bytes, u16::MAX.into()).ok()?;
        Self::with_ports(ip.src().into(), ip.dst().into(), ip.protocol(), ip.payload())
    }

    pub(super) fn v6(bytes: &'a [u8]) -> Option<Self> {
        let ip = Ipv6Packet::head_of(bytes, 40 + usize::from(u16::MAX)).ok()?;
        Self::with_ports(ip.src().into(), ip.dst().into(), ip.next_header(), ip.payload())
    }

    /// Reads the ports from the first four bytes, and a sequence number from the next four.
    fn with_ports(src: IpAddr, dst: IpAddr, protocol: IpProtocol, bytes: &'a [u8]) -> Option<Self> {
        let known = matches!(protocol, IpProtocol::TCP | IpProtocol::UDP);
        let (first, payload) = bytes.split_first_chunk::<8>().filter(|_| known)?;
        let &[a, b, c, d, e, f, g, h] = first;
        let (from, to) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        let key = FlowKey::new(SocketAddr::new(src, from), SocketAddr::new(dst, to))?;
        Some(Self { key, protocol, seq: u32::from_be_bytes([e, f, g, h]), payload })
    }

    /// Returns the quoted packet if it is a TCP segment.
    pub(super) fn segment(self) -> Option<Self> {
        Some(self).filter(|quoted| quoted.protocol == IpProtocol::TCP)
    }
}
