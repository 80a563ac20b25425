//! Software segmentation of packets whose sender requested segmentation offload (virtio 1.2, 5.1.6.2): TCP
//! (`VIRTIO_NET_HDR_GSO_TCPV4` and `TCPV6`) and UDP (`VIRTIO_NET_HDR_GSO_UDP_L4`), plain or inside a tunnel.
//!
//! A [`Segmenter`] is created from the virtio-net header, the first bytes of the frame and its length. It returns the
//! segments in order: the payload range of each and, after the caller has summed this part, the headers. It never reads
//! the payload, which may be scattered.
//!
//! A tunnel packet (VXLAN, Geneve, GRE, IP in IP) has two IP headers. The virtio-net header of a packet socket only
//! describes the inner packet: `gso_type` is its type, and `csum_start` the offset of its transport header.

mod headers;

use std::iter::FusedIterator;
use std::ops::Range;

pub use headers::Ip;
use headers::{Carrier, Headers, IpHeader};

use crate::{
    checksum::Sum,
    ethernet::EtherType,
    ip::IpProtocol,
    ipv4, ipv6, tcp,
    tcp::TcpFlags,
    udp,
    virtio_net::{
        GSO_TUNNEL, NetHeader, VIRTIO_NET_HDR_GSO_ECN, VIRTIO_NET_HDR_GSO_TCPV4, VIRTIO_NET_HDR_GSO_TCPV6,
        VIRTIO_NET_HDR_GSO_UDP_L4,
    },
};

/// Maximum length of the headers of a packet to segment, in bytes. It suffices for a tunnel with all Geneve and TCP
/// options.
pub const MAX_HEADERS: usize = 512;
/// Minimum payload of a TCP segment in bytes. The smallest maximum segment size of TCP leaves 8 bytes after all options
/// (Linux has the same limit). A smaller payload would only multiply packets. A datagram may have one byte.
pub const MIN_SIZE: u16 = 8;

/// The headers of a packet to segment. It computes the headers of the segments.
#[derive(Debug, Clone)]
pub struct Segmenter {
    headers: [u8; MAX_HEADERS],
    header_len: usize,
    found: Headers,
    transport: Transport,
    payload_len: usize,
    size: usize,
}

/// The transport header whose payload is segmented.
#[derive(Debug, Clone, Copy)]
enum Transport {
    Tcp { seq: u32, flags: u8 },
    Udp { has_checksum: bool },
}

/// A part of a packet to segment that becomes a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Number of the segment, from 0.
    pub index: usize,
    /// The payload: a range of the bytes behind the frame's headers.
    pub payload: Range<usize>,
    pub last: bool,
}

/// Returns whether the packet belongs to a tunnel. `front` is the beginning of its frame, as in [`Segmenter::new`].
pub fn is_tunnelled(header: &NetHeader, front: &[u8]) -> bool {
    header.needs_checksum()
        && IpHeader::in_frame(front, 0).is_ok_and(|ip| ip.end != usize::from(header.csum_start))
}

impl Segmenter {
    /// Creates a segmenter for a frame of `frame_len` bytes that begins with `front`, which must contain all headers:
    /// [`MAX_HEADERS`] bytes, or the whole frame, suffice. Length and checksum fields are ignored, except that 0 in a
    /// tunnel's UDP header means no checksum.
    ///
    /// # Errors
    /// [`GsoError`] if the packet cannot be segmented and must be dropped.
    pub fn new(header: &NetHeader, front: &[u8], frame_len: usize) -> Result<Self, GsoError> {
        let gso_type = header.gso_type & !GSO_TUNNEL;
        let (version, protocol) = match gso_type & !VIRTIO_NET_HDR_GSO_ECN {
            VIRTIO_NET_HDR_GSO_TCPV4 => (Some(Ip::V4), IpProtocol::TCP),
            VIRTIO_NET_HDR_GSO_TCPV6 => (Some(Ip::V6), IpProtocol::TCP),
            VIRTIO_NET_HDR_GSO_UDP_L4 if gso_type == VIRTIO_NET_HDR_GSO_UDP_L4 => (None, IpProtocol::UDP),
            _ => return Err(GsoError::Type { found: header.gso_type }),
        };
        let min_size = if protocol == IpProtocol::TCP { MIN_SIZE } else { 1 };
        if header.gso_size < min_size {
            return Err(GsoError::Size { found: header.gso_size, min_size });
        }
        let asked = header.needs_checksum().then_some((header.csum_start, header.csum_offset));
        let found = Headers::find(front, asked)?;
        let ip = found.ip;
        if ip.protocol != protocol || ip.is_routed || version.is_some_and(|version| version != ip.version) {
            return Err(GsoError::Transport { found: ip.protocol, over: ip.version, gso_type });
        }
        let (transport, transport_len, csum_offset) = match protocol {
            IpProtocol::TCP => tcp_header(front, ip.end)?,
            _ => udp_header(front, ip.end, asked.is_some())?,
        };
        if let Some((csum_start, found)) = asked
            && found != csum_offset
        {
            return Err(GsoError::Checksum { csum_start, csum_offset: found, transport_at: ip.end });
        }
        let header_len = ip.end + transport_len;
        if header_len > MAX_HEADERS {
            return Err(GsoError::TooLong { found: header_len });
        }
        let too_short = GsoError::TooShort { found: front.len().min(frame_len), needed: header_len };
        let payload_len = frame_len.checked_sub(header_len).ok_or(too_short)?;
        let mut headers = [0; MAX_HEADERS];
        for (to, from) in headers.iter_mut().zip(front.get(..header_len).ok_or(too_short)?) {
            *to = *from;
        }
        let size = usize::from(header.gso_size);
        // The longest segment must fit the length field of IP.
        let longest = header_len - found.outermost().at + payload_len.min(size);
        if longest > usize::from(u16::MAX) {
            return Err(GsoError::TooLong { found: longest });
        }
        Ok(Self { headers, header_len, found, transport, payload_len, size })
    }

