//! Offsets of the IP and transport headers of a packet to segment. A tunnel packet has outer and inner headers.

use super::{GsoError, MAX_HEADERS};
use crate::{
    ethernet::{self, EtherType, VLAN_TAG_LEN},
    ip::IpProtocol,
    ipv4, ipv6, udp,
};

/// Maximum number of VLAN tags before an IP header.
const MAX_TAGS: usize = 2;

/// Length of a VXLAN header (RFC 7348, 5), and of a Geneve header (RFC 8926, 3.4) without options.
const VXLAN_LEN: usize = 8;
/// Bits of the first byte of a Geneve header: the length of its options in words of four bytes.
const GENEVE_OPTIONS: u8 = 0x3f;

/// Bits of the first two bytes of a GRE header (RFC 2784, RFC 2890).
const GRE_HAS_CHECKSUM: u16 = 0x8000;
const GRE_HAS_KEY: u16 = 0x2000;
/// Length of a GRE header without optional fields.
const GRE_LEN: usize = 4;
/// Offset of the optional checksum in a GRE header.
pub(super) const GRE_CHECKSUM: usize = 4;
/// GRE protocol type for an Ethernet frame.
const TRANSPARENT_ETHERNET: EtherType = EtherType(0x6558);

/// IP version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ip {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

/// An IP header.
#[derive(Debug, Clone, Copy)]
pub(super) struct IpHeader {
    pub(super) version: Ip,
    pub(super) at: usize,
    /// Offset of its payload, behind options and extension headers.
    pub(super) end: usize,
    /// Protocol of the payload; [`IpProtocol::FRAGMENT`] for a fragment.
    pub(super) protocol: IpProtocol,
    /// The IPv4 identification.
    pub(super) ident: u16,
    /// There is a routing header with segments left, so the final destination differs from the header's.
    pub(super) is_routed: bool,
}

/// The headers between the two IP headers of a tunnel packet.
#[derive(Debug, Clone, Copy)]
pub(super) enum Carrier {
    /// No header: IP in IP (RFC 2003, RFC 2473, RFC 4213).
    Ip,
    /// GRE that carries an Ethernet frame or an IP packet.
    Gre { has_checksum: bool },
    /// UDP with VXLAN, Geneve, or plain IP.
    Udp { has_checksum: bool },
}

/// The IP headers of a packet.
#[derive(Debug, Clone, Copy)]
pub(super) struct Headers {
    /// The IP header before the transport header.
    pub(super) ip: IpHeader,
    /// The outer IP header of a tunnel, and the headers after it.
    pub(super) tunnel: Option<(IpHeader, Carrier)>,
}

impl Headers {
    /// Finds the headers of a frame. `asked` has `csum_start` and `csum_offset` if a checksum is requested. If
    /// `csum_start` is not the end of the first IP header, the packet belongs to a tunnel.
    pub(super) fn find(front: &[u8], asked: Option<(u16, u16)>) -> Result<Self, GsoError> {
        let ip = IpHeader::in_frame(front, 0)?;
        let Some((csum_start, csum_offset)) = asked.filter(|(start, _)| usize::from(*start) != ip.end) else {
            return Ok(Self { ip, tunnel: None });
        };
        let (carrier, inner) = inside(front, &ip, csum_start.into()).ok_or(GsoError::Checksum {
            csum_start,
            csum_offset,
            transport_at: ip.end,
        })?;
        Ok(Self { ip: inner, tunnel: Some((ip, carrier)) })
    }

    pub(super) fn outermost(&self) -> &IpHeader {
        self.tunnel.as_ref().map_or(&self.ip, |(outer, _)| outer)
    }
}

impl IpHeader {
    /// Finds the IP header in the Ethernet frame at `at`, behind any VLAN tags.
    pub(super) fn in_frame(front: &[u8], at: usize) -> Result<Self, GsoError> {
        let mut end = at + ethernet::HEADER_LEN;
        for _ in 0..=MAX_TAGS {
            match EtherType(u16::from_be_bytes(*self::at(front, end - 2)?)) {
                EtherType::IPV4 => return Self::v4(front, end),
                EtherType::IPV6 => return Self::v6(front, end),
                EtherType::VLAN | EtherType::QINQ => end += VLAN_TAG_LEN,
                found => return Err(GsoError::EtherType { found }),
            }
        }
        Err(GsoError::EtherType { found: EtherType::VLAN })
    }

    /// Parses the IP header at `at` according to its version field.
    fn of_either(front: &[u8], at: usize) -> Result<Self, GsoError> {
        match front.get(at).map(|first| first >> 4) {
            Some(6) => Self::v6(front, at),
            _ => Self::v4(front, at),
        }
    }

    fn v4(front: &[u8], at: usize) -> Result<Self, GsoError> {
        let header: &[u8; ipv4::HEADER_LEN] = self::at(front, at)?;
        let version_ihl = header[ipv4::field::VERSION_IHL];
        let len = usize::from(version_ihl & 0x0f) * 4;
        if version_ihl >> 4 != 4 || len < ipv4::HEADER_LEN {
            return Err(GsoError::IpHeader { found: version_ihl });
        }
        let more_or_offset = header[ipv4::field::FLAGS_OFFSET] & 0x3f | header[ipv4::field::FLAGS_OFFSET + 1];
        let protocol = match more_or_offset {
            0 => IpProtocol(header[ipv4::field::PROTOCOL]),
            _ => IpProtocol::FRAGMENT,
        };
        let ident = u16::from_be_bytes([header[ipv4::field::IDENT], header[ipv4::field::IDENT + 1]]);
        Ok(Self { version: Ip::V4, at, end: at + len, protocol, ident, is_routed: false })
    }

