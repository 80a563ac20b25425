//! Parsing and writing of the headers in front of TCP, UDP and ICMP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use offcore_wire::checksum::update;
use offcore_wire::{
    EtherType, EthernetFrame, IpProtocol, Ipv4Header, Ipv4Packet, Ipv6Header, Ipv6Packet, MacAddr, Sum,
    ethernet, ipv4, ipv6, tcp, udp,
};

use super::addr::FlowKey;
use super::packet::{DropReason, HEAD};

/// Length of the header in front of the IP header.
pub(crate) const ETHERNET: usize = ethernet::HEADER_LEN;

/// Default hop limit.
const HOPS: u8 = 64;

/// The headers of a received packet before the transport header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IpHeaders {
    pub src_mac: MacAddr,
    pub dst_mac: MacAddr,
    pub src: IpAddr,
    pub dst: IpAddr,
    pub protocol: IpProtocol,
    /// Explicit congestion notification, 0 to 3.
    pub ecn: u8,
    /// Time to live, or hop limit.
    pub hops: u8,
    /// Offset of the transport header in the frame.
    pub transport: usize,
    /// Offset of the end of the IP packet in the frame.
    pub end: usize,
    pub fragment: bool,
}

/// The type of a frame.
pub(crate) enum Frame {
    Arp,
    Ip,
}

/// Returns the offset of the end of the bytes that the transport checksum covers in a frame of `len` bytes. `head`
/// holds the frame's first bytes. It is the end of the IP packet, or of the UDP datagram in it. For any other protocol
/// it is `len`.
pub fn sum_end(head: &[u8], len: usize) -> usize {
    let Ok(frame) = EthernetFrame::new_checked(head) else { return len };
    let available = len.saturating_sub(ethernet::HEADER_LEN);
    let found = match frame.ethertype() {
        EtherType::IPV4 => Ipv4Packet::head_of(frame.payload(), available)
            .ok()
            .map(|ip| (usize::from(ip.total_len()), ip.header_len(), ip.protocol())),
        EtherType::IPV6 => Ipv6Packet::head_of(frame.payload(), available)
            .ok()
            .map(|ip| (ipv6::HEADER_LEN + usize::from(ip.payload_len()), ipv6::HEADER_LEN, ip.next_header())),
        _ => None,
    };
    let Some((end, transport, protocol)) = found else { return len };
    let end = ethernet::HEADER_LEN + end;
    if protocol == IpProtocol::UDP {
        end_of_datagram(head, ethernet::HEADER_LEN + transport, end)
    } else {
        end
    }
}

/// Returns the end of the datagram whose header begins at `transport`, in a packet that ends at `end`.
#[cold]
fn end_of_datagram(head: &[u8], transport: usize, end: usize) -> usize {
    let &[.., high, low] = head.get(transport..).and_then(<[u8]>::first_chunk::<6>).unwrap_or(&[0; 6]);
    let len = usize::from(u16::from_be_bytes([high, low]));
    if len < udp::HEADER_LEN { end } else { end.min(transport + len) }
}

/// Parses the headers of a frame of `len` bytes that begins with `head`. The IP headers are stored in `headers`.
// The result is written in place: copying a struct whose fields were just stored stalls, for every packet.
#[inline]
pub(crate) fn parse(head: &[u8], len: usize, headers: &mut IpHeaders) -> Result<Frame, DropReason> {
    let frame = EthernetFrame::new_checked(head).map_err(|_| DropReason::Malformed)?;
    let available = len.saturating_sub(ethernet::HEADER_LEN);
    match frame.ethertype() {
        EtherType::IPV4 => parse_v4(&frame, available, headers)?,
        EtherType::IPV6 => parse_v6(&frame, available, headers)?,
        EtherType::ARP => return Ok(Frame::Arp),
        _ => return Err(DropReason::Protocol),
    }
    Ok(Frame::Ip)
}

#[inline]
fn parse_v4(frame: &EthernetFrame<'_>, available: usize, to: &mut IpHeaders) -> Result<(), DropReason> {
    let ip = Ipv4Packet::head_of(frame.payload(), available).map_err(|_| DropReason::Malformed)?;
    if !ip.verify_checksum() {
        return Err(DropReason::Checksum);
    }
    *to = IpHeaders {
        src_mac: frame.src(),
        dst_mac: frame.dst(),
        src: ip.src().into(),
        dst: ip.dst().into(),
        protocol: ip.protocol(),
        ecn: ip.ecn(),
        hops: ip.ttl(),
        transport: ethernet::HEADER_LEN + ip.header_len(),
        end: ethernet::HEADER_LEN + usize::from(ip.total_len()),
        fragment: ip.is_fragment(),
    };
    Ok(())
}