    /// Returns the length of the headers, Ethernet to TCP or UDP, in bytes. The payload of the frame and of each
    /// segment begins at this offset.
    pub fn header_len(&self) -> usize {
        self.header_len
    }

    /// Returns the length of the longest segment with its headers, in bytes.
    pub fn longest(&self) -> usize {
        self.header_len + self.payload_len.min(self.size)
    }

    /// Returns the segments in order. A packet without payload has one segment.
    pub fn segments(&self) -> impl FusedIterator<Item = Segment> + use<> {
        let (len, size) = (self.payload_len, self.size);
        let count = len.div_ceil(size).max(1);
        (0..count).map(move |index| Segment {
            index,
            payload: index * size..len.min((index + 1) * size),
            last: index + 1 == count,
        })
    }

    /// Returns the headers of `segment`, whose payload has the sum `payload`. Lengths, IP identifications, the sequence
    /// number and the checksums are set for the segment. PSH and FIN are kept on the last segment, and CWR on the
    /// first.
    pub fn headers(&mut self, segment: &Segment, payload: Sum) -> &[u8] {
        let Headers { ip, tunnel } = self.found;
        self.put_ip(&ip, segment);
        match self.transport {
            Transport::Tcp { seq, flags } => self.put_tcp(&ip, seq, flags, segment, payload),
            Transport::Udp { has_checksum } => self.put_udp(&ip, has_checksum, segment, payload),
        }
        if let Some((outer, carrier)) = tunnel {
            self.put_ip(&outer, segment);
            match carrier {
                Carrier::Udp { has_checksum } => self.put_udp(&outer, has_checksum, segment, payload),
                Carrier::Gre { has_checksum: true } => self.put_gre_checksum(outer.end, payload),
                Carrier::Gre { has_checksum: false } | Carrier::Ip => {}
            }
        }
        &self.headers[..self.header_len]
    }

    /// Returns the length of the segment from `at` on.
    fn len_from(&self, at: usize, segment: &Segment) -> u16 {
        #[allow(clippy::cast_possible_truncation, reason = "`new` has checked the longest segment's length")]
        let len = (self.header_len - at + segment.payload.len()) as u16;
        len
    }

    fn put_ip(&mut self, ip: &IpHeader, segment: &Segment) {
        match ip.version {
            Ip::V4 => {
                let len = self.len_from(ip.at, segment);
                self.put(ip.at + ipv4::field::TOTAL_LEN, len.to_be_bytes());
                #[allow(clippy::cast_possible_truncation, reason = "identifications wrap")]
                let ident = ip.ident.wrapping_add(segment.index as u16);
                self.put(ip.at + ipv4::field::IDENT, ident.to_be_bytes());
                self.put(ip.at + ipv4::field::CHECKSUM, [0; 2]);
                let sum = Sum::of(&self.headers[ip.at..ip.end]);
                self.put(ip.at + ipv4::field::CHECKSUM, sum.checksum().to_be_bytes());
            }
            Ip::V6 => {
                let len = self.len_from(ip.at + ipv6::HEADER_LEN, segment);
                self.put(ip.at + ipv6::field::PAYLOAD_LEN, len.to_be_bytes());
            }
        }
    }

    /// Returns the sum of the pseudo header for the transport header behind `ip`.
    fn pseudo(&self, ip: &IpHeader, segment: &Segment) -> Sum {
        let addresses = match ip.version {
            Ip::V4 => ip.at + ipv4::field::SRC..ip.at + ipv4::HEADER_LEN,
            Ip::V6 => ip.at + ipv6::field::SRC..ip.at + ipv6::HEADER_LEN,
        };
        let len = self.len_from(ip.end, segment);
        Sum::of(&self.headers[addresses]) + Sum::from(u16::from(ip.protocol.0)) + Sum::from(len)
    }