    fn v6(front: &[u8], at: usize) -> Result<Self, GsoError> {
        let header: &[u8; ipv6::HEADER_LEN] = self::at(front, at)?;
        if header[0] >> 4 != 6 {
            return Err(GsoError::IpHeader { found: header[0] });
        }
        let mut protocol = IpProtocol(header[ipv6::field::NEXT_HEADER]);
        let (mut end, mut is_routed) = (at + ipv6::HEADER_LEN, false);
        // Each header has at least 8 bytes, within the first MAX_HEADERS bytes.
        while end < MAX_HEADERS
            && matches!(
                protocol,
                IpProtocol::HOP_BY_HOP | IpProtocol::DESTINATION_OPTIONS | IpProtocol::ROUTING
            )
        {
            let extension: &[u8; 4] = self::at(front, end)?;
            is_routed |= protocol == IpProtocol::ROUTING && extension[3] != 0;
            protocol = IpProtocol(extension[0]);
            end += 8 + usize::from(extension[1]) * 8;
        }
        Ok(Self { version: Ip::V6, at, end, protocol, ident: 0, is_routed })
    }
}

/// Finds the inner IP header of `outer` whose transport header begins at `transport`.
fn inside(front: &[u8], outer: &IpHeader, transport: usize) -> Option<(Carrier, IpHeader)> {
    let (carrier, ip) = match outer.protocol {
        IpProtocol::IPV4 => (Carrier::Ip, IpHeader::v4(front, outer.end).ok()?),
        IpProtocol::IPV6 => (Carrier::Ip, IpHeader::v6(front, outer.end).ok()?),
        IpProtocol::GRE => in_gre(front, outer.end).ok()?,
        IpProtocol::UDP if !outer.is_routed => {
            let has_checksum = has_udp_checksum(front, outer.end).ok()?;
            let ip = in_udp(front, outer.end + udp::HEADER_LEN).find(|ip| ip.end == transport)?;
            (Carrier::Udp { has_checksum }, ip)
        }
        _ => return None,
    };
    (ip.end == transport).then_some((carrier, ip))
}

/// Finds the IP header behind the GRE header at `at`. GRE with sequence numbers is refused: Linux does not offload the
/// segmentation of such packets.
fn in_gre(front: &[u8], at: usize) -> Result<(Carrier, IpHeader), GsoError> {
    let header: &[u8; GRE_LEN] = self::at(front, at)?;
    let flags = u16::from_be_bytes([header[0], header[1]]);
    let has_checksum = flags & GRE_HAS_CHECKSUM != 0;
    let optional = 4 * (usize::from(has_checksum) + usize::from(flags & GRE_HAS_KEY != 0));
    let end = at + GRE_LEN + optional;
    let ip = match EtherType(u16::from_be_bytes([header[2], header[3]])) {
        found if flags & !(GRE_HAS_CHECKSUM | GRE_HAS_KEY) != 0 => Err(GsoError::EtherType { found }),
        EtherType::IPV4 => IpHeader::v4(front, end),
        EtherType::IPV6 => IpHeader::v6(front, end),
        TRANSPARENT_ETHERNET => IpHeader::in_frame(front, end),
        found => Err(GsoError::EtherType { found }),
    }?;
    Ok((Carrier::Gre { has_checksum }, ip))
}

/// Returns candidates for the inner IP header of the UDP payload at `at`. Only the port determines the tunnel protocol,
/// and administrators choose ports. Therefore, the caller selects the candidate whose transport header is at
/// `csum_start`.
fn in_udp(front: &[u8], at: usize) -> impl Iterator<Item = IpHeader> {
    let options = usize::from(front.get(at).map_or(0, |first| first & GENEVE_OPTIONS)) * 4;
    let (vxlan, geneve) = (at + VXLAN_LEN, at + VXLAN_LEN + options);
    let in_frames = [vxlan, geneve].map(|at| IpHeader::in_frame(front, at));
    let bare = [vxlan, geneve, at].map(|at| IpHeader::of_either(front, at));
    in_frames.into_iter().chain(bare).flatten()
}

/// Returns whether the UDP header at `at` has a checksum.
pub(super) fn has_udp_checksum(front: &[u8], at: usize) -> Result<bool, GsoError> {
    let header: &[u8; udp::HEADER_LEN] = self::at(front, at)?;
    Ok(header[udp::field::CHECKSUM..] != [0; 2])
}

/// Returns the `N` bytes at `at`.
pub(super) fn at<const N: usize>(front: &[u8], at: usize) -> Result<&[u8; N], GsoError> {
    let error = GsoError::TooShort { found: front.len(), needed: at + N };
    front.get(at..).and_then(<[u8]>::first_chunk).ok_or(error)
}