#[inline]
fn parse_v6(frame: &EthernetFrame<'_>, available: usize, to: &mut IpHeaders) -> Result<(), DropReason> {
    let ip = Ipv6Packet::head_of(frame.payload(), available).map_err(|_| DropReason::Malformed)?;
    let payload = ethernet::HEADER_LEN + ipv6::HEADER_LEN;
    let transport = ip.transport().map_err(|_| DropReason::Malformed)?;
    *to = IpHeaders {
        src_mac: frame.src(),
        dst_mac: frame.dst(),
        src: ip.src().into(),
        dst: ip.dst().into(),
        protocol: transport.protocol,
        ecn: ip.traffic_class() & 3,
        hops: ip.hop_limit(),
        transport: payload + (ip.payload().len() - transport.payload.len()),
        end: payload + usize::from(ip.payload_len()),
        fragment: transport.fragment.is_some(),
    };
    Ok(())
}

impl IpHeaders {
    /// The headers of no packet.
    pub(crate) const NONE: Self = Self {
        src_mac: MacAddr([0; 6]),
        dst_mac: MacAddr([0; 6]),
        src: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        dst: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        protocol: IpProtocol::TCP,
        ecn: 0,
        hops: 0,
        transport: 0,
        end: 0,
        fragment: false,
    };

    /// Returns the flow between these ports from the receiver's view, or `None` for an IPv6 packet with a mapped
    /// address.
    #[inline]
    pub(crate) fn flow(&self, local: u16, remote: u16) -> Option<FlowKey> {
        FlowKey::new(SocketAddr::new(self.dst, local), SocketAddr::new(self.src, remote))
    }

    /// Returns the length of transport header and payload in bytes.
    #[inline]
    pub(crate) fn transport_len(&self) -> usize {
        self.end.saturating_sub(self.transport)
    }

    /// Returns whether the checksum over pseudo header, transport header and payload is correct. `rest` is the sum of
    /// the bytes that are not in `head`.
    #[inline]
    pub(crate) fn checksum_is_valid(&self, head: &[u8], rest: Sum) -> bool {
        let until = self.end.min(head.len()).min(HEAD);
        let (bytes, rest) = match head.get(self.transport..until) {
            Some(bytes) => (bytes, rest),
            None => match behind_long_headers(head, self.transport, rest) {
                Some(rest) => (&[][..], rest),
                None => return false,
            },
        };
        let pseudo = if matches!(self.protocol, IpProtocol::ICMP | IpProtocol::IGMP) {
            Sum::ZERO
        } else {
            pseudo(self.src, self.dst, self.protocol, self.transport_len())
        };
        (pseudo + Sum::of(bytes) + rest).is_valid()
    }

    /// Returns the drop reason for a packet with a wrong checksum. A sender that offloads the checksum, such as the
    /// kernel on veth, leaves the sum of the pseudo header in the field.
    #[cold]
    pub(crate) fn wrong_checksum(&self, head: &[u8]) -> DropReason {
        let offset = match self.protocol {
            IpProtocol::TCP => tcp::CHECKSUM_OFFSET,
            IpProtocol::UDP => udp::CHECKSUM_OFFSET,
            _ => return DropReason::Checksum,
        };
        let field = head.get(self.transport + usize::from(offset)..).and_then(<[u8]>::first_chunk);
        let open = pseudo(self.src, self.dst, self.protocol, self.transport_len()).value();
        match field {
            Some(field) if u16::from_be_bytes(*field) == open => DropReason::OpenChecksum,
            _ => DropReason::Checksum,
        }
    }
}

/// Returns the sum of the bytes from `transport` on, which is beyond [`HEAD`]. `rest` is the sum from [`HEAD`] on,
/// including extension headers.
#[cold]
fn behind_long_headers(head: &[u8], transport: usize, rest: Sum) -> Option<Sum> {
    let between = Sum::of(head.get(HEAD..transport)?);
    Some(rest + Sum::from(!between.value()))
}

/// Returns the sum of the pseudo header of a transport packet of `len` bytes.
#[inline]
pub(crate) fn pseudo(src: IpAddr, dst: IpAddr, protocol: IpProtocol, len: usize) -> Sum {
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Sum::pseudo_v4(src, dst, protocol, len as u16),
        (IpAddr::V6(src), IpAddr::V6(dst)) => Sum::pseudo_v6(src, dst, protocol, len as u32),
        _ => Sum::ZERO,
    }
}

