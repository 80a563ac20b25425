//! IP fragments (RFC 791, 3.2; RFC 8200, 4.5): parsing, and the headers of fragments and reassembled packets.

use std::net::IpAddr;
use std::ops::Range;

use offcore_wire::{EtherType, EthernetFrame, IpProtocol, Ipv4Packet, Ipv6Packet, Sum, ipv4, ipv6};

use super::ip::ETHERNET;

/// Length of IPv6's fragment header, and the unit of offsets, in bytes.
const UNIT: usize = 8;
/// Set in the word of flags and offset of IPv4 when more fragments follow.
const MORE_V4: u16 = 1 << 13;

/// The fields that identify the packet of a fragment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReassemblyKey {
    pub src: IpAddr,
    pub dst: IpAddr,
    /// The protocol for IPv4; 0 for IPv6, whose key does not include it.
    protocol: u8,
    ident: u32,
}

/// A fragment of an IP packet.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    pub of: ReassemblyKey,
    /// The range of the packet's payload.
    pub range: Range<usize>,
    pub more: bool,
    /// Offset of its payload in the frame.
    pub at: usize,
    /// For IPv6: the offset of the Next Header byte that refers to the fragment header, and the fragment header's own
    /// value.
    next_header: Option<(usize, IpProtocol)>,
}

impl Part {
    /// Parses the fragment in a frame of `len` bytes that begins with `head`. Returns `None` if it is not a valid
    /// fragment.
    pub(crate) fn of(head: &[u8], len: usize) -> Option<Self> {
        let frame = EthernetFrame::new_checked(head).ok()?;
        let available = len.saturating_sub(ETHERNET);
        let part = match frame.ethertype() {
            EtherType::IPV4 => Self::of_v4(Ipv4Packet::head_of(frame.payload(), available).ok()?),
            EtherType::IPV6 => {
                Self::of_v6(frame.payload(), Ipv6Packet::head_of(frame.payload(), available).ok()?)?
            }
            _ => return None,
        };
        let is_sound = !part.range.is_empty()
            && (!part.more || part.range.len().is_multiple_of(UNIT))
            && part.range.end <= usize::from(u16::MAX) - ipv4::HEADER_LEN;
        is_sound.then_some(part)
    }

    fn of_v4(ip: Ipv4Packet<'_>) -> Self {
        let start = usize::from(ip.fragment_offset());
        let len = usize::from(ip.total_len()) - ip.header_len();
        Self {
            of: ReassemblyKey {
                src: ip.src().into(),
                dst: ip.dst().into(),
                protocol: ip.protocol().0,
                ident: ip.ident().into(),
            },
            range: start..start + len,
            more: ip.more_fragments(),
            at: ETHERNET + ip.header_len(),
            next_header: None,
        }
    }

    fn of_v6(bytes: &[u8], ip: Ipv6Packet<'_>) -> Option<Self> {
        let transport = ip.transport().ok()?;
        let fragment = transport.fragment?;
        let behind = ip.payload().len() - transport.payload.len();
        let start = usize::from(fragment.offset);
        let len = usize::from(ip.payload_len()).checked_sub(behind)?;
        // The walk above has verified these headers.
        let (mut named_at, mut header) = (6, ipv6::HEADER_LEN);
        while IpProtocol(*bytes.get(named_at)?) != IpProtocol::FRAGMENT {
            named_at = header;
            header += UNIT * (1 + usize::from(*bytes.get(header + 1)?));
        }
        Some(Self {
            of: ReassemblyKey {
                src: ip.src().into(),
                dst: ip.dst().into(),
                protocol: 0,
                ident: fragment.ident,
            },
            range: start..start + len,
            more: fragment.more,
            at: ETHERNET + ipv6::HEADER_LEN + behind,
            next_header: Some((ETHERNET + named_at, transport.protocol)),
        })
    }