    fn put_tcp(&mut self, ip: &IpHeader, seq: u32, mut flags: u8, segment: &Segment, payload: Sum) {
        #[allow(clippy::cast_possible_truncation, reason = "sequence numbers wrap")]
        let seq = seq.wrapping_add(segment.payload.start as u32);
        self.put(ip.end + tcp::field::SEQ, seq.to_be_bytes());
        if !segment.last {
            flags &= !(TcpFlags::FIN | TcpFlags::PSH).0;
        }
        if segment.index > 0 {
            flags &= !TcpFlags::CWR.0;
        }
        self.put(ip.end + tcp::field::FLAGS, [flags]);
        self.put(ip.end + tcp::field::CHECKSUM, [0; 2]);
        let sum = self.pseudo(ip, segment) + self.sum_from(ip.end) + payload;
        self.put(ip.end + tcp::field::CHECKSUM, sum.checksum().to_be_bytes());
    }

    /// Writes the length and the checksum of the UDP header behind `ip`.
    fn put_udp(&mut self, ip: &IpHeader, has_checksum: bool, segment: &Segment, payload: Sum) {
        self.put(ip.end + udp::field::LENGTH, self.len_from(ip.end, segment).to_be_bytes());
        self.put(ip.end + udp::field::CHECKSUM, [0; 2]);
        if has_checksum {
            let sum = self.pseudo(ip, segment) + self.sum_from(ip.end) + payload;
            self.put(ip.end + udp::field::CHECKSUM, sum.checksum_nonzero().to_be_bytes());
        }
    }

    fn put_gre_checksum(&mut self, at: usize, payload: Sum) {
        self.put(at + headers::GRE_CHECKSUM, [0; 2]);
        let sum = self.sum_from(at) + payload;
        self.put(at + headers::GRE_CHECKSUM, sum.checksum().to_be_bytes());
    }

    /// Returns the sum of the headers from `at` on. All headers after an IP header have an even length.
    fn sum_from(&self, at: usize) -> Sum {
        Sum::of(&self.headers[at..self.header_len])
    }

    /// Writes a field of the headers. `new` has checked that it exists.
    fn put<const N: usize>(&mut self, at: usize, value: [u8; N]) {
        for (to, from) in self.headers.iter_mut().skip(at).zip(value) {
            *to = from;
        }
    }
}

/// Parses the TCP header at `at`. Returns its length and the offset of its checksum, too.
fn tcp_header(front: &[u8], at: usize) -> Result<(Transport, usize, u16), GsoError> {
    let header: &[u8; tcp::HEADER_LEN] = headers::at(front, at)?;
    let len = usize::from(header[tcp::field::DATA_OFFSET] >> 4) * 4;
    if len < tcp::HEADER_LEN {
        return Err(GsoError::TcpHeader { found: len });
    }
    let seq = u32::from_be_bytes(std::array::from_fn(|i| header[tcp::field::SEQ + i]));
    Ok((Transport::Tcp { seq, flags: header[tcp::field::FLAGS] }, len, tcp::CHECKSUM_OFFSET))
}

/// Parses the UDP header at `at`. Returns its length and the offset of its checksum, too. The segments have a checksum
/// if it `is_asked` for, or if the packet has one.
fn udp_header(front: &[u8], at: usize, is_asked: bool) -> Result<(Transport, usize, u16), GsoError> {
    let has_checksum = is_asked || headers::has_udp_checksum(front, at)?;
    Ok((Transport::Udp { has_checksum }, udp::HEADER_LEN, udp::CHECKSUM_OFFSET))
}

/// Why a packet cannot be segmented.
#[derive(Debug, Clone, Copy, PartialEq, Eq, displaydoc::Display, thiserror::Error)]
pub enum GsoError {
    /// packet to be segmented: csum_start {csum_start} and csum_offset {csum_offset} do not point to a TCP or UDP checksum, neither in
    /// the header at {transport_at} nor in a tunnel's inner packet
    Checksum { csum_start: u16, csum_offset: u16, transport_at: usize },
    /// packet to be segmented: it carries {found}, expected IPv4 or IPv6
    EtherType { found: EtherType },
    /// packet to be segmented: its IP header begins with {found:#04x}
    IpHeader { found: u8 },
    /// packet to be segmented: gso_size {found}, expected {min_size} or more
    Size { found: u16, min_size: u16 },
    /// packet to be segmented: the TCP header's length is {found} bytes, expected 20 or more
    TcpHeader { found: usize },
    /// packet to be segmented: {found} bytes, expected at most {MAX_HEADERS:?} of headers and 65535 a segment
    TooLong { found: usize },
    /// packet to be segmented: found {found} bytes, expected {needed} for its headers
    TooShort { found: usize, needed: usize },
    /// packet to be segmented: it carries {found} over {over:?} or is a fragment, expected the protocols of gso_type {gso_type:#04x}
    Transport { found: IpProtocol, over: Ip, gso_type: u8 },
    /// packet to be segmented: gso_type {found:#04x}, expected TCP over IPv4 or IPv6, or UDP (5)
    Type { found: u8 },
}