/// The addresses and IP fields of a packet to write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Envelope {
    pub src_mac: MacAddr,
    pub dst_mac: MacAddr,
    pub src: IpAddr,
    pub dst: IpAddr,
    pub protocol: IpProtocol,
    /// Differentiated services, and explicit congestion notification in the lowest two bits.
    pub ecn: u8,
    pub hops: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// IPv4 identification. It is meaningless and 0 in packets that are not fragmented (RFC 6864, 4.1), because a
    /// counter would reveal how many packets other hosts get.
    pub ident: u16,
}

impl Envelope {
    /// Creates an envelope with the default hop limit.
    pub(crate) fn new(src: IpAddr, dst: IpAddr, protocol: IpProtocol) -> Self {
        let none = MacAddr([0; 6]);
        Self { src_mac: none, dst_mac: none, src, dst, protocol, ecn: 0, hops: HOPS, flow_label: 0, ident: 0 }
    }

    /// Returns the length of the Ethernet and IP headers in bytes.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        ethernet::HEADER_LEN + if self.dst.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN }
    }

    /// Writes both headers in front of `transport_len` bytes into a buffer with sufficient room. Returns their length.
    #[inline]
    pub(crate) fn write(&self, to: &mut [u8], transport_len: usize) -> usize {
        let ethertype = if self.dst.is_ipv4() { EtherType::IPV4 } else { EtherType::IPV6 };
        let (link, rest) = to.split_first_chunk_mut().expect("the buffer has room for all headers");
        ethernet::write_header(link, self.dst_mac, self.src_mac, ethertype);
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let header = Ipv4Header {
                    src,
                    dst,
                    protocol: self.protocol,
                    dscp_ecn: self.ecn,
                    ident: self.ident,
                    dont_fragment: true,
                    ttl: self.hops,
                    total_len: (ipv4::HEADER_LEN + transport_len) as u16,
                };
                header.write(rest.first_chunk_mut().expect("the buffer has room for all headers"));
            }
            (src, dst) => {
                let header = Ipv6Header {
                    src: v6(src),
                    dst: v6(dst),
                    next_header: self.protocol,
                    traffic_class: self.ecn,
                    flow_label: self.flow_label,
                    hop_limit: self.hops,
                    payload_len: transport_len as u16,
                };
                header.write(rest.first_chunk_mut().expect("the buffer has room for all headers"));
            }
        }
        self.len()
    }
}

/// Returns the destination address of a frame's IP packet.
pub(crate) fn destination(frame: &[u8]) -> Option<IpAddr> {
    let frame = EthernetFrame::new_checked(frame).ok()?;
    let bytes = frame.payload();
    match frame.ethertype() {
        EtherType::IPV4 => Some(Ipv4Addr::from(*bytes.get(16..)?.first_chunk::<4>()?).into()),
        EtherType::IPV6 => Some(Ipv6Addr::from(*bytes.get(24..)?.first_chunk::<16>()?).into()),
        _ => None,
    }
}

/// Allows routers to fragment the IPv4 packet whose frame begins at `head`. IPv6 routers never fragment.
pub(crate) fn allow_fragments(head: &mut [u8]) {
    const DONT_FRAGMENT: u16 = 1 << 14;
    if head[12..ETHERNET] != EtherType::IPV4.0.to_be_bytes() {
        return;
    }
    let word = |at: usize| u16::from_be_bytes([head[ETHERNET + at], head[ETHERNET + at + 1]]);
    let (flags, checksum) = (word(6), word(10));
    let cleared = flags & !DONT_FRAGMENT;
    let checksum = update(checksum, Sum::from(u32::from(flags)), Sum::from(u32::from(cleared)));
    head[ETHERNET + 6..ETHERNET + 8].copy_from_slice(&cleared.to_be_bytes());
    head[ETHERNET + 10..ETHERNET + 12].copy_from_slice(&checksum.to_be_bytes());
}

/// Sets the hop limit of the IP packet in the frame `head` to the limit of this host's own packets.
pub(crate) fn set_hops(head: &mut [u8]) {
    const V4_HOPS: usize = ETHERNET + 8;
    const V4_CHECKSUM: usize = ETHERNET + 10;
    const V6_HOPS: usize = ETHERNET + 7;
    if head[12..ETHERNET] != EtherType::IPV4.0.to_be_bytes() {
        head[V6_HOPS] = HOPS;
        return;
    }
    // The checksum covers hops and protocol as one word.
    let word = |head: &[u8], at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
    let (old, checksum) = (word(head, V4_HOPS), word(head, V4_CHECKSUM));
    head[V4_HOPS] = HOPS;
    let checksum = update(checksum, Sum::from(old), Sum::from(word(head, V4_HOPS)));
    head[V4_CHECKSUM..V4_CHECKSUM + 2].copy_from_slice(&checksum.to_be_bytes());
}

fn v6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}