    /// Turns `head`, the headers of the first fragment, into the headers of the whole packet with `len` bytes of
    /// payload. Returns the number of bytes to remove at the front, or `None` if the packet would be too long.
    pub(crate) fn rebuild_headers(&self, head: &mut [u8], len: usize) -> Option<usize> {
        let headers = self.at - ETHERNET;
        let Some((named_at, next)) = self.next_header else {
            let total = u16::try_from(headers + len).ok()?;
            let ip = &mut head[ETHERNET..self.at];
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            ip[6..8].fill(0);
            seal_v4(ip);
            return Some(0);
        };
        let extensions = headers - ipv6::HEADER_LEN - UNIT;
        let payload = u16::try_from(extensions + len).ok()?;
        head[named_at] = next.0;
        head[ETHERNET + 4..ETHERNET + 6].copy_from_slice(&payload.to_be_bytes());
        // The headers before the fragment header move up and replace it.
        head.copy_within(..self.at - UNIT, UNIT);
        Some(UNIT)
    }
}

/// Writes the checksum of an IPv4 header.
fn seal_v4(header: &mut [u8]) {
    header[10..12].fill(0);
    let checksum = Sum::of(header).checksum();
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
}

/// Creates the headers of fragments.
#[derive(Debug)]
pub(crate) struct Cut {
    /// Ethernet and IP headers; for IPv6 with room for a fragment header.
    headers: Vec<u8>,
    is_v6: bool,
    next: u8,
    ident: u32,
    /// Length of the original headers, and maximum payload of a fragment, in bytes.
    pub skip: usize,
    size: usize,
}

impl Cut {
    /// Prepares fragments of the packet that begins with `head`, for a link with an MTU of `mtu` bytes. `ident` is the
    /// IPv6 identification. Returns `None` if the packet is not an IP packet.
    pub(crate) fn new(head: &[u8], mtu: usize, ident: u32) -> Option<Self> {
        let frame = EthernetFrame::new_checked(head).ok()?;
        let is_v6 = match frame.ethertype() {
            EtherType::IPV4 => false,
            EtherType::IPV6 => true,
            _ => return None,
        };
        let first = *frame.payload().first()?;
        let len = if is_v6 { ipv6::HEADER_LEN } else { usize::from(first & 15) * 4 };
        let skip = ETHERNET + len;
        let mut headers = head.get(..skip)?.to_vec();
        let next = if is_v6 { headers[ETHERNET + 6] } else { 0 };
        if is_v6 {
            headers[ETHERNET + 6] = IpProtocol::FRAGMENT.0;
            headers.extend([0; UNIT]);
        }
        let size = mtu.checked_sub(headers.len() - ETHERNET)? / UNIT * UNIT;
        (size > 0).then_some(Self { headers, is_v6, next, ident, skip, size })
    }

    /// Returns the ranges of `total` bytes of payload that the fragments contain.
    pub(crate) fn ranges(&self, total: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let size = self.size;
        (0..total.div_ceil(size)).map(move |index| index * size..total.min((index + 1) * size))
    }

    /// Returns the headers of the fragment that contains `range` of the payload.
    pub(crate) fn headers(&mut self, range: &Range<usize>, more: bool) -> &[u8] {
        let at = ETHERNET;
        if self.is_v6 {
            let [i0, i1, i2, i3] = self.ident.to_be_bytes();
            let [high, low] = (range.start as u16 | u16::from(more)).to_be_bytes();
            let payload = (UNIT + range.len()) as u16;
            self.headers[at + 4..at + 6].copy_from_slice(&payload.to_be_bytes());
            self.headers[self.skip..].copy_from_slice(&[self.next, 0, high, low, i0, i1, i2, i3]);
        } else {
            let ip = &mut self.headers[at..];
            let total = (ip.len() + range.len()) as u16;
            let flags = (range.start / UNIT) as u16 | if more { MORE_V4 } else { 0 };
            ip[2..4].copy_from_slice(&total.to_be_bytes());
            ip[6..8].copy_from_slice(&flags.to_be_bytes());
            seal_v4(ip);
        }
        &self.headers
    }
}
